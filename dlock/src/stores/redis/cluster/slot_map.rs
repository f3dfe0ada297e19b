//! A Cluster server's view of the slots: which servers have them, and the age of the view.

use std::collections::BTreeMap;

use redis::Value;

use super::slot::Slot;
use crate::store::url::Address;

/// The slots as a server sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// Grows with every change that the cluster agrees on.
    pub(super) epoch: u64,
    /// The masters with slots, and the replicas of each shard.
    pub(super) shards: BTreeMap<Address, Shard>,
}

/// A master's slots and its replicas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shard {
    /// Inclusive ranges.
    pub(super) ranges: Vec<(Slot, Slot)>,
    pub(super) replicas: Vec<Address>,
}

impl Shard {
    pub(super) fn slots(&self) -> impl Iterator<Item = Slot> {
        self.ranges.iter().flat_map(|(first, last)| first.to(*last))
    }
}

impl SlotMap {
    /// Parses the replies to `CLUSTER SLOTS`, and to `CLUSTER INFO` if permitted, of the server at `asked`. `None` if
    /// it knows no slot.
    pub(super) fn read(slots: &Value, info: Option<&str>, asked: &Address) -> Option<SlotMap> {
        let Value::Array(ranges) = slots else { return None };
        let mut shards = BTreeMap::<Address, Shard>::new();
        for range in ranges {
            let Value::Array(parts) = range else { return None };
            let [first, last, master, replicas @ ..] = &parts[..] else {
                return None;
            };
            let Some(master) = address(master, asked) else {
                continue;
            };
            let shard = shards.entry(master).or_default();
            shard.ranges.push((slot(first)?, slot(last)?));
            for replica in replicas.iter().filter_map(|replica| address(replica, asked)) {
                if !shard.replicas.contains(&replica) {
                    shard.replicas.push(replica);
                }
            }
        }
        let epoch = info.and_then(|info| {
            info.lines()
                .find_map(|line| line.strip_prefix("cluster_current_epoch:"))?
                .trim()
                .parse()
                .ok()
        });
        (!shards.is_empty()).then_some(SlotMap {
            epoch: epoch.unwrap_or(0),
            shards,
        })
    }

    /// Whether more than half of its masters agree, by their replies, and none of them knows a later epoch.
    pub(super) fn confirmed_by(&self, answers: &[SlotMap]) -> bool {
        let is_alike = |other: &&SlotMap| self.masters().eq(other.masters());
        let alike = answers.iter().filter(is_alike).count();
        answers.iter().all(|other| other.epoch <= self.epoch) && 2 * alike > self.shards.len()
    }

    fn masters(&self) -> impl Iterator<Item = (&Address, &[(Slot, Slot)])> {
        let shards = self.shards.iter();
        shards.map(|(master, shard)| (master, &shard.ranges[..]))
    }

    /// All servers that it names.
    pub(super) fn servers(&self) -> impl Iterator<Item = &Address> {
        self.shards
            .iter()
            .flat_map(|(master, shard)| std::iter::once(master).chain(&shard.replicas))
    }
}

fn slot(value: &Value) -> Option<Slot> {
    match value {
        Value::Int(number) => Slot::numbered(u64::try_from(*number).ok()?),
        _ => None,
    }
}

/// Parses a server's address: `[host, port, id, [more names]]`. A server that does not know its own name omits it, and
/// is at the address where it was asked.
fn address(server: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(parts) = server else { return None };
    let [host, Value::Int(port), more @ ..] = &parts[..] else {
        return None;
    };
    let host = match text(host).unwrap_or_default() {
        "" => match asked {
            Address::Tcp { host, .. } => host.clone(),
            Address::Unix(_) => return None,
        },
        // It has a preferred name that it was not given.
        "?" => more.get(1).and_then(ip)?.to_owned(),
        host => host.to_owned(),
    };
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    Some(Address::Tcp { host, port })
}

