//! The cost of metrics and traces: pairs without and with Prometheus' recorder, and without and with a subscriber
//! that formats and discards, in turns.
//!
//! On memory, and on the server that `DLOCK_BENCH_URL` names.

use std::time::{Duration, Instant};

use dlock::{Lock, LockClient};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tokio::runtime::Runtime;
use tracing::level_filters::LevelFilter;

const TURNS: usize = 60;

fn recorder() -> PrometheusRecorder {
    let mut builder = PrometheusBuilder::new();
    for (metric, bounds) in dlock::buckets::ALL {
        builder = builder
            .set_buckets_for_metric(Matcher::Full(metric.to_owned()), bounds)
            .expect("bounds");
    }
    builder.build_recorder()
}

/// The time of one pair.
fn pairs(runtime: &Runtime, lock: &Lock, times: u32) -> Duration {
    runtime.block_on(async {
        // The first one finds its series.
        let mut begin = Instant::now();
        for n in 0..=times {
            if n == 1 {
                begin = Instant::now();
            }
            let guard = lock.acquire().await.expect("it is free");
            guard.release().await.expect("it is held");
        }
        begin.elapsed() / times
    })
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

/// What is measured, done under a recorder or a subscriber.
type Under<'u> = &'u dyn Fn(&dyn Fn() -> Duration) -> Duration;

fn compare(url: &str, times: u32, name: &str, under: Under<'_>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let client = runtime
        .block_on(LockClient::connect(url))
        .expect("a store that answers");
    let lock = client.lock("order:42").group("order:{id}");
    let pairs = || pairs(&runtime, &lock, times);
    let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        let bare = pairs();
        let told = under(&pairs);
        // The first turn warms up.
        if turn > 0 {
            without.push(bare);
            with.push(told);
            ratios.push(told.as_secs_f64() / bare.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{url}: {:?} a pair, {:?} with {name}, {:+.1} % (the median of {TURNS} turns)",
        median(without),
        median(with),
        100.0 * (ratios[ratios.len() / 2] - 1.0)
    );
}

/// Under a subscriber that formats what it is told and writes it nowhere.
fn traced(level: LevelFilter, measured: &dyn Fn() -> Duration) -> Duration {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::sink)
        .finish();
    let took = tracing::subscriber::with_default(subscriber, measured);
    // Or it would still count as listened to.
    tracing::callsite::rebuild_interest_cache();
    took
}

fn main() {
    let recorder = recorder();
    let handle = recorder.handle();
    let counted = |measured: &dyn Fn() -> Duration| {
        let took = metrics::with_local_recorder(&recorder, measured);
        handle.run_upkeep();
        took
    };
    let url = std::env::var("DLOCK_BENCH_URL").ok();
    for (url, times) in [(Some("memory://"), 20_000), (url.as_deref(), 2_000)] {
        let Some(url) = url else { continue };
        compare(url, times, "Prometheus' recorder", &counted);
        compare(url, times, "traces at info", &|measured| {
            traced(LevelFilter::INFO, measured)
        });
        compare(url, times, "traces at debug", &|measured| {
            traced(LevelFilter::DEBUG, measured)
        });
    }
}
