//! The hash slots of a Cluster: the slot of a key, and a key of ours in each slot.

use std::sync::LazyLock;

use redis::RedisError;

/// How many slots there are.
pub(crate) const SLOTS: u16 = 16_384;

/// The hash slot of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(u16);

impl Slot {
    /// The hashed part of a key: the text between its first `{` and the next `}`, if it is not empty.
    pub(crate) fn of(key: &str) -> Slot {
        let hashed = tag(key).unwrap_or(key);
        Slot(crc16(hashed.as_bytes()) % SLOTS)
    }

    /// Whether the companion keys of this one, as Redisson names them, are in its slot: not if its braces are no tag.
    pub(crate) fn has_companions_of(key: &str) -> bool {
        !key.contains(['{', '}']) || tag(key).is_some()
    }

    /// The slot of this number, if there is one.
    pub(crate) fn numbered(number: u64) -> Option<Slot> {
        let number = u16::try_from(number).ok()?;
        (number < SLOTS).then_some(Slot(number))
    }

    /// Parses a redirection: the slot, and its server.
    pub(crate) fn redirected(error: &RedisError) -> Option<(&str, Slot)> {
        let (to, slot) = error.redirect_node()?;
        Some((to, Slot::numbered(slot.into())?))
    }

    /// The inclusive range.
    pub(crate) fn to(self, last: Slot) -> impl Iterator<Item = Slot> {
        (self.0..=last.0).map(Slot)
    }

    pub(crate) fn number(self) -> u32 {
        self.0.into()
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The smallest number whose digits are in this slot.
    pub(crate) fn tag(self) -> u32 {
        TAGS[self.index()]
    }
}

/// The text between the first `{` and the next `}`, if it is not empty.
fn tag(key: &str) -> Option<&str> {
    let (_, rest) = key.split_once('{')?;
    let (tag, _) = rest.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// For each slot the smallest number whose digits are in it. All clients of a cluster must compute the same one.
static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    const NONE: u32 = u32::MAX;
    let mut tags = vec![NONE; usize::from(SLOTS)];
    let mut left = tags.len();
    // Some 170,000 of them, in a few milliseconds.
    for number in 0.. {
        let tag = &mut tags[Slot::of(&number.to_string()).index()];
        if *tag == NONE {
            *tag = number;
            left -= 1;
        }
        if left == 0 {
            break;
        }
    }
    tags
});

/// CRC-16, XMODEM variant.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc: u16, byte| {
        (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)]
    })
}

static TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut at = 0;
    while at < table.len() {
        let mut crc = (at as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_where_the_servers_have_them() {
        // Values from CLUSTER KEYSLOT.
        for (key, slot) in [
            ("", 0),
            ("foo", 12182),
            ("123456789", 12739),
            ("order:{42}", 8000),
            ("order:42", 8691),
            ("{user1000}.following", 3443),
            ("{user1000}.followers", 3443),
            ("{}x", 10595),
            ("a{b", 13340),
            ("foo{{bar}}zap", 4015),
            ("foo{bar}{zap}", 5061),
            ("größe", 9425),
        ] {
            assert_eq!(Slot::of(key), Slot(slot), "{key}");
        }
    }

    #[test]
    fn companions_are_in_the_slot_of_a_key_without_braces_or_with_a_tag() {
        for key in [
            "order:42",
            "größe",
            "{42}:order",
            "order:{4}:{2}",
            "a}b{c}",
            "{a{b}",
        ] {
            assert!(Slot::has_companions_of(key), "{key}");
        }
        for key in ["none:{}", "{}{x}", "back:}x", "a{b", "{", "}", "}{"] {
            assert!(!Slot::has_companions_of(key), "{key}");
        }
    }

    #[test]
    fn each_slot_has_a_tag_of_its_own_and_always_the_same_one() {
        for number in 0..SLOTS {
            let slot = Slot(number);
            assert_eq!(Slot::of(&slot.tag().to_string()), slot);
        }
        assert_eq!(Slot::of("foo").tag(), 43681);
    }
}
