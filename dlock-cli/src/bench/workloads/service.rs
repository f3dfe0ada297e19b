//! `layer` and `idempotency`: the overhead of the layers of `dlock-tower` around a service that does nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dlock::LockKey;
use dlock_tower::idempotency::caller;
use dlock_tower::{IdempotencyLayer, LockLayer, key};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tower::{Layer, Service, service_fn};

use super::Job;
use crate::bench::tally::{Recorder, Series, Times};

/// How long the bare service is called before it is measured, and measured.
const BARE: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(200)];
/// Records expire this long after the run; no replay may come later.
const RETENTION: Duration = Duration::from_secs(5);
/// The header that distinguishes a replay from a first run.
const REPLAYED: &str = "idempotent-replayed";

type Body = Full<Bytes>;

/// The service that does nothing.
fn bare() -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    service_fn(async |_: Request<Body>| {
        let mut response = Response::new(Body::from("done"));
        *response.status_mut() = StatusCode::CREATED;
        Ok(response)
    })
}

fn request(key: Option<String>) -> Request<Body> {
    let mut request = Request::post("/orders");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    request
        .body(Body::from("one"))
        .expect("a key of digits is a header")
}

/// Calls the bare service, for comparison.
pub(super) async fn measure_bare() -> Times {
    let mut service = bare();
    let mut times = Times::new();
    for length in BARE {
        times = Times::new();
        let end = Instant::now() + length;
        while Instant::now() < end {
            let request = request(None);
            let begin = Instant::now();
            let response = service.call(request).await;
            let took = begin.elapsed();
            drop(response);
            times.record(took.as_nanos() as u64);
        }
    }
    times
}

pub(super) async fn locked(job: Arc<Job>, task: usize) {
    let mut recorder = job.tally.recorder(task, Series::Main);
    let name = format!("{}{}", job.plan.prefix, job.first_key(task));
    let layer = LockLayer::new(job.clients[0].clone(), key::fixed(LockKey::raw(name)));
    let mut service = layer.layer(bare());
    while !job.tally.is_over() {
        let request = request(None);
        let begin = Instant::now();
        let Ok(response) = service.call(request).await;
        let took = begin.elapsed();
        match response.status() {
            StatusCode::CREATED => recorder.done(took),
            status => refused(&recorder, status).await,
        }
    }
}

pub(super) async fn once(job: Arc<Job>, task: usize) {
    let mut first = job.tally.recorder(task, Series::Main);
    let mut replay = job.tally.recorder(task, Series::Replay);
    let Ok(records) = job.clients[0].records() else {
        return;
    };
    let layer = IdempotencyLayer::new(records, caller::public())
        .lease(RETENTION / 2)
        .retention(RETENTION);
    let mut service = layer.layer(bare());
    let mine = format!("{:016x}-{task}", fastrand::u64(..));
    for number in 0u64.. {
        if job.tally.is_over() {
            break;
        }
        // In memory nothing else here ever yields, which would starve the clock of the measurement.
        tokio::task::consume_budget().await;
        for (recorder, is_replay) in [(&mut first, false), (&mut replay, true)] {
            let request = request(Some(format!("\"{mine}-{number}\"")));
            let begin = Instant::now();
            let Ok(response) = service.call(request).await;
            let took = begin.elapsed();
            match response.status() {
                StatusCode::CREATED if response.headers().contains_key(REPLAYED) == is_replay => {
                    recorder.done(took);
                }
                StatusCode::CREATED => recorder.failed("not_replayed").await,
                status => refused(recorder, status).await,
            }
        }
    }
}

async fn refused(recorder: &Recorder, status: StatusCode) {
    recorder.failed(&format!("status_{}", status.as_u16())).await;
}
