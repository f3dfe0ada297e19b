//! Random sequences of operations by several owners have on each store the answers that a plain model gives, and so
//! the same on all: see [`dlock_tests::property`].

use dlock_tests::on_every_store;
use dlock_tests::property::{Stress, holds_on};

on_every_store! {
    async fn everything_by_the_same_names_answers_as_the_model_does(store: &Store) {
        holds_on(store, Stress::All, 20).await;
    }

    async fn locks_and_sets_of_them_answer_as_the_model_does(store: &Store) {
        holds_on(store, Stress::Locks, 10).await;
    }

    async fn readers_and_writers_are_answered_as_the_model_does(store: &Store) {
        holds_on(store, Stress::ReadWrite, 20).await;
    }

    async fn permits_and_latches_are_counted_as_the_model_does(store: &Store) {
        holds_on(store, Stress::Counters, 10).await;
    }
}
