//! The libraries that take part.

use std::path::Path;
use std::process::Command;

use crate::workload::{HOLDS, Workload};

/// A library, as it is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Java, two network threads per core and a connection for each task.
    Redisson,
    /// Java, as it is without any setting.
    RedissonDefaults,
    /// Go, with go-redis.
    Redsync,
    /// Node, with ioredis.
    NodeRedlock,
    /// Python, with hiredis.
    RedisPy,
    /// Rust.
    Rslock,
    /// This library, each release awaited.
    Dlock,
    /// This library, guards dropped.
    DlockUnawaited,
}

/// What a driver is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) workload: Workload,
    pub(crate) tasks: usize,
    pub(crate) processes: usize,
    pub(crate) url: &'a str,
    pub(crate) prefix: &'a str,
    pub(crate) seconds: f64,
}

impl Peer {
    /// All.
    pub const ALL: [Peer; 8] = [
        Peer::Redisson,
        Peer::RedissonDefaults,
        Peer::Redsync,
        Peer::NodeRedlock,
        Peer::RedisPy,
        Peer::Rslock,
        Peer::Dlock,
        Peer::DlockUnawaited,
    ];

    /// As it is written in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Peer::Redisson => "redisson",
            Peer::RedissonDefaults => "redisson-defaults",
            Peer::Redsync => "redsync",
            Peer::NodeRedlock => "node-redlock",
            Peer::RedisPy => "redis-py",
            Peer::Rslock => "rslock",
            Peer::Dlock => "dlock",
            Peer::DlockUnawaited => "dlock-unawaited",
        }
    }

    /// As people read it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Peer::Redisson => "Redisson",
            Peer::RedissonDefaults => "Redisson, default settings",
            Peer::Redsync => "redsync",
            Peer::NodeRedlock => "node-redlock",
            Peer::RedisPy => "redis-py",
            Peer::Rslock => "rslock",
            Peer::Dlock => "dlock",
            Peer::DlockUnawaited => "dlock, release not awaited",
        }
    }

    /// The peer of this [`Peer::name`].
    #[must_use]
    pub fn named(name: &str) -> Option<Peer> {
        Peer::ALL.into_iter().find(|peer| peer.name() == name)
    }

    /// The directory of its driver; dlock has its own command.
    #[must_use]
    pub fn driver(self) -> &'static str {
        match self {
            Peer::RedissonDefaults => Peer::Redisson.name(),
            Peer::DlockUnawaited => Peer::Dlock.name(),
            _ => self.name(),
        }
    }

    pub(crate) fn is_dlock(self) -> bool {
        matches!(self, Peer::Dlock | Peer::DlockUnawaited)
    }

    /// How long it runs before it is measured.
    pub(crate) fn warmup(self) -> f64 {
        match self {
            // until the JVM has compiled what matters
            Peer::Redisson | Peer::RedissonDefaults => 5.0,
            _ => 1.0,
        }
    }

    /// The process that does it. `dlock` is the path of dlock's command.
    pub(crate) fn command(self, drivers: &Path, dlock: &Path, task: Task<'_>) -> Command {
        let dir = drivers.join(self.driver());
        let mut command = match self {
            Peer::Redisson | Peer::RedissonDefaults => {
                let target = dir.join("target");
                let mut java = Command::new("java");
                if self == Peer::RedissonDefaults {
                    java.arg("-Ddefaults=true");
                }
                let classes = format!(
                    "{}:{}/*",
                    target.join("classes").display(),
                    target.join("lib").display()
                );
                java.args(["-cp", &classes, "dlock.peers.Driver"]);
                java
            }
            Peer::Redsync => Command::new(dir.join("target/driver")),
            Peer::NodeRedlock => {
                let mut node = Command::new("node");
                node.arg(dir.join("driver.js"));
                node
            }
            Peer::RedisPy => {
                let mut python = Command::new(dir.join("target/venv/bin/python"));
                python.arg(dir.join("driver.py"));
                python
            }
            Peer::Rslock => Command::new(dir.join("target/release/dlock-peers-rslock")),
            Peer::Dlock | Peer::DlockUnawaited => {
                let mut bench = Command::new(dlock);
                bench.args(self.bench(task));
                return bench;
            }
        };
        let workload = match task.workload {
            Workload::Sequential | Workload::Parallel => "parallel",
            Workload::Contended | Workload::Processes | Workload::Lone => "contended",
            Workload::Fair => "fair",
            Workload::Wakeup => "wakeup",
            Workload::Held => "held",
        };
        command
            .args([
                workload,
                task.url,
                &task.tasks.to_string(),
                &task.seconds.to_string(),
            ])
            .args([&self.warmup().to_string(), task.prefix, &HOLDS.to_string()]);
        command
    }

    /// The arguments of dlock's command.
    fn bench(self, task: Task<'_>) -> Vec<String> {
        let workload = match task.workload {
            Workload::Sequential => "sequential",
            Workload::Parallel => "parallel",
            Workload::Contended | Workload::Fair | Workload::Processes | Workload::Lone => "contended",
            Workload::Wakeup => "wakeup",
            Workload::Held => "held",
        };
        let mut args = vec!["bench", "--json", "--threads", "1", "--workload", workload];
        if task.workload == Workload::Fair {
            args.extend(["--kind", "fair"]);
        }
        if self == Peer::DlockUnawaited {
            args.push("--no-await-release");
        }
        let mut args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let mut with = |name: &str, value: String| args.extend([name.to_owned(), value]);
        with("--url", task.url.to_owned());
        with("--prefix", task.prefix.to_owned());
        with("--seconds", task.seconds.to_string());
        if task.workload != Workload::Held {
            with("--warmup", self.warmup().to_string());
        }
        if task.processes > 1 {
            with("--processes", task.processes.to_string());
        }
        match task.workload {
            Workload::Held => with("--keys", HOLDS.to_string()),
            Workload::Sequential | Workload::Wakeup => {}
            _ => with("--tasks", task.tasks.to_string()),
        }
        args
    }
}
