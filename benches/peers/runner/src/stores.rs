//! dlock on stores beside Redis, and what people lock with there.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::bail;

use crate::figures::{count, time, times};
use crate::markdown::{table, wrapped};
use crate::measure::{Benched, Driven, together};
use crate::process::Process;
use crate::results::{Median, Results, Run};

/// A store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Store {
    /// `etcd://`
    Etcd,
    /// `zookeeper://`
    Zookeeper,
    /// `postgres://`
    Postgres,
}

/// What locks there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entrant {
    name: &'static str,
    title: &'static str,
    set_up: &'static str,
}

const DLOCK: Entrant = Entrant {
    name: "dlock",
    title: "**dlock**",
    set_up: "tokio on all cores, optimized build; measured by `dlock bench`",
};

/// Measured where processes want the same lock: each pair is a handover to the other process, as most others have it.
const FAIR: Entrant = Entrant {
    name: "dlock-fair",
    title: "**dlock**, `fair_lock`",
    set_up: "the same, in order of arrival over all processes",
};

/// What is measured: how many tasks in how many processes, each with a lock of its own or all with the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Workload {
    name: &'static str,
    title: &'static str,
    tasks: usize,
    processes: usize,
}

const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "sequential",
        title: "One task, one lock",
        tasks: 1,
        processes: 1,
    },
    Workload {
        name: "parallel",
        title: "64 tasks, each its own lock",
        tasks: 64,
        processes: 1,
    },
    Workload {
        name: "processes",
        title: "Two processes with one task each, one lock",
        tasks: 1,
        processes: 2,
    },
];

impl Store {
    /// All, in the order of the page.
    pub const ALL: [Store; 3] = [Store::Etcd, Store::Zookeeper, Store::Postgres];

    /// As it is called in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Store::Etcd => "etcd",
            Store::Zookeeper => "zookeeper",
            Store::Postgres => "postgres",
        }
    }

    fn entrants(self) -> Vec<Entrant> {
        let others: &[Entrant] = match self {
            Store::Etcd => &[Entrant {
                name: "etcd-go",
                title: "etcd's `concurrency.Mutex`",
                set_up: "one session for all goroutines with locks of their own; one for each where they want the same",
            }],
            Store::Zookeeper => &[Entrant {
                name: "curator",
                title: "Curator's `InterProcessMutex`",
                set_up: "one client, threads and blocking calls; 3 s of warm-up",
            }],
            Store::Postgres => &[
                Entrant {
                    name: "advisory",
                    title: "`pg_advisory_lock`",
                    set_up: "a connection for each task: no lease, no token, gone with its connection",
                },
                Entrant {
                    name: "lease-row",
                    title: "a row with a lease",
                    set_up: "one statement acquires, one releases, pipelined over one connection; no token; a busy one is asked for \
                             again after 50 ms",
                },
            ],
        };
        [DLOCK, FAIR].iter().chain(others).copied().collect()
    }

    fn entrants_of(self, workload: Workload) -> Vec<Entrant> {
        let mut entrants = self.entrants();
        entrants.retain(|entrant| *entrant != FAIR || workload.processes > 1);
        entrants
    }
}

/// What is to be measured, and on what.
#[derive(Debug, Clone)]
pub struct Options {
    /// The store.
    pub store: Store,
    /// As in `etcd 3.4.23`.
    pub server: String,
    /// Where other libraries find it.
    pub address: String,
    /// Where dlock finds it.
    pub url: String,
    /// The directory of the drivers.
    pub drivers: PathBuf,
    /// dlock's command.
    pub dlock: PathBuf,
    /// How often each.
    pub rounds: u32,
    /// For how long.
    pub seconds: f64,
    /// Today.
    pub day: String,
}

