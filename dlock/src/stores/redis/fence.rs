//! The keys of the last fencing tokens.
//!
//! Each prefix has a separate key, in a Cluster one in each slot: services that share a server under different prefixes
//! cannot disturb each other's tokens, neither by accident nor on purpose, and need no permission for each other's
//! keys.

use std::sync::Arc;

use super::cluster::slot::Slot;

/// The name after the prefix.
const NAME: &str = "dlock:fence";

/// The keys of the last fencing tokens of one prefix.
#[derive(Debug, Clone)]
pub(super) struct Fence {
    prefix: Arc<str>,
    name: Arc<str>,
}

impl Fence {
    pub(super) fn of(prefix: &str) -> Fence {
        Fence {
            prefix: prefix.into(),
            name: format!("{prefix}{NAME}").into(),
        }
    }

    /// On a server that has all keys.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// In this slot of a Cluster.
    pub(super) fn in_slot(&self, slot: Slot) -> String {
        let (tag, prefix) = (slot.tag(), &self.prefix);
        let name = format!("{}:{{{tag}}}", self.name);
        // A prefix with a complete tag has all its keys in one slot. A prefix that opens a tag and leaves the rest to
        // each name must come after the slot's tag.
        match Slot::of(&name) == slot {
            true => name,
            false => format!("{NAME}:{{{tag}}}:{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_prefix_has_a_key_of_its_own_in_the_slot_of_each_of_its_names() {
        assert_eq!(Fence::of("").name(), "dlock:fence");
        assert_eq!(Fence::of("shop:").name(), "shop:dlock:fence");
        assert_eq!(Fence::of("").in_slot(Slot::of("foo")), "dlock:fence:{43681}");
        assert_eq!(
            Fence::of("shop:").in_slot(Slot::of("foo")),
            "shop:dlock:fence:{43681}"
        );
        for prefix in ["", "shop:", "{shop}:", "{", "a{b", "}", "{}"] {
            for name in ["k", "c}d", "{x}", "order:42", "größe"] {
                let slot = Slot::of(&format!("{prefix}{name}"));
                let fence = Fence::of(prefix).in_slot(slot);
                assert_eq!(Slot::of(&fence), slot, "{prefix}{name}: {fence}");
            }
        }
    }
}
