//! The resource usage of this process, and a clock that all processes of a machine share.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The CPU time of all threads of this process, including the kernel; `None` if the system does not tell.
pub(super) fn cpu() -> Option<Duration> {
    #[cfg(unix)]
    {
        Some(read(rustix::time::ClockId::ProcessCPUTime))
    }
    #[cfg(not(unix))]
    {
        None
    }
}

/// Nanoseconds by a clock that all processes of this machine share.
pub(super) fn now() -> u64 {
    #[cfg(unix)]
    let now = read(rustix::time::ClockId::Monotonic);
    #[cfg(not(unix))]
    let now = wall_clock();
    now.as_nanos() as u64
}

#[cfg(unix)]
fn read(clock: rustix::time::ClockId) -> Duration {
    let time = rustix::time::clock_gettime(clock);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg_attr(unix, allow(dead_code, reason = "unix has a better one"))]
fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The memory of this process that is in use now, in bytes; `None` if the system does not tell (all but Linux).
pub(super) fn memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
