//! What is waited for: a name and a kind, with their hash, since each acquire looks them up several times.

use std::hash::{BuildHasher, Hash, Hasher};

use crate::LockKey;
use crate::base::chance::{HashMap, hash_state};
use crate::base::kind::Kind;
use crate::base::numbers::ByNumber;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    hash: u64,
    pub(crate) kind: Kind,
    pub(crate) key: LockKey,
}

/// A map by names.
pub(crate) type ByName<V> = HashMap<Name, V, ByNumber>;

impl Name {
    pub(crate) fn new(kind: Kind, key: &LockKey) -> Name {
        // Names are made from user input: nobody shall know which of them collide.
        Name {
            hash: hash_state().hash_one((kind, key)),
            kind,
            key: key.clone(),
        }
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_their_kind_and_key() {
        let mut map: ByName<u32> = ByName::default();
        map.insert(Name::new(Kind::Read, &"a".into()), 1);
        map.insert(Name::new(Kind::Write, &"a".into()), 2);
        map.insert(Name::new(Kind::Read, &"b".into()), 3);
        assert_eq!(map.get(&Name::new(Kind::Read, &"a".into())), Some(&1));
        assert_eq!(map.get(&Name::new(Kind::Write, &"a".into())), Some(&2));
        assert_eq!(map.get(&Name::new(Kind::Write, &"b".into())), None);
    }
}
