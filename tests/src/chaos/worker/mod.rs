//! One of the processes that lock: it may be killed or stopped at any time, and logs all that it does.
//!
//! Its orders come by standard input (`go`, `rest N`, `ask`, `end`), and it answers by standard output: `up` when it is
//! connected, `rests N` when nothing is asked for or held any more, `busy …` to `ask`, `count N` now and then, `bye`.

mod hold;
mod plan;
mod task;

use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::LockClient;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::watch;

use super::broken::Break;
use super::event::{Life, Said};
use super::log::Log;
use super::store::{LONGEST_LEASE, StoreSpec};
use task::Task;

/// How long tasks at rest may take to end.
const TO_END: Duration = Duration::from_secs(3);
/// One task in so many uses the keys that are often held for long.
const LONG_TASKS: usize = 4;

/// What a worker is told when it is started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) slot: usize,
    pub(crate) life: u64,
    pub(crate) seed: u64,
    pub(crate) tasks: usize,
    pub(crate) store: StoreSpec,
    pub(crate) register: SocketAddr,
    pub(crate) logs: PathBuf,
    pub(crate) broken: Option<Break>,
}

impl Orders {
    /// The threads that run the tasks. With one of them it is certain that the runtime runs while a check is made.
    fn threads(&self) -> usize {
        1 + self.slot % 2
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Go,
    Rest,
    End,
}

/// What the tasks of a worker share.
struct Shared {
    life: Life,
    client: LockClient,
    log: Log,
    mode: watch::Sender<Mode>,
    /// Tasks at work.
    busy: AtomicUsize,
    holds: AtomicU64,
    acquired: AtomicU64,
    /// The keys that tasks ask for, by the number of their hold.
    asking: Mutex<BTreeMap<u64, usize>>,
}

impl Shared {
    fn is_resting(&self) -> bool {
        *self.mode.borrow() != Mode::Go
    }

    fn is_idle(&self) -> bool {
        self.busy.load(Ordering::SeqCst) == 0 && self.client.held() == 0 && self.client.waited_for() == 0
    }

    /// What keeps the worker from its rest.
    fn told(&self) -> String {
        let keys: Vec<_> = self.asking.lock().values().map(usize::to_string).collect();
        format!(
            "busy {} {} {} {}",
            self.busy.load(Ordering::SeqCst),
            self.client.held(),
            self.client.waited_for(),
            if keys.is_empty() {
                "-".to_owned()
            } else {
                keys.join(",")
            },
        )
    }
}

/// Works until the orchestrator says that it is over, or is gone.
pub(crate) fn main(orders: &str) -> ExitCode {
    let orders: Orders = match serde_json::from_str(orders) {
        Ok(orders) => orders,
        Err(error) => {
            eprintln!("these are no orders for a worker: {error}");
            return ExitCode::from(2);
        }
    };
    // Some holders panic on purpose.
    std::panic::set_hook(Box::new(|info| {
        if !info.payload().is::<hold::OnPurpose>() {
            eprintln!("{info}\n{}", Backtrace::force_capture());
            std::process::abort();
        }
    }));
    let runtime = match orders.threads() {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    }
    .worker_threads(orders.threads())
    .enable_all()
    .build()
    .expect("a runtime can be built");
    let outcome = runtime.block_on(work(orders));
    // A thread still reads orders.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("worker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn work(orders: Orders) -> anyhow::Result<()> {
    let life = Life {
        slot: orders.slot,
        life: orders.life,
    };
    let log = Log::open(&orders.logs.join(format!("{life}.log")))?;
    log.say(Said::Hello {
        threads: orders.threads(),
    });
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let mut order = None;
    let client = {
        let open = orders.store.open(orders.broken);
        tokio::pin!(open);
        loop {
            tokio::select! {
                client = &mut open => break client?,
                line = lines.next_line() => match line? {
                    None => return Ok(()),
                    Some(line) if line == "end" => {
                        println!("bye 0 0");
                        return Ok(());
                    }
                    // Until it is connected its state is not read; then the last one counts.
                    line => order = line,
                },
            }
        }
    };
    let shared = Arc::new(Shared {
        life,
        client,
        log,
        mode: watch::Sender::new(Mode::Rest),
        busy: AtomicUsize::new(0),
        holds: AtomicU64::new(1),
        acquired: AtomicU64::new(0),
        asking: Mutex::default(),
    });
    let mut rng = fastrand::Rng::with_seed(orders.seed);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..orders.tasks {
        let often_long = (orders.slot + task).is_multiple_of(LONG_TASKS);
        tasks.spawn(Task::new(shared.clone(), orders.register, rng.u64(..), often_long).run());
    }
    tokio::spawn(count(shared.clone()));
    println!("up");
    loop {
        let line = match order.take() {
            Some(order) => Some(order),
            None => lines.next_line().await?,
        };
        match line
            .as_deref()
            .map(|line| line.split_once(' ').unwrap_or((line, "")))
        {
            Some(("go", _)) => drop(shared.mode.send_replace(Mode::Go)),
            Some(("rest", number)) => {
                shared.mode.send_replace(Mode::Rest);
                tokio::spawn(rest(shared.clone(), number.to_owned()));
            }
            Some(("ask", _)) => println!("{}", shared.told()),
            Some(("end", _)) => break,
            // The orchestrator is gone.
            None => return Ok(()),
            Some(_) => anyhow::bail!("there is no order {line:?}"),
        }
    }
    shared.mode.send_replace(Mode::End);
    let ended = async {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        anyhow::Ok(())
    };
    if let Ok(ended) = tokio::time::timeout(TO_END, ended).await {
        ended?;
    }
    // What still waits for a lock was found stuck before.
    tasks.shutdown().await;
    // Acquires that were given up before the rest are undone, or given up for good, within their leases.
    tokio::time::sleep(LONGEST_LEASE).await;
    let report = shared.client.shutdown(Duration::from_secs(1)).await;
    shared.log.say(Said::Bye {
        lost: report.lost,
        unconfirmed: report.unconfirmed,
    });
    println!("bye {} {}", report.lost, report.unconfirmed);
    Ok(())
}

/// Reports when no lock is requested or held any more.
async fn rest(shared: Arc<Shared>, number: String) {
    while !shared.is_idle() {
        tokio::time::sleep(Duration::from_millis(2)).await;
        if !shared.is_resting() {
            return;
        }
    }
    let (held, waited_for) = (shared.client.held(), shared.client.waited_for());
    shared.log.say(Said::Rests { held, waited_for });
    println!("rests {number}");
}

async fn count(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        println!("count {}", shared.acquired.load(Ordering::Relaxed));
    }
}
