//! `reentrant`: take a lock again inside of the code that holds it, where the store need not be asked.

use std::sync::Arc;
use std::time::Instant;

use super::Job;
use crate::bench::tally::{Recorder, Series, kind_of};

pub(super) async fn work(job: Arc<Job>, task: usize) {
    let lock = job.lock(&job.clients[0], job.first_key(task));
    while !job.tally.is_over() {
        let recorder = job.tally.recorder(task, Series::Main);
        let (inner, shared) = (lock.clone(), job.clone());
        let held = lock.run(move |_| enter_again(shared, inner, recorder)).await;
        // Not acquired, or lost on the way.
        if let Err(error) = held {
            let recorder = job.tally.recorder(task, Series::Main);
            recorder.failed(kind_of(&error)).await;
        }
    }
}

async fn enter_again(job: Arc<Job>, lock: dlock::Lock, mut recorder: Recorder) {
    while !job.tally.is_over() {
        let begin = Instant::now();
        match lock.acquire().await {
            Ok(guard) => {
                let took = begin.elapsed();
                match job.give_back(guard).await {
                    Ok(()) => recorder.done(took),
                    Err(kind) => return recorder.failed(kind).await,
                }
            }
            Err(error) => return recorder.failed(kind_of(&error)).await,
        }
    }
}