/// Measures in turns, and tells of each measurement.
///
/// # Errors
/// When one cannot be measured.
pub fn measure(options: &Options, mut tell: impl FnMut(&Run)) -> anyhow::Result<Results> {
    let mut runs = Vec::new();
    for round in 1..=options.rounds {
        for workload in WORKLOADS {
            let mut entrants = options.store.entrants_of(workload);
            // another one comes first each time
            let first = (round as usize - 1) % entrants.len();
            entrants.rotate_left(first);
            for entrant in entrants {
                let run = Run {
                    round,
                    workload: workload.name.to_owned(),
                    entrant: entrant.name.to_owned(),
                    ..one(options, workload, entrant, round)?
                };
                tell(&run);
                runs.push(run);
            }
        }
    }
    Ok(Results {
        server: options.server.clone(),
        day: options.day.clone(),
        cores: thread::available_parallelism()?.get(),
        rounds: options.rounds,
        seconds: options.seconds,
        left_out: Vec::new(),
        runs,
    })
}

fn one(options: &Options, workload: Workload, entrant: Entrant, round: u32) -> anyhow::Result<Run> {
    let prefix = format!("peers:{round}:{}:{}:", workload.name, entrant.name);
    if [DLOCK, FAIR].contains(&entrant) {
        let mut process = Process::start(entrant.name, &bench(options, workload, entrant, &prefix))?;
        let answer: Benched = process.answer()?;
        return Ok(Run {
            pairs_per_s: Some(answer.pairs_per_s),
            p50_us: answer.p50_us,
            p99_us: answer.p99_us,
            process_share_min: answer.process_share_min.filter(|_| workload.processes > 1),
            errors: answer.errors,
            seconds: answer.seconds,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            runtime: "Rust".to_owned(),
            ..Run::default()
        });
    }
    let mut running = Vec::new();
    for _ in 0..workload.processes {
        running.push(Process::start(
            entrant.name,
            &driver(options, workload, entrant, &prefix)?,
        )?);
    }
    for process in &mut running {
        process.expect("ready")?;
    }
    for process in &mut running {
        process.go()?;
    }
    let mut answers = Vec::new();
    for process in &mut running {
        process.expect("done")?;
        answers.push(process.answer::<Driven>()?);
    }
    for process in running {
        process.end()?;
    }
    let run = together(&answers)?;
    Ok(Run {
        share_min: None,
        share_max: None,
        p999_us: None,
        ..run
    })
}

fn bench(options: &Options, workload: Workload, entrant: Entrant, prefix: &str) -> Command {
    let mut command = Command::new(&options.dlock);
    let kind = match workload.name {
        "sequential" => "sequential",
        "parallel" => "parallel",
        _ => "contended",
    };
    command.args(["bench", "--json", "--workload", kind, "--warmup", "1"]);
    command.args(["--url", &options.url, "--prefix", prefix]);
    command.args(["--seconds", &options.seconds.to_string()]);
    if entrant == FAIR {
        command.args(["--kind", "fair"]);
    }
    if kind != "sequential" {
        command.args(["--tasks", &workload.tasks.to_string()]);
        command.args(["--processes", &workload.processes.to_string()]);
    }
    command
}

fn driver(options: &Options, workload: Workload, entrant: Entrant, prefix: &str) -> anyhow::Result<Command> {
    let dir = |name: &str| options.drivers.join(name).join("target");
    let (mut command, warmup) = match entrant.name {
        "etcd-go" => (Command::new(dir("etcd-go").join("driver")), "1"),
        "curator" => {
            let target = dir("curator");
            let mut java = Command::new("java");
            let classes = format!(
                "{}:{}/*",
                target.join("classes").display(),
                target.join("lib").display()
            );
            java.args(["-cp", &classes, "dlock.peers.Driver"]);
            (java, "3")
        }
        "advisory" | "lease-row" => {
            let program = dir("postgres-rows").join("release/dlock-peers-postgres");
            (Command::new(program), "1")
        }
        other => bail!("{other} has no driver"),
    };
    let kind = if workload.processes > 1 {
        "contended"
    } else {
        "parallel"
    };
    command.args([kind, &options.address, &workload.tasks.to_string()]);
    command.args([&options.seconds.to_string(), warmup, prefix, entrant.name]);
    Ok(command)
}

