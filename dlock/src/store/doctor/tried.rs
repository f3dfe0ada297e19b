//! Tests that are the same for every store, and their verdicts.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::{Examination, Finding};
use crate::LockKey;
use crate::base::{chance, clock};
use crate::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store,
    StoreError,
};

/// How often an acquire, a renewal and a release are timed.
const ROUNDS: usize = 60;
/// For how long at most.
const LONGEST: Duration = Duration::from_secs(2);
/// The shortest time between two operations.
const PACE: Duration = Duration::from_millis(10);
/// The longest lease of a scratch lock: it ends soon if the doctor is interrupted.
const LEASE: Duration = Duration::from_secs(30);
/// The time between two readings of a clock.
const CLOCK: Duration = Duration::from_secs(3);

/// Returns findings for checks that a read-only diagnosis cannot make.
#[must_use]
pub fn not_tried(checks: &[&'static str]) -> Vec<Finding> {
    let unknown = |check: &&'static str| {
        let remedy = "let the doctor try: `dlock doctor`, or `doctor().probe(true)`".to_owned();
        Finding::unknown(
            check,
            "not visible: nothing was tried, this only reads",
            Some(remedy),
        )
    };
    checks.iter().map(unknown).collect()
}

/// The prefix of every [`scratch_key`]: by it a store finds what interrupted diagnoses left.
pub const SCRATCH_PREFIX: &str = "dlock:doctor:";

/// Returns the name of a lock for one diagnosis, which no other lock has.
#[must_use]
pub fn scratch_key() -> LockKey {
    LockKey::raw(format!("{SCRATCH_PREFIX}{}", chance::uuid()))
}

/// Runs the check `request-times`: acquires, renews and releases a scratch lock for some seconds, with at most a
/// hundred operations a second. The store removes what it keeps of a released lock, also of one that was not released
/// because an operation failed: its lease is at most 30 seconds.
pub async fn request_times(store: Arc<dyn Store>, key: &LockKey, examination: &Examination) -> Finding {
    let (mut took, begun) = (Vec::new(), clock::now());
    let lease = examination.lease.min(LEASE);
    for round in 0..ROUNDS {
        if round > 0 && clock::now().saturating_duration_since(begun) > LONGEST {
            break;
        }
        if let Err(error) = pair(&store, key, lease, round, &mut took).await {
            let remedy = match error.is_refused() {
                true => "what the locks need: the page of the store, under permissions",
                false => "a store that answers in time: its log, its load, and the network to it",
            };
            let why = error.message;
            return Finding::bad(
                TIMES,
                format!("a scratch lock could not be acquired, renewed and released: {why}"),
                remedy,
            );
        }
    }
    judged_times(took, examination.timeout)
}

const TIMES: &str = "request-times";

/// Acquires, renews and releases once.
async fn pair(
    store: &Arc<dyn Store>,
    key: &LockKey,
    lease: Duration,
    round: usize,
    took: &mut Vec<Duration>,
) -> Result<(), StoreError> {
    let grant = GrantId::new(chance::uuid(), round as u64 + 1);
    let mut timed = |sent: Instant| took.push(clock::now().saturating_duration_since(sent));
    let sent = clock::now();
    let acquire = AcquireRequest::new(Kind::Mutex, key.clone(), grant, lease);
    let acquired = store.clone().acquire(acquire).await?;
    timed(sent);
    if !matches!(acquired, AcquireReply::Acquired(_)) {
        return Err(StoreError::unknown(format!("the store answered {acquired:?}")));
    }
    tokio::time::sleep(PACE).await;
    let sent = clock::now();
    let renew = RenewRequest::new(Kind::Mutex, key.clone(), grant, lease);
    let renewed = store.clone().renew(vec![renew]).await?;
    timed(sent);
    match renewed.into_iter().next() {
        Some(Ok(Renewal::Gone)) => return Err(StoreError::unknown("a lock of some milliseconds was gone")),
        Some(Err(error)) => return Err(error),
        Some(Ok(_)) | None => {}
    }
    tokio::time::sleep(PACE).await;
    let sent = clock::now();
    let release = ReleaseRequest::new(Kind::Mutex, key.clone(), grant);
    let released = store.clone().release(release).await?;
    timed(sent);
    tokio::time::sleep(PACE).await;
    match released {
        ReleaseReply::Released { .. } => Ok(()),
        other => Err(StoreError::unknown(format!("a release answered {other:?}"))),
    }
}

