//! One process's part of a measurement: connect, meet, warm up, measure, give everything back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::args::Plan;
use super::messages::Outcome;
use super::progress::Progress;
use super::server::{Counters, Server};
use super::team::Team;
use super::usage;
use super::workloads::Job;

/// How long the tasks have to finish what they are at before it is dropped, which is safe as well.
const GRACE: Duration = Duration::from_secs(2);
/// How long guards that are left may take to be given back.
const LEFT: Duration = Duration::from_secs(1);

/// What only the process that was started by the user knows.
#[derive(Debug, Default)]
pub(super) struct Around {
    /// As in `Redis 7.0.15`; `None` when it does not say.
    pub(super) server: Option<String>,
    /// What the server did while it was measured; `None` when it does not say.
    pub(super) counters: Option<Counters>,
}

/// Measures.
pub(super) async fn measure(
    plan: &Plan,
    team: &mut Team,
    stop: &CancellationToken,
) -> Result<(Outcome, Around), String> {
    let mut around = Around::default();
    let job = Job::prepare(plan.clone())
        .await
        .map_err(|error| error.to_string())?;
    let mut server = match plan.process {
        0 => Server::connect(&plan.url).await,
        _ => None,
    };
    if let Some(server) = &mut server {
        around.server = server.name().await;
    }
    let job = Arc::new(job);
    let outcome = match team.meet(stop).await {
        Ok(()) => run(&job, stop, &mut server, &mut around).await,
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

async fn run(
    job: &Arc<Job>,
    stop: &CancellationToken,
    server: &mut Option<Server>,
    around: &mut Around,
) -> Result<Outcome, String> {
    let (plan, tally) = (&job.plan, &job.tally);
    let progress = Progress::start(plan, tally);
    let mut tasks = job.start();
    pause(plan.warmup, stop).await;
    let before = counters(server).await;
    let (cpu, begin) = (usage::cpu(), Instant::now());
    if !stop.is_cancelled() {
        tally.begin();
        pause(plan.measure, stop).await;
    }
    tally.end();
    let took = begin.elapsed();
    let cpu_s = cpu
        .zip(usage::cpu())
        .map(|(before, after)| (after - before).as_secs_f64());
    let memory = usage::memory();
    let after = counters(server).await;
    around.counters = before.zip(after).map(|(before, after)| after.since(before));
    let counts = tally.counts();
    if tokio::time::timeout(GRACE, async { while tasks.join_next().await.is_some() {} })
        .await
        .is_err()
    {
        tasks.shutdown().await;
    }
    progress.end();
    Ok(Outcome {
        seconds: took.as_secs_f64(),
        counts,
        sums: tally.sums(),
        cpu_s,
        memory,
        handovers: std::mem::take(&mut job.handovers.lock()),
        figures: Default::default(),
    })
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