/// The IP address among a server's other names.
fn ip(names: &Value) -> Option<&str> {
    match names {
        Value::Map(names) => names
            .iter()
            .find(|(name, _)| text(name) == Some("ip"))
            .and_then(|(_, ip)| text(ip)),
        Value::Array(names) => names
            .chunks(2)
            .find(|pair| text(&pair[0]) == Some("ip"))
            .and_then(|pair| text(pair.get(1)?)),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

/// Parses the address in `MOVED` and `ASK`: an IPv6 address has no brackets there, and a server that does not know its
/// own name gives only its port.
pub(super) fn redirect(to: &str, asked: Option<&Address>) -> Option<Address> {
    let (host, port) = to.rsplit_once(':')?;
    let host = match (host, asked) {
        ("", Some(Address::Tcp { host, .. })) => host.clone(),
        ("" | "?", _) => return None,
        (host, _) => host.trim_start_matches('[').trim_end_matches(']').to_owned(),
    };
    let port = port.parse().ok().filter(|port| *port > 0)?;
    Some(Address::Tcp { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address::Tcp {
            host: host.to_owned(),
            port,
        }
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn server(host: Value, port: i64, names: Value) -> Value {
        Value::Array(vec![host, Value::Int(port), bulk("id"), names])
    }

    #[test]
    fn slots_are_read_with_all_the_ways_in_which_servers_name_themselves() {
        let names = |ip: &str| Value::Map(vec![(bulk("ip"), bulk(ip))]);
        let none = || Value::Array(Vec::new());
        let answer = Value::Array(vec![
            Value::Array(vec![
                Value::Int(0),
                Value::Int(100),
                server(bulk("a.example"), 7000, none()),
                server(bulk("10.0.0.9"), 7001, none()),
            ]),
            Value::Array(vec![
                Value::Int(200),
                Value::Int(200),
                server(bulk("a.example"), 7000, none()),
                server(bulk("10.0.0.9"), 7001, none()),
            ]),
            Value::Array(vec![
                Value::Int(101),
                Value::Int(150),
                server(Value::Nil, 7002, none()),
            ]),
            Value::Array(vec![
                Value::Int(151),
                Value::Int(152),
                server(bulk("?"), 7003, names("10.0.0.3")),
            ]),
            Value::Array(vec![
                Value::Int(153),
                Value::Int(16383),
                server(bulk("?"), 7004, none()),
            ]),
        ]);
        let info = "cluster_state:ok\r\ncluster_current_epoch:17\r\n";
        let slot_map = SlotMap::read(&answer, Some(info), &at("seed", 1)).unwrap();
        assert_eq!(slot_map.epoch, 17);
        let slot = |number| Slot::numbered(number).unwrap();
        let shards: Vec<_> = slot_map.shards.iter().collect();
        assert_eq!(shards[0].0, &at("10.0.0.3", 7003));
        assert_eq!(shards[1].0, &at("a.example", 7000));
        assert_eq!(shards[1].1.ranges, [(slot(0), slot(100)), (slot(200), slot(200))]);
        assert_eq!(shards[1].1.replicas, [at("10.0.0.9", 7001)]);
        assert_eq!(shards[2].0, &at("seed", 7002));
        // A server without a usable address is left out.
        assert_eq!(shards.len(), 3);
        assert_eq!(slot_map.servers().count(), 4);
        assert_eq!(
            SlotMap::read(&Value::Array(Vec::new()), None, &at("seed", 1)),
            None
        );
    }

    /// Three masters and what they say of the slots, at this epoch.
    fn slot_map(epoch: u64, ports: [u16; 3]) -> SlotMap {
        let slot = |number| Slot::numbered(number).unwrap();
        let shards = ports.into_iter().zip(0..).map(|(port, at)| {
            let shard = Shard {
                ranges: vec![(slot(5000 * at), slot(5000 * at + 4999))],
                replicas: vec![],
            };
            (super::tests::at("h", port), shard)
        });
        SlotMap {
            epoch,
            shards: shards.collect(),
        }
    }

    #[test]
    fn earlier_epoch_counts_only_with_a_majority_of_its_masters() {
        let new = slot_map(3, [1, 2, 3]);
        assert!(new.confirmed_by(&[new.clone(), new.clone()]));
        assert!(!new.confirmed_by(std::slice::from_ref(&new)));
        // A server that was cut off has an old view, and the others know better.
        let known = slot_map(9, [1, 2, 4]);
        assert!(!new.confirmed_by(&[new.clone(), new.clone(), known]));
        let other = slot_map(3, [1, 2, 4]);
        assert!(!new.confirmed_by(&[new.clone(), other.clone(), other]));
    }

    #[test]
    fn redirections_name_a_host_or_only_a_port() {
        let asked = at("h", 1);
        assert_eq!(
            redirect("10.0.0.1:7000", Some(&asked)),
            Some(at("10.0.0.1", 7000))
        );
        assert_eq!(redirect(":7000", Some(&asked)), Some(at("h", 7000)));
        assert_eq!(redirect("::1:7000", Some(&asked)), Some(at("::1", 7000)));
        assert_eq!(redirect("?:7000", Some(&asked)), None);
        assert_eq!(redirect("h:0", Some(&asked)), None);
        assert_eq!(redirect(":7000", None), None);
    }
}