/// Judges the check `request-times` by the durations of operations.
pub(crate) fn judged_times(mut took: Vec<Duration>, timeout: Duration) -> Finding {
    took.sort_unstable();
    let Some((middle, p99)) = took.get(took.len() / 2).zip(took.get(took.len() * 99 / 100)) else {
        return Finding::unknown(TIMES, "not visible: no operation was timed", None);
    };
    let times = format!(
        "an operation takes {middle:.1?}, and {p99:.1?} at the 99th percentile of {}",
        took.len()
    );
    match *p99 > timeout / 5 {
        true => Finding::bad(
            TIMES,
            format!("{times}: more than a fifth of the timeout of {timeout:?}"),
            "a nearer or less busy server, or a longer timeout and lease",
        ),
        false => Finding::good(TIMES, times),
    }
}

/// A reading of a server's clock, beside that of this process.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::store::doctor::ClockReading;
///
/// # let ask_the_server = async || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
/// let reading = ClockReading::of(async { Ok(ask_the_server().await.as_micros() as i64) }).await.unwrap();
/// assert!(reading.ahead_ms().abs() < 1000);
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ClockReading {
    /// In microseconds.
    server: i64,
    /// In the middle of the round trip.
    at: Instant,
    round_trip: Duration,
    ahead_ms: i64,
}

impl ClockReading {
    /// Reads the server's time, in microseconds since 1970.
    ///
    /// # Errors
    ///
    /// The failure of `ask`.
    pub async fn of(ask: impl Future<Output = Result<i64, String>>) -> Result<ClockReading, String> {
        let (before, wall) = (clock::now(), SystemTime::now());
        let server = ask.await?;
        let round_trip = clock::now().saturating_duration_since(before);
        let wall = wall.duration_since(UNIX_EPOCH).unwrap_or_default() + round_trip / 2;
        let wall = i64::try_from(wall.as_micros()).unwrap_or(i64::MAX);
        Ok(ClockReading {
            server,
            at: before + round_trip / 2,
            round_trip,
            ahead_ms: server.saturating_sub(wall) / 1000,
        })
    }

    /// Returns how far the server's clock is ahead of the wall clock of this process, in milliseconds.
    #[must_use]
    pub fn ahead_ms(&self) -> i64 {
        self.ahead_ms
    }

    /// Waits until a second reading is meaningful.
    pub async fn long_enough(&self) {
        clock::sleep_until(self.at + CLOCK).await;
    }

    /// Judges the check `clock` by this reading and a later one.
    #[must_use]
    pub fn judged(&self, later: &ClockReading) -> Finding {
        const CHECK: &str = "clock";
        let here = later.at.saturating_duration_since(self.at);
        if here < Duration::from_secs(1) {
            return Finding::unknown(
                CHECK,
                "not visible in so short a time",
                Some("let the doctor try: it looks for some seconds then".to_owned()),
            );
        }
        let there = later.server.saturating_sub(self.server);
        let here_us = i64::try_from(here.as_micros()).unwrap_or(i64::MAX);
        let apart = there.abs_diff(here_us);
        let error = u64::try_from((self.round_trip + later.round_trip).as_micros()).unwrap_or(u64::MAX);
        let allowed = (here_us.unsigned_abs() / 1000).saturating_add(error);
        match apart > allowed {
            true => Finding::bad(
                CHECK,
                format!(
                    "in {here:.1?} by the clock of this process the server's went {:.3} s: it drifts or steps, and leases \
                     end at other times than their holders believe",
                    there as f64 / 1e6
                ),
                "let a time service slew the clock and not step it; look at the virtual machine",
            ),
            false => Finding::good(
                CHECK,
                format!("it went as fast as ours for {here:.1?}, within {error} µs"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::doctor::Verdict;

    #[test]
    fn clock_that_drifts_or_steps_is_bad_and_a_slow_reply_is_not() {
        let start = clock::now();
        let reading = |server_ms: i64, after_ms, trip_ms| ClockReading {
            server: server_ms * 1000,
            at: start + Duration::from_millis(after_ms),
            round_trip: Duration::from_millis(trip_ms),
            ahead_ms: 0,
        };
        let verdict = |server, after, trip| reading(0, 0, 1).judged(&reading(server, after, trip)).verdict;
        assert_eq!(verdict(3000, 3000, 1), Verdict::Good);
        assert_eq!(verdict(3004, 3000, 1), Verdict::Good);
        assert_eq!(verdict(3006, 3000, 1), Verdict::Bad);
        assert_eq!(verdict(-57_000, 3000, 1), Verdict::Bad);
        assert_eq!(verdict(3200, 3000, 300), Verdict::Good);
        assert_eq!(verdict(500, 500, 1), Verdict::Unknown);
    }

    #[test]
    fn steps_may_take_a_fifth_of_the_timeout() {
        let verdict =
            |took| judged_times(vec![Duration::from_millis(took); 100], Duration::from_secs(1)).verdict;
        assert_eq!((verdict(200), verdict(201)), (Verdict::Good, Verdict::Bad));
        assert_eq!(
            judged_times(Vec::new(), Duration::from_secs(1)).verdict,
            Verdict::Unknown
        );
    }
}
