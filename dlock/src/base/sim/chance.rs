//! The randomness of a simulated process.

use std::hash::{BuildHasherDefault, Hasher};

use uuid::Uuid;

use super::process::{next_number, with_random};

/// The same order in every run.
pub(crate) type State = BuildHasherDefault<Mixing>;

/// Users of a simulation do not choose colliding names: values are only mixed, since they are hashed again and again.
#[derive(Default)]
pub(crate) struct Mixing(u64);

impl Hasher for Mixing {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn finish(&self) -> u64 {
        // A table uses the first and the last bits.
        (self.0 ^ (self.0 >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

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

pub(crate) fn unique_id() -> u64 {
    next_number()
}

/// One for all processes: values hashed in one may be looked up in another.
pub(crate) fn hash_state() -> &'static State {
    static STATE: State = State::new();
    &STATE
}
