//! All randomness of the library, in one place: ids, jitter, and the order of hash maps. In the simulation it all comes
//! from a seed.

use std::hash::BuildHasher;
use std::time::Duration;

use uuid::Uuid;

#[cfg(not(dlock_sim))]
use self::real as source;
#[cfg(dlock_sim)]
use crate::base::sim::chance as source;

/// A map with a random order; in a simulation the order is the same in every run.
pub(crate) type HashMap<K, V, S = source::State> = std::collections::HashMap<K, V, S>;
/// A set with such an order.
pub(crate) type HashSet<T, S = source::State> = std::collections::HashSet<T, S>;

/// A random id.
pub fn uuid() -> Uuid {
    source::uuid()
}

/// A number from 0 up to, but not including, 1.
pub fn fraction() -> f64 {
    source::fraction()
}

/// A pause of half to one and a half times this length.
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fraction())
}

/// A pause of half to all of this length.
pub fn shortened(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fraction() / 2.0)
}

/// A number below `n`, which is not zero.
pub(crate) fn below(n: u64) -> u64 {
    source::below(n)
}

/// Shuffles the items.
#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "only servers are tried in a random order")
)]
pub(crate) fn shuffle<T>(all: &mut [T]) {
    source::shuffle(all);
}

/// A number that is unique in this process, and greater than those before.
pub fn next_id() -> u64 {
    source::next_id()
}

/// A number that is unique in this process, also among those of [`next_id`], in no order.
pub(crate) fn unique_id() -> u64 {
    source::unique_id()
}

/// Hashes with a secret of this process, so that users cannot choose input with colliding hashes.
pub(crate) fn hash_state() -> &'static impl BuildHasher {
    source::hash_state()
}

#[cfg(not(dlock_sim))]
mod real {
    use std::cell::Cell;
    use std::ops::Range;
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use uuid::Uuid;

    use crate::base::own_line::OwnLine;

    pub(super) type State = std::hash::RandomState;

    pub(super) fn uuid() -> Uuid {
        Uuid::new_v4()
    }

    pub(super) fn fraction() -> f64 {
        fastrand::f64()
    }

    pub(super) fn below(n: u64) -> u64 {
        fastrand::u64(..n)
    }

    pub(super) fn shuffle<T>(all: &mut [T]) {
        fastrand::shuffle(all);
    }

    static NEXT: OwnLine<AtomicU64> = OwnLine::new(AtomicU64::new(1));

    pub(super) fn next_id() -> u64 {
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// How many numbers a thread takes at a time.
    const BLOCK: u64 = 256;

    thread_local! {
        static OF_THREAD: Cell<Range<u64>> = const { Cell::new(0..0) };
    }

    pub(super) fn unique_id() -> u64 {
        let draw = |block: &Cell<Range<u64>>| {
            let mut numbers = block.take();
            let number = numbers.next().unwrap_or_else(|| {
                let first = NEXT.fetch_add(BLOCK, Ordering::Relaxed);
                numbers = first + 1..first + BLOCK;
                first
            });
            block.set(numbers);
            number
        };
        // While the thread ends, as from destructors of its other values.
        OF_THREAD.try_with(draw).unwrap_or_else(|_| next_id())
    }

    pub(super) fn hash_state() -> &'static State {
        static STATE: LazyLock<State> = LazyLock::new(State::new);
        &STATE
    }
}
