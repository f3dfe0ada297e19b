//! Random sequences of operations by several owners have in memory, by a paused clock, the answers that a plain model
//! gives: see [`dlock_tests::property`].

use dlock_tests::property::{Stress, holds_in_memory};

#[test]
fn everything_by_the_same_names_answers_as_the_model_does() {
    holds_in_memory(Stress::All, 600);
}

#[test]
fn locks_and_sets_of_them_answer_as_the_model_does() {
    holds_in_memory(Stress::Locks, 400);
}

#[test]
fn readers_and_writers_are_answered_as_the_model_does() {
    holds_in_memory(Stress::ReadWrite, 600);
}

#[test]
fn permits_and_latches_are_counted_as_the_model_does() {
    holds_in_memory(Stress::Counters, 400);
}
