//! Names of locks.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::Error;

/// The maximum length of a lock name, in bytes.
pub const MAX_KEY_BYTES: usize = 512;

const BRACES: [char; 2] = ['{', '}'];

/// On Redis, how the keys of records, of the audit log and of what clients publish begin.
pub(crate) const OWN: &str = "dlock:";

/// The name of a lock.
///
/// Every string converts into a name: functions that take `impl Into<LockKey>` take `"report"` and
/// `format!("order:{id}")` alike. A name is UTF-8, 1 to [`MAX_KEY_BYTES`] bytes long and has no control characters. It
/// has no `{` or `}` either: on Redis they choose the hash slot and change the names of the keys around the lock, and
/// names are often made from user input. For the same reason it does not begin with `dlock:`, as the keys of records, of the
/// audit log and of other things of this library do. [`LockKey::raw`] allows both.
///
/// Converting never fails. A name that breaks the rules is reported as [`Error::InvalidKey`] by the call that uses it,
/// before anything is sent; [`LockKey::new`] reports it at once.
///
/// ```
/// use dlock::LockKey;
///
/// assert!(LockKey::new("order:42").is_ok());
/// assert!(LockKey::new("").is_err());
/// assert!(LockKey::new("order:{42}").is_err());
/// assert!(LockKey::raw("order:{42}").check().is_ok());
/// assert!(LockKey::new("dlock:audit").is_err());
/// ```
///
/// Two keys are equal when their names are, raw or not: they name the same lock. A key is equal to its text, too, and
/// finds its place in a map by it:
///
/// ```
/// use dlock::LockKey;
/// use std::collections::HashMap;
///
/// let order: LockKey = "order:42".parse()?;
/// assert_eq!(order, "order:42");
/// let held = HashMap::from([(order, 7)]);
/// assert_eq!(held.get("order:42"), Some(&7));
/// # Ok::<_, dlock::Error>(())
/// ```
#[derive(Clone)]
pub struct LockKey {
    name: Name,
}

/// In two words: every hold has one.
#[derive(Clone)]
enum Name {
    Plain(Arc<str>),
    /// May have braces, or begin with `dlock:`.
    Raw(Arc<Box<str>>),
}

impl LockKey {
    /// Checks a name at once.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] when the name breaks a rule.
    pub fn new(name: impl Into<LockKey>) -> Result<LockKey, Error> {
        let key = name.into();
        key.check()?;
        Ok(key)
    }

    /// Creates a name that may contain `{` and `}`, to share a `{tag}` name with Java services or to put several locks
    /// into one Cluster slot. It may begin with `dlock:`, to look at a lock that has such a name already. The other rules
    /// apply. Do not create such names from user input.
    ///
    /// In a Cluster, for all kinds but the plain lock, braces must form a tag, as `{42}`: other braces are
    /// [`Error::Unsupported`].
    ///
    /// On Redis and Valkey, without a client [prefix](crate::LockClientBuilder::prefix), do not use a name both with and
    /// without braces around all of it, as `jobs` and `{jobs}`. They are two locks whose other data have the same keys, as in
    /// Redisson: both share the holders of a semaphore, the queue of a fair lock, and the waiting writers of a read-write
    /// lock. Plain locks and latches are apart.
    pub fn raw(name: impl Into<String>) -> LockKey {
        let name = name.into();
        // Otherwise it is like any other.
        if !name.contains(BRACES) && !name.starts_with(OWN) {
            return name.into();
        }
        LockKey {
            name: Name::Raw(Arc::new(name.into())),
        }
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.name {
            Name::Plain(name) => name,
            Name::Raw(name) => name,
        }
    }

    /// Returns the name; only a raw one is copied.
    #[cfg(feature = "redis")]
    pub(crate) fn into_shared(self) -> Arc<str> {
        match self.name {
            Name::Plain(name) => name,
            Name::Raw(name) => (**name).into(),
        }
    }

