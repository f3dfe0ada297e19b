//! What it costs that everything is counted: pairs without a recorder and with Prometheus', in turns.
//!
//! On memory, and on the server that `DLOCK_BENCH_URL` names.

use std::time::{Duration, Instant};

use dlock::{Lock, LockClient};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use tokio::runtime::Runtime;

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

fn compare(url: &str, times: u32) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let client = runtime
        .block_on(LockClient::connect(url))
        .expect("a store that answers");
    let lock = client.lock("order:42").group("order:{id}");
    let recorder = recorder();
    let handle = recorder.handle();
    let (mut without, mut with, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..=TURNS {
        let bare = pairs(&runtime, &lock, times);
        let counted = metrics::with_local_recorder(&recorder, || pairs(&runtime, &lock, times));
        handle.run_upkeep();
        // The first turn warms up.
        if turn > 0 {
            without.push(bare);
            with.push(counted);
            ratios.push(counted.as_secs_f64() / bare.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{url}: {:?} a pair without a recorder, {:?} with Prometheus', {:+.1} % (the median of {TURNS} turns)",
        median(without),
        median(with),
        100.0 * (ratios[ratios.len() / 2] - 1.0)
    );
}

fn main() {
    compare("memory://", 20_000);
    if let Ok(url) = std::env::var("DLOCK_BENCH_URL") {
        compare(&url, 2_000);
    }
}
