//! Groups of locks, by which metrics distinguish them: one per kind of work, never one per name.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;

use parking_lot::RwLock;

/// The maximum number of groups; later ones are all called `other`.
pub(crate) const MOST: usize = 200;

/// A group of locks. Names are kept for the life of the process, so there is a limit.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Group(u8);

#[derive(Default)]
struct Names {
    numbers: HashMap<&'static str, u8>,
    names: Vec<&'static str>,
}

static NAMES: LazyLock<RwLock<Names>> = LazyLock::new(RwLock::default);

thread_local! {
    /// The group that this thread has asked for last: a lock layer asks for the one of its route with each request, and all
    /// threads would write to the lock of the table.
    static LAST: Cell<Option<(&'static str, Group)>> = const { Cell::new(None) };
}

impl Group {
    /// The group of locks without one.
    pub(crate) const NONE: Group = Group(0);
    const OTHER: Group = Group(1);
    const FIRST: u8 = 2;

    /// The group of this name.
    pub(crate) fn of(name: &str) -> Group {
        if let Some((last, group)) = LAST.get()
            && last == name
        {
            return group;
        }
        {
            let names = NAMES.read();
            if let Some((name, number)) = names.numbers.get_key_value(name) {
                LAST.set(Some((name, Group(*number))));
                return Group(*number);
            }
            if names.names.len() >= MOST {
                return Group::OTHER;
            }
        }
        let mut names = NAMES.write();
        if let Some(number) = names.numbers.get(name) {
            return Group(*number);
        }
        let at = names.names.len();
        if at >= MOST {
            return Group::OTHER;
        }
        let Ok(number) = u8::try_from(at + usize::from(Group::FIRST)) else {
            return Group::OTHER;
        };
        let name: &'static str = Box::leak(name.into());
        names.names.push(name);
        names.numbers.insert(name, number);
        Group(number)
    }

    /// The number of the group, below 256.
    #[cfg(feature = "metrics")]
    pub(crate) fn number(self) -> u64 {
        u64::from(self.0)
    }

    /// The label of the group.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Group::NONE => "none",
            Group::OTHER => "other",
            Group(number) => {
                let names = NAMES.read();
                names
                    .names
                    .get(usize::from(number - Group::FIRST))
                    .copied()
                    .unwrap_or("other")
            }
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_their_names_and_the_201st_is_another_one() {
        assert_eq!((Group::default().name(), Group::default()), ("none", Group::NONE));
        let names: Vec<String> = (0..MOST + 5).map(|n| format!("group-{n}")).collect();
        let groups: Vec<Group> = names.iter().map(|name| Group::of(name)).collect();
        // Other tests of this process may also create groups.
        let (kept, other): (Vec<_>, Vec<_>) = names
            .iter()
            .zip(&groups)
            .partition(|(_, group)| **group != Group::OTHER);
        assert!(kept.len() <= MOST && kept.len() > MOST / 2 && other.len() >= 5);
        for (name, group) in kept {
            assert_eq!((group.name(), Group::of(name)), (name.as_str(), *group));
        }
        assert!(other.iter().all(|(_, group)| group.name() == "other"));
    }
}
