//! Ports for servers that must come back on the same port.

use std::fs::{self, File, Permissions};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::fcntl::{Flock, FlockArg};

/// How far above its port a server of a Cluster speaks to the others, where nothing else is configured.
pub(crate) const BUS: u16 = 10_000;

/// A port of 127.0.0.1 that stays ours, among all processes of tests, until it is dropped.
///
/// It lies below the range from which the kernel takes the ports of outgoing connections. Otherwise some client's
/// connection could sit on it while its server is down, and the restart would fail.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    /// Of an empty file, which stays behind. The kernel unlocks it when the process ends, however that happens.
    _lock: Flock<File>,
}

impl Port {
    /// Finds one without a listener right now. A process that is no test may still be quicker to bind it.
    pub(crate) fn reserve() -> Self {
        let end = first_outgoing_port().unwrap_or(32_768);
        let range = if end > 12_000 { 10_000..end } else { 10_000..65_535 };
        loop {
            if let Some(port) = Self::lock(fastrand::u16(range.clone())) {
                return port;
            }
        }
    }

    /// One whose neighbour 10,000 above is free as well, where a server of a Cluster speaks to the others.
    pub(crate) fn reserve_with_bus() -> (Self, Option<Self>) {
        loop {
            let port = Self::reserve();
            let bus = port.number.checked_add(BUS);
            let bus = bus.filter(|bus| first_outgoing_port().is_none_or(|first| *bus < first));
            if let Some(bus) = bus.and_then(Self::lock) {
                return (port, Some(bus));
            }
        }
    }

    /// This port, if no test has it and no process listens on it.
    fn lock(number: u16) -> Option<Self> {
        let directory = std::env::temp_dir().join("dlock-test-ports");
        fs::create_dir_all(&directory).expect("temporary files can be written");
        // Other users run tests as well. Only the owner of the directory can allow that, and has done so.
        let _ = fs::set_permissions(&directory, Permissions::from_mode(0o1777));
        let file = shared(&directory.join(number.to_string())).ok()?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
        Some(Self { number, _lock: lock })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

/// The file, which any user can lock.
fn shared(path: &Path) -> io::Result<File> {
    // A file of another user may be opened, but not created again.
    if let Ok(file) = File::open(path) {
        return Ok(file);
    }
    let file = File::create(path)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    Ok(file)
}

fn first_outgoing_port() -> Option<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    range.split_whitespace().next()?.parse().ok()
}
