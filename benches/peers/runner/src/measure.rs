//! The rounds: in each every workload, in each of those every library in turn, on one server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;

use crate::entrant::Entrant;
use crate::peer::{Peer, Task};
use crate::process::Process;
use crate::results::{LeftOut, Lone, Results, Run};
use crate::server::Server;
use crate::workload::Workload;

/// What is to be measured, and with what.
#[derive(Debug, Clone)]
pub struct Options {
    /// How often each.
    pub rounds: u32,
    /// For how long rates are measured.
    pub seconds: f64,
    /// The program of the server.
    pub server: PathBuf,
    /// The directory of the drivers.
    pub drivers: PathBuf,
    /// dlock's command.
    pub dlock: PathBuf,
    /// The drivers that could not be built, and why.
    pub missing: BTreeMap<String, String>,
    /// The libraries and workloads to measure; all when there are none.
    pub only: Vec<String>,
    /// Today.
    pub day: String,
}

/// What the driver of another library says.
#[derive(Debug, Deserialize)]
pub(crate) struct Driven {
    pub(crate) seconds: f64,
    pub(crate) task_pairs: Vec<u64>,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    pub(crate) errors: u64,
    version: String,
    runtime: String,
}

/// What `dlock bench --json` says.
#[derive(Debug, Deserialize)]
pub(crate) struct Benched {
    pub(crate) seconds: f64,
    pub(crate) pairs_per_s: f64,
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    p999_us: Option<f64>,
    share_min: Option<f64>,
    share_max: Option<f64>,
    pub(crate) process_share_min: Option<f64>,
    pub(crate) errors: u64,
    pub(crate) client_cpu_s: Option<f64>,
    pub(crate) server_us_per_pair: Option<f64>,
    pub(crate) server_script_us_per_pair: Option<f64>,
    rss_mb: Option<f64>,
    server_commands: Option<u64>,
}

/// Measures, and tells of each measurement.
///
/// # Errors
/// When the server cannot be used. A library that fails is left out, and the others go on.
pub fn measure(options: &Options, mut tell: impl FnMut(&Run)) -> anyhow::Result<Results> {
    let wanted = |workload: Workload, entrant: &Entrant| {
        let names = [workload.name(), entrant.peer.name(), entrant.peer.driver()];
        options.only.is_empty()
            || names
                .iter()
                .any(|name| options.only.iter().any(|only| only == name))
    };
    let server = Server::start(&options.server)?;
    let mut results = Results {
        server: server.version()?,
        day: options.day.clone(),
        cores: thread::available_parallelism()?.get(),
        rounds: options.rounds,
        seconds: options.seconds,
        left_out: Vec::new(),
        runs: Vec::new(),
    };
    for (driver, why) in &options.missing {
        results.left_out.push(LeftOut {
            entrant: driver.clone(),
            workload: None,
            why: why.clone(),
        });
    }
    for round in 1..=options.rounds {
        for workload in Workload::ALL {
            let mut entrants = Entrant::all_of(workload);
            entrants.retain(|entrant| wanted(workload, entrant) && !is_missing(options, *entrant));
            // another one comes first each time
            let first = (round as usize - 1) % entrants.len().max(1);
            entrants.rotate_left(first);
            for entrant in entrants {
                let failed = |left: &LeftOut| {
                    left.entrant == entrant.name() && left.workload.as_deref() == Some(workload.name())
                };
                if results.left_out.iter().any(failed) {
                    continue;
                }
                let prefix = format!("peers:{round}:{}:{}:", workload.name(), entrant.name());
                let one = One {
                    options,
                    server: &server,
                    workload,
                    prefix: &prefix,
                };
                match one.measure(entrant) {
                    Ok(run) => {
                        let run = Run {
                            round,
                            workload: workload.name().to_owned(),
                            entrant: entrant.name(),
                            ..run
                        };
                        tell(&run);
                        results.runs.push(run);
                    }
                    Err(why) => {
                        let why = format!("{why:#}");
                        // without the key that it was tried with
                        let why = why
                            .split_once(" is not supported: ")
                            .map_or(&*why, |(_, why)| why);
                        results.left_out.push(LeftOut {
                            entrant: entrant.name(),
                            workload: Some(workload.name().to_owned()),
                            why: why.to_owned(),
                        });
                    }
                }
                server.flush()?;
            }
        }
    }
    Ok(results)
}

