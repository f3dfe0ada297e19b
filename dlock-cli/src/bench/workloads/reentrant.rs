//! `reentrant`: acquire a lock again inside the code that holds it, without a request to the store.

use std::sync::Arc;

use super::Job;
use crate::bench::tally::{Recorder, Series, kind_of};

pub(super) async fn work(job: Arc<Job>, task: usize) {
    let lock = job.lock(&job.clients[0], job.first_key(task));
    while !job.tally.is_over() {
        let recorder = job.tally.recorder(task, Series::Main);
        let (inner, shared) = (lock.clone(), job.clone());
        let held = lock.run(move |_| enter_again(shared, inner, recorder)).await;
        // Not acquired, or lost in between.
        if let Err(error) = held {
            let recorder = job.tally.recorder(task, Series::Main);
            recorder.failed(kind_of(&error)).await;
        }
    }
}

async fn enter_again(job: Arc<Job>, lock: dlock::Lock, mut recorder: Recorder) {
    while !job.tally.is_over() {
        match job.pair(&lock).await {
            Ok(took) => recorder.done(took),
            Err(kind) => return recorder.failed(kind).await,
        }
    }
}
