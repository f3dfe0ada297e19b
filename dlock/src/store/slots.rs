//! Records of work that is done once in each slot of time.
//!
//! A slot is named by the moment at which it begins, in microseconds since the Unix epoch. The record of the work has
//! the last claimed slot as its fingerprint, so that every other operation treats it like any record.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::store::records::{ClaimReply, Fingerprint};

/// How far a slot without a period may be ahead of the store's clock.
const AHEAD: Duration = Duration::from_secs(5 * 60);

/// Which slot a claim is for; see [`RecordStore::claim_slot`](crate::record::RecordStore::claim_slot).
///
/// ```
/// use dlock::record::SlotRequest;
/// use std::time::Duration;
///
/// let slot = SlotRequest::nearest(Duration::from_secs(300)); // of those that begin every five minutes
/// assert_eq!(slot.period(), Some(Duration::from_secs(300)));
/// assert_eq!(slot.time(), None); // the store's clock says which
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotRequest {
    /// In µs; 0 if there is none.
    period: u64,
    /// In µs since the epoch; 0 for the nearest slot.
    at: u64,
}

impl SlotRequest {
    /// Requests the slot whose beginning is nearest to the store's current time, among those that begin at the
    /// multiples of the period since the Unix epoch. Never rounded down: a tick that comes a moment early is for the
    /// slot that is about to begin.
    #[must_use]
    pub fn nearest(period: Duration) -> SlotRequest {
        SlotRequest {
            period: micros(period).max(1),
            at: 0,
        }
    }

    /// Requests the slot that begins at this moment: the nominal time of a scheduler. It may be five minutes ahead of
    /// the store's clock.
    #[must_use]
    pub fn at(time: SystemTime) -> SlotRequest {
        SlotRequest {
            period: 0,
            at: micros_of(time),
        }
    }

    /// Sets the period: the slot may then be one period ahead of the nearest slot.
    #[must_use]
    pub fn with_period(self, period: Duration) -> SlotRequest {
        SlotRequest {
            period: micros(period).max(1),
            ..self
        }
    }

    /// Returns the period, if there is one.
    #[must_use]
    pub fn period(&self) -> Option<Duration> {
        (self.period > 0).then(|| Duration::from_micros(self.period))
    }

    /// Returns the beginning of the slot, unless it is the nearest one.
    #[must_use]
    pub fn time(&self) -> Option<SystemTime> {
        (self.at > 0).then(|| time_of(self.at))
    }

    /// Returns how far a slot may begin ahead of the nearest slot, or of the current time without a period.
    #[must_use]
    pub fn ahead(&self) -> Duration {
        self.period().unwrap_or(AHEAD)
    }

    /// How long before its beginning a slot may be done.
    #[cfg(feature = "once")]
    pub(crate) fn longest_ahead(&self) -> Duration {
        self.ahead() + self.period().unwrap_or_default() / 2
    }

    /// Returns the requested slot, and the latest acceptable one, by a store's clock in µs since the epoch.
    pub(crate) fn judged(&self, now: u64) -> (u64, u64) {
        let nearest = match self.period {
            0 => now,
            period => {
                let middle = now.saturating_add(period / 2);
                middle - middle % period
            }
        };
        let latest = nearest.saturating_add(micros(self.ahead()));
        (if self.at > 0 { self.at } else { nearest }, latest)
    }
}

/// The reply to a claim for a slot.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, RecordKey, SlotOutcome, SlotRequest};
/// use std::time::Duration;
///
/// let records = dlock::LockClient::memory().records()?;
/// let (key, minute, day) = (RecordKey::new("poll")?, Duration::from_secs(60), Duration::from_secs(24 * 60 * 60));
/// let request = ClaimRequest::new(key, ClaimToken::new(), [0; 32], Duration::from_secs(10), day);
/// let reply = records.claim_slot(request, SlotRequest::nearest(minute)).await?;
/// assert!(matches!(reply.outcome, SlotOutcome::Claim(ClaimReply::Claimed { attempt: 1, .. })));
/// assert_eq!(reply.last, None); // the first slot of this record
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlotReply {
    /// The store's current time.
    pub now: SystemTime,
    /// The claimed slot. For a repeated claim, the slot that it has.
    pub slot: SystemTime,
    /// The previous slot of the record.
    pub last: Option<SystemTime>,
    /// The outcome.
    pub outcome: SlotOutcome,
}

