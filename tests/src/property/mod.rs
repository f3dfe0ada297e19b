//! Random sequences of operations by several owners, on a store and on a plain model of it, whose answers must be the
//! same.
//!
//! | part | for |
//! |---|---|
//! | `ops` | what the owners do, drawn at random |
//! | `model` | what the rules say to it: plain data |
//! | `world` | doing it on a store, and comparing |
//!
//! A sequence goes on one step at a time, so that there is one right answer to each. What waits meanwhile is one waiter
//! for each name, which must have it as soon as the model says that it is free, and not before. After each step the
//! store's own view is compared, too: the holders, their leases, and the counters.
//!
//! The clock continues during a sequence: no step begins shortly before a lease ends, and a sequence in which a lease
//! nevertheless ended during a step is repeated.
//!
//! A sequence that fails is shortened as far as possible, and printed. `DLOCK_PROPERTY_CASES` sets how many sequences
//! are tried, instead of the number of each test.

mod model;
mod ops;
mod world;

use proptest::test_runner::{Config, TestCaseError, TestCaseResult, TestRunner};
use tokio::runtime::Handle;

use self::ops::Op;
pub use self::ops::Stress;
use self::world::{Halt, World};
use crate::Store;

/// How often a sequence is begun in which a lease ends at a moment that spoils it.
const ROUNDS: usize = 20;

fn runner(cases: u32) -> TestRunner {
    let cases = std::env::var("DLOCK_PROPERTY_CASES").ok().map_or(cases, |cases| {
        cases.parse().expect("DLOCK_PROPERTY_CASES is a number")
    });
    TestRunner::new(Config {
        cases,
        // On a server a sequence takes its time. PROPTEST_MAX_SHRINK_ITERS says how often it is tried to shorten one.
        max_shrink_time: 60_000,
        failure_persistence: None,
        ..Config::default()
    })
}

async fn play(store: &Store, ops: &[Op]) -> TestCaseResult {
    for _ in 0..ROUNDS {
        match World::new(store).await.play(ops).await {
            Ok(()) => return Ok(()),
            Err(Halt::Missed) => {}
            Err(Halt::Wrong(why)) => return Err(TestCaseError::fail(why)),
        }
    }
    Err(TestCaseError::fail("not once was a lease's end not in the way"))
}

/// Goes through that many sequences on a store, by the clock of the machine. For runtimes of several threads.
///
/// # Panics
/// When an answer is not what the model says, with the shortest sequence that shows it.
pub async fn holds_on(store: &Store, stress: Stress, cases: u32) {
    let runtime = Handle::current();
    let outcome = tokio::task::block_in_place(|| {
        let sequences = ops::sequence(stress);
        runner(cases).run(&sequences, |ops| runtime.block_on(play(store, &ops)))
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
