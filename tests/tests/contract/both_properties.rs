//! Random sequences of operations by several owners have on servers the answers that a plain model gives: see
//! [`dlock_tests::property`]. The simulation does the same in memory, with users that do not take turns.

macro_rules! on {
    ($($store:ident: $cases:literal sequences,)*) => {
        $(mod $store {
            use dlock_tests::Store;
            use dlock_tests::property::{Stress, holds_on};

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn everything_by_the_same_names_answers_as_the_model_does() {
                holds_on(&Store::$store().await, Stress::All, $cases).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn locks_and_sets_of_them_answer_as_the_model_does() {
                holds_on(&Store::$store().await, Stress::Locks, $cases).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn readers_and_writers_are_answered_as_the_model_does() {
                holds_on(&Store::$store().await, Stress::ReadWrite, $cases).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn permits_and_latches_are_counted_as_the_model_does() {
                holds_on(&Store::$store().await, Stress::Counters, $cases).await;
            }
        })*
    };
}

// Masters that sentinels name have the scripts of one server; in a Cluster, sets go over several slots.
on! {
    server: 30 sequences,
    cluster: 10 sequences,
}
