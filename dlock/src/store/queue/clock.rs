//! The clock of a server, as far as this process knows it.

use std::time::Duration;

use tokio::time::Instant;

/// After this time a less precise reading replaces an older one.
const OLD: Duration = Duration::from_secs(30);

/// Converts times of this process's clock to the server's: a request carries the server's time after which the server
/// refuses it.
///
/// ```
/// use dlock::store::queue::ServerClock;
/// use std::time::Duration;
/// use tokio::time::Instant;
///
/// let sent = Instant::now();
/// let clock = ServerClock::new(5_000_000, sent, sent + Duration::from_millis(2)); // the server said 5 s
/// assert_eq!(clock.at(sent + Duration::from_millis(1002)), 6_000_000);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ServerClock {
    reading: Reading,
}

/// The server's clock showed `server` microseconds, at some moment between `sent` and `received`.
#[derive(Debug, Clone, Copy)]
struct Reading {
    server: i64,
    sent: Instant,
    received: Instant,
}

impl ServerClock {
    /// Creates the clock of a server that showed `server`, in µs, between these moments.
    #[must_use]
    pub fn new(server: i64, sent: Instant, received: Instant) -> ServerClock {
        let reading = Reading {
            server,
            sent,
            received,
        };
        ServerClock { reading }
    }

    /// Adds a reading. It replaces the previous one if it is more precise, if that one is old, or if both cannot be
    /// right: then the clock was set.
    pub fn saw(&mut self, server: i64, sent: Instant, received: Instant) {
        let (before, now) = (
            self.reading,
            Reading {
                server,
                sent,
                received,
            },
        );
        let sharper = now.earliest(received) >= before.earliest(received);
        let set_back = now.latest(received) < before.earliest(received);
        if sharper || set_back || received.duration_since(before.received) > OLD {
            self.reading = now;
        }
    }

    /// Returns the earliest time that it shows when this process's clock shows `when`. If the server refuses a request
    /// after that time, the request takes no effect after `when`.
    #[must_use]
    pub fn at(&self, when: Instant) -> i64 {
        self.reading.earliest(when)
    }
}

impl Reading {
    fn earliest(&self, when: Instant) -> i64 {
        shifted(self.server, self.received, when)
    }

    fn latest(&self, when: Instant) -> i64 {
        shifted(self.server, self.sent, when)
    }
}

fn shifted(server: i64, from: Instant, to: Instant) -> i64 {
    let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
    match to.checked_duration_since(from) {
        Some(later) => server.saturating_add(micros(later)),
        None => server.saturating_sub(micros(from.duration_since(to))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// The server may have read its clock as late as the reply came: only then does it refuse in time.
    #[test]
    fn moment_is_counted_from_the_reply() {
        let begin = Instant::now();
        let clock = ServerClock::new(5_000_000, begin, begin + ms(40));
        assert_eq!(clock.at(begin + ms(1040)), 6_000_000);
        assert_eq!(clock.at(begin), 4_960_000);
    }

    #[test]
    fn sharper_reading_replaces_another_and_a_blurred_one_does_not() {
        let begin = Instant::now();
        let mut clock = ServerClock::new(5_000_000, begin, begin + ms(40));
        // The same moment of the server, known to within 10 ms.
        clock.saw(5_100_000, begin + ms(100), begin + ms(110));
        assert_eq!(clock.at(begin + ms(110)), 5_100_000);
        clock.saw(5_200_000, begin + ms(200), begin + ms(900));
        assert_eq!(clock.at(begin + ms(110)), 5_100_000);
        // A minute later it may have drifted.
        clock.saw(65_200_000, begin + ms(60_200), begin + ms(60_900));
        assert_eq!(clock.at(begin + ms(60_900)), 65_200_000);
    }

    #[test]
    fn clock_that_was_set_is_followed_at_once() {
        let begin = Instant::now();
        for server in [9_000_000_000, 1_000_000] {
            let mut clock = ServerClock::new(5_000_000_000, begin, begin + ms(1));
            clock.saw(server, begin + ms(10), begin + ms(11));
            assert_eq!(clock.at(begin + ms(11)), server);
        }
    }
}
