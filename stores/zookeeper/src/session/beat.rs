//! For how long the servers keep a session, by what they answered.
//!
//! A server answers pings by itself, and tells the leader of the sessions that it heard of only now and then: a server that
//! is cut off from the leader answers for seconds while the leader ends the session. What shows that the leader was there is
//! the reply to a write. By then it knows of the messages that its server had a tick before. So the session is kept, from
//! the sending of the last message that was *answered* a tick before the write was sent.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Messages of one connection that were answered.
#[derive(Debug)]
pub(super) struct Beats {
    /// After how long at most a server has told the leader.
    tick: Duration,
    /// No two messages are closer to each other than this.
    grain: Duration,
    answered: VecDeque<Beat>,
}

#[derive(Debug, Clone, Copy)]
struct Beat {
    sent: Instant,
    answered: Instant,
}

impl Beats {
    pub(super) fn new(session: Duration, tick: Duration) -> Beats {
        Beats {
            tick,
            grain: session / 64,
            answered: VecDeque::new(),
        }
    }

    /// A message was answered.
    pub(super) fn answered(&mut self, sent: Instant, now: Instant) {
        if self
            .answered
            .back()
            .is_some_and(|last| sent < last.sent + self.grain)
        {
            return;
        }
        // All but the newest of those that are a tick old are of no use any more.
        let old = |beat: &Beat| beat.answered + self.tick <= sent;
        while self.answered.get(1).is_some_and(old) {
            self.answered.pop_front();
        }
        self.answered.push_back(Beat { sent, answered: now });
    }

    /// From when the session counts, after a write that was sent then had its reply.
    pub(super) fn counts_from(&self, write_sent: Instant) -> Option<Instant> {
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
        let start = Instant::now();
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
            // Those that were dropped are older than any write to come.
            let wanted = from.map(|from| start + s(from));
            assert!(
                counts == wanted || write < 7.0 && counts.is_none(),
                "{write} {counts:?}"
            );
        }
    }

    #[test]
    fn few_messages_are_kept_of_many() {
        let start = Instant::now();
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
