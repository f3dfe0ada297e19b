//! Whether a step was sent: shared by its caller and the task that sends it.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether a step was sent, agreed upon between its caller and the task that sends it: a step that was given up before
/// it was sent is certainly not carried out.
///
/// ```
/// use dlock::store::queue::SendState;
///
/// let state = SendState::default();
/// assert!(state.give_up()); // its caller waits no longer
/// assert!(!state.send()); // so it is not sent
/// ```
#[derive(Debug, Default)]
pub struct SendState(AtomicU8);

impl SendState {
    const SENT: u8 = 1;
    const GIVEN_UP: u8 = 2;

    /// Marks it as sent; returns whether it may be sent.
    pub fn send(&self) -> bool {
        self.settle(Self::SENT) == Self::SENT
    }

    /// Records that it was sent but not carried out: it may be sent once more.
    pub fn take_back(&self) {
        let _ = self
            .0
            .compare_exchange(Self::SENT, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Gives it up; returns whether it never will be sent.
    pub fn give_up(&self) -> bool {
        self.settle(Self::GIVEN_UP) == Self::GIVEN_UP
    }

    fn settle(&self, to: u8) -> u8 {
        let settled = self.0.compare_exchange(0, to, Ordering::SeqCst, Ordering::SeqCst);
        settled.map_or_else(|before| before, |_| to)
    }
}
