//! Whether a step was sent, as its caller and the task that sends it agree.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether a step was sent, agreed upon between the task that asks and the one that sends: a step that was given up before
/// it was sent is certainly not done.
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

    /// Whether it may be sent.
    pub fn send(&self) -> bool {
        self.settle(Self::SENT) == Self::SENT
    }

    /// It was sent and not carried out: it may be sent once more.
    pub fn take_back(&self) {
        let _ = self
            .0
            .compare_exchange(Self::SENT, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether it never will be.
    pub fn give_up(&self) -> bool {
        self.settle(Self::GIVEN_UP) == Self::GIVEN_UP
    }

    fn settle(&self, to: u8) -> u8 {
        let settled = self.0.compare_exchange(0, to, Ordering::SeqCst, Ordering::SeqCst);
        settled.map_or_else(|before| before, |_| to)
    }
}
