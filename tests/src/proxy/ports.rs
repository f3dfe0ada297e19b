//! Servers that name other servers: a client behind a proxy sees the ports of other proxies.

use std::collections::HashMap;

use bytes::Bytes;

/// How a host is told.
const HOST: &[u8] = b"127.0.0.1";
/// What stands between a host and its port: in redirections, in announcements, as numbers and as texts of a list or map.
const BETWEEN: [&[u8]; 5] = [b":", b" ", b"\r\n:", b"\r\n$5\r\n", b"\r\n$4\r\nport\r\n$5\r\n"];
/// How many digits a port has.
const DIGITS: usize = 5;

/// A reply with the ports that are to be told.
pub(super) fn told(raw: Bytes, ports: &HashMap<u16, u16>) -> Bytes {
    if ports.is_empty() || raw.len() < HOST.len() {
        return raw;
    }
    let mut changed = None;
    for at in 0..=raw.len() - HOST.len() {
        if !raw[at..].starts_with(HOST) {
            continue;
        }
        let rest = &raw[at + HOST.len()..];
        let Some(between) = BETWEEN
            .iter()
            .find(|between| rest.starts_with(between) && port(&rest[between.len()..]).is_some())
        else {
            continue;
        };
        let of = port(&rest[between.len()..]).and_then(|port| ports.get(&port));
        if let Some(new) = of {
            let from = at + HOST.len() + between.len();
            let raw = changed.get_or_insert_with(|| raw.to_vec());
            raw[from..from + DIGITS].copy_from_slice(format!("{new:05}").as_bytes());
        }
    }
    changed.map_or(raw, Bytes::from)
}

/// The number of five digits that stands at the beginning.
fn port(text: &[u8]) -> Option<u16> {
    let (number, rest) = text.split_at_checked(DIGITS)?;
    if rest.first().is_some_and(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(number).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_told_in_every_way_in_which_servers_tell_them_and_nothing_else_is_changed() {
        let ports = HashMap::from([(11111, 22222), (11112, 22223)]);
        let is_told =
            |text: &str| String::from_utf8(told(Bytes::from(text.to_owned()), &ports).to_vec()).unwrap();
        for (said, heard) in [
            ("-MOVED 7 127.0.0.1:11111\r\n", "-MOVED 7 127.0.0.1:22222\r\n"),
            (
                "+main 127.0.0.1 11111 127.0.0.1 11112\r\n",
                "+main 127.0.0.1 22222 127.0.0.1 22223\r\n",
            ),
            (
                "*2\r\n$9\r\n127.0.0.1\r\n:11111\r\n",
                "*2\r\n$9\r\n127.0.0.1\r\n:22222\r\n",
            ),
            (
                "*2\r\n$9\r\n127.0.0.1\r\n$5\r\n11112\r\n",
                "*2\r\n$9\r\n127.0.0.1\r\n$5\r\n22223\r\n",
            ),
            (
                "%2\r\n$2\r\nip\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n$5\r\n11111\r\n",
                "%2\r\n$2\r\nip\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n$5\r\n22222\r\n",
            ),
        ] {
            assert_eq!(is_told(said), heard);
        }
        for same in [
            "-MOVED 7 127.0.0.1:11113\r\n",
            "-MOVED 7 127.0.0.1:111112\r\n",
            "-MOVED 7 127.0.0.1:",
            "+11111\r\n",
            ":11111\r\n",
            "+127.0.0.1",
        ] {
            assert_eq!(is_told(same), same);
        }
    }
}