    fn is_raw(&self) -> bool {
        matches!(self.name, Name::Raw(_))
    }

    /// Checks the name against the rules.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], with the broken rule and its position.
    pub fn check(&self) -> Result<(), Error> {
        let name = self.as_str();
        let is_own = name.starts_with(OWN) && !self.is_raw();
        // Fast path: most names have neither control characters nor braces.
        let plain = |byte: u8| matches!(byte, b' '..=b'z' | b'|' | b'~');
        // Without a branch for each byte, several bytes are compared at once.
        let all_plain = || name.bytes().fold(true, |all, byte| all & plain(byte));
        let reason = if name.is_empty() {
            "it is empty".to_owned()
        } else if name.len() > MAX_KEY_BYTES {
            format!("it has {} bytes, {MAX_KEY_BYTES} are the most", name.len())
        } else if is_own {
            format!(
                "it begins with `{OWN}`, as dlock's own keys do (put a prefix before it; LockKey::raw lets it through on purpose)"
            )
        } else if all_plain() {
            return Ok(());
        } else if let Some((at, _)) = name.char_indices().find(|(_, c)| c.is_control()) {
            format!("it has a control character at byte {at}")
        } else if let Some(at) = name.find(BRACES).filter(|_| !self.is_raw()) {
            format!("it has a brace at byte {at} (LockKey::raw lets braces through on purpose)")
        } else {
            return Ok(());
        };
        Err(Error::InvalidKey {
            key: shortened(name),
            reason,
        })
    }
}

/// Shortens an invalid name for a message, to one line.
fn shortened(name: &str) -> String {
    const SHOWN: usize = 64;
    let mut text: String = name.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if name.chars().nth(SHOWN).is_some() {
        text.push('…');
    }
    text
}

impl PartialEq for LockKey {
    fn eq(&self, other: &LockKey) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for LockKey {}

impl std::hash::Hash for LockKey {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl PartialOrd for LockKey {
    fn partial_cmp(&self, other: &LockKey) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LockKey {
    fn cmp(&self, other: &LockKey) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

/// The name itself: stores and services build names of their own by it. Control characters, which no name of a lock has, are
/// escaped, so that a message stays on its line.
impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.as_str();
        let mut written = 0;
        for (at, control) in name.match_indices(char::is_control) {
            write!(f, "{}{}", &name[written..at], control.escape_debug())?;
            written = at + control.len();
        }
        f.write_str(&name[written..])
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockKey({})", shortened(self.as_str()))
    }
}

impl AsRef<str> for LockKey {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

/// So that a map by keys is searched by text: a key is equal to, sorts as, and has the hash of its text.
impl Borrow<str> for LockKey {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq<str> for LockKey {
    fn eq(&self, name: &str) -> bool {
        self.as_str() == name
    }
}

impl PartialEq<&str> for LockKey {
    fn eq(&self, name: &&str) -> bool {
        self.as_str() == *name
    }
}

impl PartialEq<LockKey> for str {
    fn eq(&self, key: &LockKey) -> bool {
        self == key.as_str()
    }
}

impl PartialEq<LockKey> for &str {
    fn eq(&self, key: &LockKey) -> bool {
        *self == key.as_str()
    }
}

/// As by [`LockKey::new`]: a name that breaks a rule is an error.
impl FromStr for LockKey {
    type Err = Error;

    fn from_str(name: &str) -> Result<LockKey, Error> {
        LockKey::new(name)
    }
}

impl From<&str> for LockKey {
    fn from(name: &str) -> Self {
        Arc::<str>::from(name).into()
    }
}

impl From<&&str> for LockKey {
    fn from(name: &&str) -> Self {
        (*name).into()
    }
}

impl From<String> for LockKey {
    fn from(name: String) -> Self {
        Arc::<str>::from(name).into()
    }
}

impl From<&String> for LockKey {
    fn from(name: &String) -> Self {
        name.as_str().into()
    }
}

impl From<Cow<'_, str>> for LockKey {
    fn from(name: Cow<'_, str>) -> Self {
        name.as_ref().into()
    }
}

impl From<Arc<str>> for LockKey {
    fn from(name: Arc<str>) -> Self {
        LockKey {
            name: Name::Plain(name),
        }
    }
}

impl From<&LockKey> for LockKey {
    fn from(key: &LockKey) -> Self {
        key.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};
    use std::hash::{DefaultHasher, Hash, Hasher};

