//! What is waited for: a name and a kind, with their hash, since each acquire looks it up several times.

use std::hash::{BuildHasher, Hash, Hasher};

use crate::LockKey;
use crate::base::chance::{HashMap, hash_state};
use crate::base::int_hash::{BuildIntHasher, scatter};
use crate::base::kind::Kind;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LockId {
    hash: u64,
    pub(crate) kind: Kind,
    pub(crate) key: LockKey,
}

/// A map by lock id.
pub(crate) type ByLockId<V> = HashMap<LockId, V, BuildIntHasher>;

impl LockId {
    pub(crate) fn new(kind: Kind, key: &LockKey) -> LockId {
        // Names come from user input: users must not know which of them collide.
        let mut hasher = hash_state().build_hasher();
        hasher.write(key.as_str().as_bytes());
        LockId {
            hash: hasher.finish() ^ scatter(kind as u64),
            kind,
            key: key.clone(),
        }
    }

    /// Returns in which of so many parts its name belongs, a power of two.
    pub(crate) fn part(&self, of: usize) -> usize {
        let of_name = self.hash ^ scatter(self.kind as u64);
        // Maps take the lower bits and the upper ones.
        (of_name >> 32) as usize % of
    }

    /// Readers for the writers of a lock, and the other way round. `None` for all other kinds.
    pub(crate) fn other_side(&self) -> Option<LockId> {
        let other = match self.kind {
            Kind::Read => Kind::Write,
            Kind::Write => Kind::Read,
            _ => return None,
        };
        Some(LockId::new(other, &self.key))
    }
}

impl Hash for LockId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_their_kind_and_key() {
        let mut map: ByLockId<u32> = ByLockId::default();
        map.insert(LockId::new(Kind::Read, &"a".into()), 1);
        map.insert(LockId::new(Kind::Write, &"a".into()), 2);
        map.insert(LockId::new(Kind::Read, &"b".into()), 3);
        assert_eq!(map.get(&LockId::new(Kind::Read, &"a".into())), Some(&1));
        assert_eq!(map.get(&LockId::new(Kind::Write, &"a".into())), Some(&2));
        assert_eq!(map.get(&LockId::new(Kind::Write, &"b".into())), None);
    }
}
