//! The names of keys in etcd.
//!
//! | key | meaning |
//! |---|---|
//! | `<namespace>q/<lock>\0L`, `…W` | the grant of a plain lock, of a writer |
//! | `<namespace>q/<lock>\0r<session>.<number>` | the grant of a reader |
//! | `<namespace>q/<lock>\0P<session>.<number>.<amount>` | the grant of so many permits |
//! | `<namespace>q/<lock>\0A` | the total of a semaphore, a decimal number |
//! | `<namespace>q/<lock>\0C` | the count of a latch, a decimal number |
//! | `<namespace>q/<lock>\0w<session>.<number>` | the position of a waiter for a fair lock, in order of the revisions that created them |
//! | `<namespace>q/<lock>\0v<revision>.<session>.<number>` | the position of a waiter that had lost its position of this revision |
//! | `<namespace>q/<lock>\0x<session>.<number>.<amount>` | the position of a waiter for so many permits |
//! | `<namespace>o/<id>` | the reply to an operation on a semaphore or latch, which may arrive again |
//! | `<namespace>c/<lease>` | the epoch of a session; its value is the name of the service |
//!
//! The value of a grant is its id, `held` or `kept` (released, but keeping the lock for a while), and milliseconds.
//! The value of a position is the id of the waiter, and `waits`.
//!
//! All but readers have capital letters, which sort before the small letter of readers, so one condition covers them. The
//! numbers come first: they have no holder.
//! The letters of positions follow: they exclude no grant.
//!
//! Grants reuse the same keys: until its next compaction, the server scans all keys that ever existed in a range to
//! find that it is empty.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::{GrantId, Kind, Reason, StoreError};

use crate::client::proto::{KeyRange, end_of};

/// The most bytes of a name, including its prefix.
const LONGEST: usize = 2048;
const TOTAL: u8 = b'A';
const COUNT: u8 = b'C';
const PLAIN: u8 = b'L';
const PERMIT: u8 = b'P';
const WRITE: u8 = b'W';
const READ: u8 = b'r';
const RETURNED: u8 = b'v';
const WAITS: u8 = b'w';
const WAITS_FOR_PERMITS: u8 = b'x';

/// Names the keys of the store.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    pub(crate) namespace: String,
    pub(crate) prefix: String,
}

/// The name of a lock, with the prefix of the client.
pub(crate) type Name = Arc<str>;

