//! Who is inside locks of one key, as those that are there say.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// As much as all readers of a test together.
const WRITER: i64 = 1 << 32;

/// Sees that a writer is alone, and that the tokens of writers grow. The holder of a plain lock is a writer.
#[derive(Debug, Default)]
pub struct Inside {
    now: AtomicI64,
    written: AtomicU64,
    together: AtomicI64,
    turns: AtomicU64,
}

impl Inside {
    /// A writer comes in. One without a token, of another library, gives 0.
    ///
    /// # Panics
    /// When somebody is inside, or had a greater token before.
    pub fn write(&self, token: u64) {
        assert_eq!(
            self.now.fetch_add(WRITER, Ordering::SeqCst),
            0,
            "a writer is not alone"
        );
        if token > 0 {
            let last = self.written.swap(token, Ordering::SeqCst);
            assert!(token > last, "token {token} after {last}");
        }
    }

    /// It leaves.
    pub fn written(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_sub(WRITER, Ordering::SeqCst);
    }

    /// A reader comes in. One without a token, of another library, gives [`u64::MAX`].
    ///
    /// # Panics
    /// When a writer is inside, or had a greater token before.
    pub fn read(&self, token: u64) {
        let before = self.now.fetch_add(1, Ordering::SeqCst);
        assert!(before < WRITER, "a reader is beside a writer");
        assert!(token > self.written.load(Ordering::SeqCst));
        self.together.fetch_max(before + 1, Ordering::SeqCst);
    }

    /// It leaves.
    pub fn was_read(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    /// How many came and left.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::SeqCst)
    }

    /// The most readers that were inside at a time.
    pub fn together(&self) -> i64 {
        self.together.load(Ordering::SeqCst)
    }
}
