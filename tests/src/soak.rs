//! Runs everything at once for a long time; afterwards memory, connections, subscriptions and keys must be as at the
//! beginning: `cargo run --release -p dlock-tests --bin soak -- --minutes 10`.
//!
//! Tasks acquire a few contended names, and names that were never used before; all kinds, one lock and several at a
//! time. They wait, give up, are dropped half way, hold for longer than their lease, release or drop. In each round
//! another client starts and shuts down. After each round all tasks stop, and the state is checked.

use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use dlock::{Error, LockClient, LockKind};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::{Flavor, Server, eventually};

/// So many names are wanted by all.
const HOT: u64 = 4;
/// What a worker does at most before it rests.
const REST: Duration = Duration::from_millis(5);
/// What locks are asked for with that are not renewed.
const LEASE: Duration = Duration::from_secs(1);
/// The keys that should not be there. Redisson's own counter of a name never ends, and answers to steps that may be asked
/// again, of which there are many, end by themselves.
const LEFT: &str = "
    local left = {}
    for _, key in ipairs(redis.call('KEYS', '*')) do
        local stays = key == 'dlock:fence' or key:find('^redisson_lock_token:') or key:find('}:dlock:', 1, true)
        if not stays then left[#left + 1] = key end
    end
    return left";
const KINDS: [LockKind; 5] = [
    LockKind::Mutex,
    LockKind::Fair,
    LockKind::Fenced,
    LockKind::Read,
    LockKind::Write,
];

/// Locks for a long time, and sees what is left of it.
#[derive(Debug, Clone, Parser)]
#[command(name = "soak")]
struct Options {
    /// For how long; fractions are fine
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// How many tasks lock
    #[arg(long, default_value_t = 64)]
    tasks: u64,
    /// Seconds from one look to the next
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    round: u64,
    /// One line of JSON for each look
    #[arg(long)]
    json: bool,
}

/// The state without activity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Operations since the beginning, and how many of them had a lock.
    pub operations: u64,
    /// See `operations`.
    pub acquired: u64,
    /// Failures that are neither a busy lock nor an end of the waiting.
    pub errors: u64,
    /// Resident memory of this process in kB.
    pub rss_kb: u64,
    /// What the server says that it uses, in kB.
    pub server_kb: u64,
    /// Connections to the server.
    pub connections: usize,
    /// Channels with subscribers.
    pub subscriptions: usize,
    /// Keys on the server but for the fence counters.
    pub keys: Vec<String>,
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>10} operations, {:>9} acquired, {} errors; {:>7} kB here, {:>6} kB on the server; {} connections, {} \
             subscriptions, {} keys",
            self.operations,
            self.acquired,
            self.errors,
            self.rss_kb,
            self.server_kb,
            self.connections,
            self.subscriptions,
            self.keys.len()
        )
    }
}

#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    acquired: AtomicU64,
    errors: AtomicU64,
    /// For unused names.
    names: AtomicU64,
}

/// A server, and one client that stays.
#[derive(Debug)]
pub struct Soak {
    server: Server,
    client: LockClient,
    tasks: u64,
    counts: Arc<Counts>,
}

impl Soak {
    /// On a server of its own.
    ///
    /// # Panics
    /// When the server does not start.
    pub async fn start(tasks: u64) -> Soak {
        let server = Server::start(Flavor::from_env()).await;
        let client = LockClient::connect(&server.url())
            .await
            .expect("the server is there");
        Soak {
            server,
            client,
            tasks,
            counts: Arc::default(),
        }
    }