impl Names {
    /// Returns the name of a lock.
    pub(crate) fn lock(&self, key: &LockKey) -> Result<Name, StoreError> {
        let name = [&*self.prefix, key.as_str()].concat();
        if name.len() > LONGEST || name.contains('\0') {
            let message = format!("a key has up to {LONGEST} bytes with its prefix, and no zero byte");
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        Ok(name.into())
    }

    /// Returns the key of a grant that excludes all others.
    pub(crate) fn exclusive(&self, name: &str, kind: Kind) -> Vec<u8> {
        let mut key = self.all(name).0;
        key.push(letter(kind));
        key
    }

    /// Returns the key of a reader of this session.
    pub(crate) fn reader(&self, name: &str, session: i64, number: usize) -> Vec<u8> {
        let mut key = self.exclusive(name, Kind::Read);
        key.extend_from_slice(format!("{session:016x}.{number}").as_bytes());
        key
    }

    /// Returns the key of a grant of permits.
    pub(crate) fn permits(&self, name: &str, session: i64, number: usize, amount: u32) -> Vec<u8> {
        self.of_permits(name, PERMIT, session, number, amount)
    }

    /// Returns the key of the position of a waiter for permits.
    pub(crate) fn permits_position(&self, name: &str, session: i64, number: usize, amount: u32) -> Vec<u8> {
        self.of_permits(name, WAITS_FOR_PERMITS, session, number, amount)
    }

    fn of_permits(&self, name: &str, letter: u8, session: i64, number: usize, amount: u32) -> Vec<u8> {
        let mut key = self.all(name).0;
        key.push(letter);
        key.extend_from_slice(format!("{session:016x}.{number}.{amount}").as_bytes());
        key
    }

    /// Returns the key of the total of a semaphore.
    pub(crate) fn total(&self, name: &str) -> Vec<u8> {
        self.between(name, Some(TOTAL), TOTAL).0
    }

    /// Returns the key of the count of a latch.
    pub(crate) fn count(&self, name: &str) -> Vec<u8> {
        self.between(name, Some(COUNT), COUNT).0
    }

    /// Returns the key of the reply to an operation.
    pub(crate) fn operation(&self, id: GrantId) -> Vec<u8> {
        format!("{}o/{id}", self.namespace).into_bytes()
    }

    /// Returns the range of all keys of a lock.
    pub(crate) fn all(&self, name: &str) -> KeyRange {
        let start = format!("{}q/{name}\0", self.namespace).into_bytes();
        let end = end_of(&start);
        (start, end)
    }

    /// Returns the range of all grants of a lock, and of its numbers.
    pub(crate) fn grants(&self, name: &str) -> KeyRange {
        self.between(name, None, READ + 1)
    }

    /// Returns the range of all grants of a lock.
    pub(crate) fn holders(&self, name: &str) -> KeyRange {
        self.between(name, Some(PLAIN), READ + 1)
    }

    /// Returns the range of all grants of permits.
    pub(crate) fn all_permits(&self, name: &str) -> KeyRange {
        self.between(name, Some(PERMIT), PERMIT + 1)
    }

    /// Returns the range of all positions of waiters for permits.
    pub(crate) fn waiting_for_permits(&self, name: &str) -> KeyRange {
        self.between(name, Some(WAITS_FOR_PERMITS), WAITS_FOR_PERMITS + 1)
    }

    /// Whether the key of a lock is that of a waiter for permits.
    pub(crate) fn is_position_for_permits(&self, name: &str, key: &[u8]) -> bool {
        let (start, end) = self.waiting_for_permits(name);
        *start <= *key && *key < *end
    }

    /// Whether the key of a lock is that of a grant, or of a number.
    pub(crate) fn is_grant(&self, name: &str, key: &[u8]) -> bool {
        let (start, end) = self.grants(name);
        *start <= *key && *key < *end
    }

    /// Returns the range of the grants that conflict with a lock of this kind.
    pub(crate) fn in_the_way(&self, name: &str, kind: Kind) -> KeyRange {
        match kind {
            Kind::Read => self.between(name, None, READ),
            _ => self.grants(name),
        }
    }

    /// Returns the ranges of what a key holds that is no plain lock.
    pub(crate) fn not_plain(&self, name: &str) -> [KeyRange; 2] {
        [
            self.between(name, None, PLAIN),
            self.between(name, Some(PLAIN + 1), READ + 1),
        ]
    }

    /// Returns the range of the positions that keep the revisions that created them.
    pub(crate) fn positions(&self, name: &str) -> KeyRange {
        self.between(name, Some(WAITS), WAITS + 1)
    }

    /// Returns the range of all positions.
    pub(crate) fn waiting(&self, name: &str) -> KeyRange {
        self.between(name, Some(RETURNED), WAITS + 1)
    }

    /// Returns the range of the positions of returned waiters that were created before this revision at first, and that
    /// of all other positions.
    pub(crate) fn waiting_before(&self, name: &str, revision: i64) -> (KeyRange, KeyRange) {
        let (start, end) = self.waiting(name);
        let mut bound = start.clone();
        bound.extend_from_slice(format!("{revision:016x}").as_bytes());
        ((start, bound.clone()), (bound, end))
    }

    fn between(&self, name: &str, from: Option<u8>, to: u8) -> KeyRange {
        let mut start = self.all(name).0;
        let mut end = start.clone();
        start.extend(from);
        end.push(to);
        (start, end)
    }

    /// Returns the key of the position of a waiter; `returned` is the first revision of a waiter that had lost it.
    pub(crate) fn position(&self, name: &str, returned: Option<i64>, session: i64, number: usize) -> Vec<u8> {
        let mut key = self.all(name).0;
        let position = match returned {
            None => format!("{}{session:016x}.{number}", char::from(WAITS)),
            Some(revision) => format!("{}{revision:016x}.{session:016x}.{number}", char::from(RETURNED)),
        };
        key.extend_from_slice(position.as_bytes());
        key
    }

    /// The revision that the position of a returned waiter names.
    pub(crate) fn returned(&self, name: &str, key: &[u8]) -> Option<i64> {
        let position = key.strip_prefix(&*self.all(name).0)?.strip_prefix(&[RETURNED])?;
        let revision = std::str::from_utf8(position.get(..16)?).ok()?;
        i64::from_str_radix(revision, 16).ok()
    }

    /// Returns the range of the grants of all locks whose names begin with the client's prefix and `prefix`.
    pub(crate) fn with_prefix(&self, prefix: &str) -> KeyRange {
        let start = format!("{}q/{}{prefix}", self.namespace, self.prefix).into_bytes();
        let end = end_of(&start);
        (start, end)
    }

    /// Returns the key of the epoch of a session.
    pub(crate) fn epoch(&self, lease: i64) -> Vec<u8> {
        format!("{}c/{lease:016x}", self.namespace).into_bytes()
    }

    /// Returns the lock, without the client's prefix, and the kind that the key of a grant names.
    pub(crate) fn read<'a>(&self, key: &'a [u8]) -> Option<(&'a str, Kind)> {
        let (name, letter) = self.split(key)?;
        let kind = kind(letter).filter(|_| letter >= PLAIN)?;
        Some((name.strip_prefix(&self.prefix)?, kind))
    }

