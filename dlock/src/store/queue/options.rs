//! Checks of the options that the builders of stores share. They return what is wrong.

use std::time::Duration;

use crate::base::moment::LONGEST_LEASE;

/// The most connections of a store. A few are enough: steps that wait are sent together.
const MOST_CONNECTIONS: usize = 1000;

/// Checks how long a step may take: a timer must be able to take it.
pub fn check_timeout(timeout: Duration) -> Result<(), &'static str> {
    match timeout {
        Duration::ZERO => Err("no step can be carried out in no time"),
        _ => check_interval(timeout),
    }
}

/// Checks an interval between background work.
pub fn check_interval(interval: Duration) -> Result<(), &'static str> {
    match interval {
        Duration::ZERO => Err("it would never pause"),
        _ if interval > LONGEST_LEASE => Err("it is more than a year"),
        _ => Ok(()),
    }
}

/// Checks how many connections a store may open.
pub fn check_connections(connections: usize) -> Result<(), &'static str> {
    match connections {
        0 => Err("steps need one connection at least"),
        1..=MOST_CONNECTIONS => Ok(()),
        _ => Err("it is more than 1000: steps that wait are sent together, so a few connections are enough"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_no_timer_and_no_server_can_take_are_refused() {
        let (year, ms) = (LONGEST_LEASE, Duration::from_millis(1));
        for check in [check_timeout, check_interval] {
            assert!(check(ms).is_ok() && check(year).is_ok());
            assert!(
                check(Duration::ZERO).is_err() && check(year + ms).is_err() && check(Duration::MAX).is_err()
            );
        }
        assert!(check_connections(1).is_ok() && check_connections(1000).is_ok());
        assert!(check_connections(0).is_err() && check_connections(1001).is_err());
    }
}