fn is_missing(options: &Options, entrant: Entrant) -> bool {
    let peers = [Some(entrant.peer), entrant.lone];
    peers
        .into_iter()
        .flatten()
        .any(|peer| options.missing.contains_key(peer.driver()))
}

/// One measurement.
struct One<'a> {
    options: &'a Options,
    server: &'a Server,
    workload: Workload,
    prefix: &'a str,
}

impl One<'_> {
    fn measure(&self, entrant: Entrant) -> anyhow::Result<Run> {
        let seconds = self.workload.seconds(self.options.seconds);
        let (peer, tasks) = (entrant.peer, self.workload.tasks());
        let processes = if self.workload == Workload::Processes {
            2
        } else {
            1
        };
        match entrant.lone {
            Some(lone) if peer.is_dlock() => self.beside_dlock(peer, lone, tasks, seconds),
            Some(lone) => self.beside_driver(peer, lone, tasks, seconds),
            None if peer.is_dlock() => {
                let mut process = self.start(peer, tasks, processes, seconds)?;
                self.benched(&mut process)
            }
            None => {
                let mut running = Vec::new();
                for _ in 0..processes {
                    running.push(self.start(peer, tasks, 1, seconds)?);
                }
                self.driven(running, || Ok(()))
            }
        }
    }

    fn start(&self, peer: Peer, tasks: usize, processes: usize, seconds: f64) -> anyhow::Result<Process> {
        let url = self.server.url();
        let task = Task {
            workload: self.workload,
            tasks,
            processes,
            url: &url,
            prefix: self.prefix,
            seconds,
        };
        let command = peer.command(&self.options.drivers, &self.options.dlock, task);
        Process::start(peer.name(), &command)
    }

    /// The drivers do the same at the same time, which `begins` as soon as all are ready.
    fn driven(
        &self,
        mut running: Vec<Process>,
        begins: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Run> {
        for process in &mut running {
            process.expect("ready")?;
        }
        begins()?;
        let commands = self.server.commands()?;
        let mut cpu_s = 0.0;
        for process in &mut running {
            cpu_s -= process.usage()?.cpu_s;
            process.go()?;
        }
        let mut rss_mb = 0.0;
        for process in &mut running {
            process.expect("done")?;
            let usage = process.usage()?;
            cpu_s += usage.cpu_s;
            rss_mb += usage.rss_mb;
        }
        let commands = self.server.commands()? - commands;
        let mut answers = Vec::new();
        for mut process in running {
            answers.push(process.answer::<Driven>()?);
            process.end()?;
        }
        let mut run = together(&answers)?;
        run.client_cpu_s = Some(round(cpu_s, 2));
        run.rss_mb = Some(round(rss_mb, 1));
        if self.workload == Workload::Held {
            run.server_commands = Some(commands);
        }
        Ok(run)
    }

    fn benched(&self, process: &mut Process) -> anyhow::Result<Run> {
        let answer: Benched = process.answer()?;
        let held = self.workload == Workload::Held;
        Ok(Run {
            pairs_per_s: (!held).then(|| round(answer.pairs_per_s, 1)),
            p50_us: answer.p50_us.filter(|_| !held).map(micros),
            p99_us: answer.p99_us.filter(|_| !held).map(micros),
            p999_us: answer.p999_us.filter(|_| !held).map(micros),
            share_min: answer.share_min.filter(|_| !held).map(share),
            share_max: answer.share_max.filter(|_| !held).map(share),
            process_share_min: answer
                .process_share_min
                .filter(|_| self.workload == Workload::Processes)
                .map(share),
            errors: answer.errors,
            client_cpu_s: answer.client_cpu_s.map(|cpu| round(cpu, 3)),
            rss_mb: answer.rss_mb.map(|mb| round(mb, 1)),
            server_commands: answer.server_commands.filter(|_| held),
            seconds: round(answer.seconds, 3),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Run::default()
        })
    }

    /// dlock does not wait to be told: it is measured from its warm-up's end on, and the lone one within that time.
    fn beside_dlock(&self, peer: Peer, lone: Peer, tasks: usize, seconds: f64) -> anyhow::Result<Run> {
        let (early, late) = (Duration::from_millis(300), 0.6);
        let alone = seconds - late;
        if alone <= 0.0 {
            bail!("--seconds: a lone waiter needs more than {late}");
        }
        let mut waiter = None;
        if !lone.is_dlock() {
            let mut driver = self.start(lone, 1, 1, alone)?;
            driver.expect("ready")?;
            waiter = Some(driver);
        }
        let mut process = self.start(peer, tasks, 1, seconds)?;
        thread::sleep(early);
        let lone = match waiter {
            Some(driver) => {
                thread::sleep(Duration::from_secs_f64(peer.warmup()));
                driver_alone(driver)?
            }
            None => {
                let mut waiter = self.start(lone, 1, 1, alone)?;
                lone_of(&self.benched(&mut waiter)?)
            }
        };
        let run = self.benched(&mut process)?;
        Ok(Run {
            lone: Some(lone),
            ..run
        })
    }

    fn beside_driver(&self, peer: Peer, lone: Peer, tasks: usize, seconds: f64) -> anyhow::Result<Run> {
        let mut waiter = self.start(lone, 1, 1, seconds)?;
        waiter.expect("ready")?;
        let process = self.start(peer, tasks, 1, seconds)?;
        let (begin, begun) = mpsc::channel();
        let lone = thread::spawn(move || {
            begun.recv().context("the others are not ready")?;
            driver_alone(waiter)
        });
        let run = self.driven(vec![process], || begin.send(()).context("the lone one is gone"))?;
        let lone = lone.join().expect("it does not panic")?;
        Ok(Run {
            lone: Some(lone),
            ..run
        })
    }
}