    /// Works for that long, lets everything end, and looks.
    ///
    /// # Panics
    /// When holds or waiters are left, or a task panicked.
    pub async fn round(&self, length: Duration) -> Look {
        let until = Instant::now() + length;
        let guest = LockClient::connect(&self.server.url())
            .await
            .expect("the server is there");
        let mut tasks = JoinSet::new();
        for task in 0..self.tasks {
            let client = match task % 4 {
                0 => guest.clone(),
                _ => self.client.clone(),
            };
            let counts = self.counts.clone();
            tasks.spawn(async move {
                while Instant::now() < until {
                    one(&client, &counts).await;
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no task panics");
        }
        guest.shutdown(Duration::from_secs(10)).await;
        drop(guest);
        for n in 0..HOT {
            let gone = self.client.semaphore(permits_named(n)).delete().await;
            let both = (gone, self.client.latch(latch_named(n)).delete().await);
            assert!(matches!(both, (Ok(_), Ok(_))), "{both:?}");
        }
        eventually("nothing is held and no caller waits", async || {
            self.client.held() == 0 && self.client.waited_for() == 0
        })
        .await;
        // Leases that were not ended, subscriptions and connections that are being ended.
        let over = eventually("only the fence is left", async || self.keys().await.is_empty());
        if timeout(Duration::from_secs(30), over).await.is_err() {
            panic!("left on the server: {:?}", self.keys().await);
        }
        eventually("there is no listener", async || {
            self.server.pubsub_channels().await.is_empty()
        })
        .await;
        sleep(LEASE).await;
        self.look().await
    }

    async fn keys(&self) -> Vec<String> {
        self.server.query(&["EVAL", LEFT, "0"]).await
    }

    async fn look(&self) -> Look {
        let memory: String = self.server.query(&["INFO", "memory"]).await;
        let used = memory.lines().find_map(|line| line.strip_prefix("used_memory:"));
        Look {
            operations: self.counts.operations.load(Ordering::Relaxed),
            acquired: self.counts.acquired.load(Ordering::Relaxed),
            errors: self.counts.errors.load(Ordering::Relaxed),
            rss_kb: rss_kb(),
            server_kb: used
                .and_then(|bytes| bytes.trim().parse::<u64>().ok())
                .unwrap_or(0)
                / 1024,
            connections: self.server.client_list().await.len(),
            subscriptions: self.server.pubsub_channels().await.len(),
            keys: self.keys().await,
        }
    }
}

fn rss_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    rss.and_then(|text| text.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

/// Something or other.
async fn one(client: &LockClient, counts: &Counts) {
    counts.operations.fetch_add(1, Ordering::Relaxed);
    // Redisson's own counter stays for each name, so it is not for names that are used once.
    let (key, kind) = match fastrand::bool() {
        true => {
            let kind = fastrand::usize(..KINDS.len());
            (format!("hot:{kind}:{}", fastrand::u64(..HOT)), KINDS[kind])
        }
        false => {
            let key = format!("once:{}", counts.names.fetch_add(1, Ordering::Relaxed));
            (
                key,
                fastrand::choice([LockKind::Mutex, LockKind::Fair, LockKind::Write]).unwrap_or_default(),
            )
        }
    };
    let patience = Duration::from_micros(fastrand::u64(1..20_000));
    let work = async {
        match fastrand::u8(..12) {
            0 if kind == LockKind::Mutex => several(client, key).await,
            1 => permits(client).await,
            2 => latch(client).await,
            n => {
                let mut lock = client.lock(key).kind(kind).wait(patience);
                if n < 5 {
                    lock = lock.fixed_lease(LEASE);
                }
                let guard = lock.acquire().await?;
                let again = guard.reenter()?;
                match (n, fastrand::u8(..50)) {
                    (..5, 0) => sleep(LEASE).await,
                    _ => sleep(Duration::from_micros(fastrand::u64(..2_000))).await,
                }
                drop(again);
                match n {
                    ..9 => guard.release().await,
                    _ => Ok(()),
                }
            }
        }
    };
    let outcome = match fastrand::u8(..8) {
        // Dropped, wherever it is.
        0 => timeout(patience, work).await.unwrap_or(Ok(())),
        _ => work.await,
    };
    match outcome {
        Ok(()) => counts.acquired.fetch_add(1, Ordering::Relaxed),
        Err(Error::NotAcquired { .. } | Error::Lost { .. } | Error::NotReleased { .. }) => 0,
        // Some wait for less than a reply takes here.
        Err(Error::Unreachable { message, .. } | Error::OutcomeUnknown { message, .. })
            if message.contains("within the")
                && (message.ends_with("of waiting") || message.ends_with("wait time")) =>
        {
            0
        }
        Err(error) => {
            eprintln!("{error}");
            counts.errors.fetch_add(1, Ordering::Relaxed)
        }
    };
    sleep(fastrand::u32(..1000) * REST / 1000).await;
}

async fn several(client: &LockClient, key: String) -> Result<(), Error> {
    let keys = [key, format!("hot:0:{}", fastrand::u64(..HOT))];
    let guard = client.multi(keys).wait(REST).acquire().await?;
    guard.release().await
}

fn permits_named(n: u64) -> String {
    format!("permits:{n}")
}

fn latch_named(n: u64) -> String {
    format!("latch:{n}")
}

async fn permits(client: &LockClient) -> Result<(), Error> {
    let semaphore = client
        .semaphore(permits_named(fastrand::u64(..HOT)))
        .permits(2)
        .wait(REST);
    let permit = semaphore.acquire().await?;
    sleep(REST / 5).await;
    permit.release().await?;
    if fastrand::u8(..4) == 0 {
        semaphore.delete().await?;
    }
    Ok(())
}

async fn latch(client: &LockClient) -> Result<(), Error> {
    let latch = client.latch(latch_named(fastrand::u64(..HOT)));
    latch.try_set_count(1).await?;
    let (opened, counted) = tokio::join!(latch.wait_for(REST), latch.count_down());
    opened?;
    match counted {
        Ok(_) | Err(Error::LatchOpen { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The program.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let soak = Soak::start(options.tasks).await;
        let began = Instant::now();
        let length = Duration::from_secs_f64(options.minutes * 60.0);
        let mut looks = Vec::new();
        while began.elapsed() < length {
            let look = soak.round(Duration::from_secs(options.round)).await;
            let seconds = began.elapsed().as_secs();
            match options.json {
                true => println!(
                    "{}",
                    json!({
                        "seconds": seconds, "operations": look.operations, "acquired": look.acquired,
                        "errors": look.errors, "rss_kb": look.rss_kb, "server_kb": look.server_kb,
                        "connections": look.connections, "subscriptions": look.subscriptions,
                        "keys": look.keys.len(),
                    })
                ),
                false => println!("{seconds:>5} s: {look}"),
            }
            looks.push(look);
        }
        let same = |first: &Look, last: &Look| {
            first.connections == last.connections
                && first.subscriptions == last.subscriptions
                && last.errors == 0
        };
        match (looks.first(), looks.last()) {
            (Some(first), Some(last)) if same(first, last) => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    })
}
