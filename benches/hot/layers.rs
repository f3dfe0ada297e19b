//! The cost that the layers of `dlock-tower` add to a request, on memory.

#[allow(dead_code, reason = "each benchmark uses its part of it")]
mod fixture;

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use dlock::LockClient;

use fixture::{bare, call, locked, once, request};

fn layers(c: &mut Criterion) {
    let runtime = fixture::runtime();
    let client = runtime.block_on(async { LockClient::memory() });
    let (bare, locked) = (bare(), locked(&client));
    c.bench_function("request: no layer", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let begin = Instant::now();
                for _ in 0..times {
                    call(&bare, request(1)).await;
                }
                begin.elapsed()
            })
        });
    });
    c.bench_function("request: the lock layer", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let begin = Instant::now();
                for _ in 0..times {
                    call(&locked, request(1)).await;
                }
                begin.elapsed()
            })
        });
    });
    let once = runtime.block_on(async { once(&client) });
    let mut number = 0;
    c.bench_function("request: the idempotency layer, first run", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let begin = Instant::now();
                for _ in 0..times {
                    number += 1;
                    call(&once, request(number)).await;
                }
                begin.elapsed()
            })
        });
    });
    c.bench_function("request: the idempotency layer, replay", |b| {
        b.iter_custom(|times| {
            runtime.block_on(async {
                let mut took = Duration::ZERO;
                for _ in 0..times {
                    number += 1;
                    call(&once, request(number)).await;
                    let again = request(number);
                    let begin = Instant::now();
                    call(&once, again).await;
                    took += begin.elapsed();
                }
                took
            })
        });
    });
}

criterion_group!(hot, layers);
criterion_main!(hot);