    /// Returns the kind of what the key of a lock holds: a grant or a number.
    pub(crate) fn kind(&self, key: &[u8]) -> Option<Kind> {
        kind(self.split(key)?.1)
    }

    /// Returns the lock with its prefix, and the letter.
    fn split<'a>(&self, key: &'a [u8]) -> Option<(&'a str, u8)> {
        let key = std::str::from_utf8(key).ok()?;
        let key = key.strip_prefix(&self.namespace)?.strip_prefix("q/")?;
        let (name, rest) = key.split_once('\0')?;
        Some((name, *rest.as_bytes().first()?))
    }
}

fn kind(letter: u8) -> Option<Kind> {
    Some(match letter {
        PLAIN => Kind::Mutex,
        WRITE => Kind::Write,
        READ => Kind::Read,
        TOTAL | PERMIT => Kind::Permit,
        COUNT => Kind::Latch,
        _ => return None,
    })
}

/// Returns how many permits a key is for: 1 if it is no key of permits.
pub(crate) fn amount(key: &[u8]) -> u32 {
    let amount = key.rsplit(|byte| *byte == b'.').next();
    let amount = amount.and_then(|amount| std::str::from_utf8(amount).ok());
    amount.and_then(|amount| amount.parse().ok()).unwrap_or(1)
}

/// Whether grants of these kinds share a key.
pub(crate) fn is_same(one: Kind, other: Kind) -> bool {
    letter(one) == letter(other)
}

fn letter(kind: Kind) -> u8 {
    match kind {
        Kind::Read => READ,
        Kind::Write => WRITE,
        Kind::Permit => PERMIT,
        _ => PLAIN,
    }
}

/// Describes what the key holds if the requested kind is something else; `None` if both kinds share their data.
pub(crate) fn other_lock(asked: Kind, held: Kind) -> Option<&'static str> {
    (noun(held) != noun(asked)).then(|| noun(held))
}

fn noun(kind: Kind) -> &'static str {
    match kind {
        Kind::Read | Kind::Write => "a read-write lock",
        Kind::Permit | Kind::Unowned => "a semaphore",
        Kind::Latch => "a latch",
        _ => "a plain lock",
    }
}

/// The state in the value of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// The grant is held, with this lease.
    Held(Duration),
    /// The grant was released, but keeps the lock for this long.
    Kept(Duration),
}

impl State {
    /// Returns the value for this grant.
    pub(crate) fn write(self, grant: GrantId) -> Vec<u8> {
        let (word, time) = match self {
            State::Held(lease) => ("held", lease),
            State::Kept(rest) => ("kept", rest),
        };
        // Rounded up: never less than the exact time.
        format!("{grant} {word} {}", time.as_micros().div_ceil(1000)).into_bytes()
    }

    /// Returns the id of the grant and its state.
    pub(crate) fn read(value: &[u8]) -> (&str, State) {
        let text = std::str::from_utf8(value).unwrap_or_default();
        let (grant, state) = text.split_once(' ').unwrap_or((text, ""));
        let (word, time) = state.split_once(' ').unwrap_or_default();
        let time = time.parse().map_or(Duration::MAX, Duration::from_millis);
        let state = match word {
            "kept" => State::Kept(time),
            _ => State::Held(time),
        };
        (grant, state)
    }

