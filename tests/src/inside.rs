//! Counts the holders of a lock, as they report it themselves.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// As much as all readers of a test together.
const WRITER: i64 = 1 << 32;

/// Checks that a writer is alone, and that the tokens of writers grow. The holder of a plain lock is a writer.
#[derive(Debug, Default)]
pub struct Inside {
    now: AtomicI64,
    written: AtomicU64,
    together: AtomicI64,
    turns: AtomicU64,
}

impl Inside {
    /// Records that a writer acquired the lock; `token` is 0 for a library without fencing tokens.
    ///
    /// # Panics
    /// When the lock has another holder, or an earlier writer had a greater token.
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

    /// Records that a writer releases the lock.
    pub fn written(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_sub(WRITER, Ordering::SeqCst);
    }

    /// Records that a reader acquired the lock; `token` is [`u64::MAX`] for a library without fencing tokens.
    ///
    /// # Panics
    /// When a writer holds the lock, or an earlier writer had a greater token.
    pub fn read(&self, token: u64) {
        let before = self.now.fetch_add(1, Ordering::SeqCst);
        assert!(before < WRITER, "a reader is beside a writer");
        assert!(token > self.written.load(Ordering::SeqCst));
        self.together.fetch_max(before + 1, Ordering::SeqCst);
    }

    /// Records that a reader releases the lock.
    pub fn was_read(&self) {
        self.turns.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns how many holders have released the lock.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::SeqCst)
    }

    /// Returns the largest number of readers at a time.
    pub fn together(&self) -> i64 {
        self.together.load(Ordering::SeqCst)
    }
}