fn driver_alone(mut driver: Process) -> anyhow::Result<Lone> {
    driver.go()?;
    driver.expect("done")?;
    let answer = driver.answer::<Driven>()?;
    driver.end()?;
    Ok(lone_of(&together(&[answer])?))
}

fn lone_of(run: &Run) -> Lone {
    Lone {
        pairs_per_s: run.pairs_per_s.unwrap_or(0.0),
        p50_us: run.p50_us.unwrap_or(0.0),
        p99_us: run.p99_us.unwrap_or(0.0),
        errors: run.errors,
    }
}

/// What several processes have done together.
pub(crate) fn together(answers: &[Driven]) -> anyhow::Result<Run> {
    let Some(first) = answers.first() else {
        bail!("nothing was measured");
    };
    let by_process: Vec<u64> = answers
        .iter()
        .map(|answer| answer.task_pairs.iter().sum())
        .collect();
    let by_task = || {
        answers
            .iter()
            .flat_map(|answer| answer.task_pairs.iter().copied())
    };
    let all: u64 = by_process.iter().sum();
    let part = |count: Option<u64>| Some(share(count.filter(|_| all > 0)? as f64 / all as f64));
    let worst =
        |of: fn(&Driven) -> f64| Some(micros(answers.iter().map(of).fold(0.0, f64::max))).filter(|_| all > 0);
    Ok(Run {
        pairs_per_s: (all > 0).then(|| round(all as f64 / first.seconds, 1)),
        p50_us: worst(|answer| answer.p50_us),
        p99_us: worst(|answer| answer.p99_us),
        p999_us: worst(|answer| answer.p999_us),
        share_min: part(by_task().min()),
        share_max: part(by_task().max()),
        process_share_min: part(by_process.iter().min().copied()).filter(|_| answers.len() > 1),
        errors: answers.iter().map(|answer| answer.errors).sum(),
        seconds: first.seconds,
        version: first.version.clone(),
        runtime: first.runtime.clone(),
        ..Run::default()
    })
}

fn round(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}

fn micros(value: f64) -> f64 {
    round(value, 1)
}

fn share(value: f64) -> f64 {
    round(value, 5)
}
