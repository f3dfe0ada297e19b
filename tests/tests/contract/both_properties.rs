//! Random sequences of operations by several owners have on each store the answers that a plain model gives, and so
//! the same on all: see [`dlock_tests::property`].

use dlock_tests::property::{Stress, holds_on};
use dlock_tests::{Store, on_every_store};

/// Memory has a suite of its own, by a paused clock; Cluster and sentinels have the scripts of one server.
fn cases(store: &Store) -> u32 {
    match store {
        Store::Memory(_) | Store::Quorum(_) => 5,
        Store::Server(_) => 40,
        Store::Shared(_) => 10,
    }
}

on_every_store! {
    async fn everything_by_the_same_names_answers_as_the_model_does(store: &Store) {
        holds_on(store, Stress::All, cases(store)).await;
    }

    async fn locks_and_sets_of_them_answer_as_the_model_does(store: &Store) {
        holds_on(store, Stress::Locks, cases(store)).await;
    }

    async fn readers_and_writers_are_answered_as_the_model_does(store: &Store) {
        holds_on(store, Stress::ReadWrite, cases(store)).await;
    }

    async fn permits_and_latches_are_counted_as_the_model_does(store: &Store) {
        holds_on(store, Stress::Counters, cases(store)).await;
    }
}
