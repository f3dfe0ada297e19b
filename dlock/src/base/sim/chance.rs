//! The chance of a simulated process.

use std::collections::hash_map::DefaultHasher;
use std::hash::BuildHasherDefault;

use uuid::Uuid;

use super::process::{next_number, with_random};

/// The same order in every run.
pub(crate) type State = BuildHasherDefault<DefaultHasher>;

pub(crate) fn uuid() -> Uuid {
    let bits = with_random(|random| random.u128(..));
    uuid::Builder::from_random_bytes(bits.to_be_bytes()).into_uuid()
}

pub(crate) fn fraction() -> f64 {
    with_random(fastrand::Rng::f64)
}

pub(crate) fn below(n: u64) -> u64 {
    with_random(|random| random.u64(..n))
}

pub(crate) fn shuffle<T>(all: &mut [T]) {
    with_random(|random| random.shuffle(all));
}

pub(crate) fn next_id() -> u64 {
    next_number()
}

/// One for all processes: what is hashed in one may be looked up in another.
pub(crate) fn hash_state() -> &'static State {
    static STATE: State = State::new();
    &STATE
}
