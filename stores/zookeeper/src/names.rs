//! The names of nodes: of locks, and, in Curator's format, of their holders and waiters.

use std::cmp::Ordering;
use std::fmt::Write;

/// Returns the name of the node of a lock: the key, with `%XX` for each byte of `%`, `/` and characters that ZooKeeper
/// does not allow in a name.
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

/// Whether a character stays as it is: one that ZooKeeper allows in a name, except `%`. ZooKeeper sees a character
/// beyond the first 65,536 as two characters that it does not allow.
fn is_allowed(c: char) -> bool {
    !matches!(c, '%' | '/' | '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

/// Returns the key of the lock with this node; `None` if the name does not encode a key.
pub(crate) fn key_of_node(name: &str) -> Option<String> {
    let key = percent_encoding::percent_decode_str(name).decode_utf8().ok()?;
    (node_of_key(&key) == name).then(|| key.into_owned())
}

/// The purpose of a node inside the node of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Mutex,
    Read,
    Write,
}

impl Role {
    /// The part of the name before the number.
    fn name(self) -> &'static str {
        match self {
            Role::Mutex => "lock-",
            Role::Read => "__READ__",
            Role::Write => "__WRIT__",
        }
    }

    /// Whether both roles can belong to the same lock.
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

/// What a key holds that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counter {
    Semaphore,
    Latch,
}

impl Counter {
    /// The counter that has a node of this name below that of its key.
    fn with(name: &str) -> Option<Counter> {
        match name {
            "locks" | "leases" | "permits" => Some(Counter::Semaphore),
            "latch" => Some(Counter::Latch),
            _ => None,
        }
    }

    fn family(self) -> &'static str {
        match self {
            Counter::Semaphore => "a semaphore",
            Counter::Latch => "a latch",
        }
    }
}

/// The family of what a key holds, given the names of the nodes below its own, beside this counter; `None` stands for a lock,
/// beside which other locks are not looked for.
pub(crate) fn family_beside(names: &[String], counter: Option<Counter>) -> Option<&'static str> {
    names.iter().find_map(|name| match Counter::with(name) {
        Some(other) => (Some(other) != counter).then(|| other.family()),
        None => (Node::parse(name).filter(|_| counter.is_some())).map(|node| node.role.family()),
    })
}

/// The sequence number of a node. After 2³¹ - 1 a server gives this number to all further nodes (ZooKeeper 3.8), or continues
/// with the most negative one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Position(i32);

impl Position {
    /// Whether other nodes may have the same number, so that it gives no order.
    pub(crate) fn is_exhausted(self) -> bool {
        self.0 == i32::MAX
    }
}

impl PartialOrd for Position {
    fn partial_cmp(&self, other: &Position) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Position {
    /// Numbers that exist at the same time are less than 2³¹ apart.
    fn cmp(&self, other: &Position) -> Ordering {
        self.0.wrapping_sub(other.0).cmp(&0)
    }
}

/// A node inside the node of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) position: Position,
}

impl Node {
    /// Returns `None` for a name that does not belong to a lock.
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

    /// Returns the nodes in a list, in queue order. A writer precedes the readers that are nested in it.
    pub(crate) fn sorted(names: &[String]) -> Vec<Node> {
        let mut nodes: Vec<Node> = names.iter().filter_map(|name| Node::parse(name)).collect();
        nodes.sort_by_key(|node| (node.position, node.role == Role::Read));
        nodes
    }

    /// Returns the name of a node with the same number, for a reader that is nested in this writer.
    pub(crate) fn beside(&self, mark: &Mark, role: Role) -> String {
        let number = self
            .name
            .rsplit_once(self.role.name())
            .map_or("", |(_, number)| number);
        format!("{}{number}", mark.prefix(role))
    }
}

/// The part of a name by which the client that created the node identifies it: Curator's "protection".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark(String);

impl Mark {
    /// Creates a random mark.
    pub(crate) fn draw() -> Mark {
        // A UUID of version 4, in Curator's format.
        let bits = fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
        let hex = format!("{bits:032x}");
        let groups = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        Mark(format!("_c_{}-", groups.join("-")))
    }

    /// The name of a node before the server appends its number.
    pub(crate) fn prefix(&self, role: Role) -> String {
        format!("{}{}", self.0, role.name())
    }

    /// The name of one of the leases of a grant of permits.
    pub(crate) fn lease(&self, index: u32) -> String {
        format!("{}lease-{index:010}", self.0)
    }

    pub(crate) fn is_of(&self, name: &str) -> bool {
        name.starts_with(&self.0)
    }
}

/// Returns the id in a name that Curator or dlock created.
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
        // Not the node of a key, although it can be decoded.
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

    /// Another client library let the second holder precede the first one after this many nodes.
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
        let exhausted = |name: &str| Node::parse(name).unwrap().position.is_exhausted();
        assert!(exhausted("lock-2147483647") && !exhausted("lock-2147483646"));
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
