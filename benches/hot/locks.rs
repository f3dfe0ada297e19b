//! The cost of the parts between an acquire and the store: scope, waiters, guard, on memory.

#[allow(dead_code, reason = "each benchmark uses its part of it")]
mod fixture;

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use dlock::LockClient;

use fixture::{handed_on, inside, pair};

fn guard(c: &mut Criterion) {
    let runtime = fixture::runtime();
    let client = runtime.block_on(async { LockClient::memory() });
    let lock = client.lock("order:42");
    c.bench_function("guard: acquire and release", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let begin = Instant::now();
                for _ in 0..times {
                    pair(&lock).await;
                }
                begin.elapsed()
            })
        });
    });
    c.bench_function("guard: try a lock that is held", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let guard = lock.acquire().await.expect("it is free");
                let begin = Instant::now();
                for _ in 0..times {
                    assert!(lock.try_acquire().await.is_err());
                }
                let took = begin.elapsed();
                guard.release().await.expect("it is held");
                took
            })
        });
    });
    c.bench_function("guard: is it held", |b| {
        runtime.block_on(async {
            let guard = lock.acquire().await.expect("it is free");
            b.iter(|| black_box(guard.is_held()));
            guard.release().await.expect("it is held");
        });
    });
    c.bench_function("lock: by its name", |b| {
        b.iter(|| black_box(client.lock("order:42")))
    });
}

fn scope(c: &mut Criterion) {
    let runtime = fixture::runtime();
    let client = runtime.block_on(async { LockClient::memory() });
    let lock = client.lock("order:42");
    for depth in [1, 8] {
        c.bench_function(&format!("scope: enter again, {depth} deep"), |b| {
            b.iter_custom(|times| {
                runtime.block_on(inside(&client, &lock, depth, async || {
                    let begin = Instant::now();
                    for _ in 0..times {
                        pair(&lock).await;
                    }
                    begin.elapsed()
                }))
            });
        });
        c.bench_function(&format!("scope: a frame, {depth} deep"), |b| {
            b.iter_custom(|times| {
                runtime.block_on(inside(&client, &lock, depth, async || {
                    let begin = Instant::now();
                    for _ in 0..times {
                        dlock::scope::current().wrap(async { black_box(()) }).await;
                    }
                    begin.elapsed()
                }))
            });
        });
        c.bench_function(&format!("scope: the innermost hold, {depth} deep"), |b| {
            b.iter_custom(|times| {
                runtime.block_on(inside(&client, &lock, depth, async || {
                    let begin = Instant::now();
                    for _ in 0..times {
                        black_box(dlock::current());
                    }
                    begin.elapsed()
                }))
            });
        });
    }
}

fn waiters(c: &mut Criterion) {
    const EACH: usize = 64;
    let runtime = fixture::runtime();
    let client = runtime.block_on(async { LockClient::memory() });
    for tasks in [2, 16, 256] {
        for (how, handoffs) in [("handed off", 4096), ("by way of the store", 0)] {
            let lock = client.lock("order:42").local_handoffs(handoffs);
            let mut group = c.benchmark_group(format!("waiters: {tasks} in turn, {how}"));
            group.throughput(criterion::Throughput::Elements((tasks * EACH) as u64));
            group.bench_function("each", |b| {
                b.iter(|| runtime.block_on(handed_on(&lock, tasks, EACH)));
            });
            group.finish();
        }
    }
}

criterion_group!(hot, guard, scope, waiters);
criterion_main!(hot);