impl SlotReply {
    /// Creates a reply.
    #[must_use]
    pub fn new(
        now: SystemTime,
        slot: SystemTime,
        last: Option<SystemTime>,
        outcome: SlotOutcome,
    ) -> SlotReply {
        SlotReply {
            now,
            slot,
            last,
            outcome,
        }
    }

    /// Creates a reply from microseconds since the epoch, as stores count.
    #[must_use]
    pub fn of_micros(now: u64, slot: u64, last: Option<u64>, outcome: SlotOutcome) -> SlotReply {
        SlotReply::new(time_of(now), time_of(slot), last.map(time_of), outcome)
    }
}

/// The outcome of a claim for a slot. Checked in this order: a repeated claim, too far ahead, clock went back, missed,
/// and then as any [claim](ClaimReply). A record of work without slots is a mismatch, whatever the slot.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::record::{ClaimRequest, ClaimToken, RecordKey, SlotOutcome, SlotRequest};
/// use std::time::{Duration, SystemTime};
///
/// let records = dlock::LockClient::memory().records()?;
/// let day = Duration::from_secs(24 * 60 * 60);
/// let request = ClaimRequest::new(RecordKey::new("poll")?, ClaimToken::new(), [0; 32], day / 24, day);
/// let reply = records.claim_slot(request, SlotRequest::at(SystemTime::now() + day)).await?;
/// assert_eq!(reply.outcome, SlotOutcome::TooFarAhead);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotOutcome {
    /// As for any claim. `InProgress` may be the claim of an earlier slot, whose work still runs.
    Claim(ClaimReply),
    /// A later slot was claimed before, or the slot is older than the record's retention. Nothing was changed.
    Missed,
    /// The record has a slot further ahead of the store's clock than any claim may be: the clock was set back. Nothing
    /// was changed.
    ClockWentBack,
    /// The requested slot is too far ahead of the store's clock. Nothing was changed.
    TooFarAhead,
}

/// The fingerprint of a record with this last slot: `slot `, 16 digits, and spaces.
pub(crate) fn slot_print(slot: u64) -> Fingerprint {
    let mut print = [b' '; 32];
    print[..21].copy_from_slice(format!("slot {:016}", slot.min(9_999_999_999_999_999)).as_bytes());
    print
}

/// Returns the slot of a record with this fingerprint; `None` for one without slots.
#[must_use]
pub fn slot_of_fingerprint(print: &Fingerprint) -> Option<SystemTime> {
    micros_of_print(print).map(time_of)
}

pub(crate) fn micros_of_print(print: &Fingerprint) -> Option<u64> {
    let digits = print.strip_prefix(b"slot ")?.strip_suffix(b"           ")?;
    digits.iter().all(u8::is_ascii_digit).then_some(())?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Whole microseconds, saturating.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros())
        .unwrap_or(u64::MAX)
        .min(1 << 52)
}

/// Microseconds since the Unix epoch; 1 for earlier times.
pub(crate) fn micros_of(time: SystemTime) -> u64 {
    micros(time.duration_since(UNIX_EPOCH).unwrap_or_default()).max(1)
}

pub(crate) fn time_of(micros: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros.min(1 << 53))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_of_a_fingerprint_is_the_one_it_was_made_of() {
        for slot in [1, 1_767_225_600_000_000, 9_999_999_999_999_999] {
            assert_eq!(micros_of_print(&slot_print(slot)), Some(slot));
        }
        assert_eq!(micros_of_print(&[0; 32]), None);
        assert_eq!(micros_of_print(&[b' '; 32]), None);
    }

    #[test]
    fn nearest_slot_is_never_rounded_down() {
        let slot = SlotRequest::nearest(Duration::from_secs(1));
        for (now, nearest) in [
            (10_000_000, 10_000_000),
            (9_996_000, 10_000_000),
            (10_004_000, 10_000_000),
            (10_500_000, 11_000_000),
            (10_499_999, 10_000_000),
        ] {
            assert_eq!(slot.judged(now), (nearest, nearest + 1_000_000), "{now}");
        }
        let named = SlotRequest::at(time_of(7_000_000));
        assert_eq!(named.judged(10_000_000), (7_000_000, 310_000_000));
        let odd = SlotRequest::nearest(Duration::from_micros(3));
        assert_eq!(odd.judged(10).0, 9);
        assert_eq!(odd.judged(11).0, 12);
    }
}
