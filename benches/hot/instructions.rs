//! Counts the instructions of the most important parts. Unlike times, these counts are stable on a noisy machine, so
//! a regression shows. Run it by `benches/instructions`, which lists its requirements and configures Valgrind.

#![allow(missing_docs, unreachable_pub, reason = "of what the macros make")]

#[allow(dead_code, reason = "each benchmark uses its part of it")]
mod fixture;

use std::hint::black_box;

use dlock::{Lock, LockClient};
use gungraun::{library_benchmark, library_benchmark_group, main};
use tokio::runtime::Runtime;

use fixture::{call, handed_on, inside, locked, once, pair, request};

/// A client that has been used before, so that nothing is set up while it is counted.
struct Warm {
    runtime: Runtime,
    client: LockClient,
    lock: Lock,
}

fn warm() -> Warm {
    let runtime = fixture::runtime();
    let client = runtime.block_on(async { LockClient::memory() });
    let lock = client.lock("order:42");
    runtime.block_on(async {
        for _ in 0..100 {
            pair(&lock).await;
        }
        handed_on(&lock, 4, 10).await;
    });
    Warm {
        runtime,
        client,
        lock,
    }
}

// Counting begins and ends at each function whose name begins with that of the benchmark, closures too. So there are none in
// them: what they run stands here.

async fn pairs(lock: &Lock, count: u64) {
    for _ in 0..count {
        pair(lock).await;
    }
}

async fn entered_again(client: &LockClient, lock: &Lock, count: u64) {
    inside(client, lock, 1, async || pairs(lock, count).await).await;
}

async fn requests(client: &LockClient, count: u64) {
    let service = locked(client);
    for _ in 0..count {
        black_box(call(&service, request(1)).await);
    }
}

async fn requests_and_replays(client: &LockClient, count: u64) {
    let service = once(client);
    for number in 0..count {
        black_box(call(&service, request(number)).await);
        black_box(call(&service, request(number)).await);
    }
}

// The returned value is dropped after counting.

#[library_benchmark(setup = warm)]
fn acquire_and_release(warm: Warm) -> Warm {
    warm.runtime.block_on(pair(&warm.lock));
    warm
}

#[library_benchmark(setup = warm)]
fn a_hundred_acquired_and_released(warm: Warm) -> Warm {
    warm.runtime.block_on(pairs(&warm.lock, 100));
    warm
}

#[library_benchmark(setup = warm)]
fn a_hundred_entered_again(warm: Warm) -> Warm {
    warm.runtime
        .block_on(entered_again(&warm.client, &warm.lock, 100));
    warm
}

#[library_benchmark(setup = warm)]
fn four_times_25_handed_on(warm: Warm) -> Warm {
    warm.runtime.block_on(handed_on(&warm.lock, 4, 25));
    warm
}

#[library_benchmark(setup = warm)]
fn a_hundred_requests_under_a_lock(warm: Warm) -> Warm {
    warm.runtime.block_on(requests(&warm.client, 100));
    warm
}

#[library_benchmark(setup = warm)]
fn fifty_requests_run_once_and_replayed(warm: Warm) -> Warm {
    warm.runtime.block_on(requests_and_replays(&warm.client, 50));
    warm
}

library_benchmark_group!(
    name = hot,
    benchmarks = [
        acquire_and_release,
        a_hundred_acquired_and_released,
        a_hundred_entered_again,
        four_times_25_handed_on,
        a_hundred_requests_under_a_lock,
        fifty_requests_run_once_and_replayed
    ]
);
main!(library_benchmark_groups = hot);
