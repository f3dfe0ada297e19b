//! The part of one process in a measurement: connect, meet, warm up, measure, release everything.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::args::{Plan, Workload};
use super::messages::Outcome;
use super::progress::Progress;
use super::server::{Counters, Server};
use super::team::Team;
use super::usage;
use super::workloads::{Job, held};
use crate::look::told;

/// How long the tasks may take to finish before they are dropped, which is safe as well.
const GRACE: Duration = Duration::from_secs(2);
/// How long the release of the remaining guards may take.
const LEFT: Duration = Duration::from_secs(1);

/// What only the process that the user started knows.
#[derive(Debug, Default)]
pub(super) struct Around {
    /// As in `Redis 7.0.15`; `None` if unknown.
    pub(super) server: Option<String>,
    /// The server's work during the measurement; `None` if unknown.
    pub(super) counters: Option<Counters>,
}

/// Measures.
pub(super) async fn measure(
    plan: &Plan,
    team: &mut Team,
    stop: &CancellationToken,
) -> Result<(Outcome, Around), String> {
    let mut around = Around::default();
    let job = Job::prepare(plan.clone()).await.map_err(|error| told(&error))?;
    let mut server = match plan.process {
        0 => Server::connect(&plan.url, plan.kind.into()).await,
        _ => None,
    };
    if let Some(server) = &mut server {
        around.server = server.name().await;
    }
    let job = Arc::new(job);
    let outcome = match team.meet(stop).await {
        Ok(()) if plan.workload == Workload::Held => hold(&job, team, stop, &mut server, &mut around).await,
        Ok(()) => Ok(run(&job, stop, &mut server, &mut around).await),
        Err(why) => Err(why),
    };
    let mut unconfirmed = 0;
    for client in &job.clients {
        unconfirmed += client.shutdown(LEFT).await.unconfirmed;
    }
    let mut outcome = outcome?;
    if unconfirmed > 0 {
        outcome.sums.failed("release_unconfirmed", unconfirmed as u64);
    }
    Ok((outcome, around))
}

/// The resource usage between two moments.
struct Window {
    begin: Instant,
    cpu: Option<Duration>,
    counters: Option<Counters>,
}

impl Window {
    async fn open(server: &mut Option<Server>) -> Window {
        let counters = counters(server).await;
        Window {
            begin: Instant::now(),
            cpu: usage::cpu(),
            counters,
        }
    }

    async fn close(self, server: &mut Option<Server>, around: &mut Around) -> Outcome {
        let took = self.begin.elapsed();
        let cpu = self.cpu.zip(usage::cpu());
        let memory = usage::memory();
        let after = counters(server).await;
        around.counters = self
            .counters
            .zip(after)
            .map(|(before, after)| after.since(before));
        Outcome {
            counted: took.as_secs_f64(),
            seconds: took.as_secs_f64(),
            cpu_s: cpu.map(|(before, after)| (after - before).as_secs_f64()),
            memory,
            ..Outcome::default()
        }
    }
}

/// Runs tasks that repeat the same operation.
async fn run(
    job: &Arc<Job>,
    stop: &CancellationToken,
    server: &mut Option<Server>,
    around: &mut Around,
) -> Outcome {
    let (plan, tally) = (&job.plan, &job.tally);
    let progress = Progress::start(plan, tally);
    let mut tasks = job.start();
    pause(plan.warmup, stop).await;
    let window = Window::open(server).await;
    if !stop.is_cancelled() {
        tally.begin();
        pause(plan.measure, stop).await;
    }
    tally.end();
    let mut outcome = window.close(server, around).await;
    outcome.counts = tally.counts();
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, all).await.is_err() {
        tasks.shutdown().await;
    }
    progress.end().await;
    outcome.sums = tally.sums();
    outcome.handoffs = std::mem::take(&mut job.handoffs.lock());
    outcome
}

/// Acquires, keeps and releases locks. The costs are measured while all are held.
async fn hold(
    job: &Arc<Job>,
    team: &mut Team,
    stop: &CancellationToken,
    server: &mut Option<Server>,
    around: &mut Around,
) -> Result<Outcome, String> {
    let tally = &job.tally;
    let progress = Progress::start(&job.plan, tally);
    let before = usage::memory();
    tally.begin();
    let begin = Instant::now();
    let mut guards = held::take(job, stop).await;
    let counted = begin.elapsed().as_secs_f64();
    tally.end();
    let together = team.meet(stop).await;
    let window = Window::open(server).await;
    let mut holding = match together {
        Ok(()) => held::keep(job, &guards, stop).await,
        Err(_) => Default::default(),
    };
    let mut outcome = window.close(server, around).await;
    holding.lost = held::drop_lost(&mut guards);
    holding.memory = outcome
        .memory
        .zip(before)
        .map(|(after, before)| after as i64 - before as i64);
    held::release_all(job, guards, &mut holding).await;
    progress.end().await;
    outcome.counted = counted;
    outcome.counts = tally.counts();
    outcome.sums = tally.sums();
    if holding.lost > 0 {
        outcome.sums.failed("lost_while_held", holding.lost);
    }
    outcome.holding = Some(holding);
    together.map(|()| outcome)
}

async fn counters(server: &mut Option<Server>) -> Option<Counters> {
    server.as_mut()?.counters().await
}

/// Sleeps, but not longer than the measurement lasts.
async fn pause(time: Duration, stop: &CancellationToken) {
    tokio::select! {
        () = tokio::time::sleep(time) => {}
        () = stop.cancelled() => {}
    }
}