    use super::*;

    #[test]
    fn harmful_names_are_refused_with_the_reason() {
        for (name, says) in [
            (String::new(), "empty"),
            ("x".repeat(MAX_KEY_BYTES + 1), "513 bytes"),
            ("a\nb".into(), "control character at byte 1"),
            ("a\u{0}b".into(), "control character"),
            ("a{b".into(), "brace at byte 1"),
            ("a}b".into(), "brace"),
            ("dlock:audit".into(), "begins with `dlock:`"),
            ("dlock:\u{fc}".into(), "put a prefix before it"),
        ] {
            let error = LockKey::new(name).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(LockKey::new("x".repeat(MAX_KEY_BYTES)).is_ok());
        assert!(LockKey::new("größe:42").is_ok());
        assert!(LockKey::new("dlock").is_ok() && LockKey::new("shop:dlock:audit").is_ok());
    }

    #[test]
    fn a_huge_name_makes_no_huge_message() {
        let error = LockKey::new("x".repeat(10_000)).unwrap_err().to_string();
        assert!(error.len() < 300, "{error}");
    }

    #[test]
    fn key_is_displayed_as_its_name_without_control_characters() {
        for name in [
            "order:42".into(),
            "it's \"ü\" e\u{301}".into(),
            "x".repeat(MAX_KEY_BYTES),
        ] {
            assert_eq!(LockKey::from(&*name).to_string(), name);
        }
        assert_eq!(LockKey::from("a\nb\u{1b}[0m").to_string(), r"a\nb\u{1b}[0m");
    }

    #[test]
    fn a_name_takes_two_words() {
        assert_eq!(size_of::<LockKey>(), 2 * size_of::<usize>());
        assert_eq!(LockKey::raw("a{b}"), LockKey::from("a{b}"));
    }

    #[test]
    fn key_is_found_and_compared_by_its_text() {
        for key in [
            LockKey::from("order:{42}"),
            LockKey::raw("order:{42}"),
            "größe".into(),
        ] {
            let text = key.as_str().to_owned();
            let hash = |what: &dyn Fn(&mut DefaultHasher)| {
                let mut hasher = DefaultHasher::new();
                what(&mut hasher);
                hasher.finish()
            };
            assert_eq!(hash(&|to| key.hash(to)), hash(&|to| text.hash(to)));
            assert_eq!(HashMap::from([(key.clone(), 1)]).get(text.as_str()), Some(&1));
            assert_eq!(BTreeMap::from([(key.clone(), 1)]).get(text.as_str()), Some(&1));
            assert!(key == *text && key == text.as_str());
            assert!(*text == key && text.as_str() == key);
            assert_ne!(key, "a");
            assert_eq!("a".cmp(&text), LockKey::from("a").cmp(&key));
        }
    }

    #[test]
    fn text_is_parsed_to_a_key_by_the_rules() {
        assert_eq!("order:42".parse::<LockKey>().unwrap(), "order:42");
        let refused = "order:{42}".parse::<LockKey>().unwrap_err();
        assert!(matches!(refused, Error::InvalidKey { .. }), "{refused}");
    }

    #[test]
    fn raw_names_keep_the_other_rules() {
        assert!(LockKey::raw("{a}:b").check().is_ok());
        assert!(LockKey::raw("dlock:audit").check().is_ok());
        assert!(LockKey::raw("{a}\n").check().is_err());
    }
}