const EXPLANATION: &str = "Each store beside what people lock with on it today, in turns, made by `benches/peers/stores.sh`. One server \
    of each, with its data and its commits on the same disk. An acquire and its release with no work between; the times are those of \
    the acquire. dlock's locks have a lease, a fencing token and a word of their loss throughout. One task waits for the disk \
    twice in each pair on etcd and ZooKeeper, whichever client it has: where that is most of its time, no client is much faster. Of two processes that want one lock, a fair lock, \
    `concurrency.Mutex`, Curator's mutex and `pg_advisory_lock` give it to the other one each time; a plain lock of dlock and the row \
    go to the same one as often as it comes first.";

/// The results in a directory, of those that are there.
///
/// # Errors
/// When one cannot be read.
pub fn read(dir: &Path) -> anyhow::Result<Vec<(Store, Results)>> {
    let mut all = Vec::new();
    for store in Store::ALL {
        let path = dir.join(format!("{}.json", store.name()));
        if path.exists() {
            all.push((store, Results::read(&path)?));
        }
    }
    Ok(all)
}

/// What the page says of them.
pub(crate) fn section(all: &[(Store, Results)]) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "\n## On etcd, ZooKeeper and PostgreSQL\n\n{}\n",
        wrapped(EXPLANATION)
    );
    for (store, results) in all {
        let Results {
            server,
            cores,
            rounds,
            seconds,
            day,
            ..
        } = results;
        let _ = write!(
            text,
            "\n### {server}\n\n{cores} cores, {rounds} rounds of {seconds} s, {day}.\n\n"
        );
        let set_up = store.entrants().into_iter().map(|entrant| {
            let run = results.runs.iter().find(|run| run.entrant == entrant.name);
            let (version, runtime) = run.map_or(("", ""), |run| (&run.version, &run.runtime));
            let title = entrant.title.to_owned();
            vec![
                title,
                version.to_owned(),
                runtime.to_owned(),
                entrant.set_up.to_owned(),
            ]
        });
        text.push_str(&table(&["", "version", "runs on", "set up"], set_up));
        for workload in WORKLOADS {
            let _ = write!(text, "\n{}:\n\n", workload.title);
            text.push_str(&rates(*store, results, workload));
        }
    }
    text
}

fn rates(store: Store, results: &Results, workload: Workload) -> String {
    let rate = |name: &str| results.median(workload.name, name, |run| run.pairs_per_s);
    let (own, fair) = (rate(DLOCK.name), rate(FAIR.name));
    let rows = store.entrants_of(workload).into_iter().map(|entrant| {
        let of = |value: fn(&Run) -> Option<f64>| results.median(workload.name, entrant.name, value);
        let pairs = rate(entrant.name);
        let ratio = |to: Option<Median>| match to.zip(pairs) {
            Some((own, pairs)) if ![DLOCK, FAIR].contains(&entrant) => times(own.value / pairs.value),
            _ => String::new(),
        };
        let mut row = vec![
            entrant.title.to_owned(),
            pairs.map_or_else(String::new, |pairs| count(pairs.value)),
            ratio(own),
            of(|run| run.p50_us).map_or_else(String::new, |micros| time(micros.value)),
            of(|run| run.p99_us).map_or_else(String::new, |micros| time(micros.value)),
            of(|run| Some(run.errors as f64)).map_or_else(String::new, |errors| count(errors.value)),
        ];
        if workload.processes > 1 {
            row.insert(3, ratio(fair));
        }
        row
    });
    let mut head = vec!["", "pairs/s", "dlock ÷ it", "p50", "p99", "failed"];
    if workload.processes > 1 {
        head.insert(3, "fair ÷ it");
    }
    table(&head, rows)
}
