//! Ports for servers that must come back on the same port.

use std::collections::HashSet;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};

use parking_lot::Mutex;

/// How far above its port a server of a Cluster speaks to the others, where nothing else is configured.
pub(crate) const BUS: u16 = 10_000;

static TAKEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A port of 127.0.0.1 that stays ours, within this process, until it is dropped.
///
/// It lies below the range from which the kernel takes the ports of outgoing connections. Otherwise some client's
/// connection could sit on it while its server is down, and the restart would fail.
#[derive(Debug)]
pub(crate) struct Port(u16);

impl Port {
    /// Finds one without a listener right now. Another process may still be quicker to bind it.
    pub(crate) fn reserve() -> Self {
        let mut taken = TAKEN.lock();
        let taken = taken.get_or_insert_default();
        let end = first_outgoing_port().unwrap_or(32_768);
        let range = if end > 12_000 { 10_000..end } else { 10_000..65_535 };
        loop {
            let port = fastrand::u16(range.clone());
            if !taken.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                taken.insert(port);
                return Self(port);
            }
        }
    }

    /// One whose neighbour 10,000 above is free as well, where a server of a Cluster speaks to the others.
    pub(crate) fn reserve_with_bus() -> (Self, Option<Self>) {
        loop {
            let port = Self::reserve();
            let Some(bus) = port.0.checked_add(BUS) else {
                continue;
            };
            let mut taken = TAKEN.lock();
            let taken = taken.get_or_insert_default();
            let is_free = !taken.contains(&bus) && TcpListener::bind((Ipv4Addr::LOCALHOST, bus)).is_ok();
            if is_free && first_outgoing_port().is_none_or(|first| bus < first) {
                taken.insert(bus);
                return (port, Some(Self(bus)));
            }
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.0
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if let Some(taken) = TAKEN.lock().as_mut() {
            taken.remove(&self.0);
        }
    }
}

fn first_outgoing_port() -> Option<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    range.split_whitespace().next()?.parse().ok()
}
