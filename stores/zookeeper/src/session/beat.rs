//! Computes, from the server's replies, how long a session is kept.
//!
//! A server answers pings by itself, and reports the sessions of its clients to the leader only now and then: a server
//! that is cut off from the leader answers for seconds while the leader ends the session. Only the reply to a write
//! shows that the leader was reachable. By then the leader knows of the messages that its server had received a tick
//! before. So the session timeout counts from the sending of the last message that was *answered* a tick before the
//! write was sent.

use std::collections::VecDeque;
use std::time::Duration;

use dlock::store::queue::Moment;

/// The messages of one connection that were answered.
#[derive(Debug)]
pub(super) struct Beats {
    /// The longest time until a server has reported a message to the leader.
    tick: Duration,
    /// The least distance between two recorded messages.
    grain: Duration,
    answered: VecDeque<Beat>,
}

#[derive(Debug, Clone, Copy)]
struct Beat {
    sent: Moment,
    answered: Moment,
}

impl Beats {
    pub(super) fn new(session: Duration, tick: Duration) -> Beats {
        Beats {
            tick,
            grain: session / 64,
            answered: VecDeque::new(),
        }
    }

    /// Records the reply to a message.
    pub(super) fn answered(&mut self, sent: Moment, now: Moment) {
        if self
            .answered
            .back()
            .is_some_and(|last| sent < last.sent + self.grain)
        {
            return;
        }
        // Of the messages that are at least a tick old, only the newest is needed.
        let old = |beat: &Beat| beat.answered + self.tick <= sent;
        while self.answered.get(1).is_some_and(old) {
            self.answered.pop_front();
        }
        self.answered.push_back(Beat { sent, answered: now });
    }

    /// Returns the start of the session timeout, given the reply to a write that was sent at this moment.
    pub(super) fn counts_from(&self, write_sent: Moment) -> Option<Moment> {
        let known = |beat: &&Beat| beat.answered + self.tick <= write_sent;
        self.answered.iter().rev().find(known).map(|beat| beat.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    #[test]
    fn session_counts_from_the_last_message_that_was_answered_a_tick_before_a_write() {
        let start = Moment::now();
        let mut beats = Beats::new(s(32.0), s(2.0));
        assert_eq!(beats.counts_from(start + s(10.0)), None);
        for (sent, answered) in [(0.0, 0.1), (1.0, 1.1), (2.0, 5.0), (6.0, 6.1), (7.0, 7.1)] {
            beats.answered(start + s(sent), start + s(answered));
        }
        for (write, from) in [
            (2.0, None),
            (3.2, Some(1.0)),
            (6.9, Some(1.0)),
            (7.0, Some(2.0)),
            (9.5, Some(7.0)),
        ] {
            let counts = beats.counts_from(start + s(write));
            // Dropped messages are older than any later write needs.
            let wanted = from.map(|from| start + s(from));
            assert!(
                counts == wanted || write < 7.0 && counts.is_none(),
                "{write} {counts:?}"
            );
        }
    }

    #[test]
    fn few_messages_are_kept_of_many() {
        let start = Moment::now();
        let mut beats = Beats::new(s(30.0), s(15.0));
        for n in 0..100_000_u32 {
            let sent = start + n * Duration::from_millis(1);
            beats.answered(sent, sent + s(0.001));
        }
        assert!(beats.answered.len() < 64, "{}", beats.answered.len());
        let from = beats.counts_from(start + s(100.0)).unwrap();
        assert!(from >= start + s(84.0) && from <= start + s(85.0));
    }
}