    /// The longest time that the grant may still last.
    pub(crate) fn lasts(self) -> Duration {
        match self {
            State::Held(time) | State::Kept(time) => time,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names {
            namespace: "dlock/".to_owned(),
            prefix: "shop:".to_owned(),
        }
    }

    fn is_within(key: &[u8], range: &KeyRange) -> bool {
        *key >= *range.0 && *key < *range.1
    }

    fn key(names: &Names, name: &str, kind: Kind) -> Vec<u8> {
        match kind {
            Kind::Read => names.reader(name, 17, 2),
            kind => names.exclusive(name, kind),
        }
    }

    #[test]
    fn key_is_read_as_it_was_written() {
        let names = names();
        let name = names.lock(&"order:42".into()).unwrap();
        for kind in [Kind::Mutex, Kind::Read, Kind::Write] {
            let key = key(&names, &name, kind);
            assert_eq!(names.read(&key), Some(("order:42", kind)));
            assert!(is_within(&key, &names.all(&name)));
            assert!(is_within(&key, &names.with_prefix("order")));
            assert!(!is_within(&key, &names.all("shop:order:4")));
            assert!(!is_within(&key, &names.all("shop:order:422")));
        }
    }

    #[test]
    fn readers_are_in_the_way_of_all_but_readers() {
        let names = names();
        for (held, asked, is_in_the_way) in [
            (Kind::Mutex, Kind::Mutex, true),
            (Kind::Mutex, Kind::Read, true),
            (Kind::Write, Kind::Read, true),
            (Kind::Write, Kind::Write, true),
            (Kind::Read, Kind::Write, true),
            (Kind::Read, Kind::Mutex, true),
            (Kind::Read, Kind::Read, false),
        ] {
            let key = key(&names, "k", held);
            let range = names.in_the_way("k", asked);
            assert_eq!(is_within(&key, &range), is_in_the_way, "{held} {asked}");
        }
    }

    #[test]
    fn positions_exclude_no_grant_and_say_their_order() {
        let names = names();
        let (new, returned) = (
            names.position("k", None, 17, 2),
            names.position("k", Some(9), 17, 2),
        );
        for (key, revision) in [(&new, None), (&returned, Some(9))] {
            assert!(is_within(key, &names.all("k")));
            assert!(!is_within(key, &names.grants("k")));
            assert_eq!(is_within(key, &names.positions("k")), revision.is_none());
            assert_eq!(names.returned("k", key), revision);
            assert_eq!(names.read(key), None);
        }
        for (revision, is_before) in [(9, false), (10, true)] {
            let (before, others) = names.waiting_before("k", revision);
            assert_eq!(is_within(&returned, &before), is_before);
            assert_eq!(is_within(&returned, &others), !is_before);
            assert!(!is_within(&new, &before) && is_within(&new, &others));
        }
        for kind in [Kind::Read, Kind::Write, Kind::Mutex] {
            let key = key(&names, "k", kind);
            assert!(is_within(&key, &names.grants("k")));
            let is_other = names.not_plain("k").iter().any(|range| is_within(&key, range));
            assert_eq!(is_other, kind != Kind::Mutex);
        }
    }

    #[test]
    fn permits_and_numbers_exclude_locks_and_only_permits_have_holders() {
        let names = names();
        let (permits, waits) = (
            names.permits("shop:k", 17, 2, 30),
            names.permits_position("shop:k", 17, 2, 30),
        );
        for key in [names.total("shop:k"), names.count("shop:k"), permits.clone()] {
            assert!(is_within(&key, &names.in_the_way("shop:k", Kind::Read)));
            assert!(is_within(&key, &names.in_the_way("shop:k", Kind::Mutex)));
            assert!(
                names
                    .not_plain("shop:k")
                    .iter()
                    .any(|range| is_within(&key, range))
            );
            assert_eq!(is_within(&key, &names.holders("shop:k")), key == permits);
            assert_eq!(is_within(&key, &names.all_permits("shop:k")), key == permits);
            assert_eq!(names.read(&key).is_some(), key == permits);
        }
        assert_eq!(names.kind(&names.total("shop:k")), Some(Kind::Permit));
        assert_eq!(names.kind(&names.count("shop:k")), Some(Kind::Latch));
        assert!(is_within(&waits, &names.all("shop:k")) && !is_within(&waits, &names.grants("shop:k")));
        assert!(!is_within(&waits, &names.waiting("shop:k")) && names.kind(&waits).is_none());
        assert_eq!((amount(&permits), amount(&waits)), (30, 30));
    }

    #[test]
    fn name_without_end_is_refused() {
        for key in ["a\0b".to_owned(), "x".repeat(LONGEST)] {
            let error = names().lock(&LockKey::raw(key)).unwrap_err();
            assert_eq!(error.reason, Reason::Refused);
        }
    }

    #[test]
    fn state_is_read_as_it_was_written_and_a_foreign_value_has_no_end() {
        let (ms, grant) = (Duration::from_millis, GrantId::from_parts(7, 9));
        for state in [State::Held(ms(30_000)), State::Kept(ms(1))] {
            assert_eq!(State::read(&state.write(grant)), (&*grant.to_string(), state));
        }
        assert_eq!(State::read(b"what"), ("what", State::Held(Duration::MAX)));
    }
}
