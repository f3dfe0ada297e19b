//! The names of nodes: of locks, and, in Curator's form, of those who hold them or wait.

use std::cmp::Ordering;
use std::fmt::Write;

/// The name of the node of a lock: the key, with `%XX` for each byte of `%`, of `/` and of what ZooKeeper does not allow in a
/// name.
pub(crate) fn node_of_key(key: &str) -> String {
    if key == "." || key == ".." {
        return key.replace('.', "%2E");
    }
    let mut name = String::with_capacity(key.len());
    for c in key.chars() {
        if is_allowed(c) {
            name.push(c);
        } else {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                // Writing to a string does not fail.
                let _ = write!(name, "%{byte:02X}");
            }
        }
    }
    name
}

/// What ZooKeeper allows in a name, but `%`. It sees characters beyond the first 65,536 as two of its own, which it does
/// not allow.
fn is_allowed(c: char) -> bool {
    !matches!(c, '%' | '/' | '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

/// The key of the lock that has this node; none if no key has it.
pub(crate) fn key_of_node(name: &str) -> Option<String> {
    let key = percent_encoding::percent_decode_str(name).decode_utf8().ok()?;
    (node_of_key(&key) == name).then(|| key.into_owned())
}

/// What a node under that of a lock is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Mutex,
    Read,
    Write,
}

impl Role {
    /// The part of the name before its number.
    fn name(self) -> &'static str {
        match self {
            Role::Mutex => "lock-",
            Role::Read => "__READ__",
            Role::Write => "__WRIT__",
        }
    }

    /// Whether both are of the lock that one name is.
    pub(crate) fn is_of_family(self, other: Role) -> bool {
        (self == Role::Mutex) == (other == Role::Mutex)
    }

    pub(crate) fn family(self) -> &'static str {
        match self {
            Role::Mutex => "a plain lock",
            Role::Read | Role::Write => "a read-write lock",
        }
    }
}

/// A number of a queue, which the server counts up; it goes on after 2³¹ - 1 with the most negative one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position(i32);

impl PartialOrd for Position {
    fn partial_cmp(&self, other: &Position) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Position {
    /// Of those that are there at one time none is 2³¹ behind another.
    fn cmp(&self, other: &Position) -> Ordering {
        self.0.wrapping_sub(other.0).cmp(&0)
    }
}

/// A node under that of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) position: Position,
}

impl Node {
    /// None for what is no part of a lock.
    pub(crate) fn parse(name: &str) -> Option<Node> {
        [Role::Mutex, Role::Read, Role::Write]
            .into_iter()
            .find_map(|role| {
                let (_, number) = name.rsplit_once(role.name())?;
                let position = Position(number.parse().ok()?);
                let name = name.to_owned();
                Some(Node { name, role, position })
            })
    }

    /// Those of a list, the first in front.
    pub(crate) fn sorted(names: &[String]) -> Vec<Node> {
        let mut nodes: Vec<Node> = names.iter().filter_map(|name| Node::parse(name)).collect();
        nodes.sort_by_key(|node| node.position);
        nodes
    }

    /// The name of a node of the same position: that of a reader under its own writer.
    pub(crate) fn beside(&self, mark: &Mark, role: Role) -> String {
        let number = self
            .name
            .rsplit_once(self.role.name())
            .map_or("", |(_, number)| number);
        format!("{}{number}", mark.prefix(role))
    }
}

/// The part of a name by which its maker finds it again: Curator's "protection".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark(String);

impl Mark {
    /// One that no node had before.
    pub(crate) fn draw() -> Mark {
        // A UUID of version 4, in Curator's form.
        let bits = fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
        let hex = format!("{bits:032x}");
        let groups = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        Mark(format!("_c_{}-", groups.join("-")))
    }

    /// The name of a node before the server adds its number.
    pub(crate) fn prefix(&self, role: Role) -> String {
        format!("{}{}", self.0, role.name())
    }

    pub(crate) fn is_of(&self, name: &str) -> bool {
        name.starts_with(&self.0)
    }
}

/// The id that a name has of its maker, where Curator or dlock made it.
pub(crate) fn marked(name: &str) -> Option<&str> {
    name.strip_prefix("_c_")?.get(..36)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(names: &[&str]) -> Vec<String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Node::sorted(&names).into_iter().map(|node| node.name).collect()
    }

    #[test]
    fn keys_are_found_again_by_their_nodes() {
        for (key, node) in [
            ("order:42", "order:42"),
            ("a/b", "a%2Fb"),
            ("100%", "100%25"),
            (".", "%2E"),
            ("..", "%2E%2E"),
            ("...", "..."),
            ("größe", "größe"),
            ("😀", "%F0%9F%98%80"),
            ("\u{feff}", "\u{feff}"),
            ("\u{e000}", "%EE%80%80"),
            ("\u{80}", "%C2%80"),
        ] {
            assert_eq!(node_of_key(key), node);
            assert_eq!(key_of_node(node).as_deref(), Some(key));
        }
        // Not the node of a key, though it would be decoded.
        for node in ["%41", "%2f", "%", "%FF", "."] {
            assert_eq!(key_of_node(node), None, "{node}");
        }
    }

    #[test]
    fn nodes_are_in_the_order_of_their_numbers_whatever_their_marks() {
        let names = [
            "_c_f-lock-0000000003",
            "_c_a-lock-0000000010",
            "lock-0000000001",
            "leases",
            "lock-x",
        ];
        assert_eq!(
            order(&names),
            ["lock-0000000001", "_c_f-lock-0000000003", "_c_a-lock-0000000010"]
        );
        let kinds = ["_c_b-__WRIT__0000000002", "_c_a-__READ__0000000001"];
        assert_eq!(
            order(&kinds),
            ["_c_a-__READ__0000000001", "_c_b-__WRIT__0000000002"]
        );
    }

    /// At a peer the second holder came before the first one, after so many.
    #[test]
    fn numbers_go_on_after_the_greatest() {
        let names = [
            "lock--2147483648",
            "lock-2147483647",
            "lock--2147483647",
            "lock-2147483646",
        ];
        assert_eq!(
            order(&names),
            [
                "lock-2147483646",
                "lock-2147483647",
                "lock--2147483648",
                "lock--2147483647"
            ]
        );
    }

    #[test]
    fn marks_have_the_form_of_curator() {
        let (mark, other) = (Mark::draw(), Mark::draw());
        let name = mark.prefix(Role::Mutex);
        assert_eq!((name.len(), &name[..3], &name[39..]), (45, "_c_", "-lock-"));
        assert_eq!(
            marked(&name).map(|id| id.split('-').map(str::len).collect()),
            Some(vec![8, 4, 4, 4, 12])
        );
        assert!(mark.is_of(&name) && !other.is_of(&name));
        let writer = Node::parse("_c_x-__WRIT__0000000007").unwrap();
        let reader = Node::parse(&writer.beside(&mark, Role::Read)).unwrap();
        assert_eq!((reader.role, reader.position), (Role::Read, writer.position));
    }
}
