//! The results of a measurement: one JSON object for programs, a table for people.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::args::{KindArg, Plan, Workload};
use super::figures::{grouped, time_of};
use super::messages::Outcome;
use super::plot;
use super::process::Around;
use super::server::Counters;
use super::tally::{Series, Sums, Times};
use super::workloads::held::Holding;
use super::workloads::wakeups;

/// The result. Times are in microseconds, memory in MB of 10⁶ bytes; values that could not be measured are null.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    workload: Workload,
    kind: KindArg,
    /// `Redis 7.0.15`, `memory`.
    server: Option<String>,
    /// In each process.
    tasks: usize,
    processes: usize,
    threads: usize,
    keys: Option<u64>,
    await_release: bool,
    /// As given; null is the library's default.
    local_handoffs: Option<u32>,
    /// How long it was measured; for `held`, while all were held.
    seconds: f64,
    /// Whether Ctrl-C ended it early.
    interrupted: bool,
    /// Acquisitions with their releases.
    pairs: u64,
    pairs_per_s: f64,
    #[serde(flatten)]
    spread: Spread,
    /// The share of the task with the fewest acquisitions.
    share_min: Option<f64>,
    /// The share of the task with the most acquisitions.
    share_max: Option<f64>,
    process_share_min: Option<f64>,
    process_share_max: Option<f64>,
    errors: u64,
    errors_by_kind: BTreeMap<String, u64>,
    /// Of all processes.
    client_cpu_s: Option<f64>,
    /// In percent of one core.
    client_cpu_percent: Option<f64>,
    /// Of all processes.
    rss_mb: Option<f64>,
    rss_mb_by_process: Vec<Option<f64>>,
    /// Commands sent to the server; a script counts as one.
    server_commands: Option<u64>,
    /// The server's own count, which includes the commands inside scripts.
    server_commands_in_scripts_too: Option<u64>,
    server_cpu_s: Option<f64>,
    /// Of the server, per pair.
    server_us_per_pair: Option<f64>,
    /// The part of that in scripts, and in commands instead of them, by the server's own count.
    server_script_us_per_pair: Option<f64>,
    /// The same requests to the service without a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    bare: Option<Spread>,
    /// The layer's own part: its median less that of the bare service.
    #[serde(skip_serializing_if = "Option::is_none")]
    added_us: Option<f64>,
    /// Requests answered from their records; the first runs are in the figures above.
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<Spread>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<Held>,
    #[serde(skip)]
    sums: Sums,
    #[serde(skip)]
    times: Times,
}

/// The distribution of times, in microseconds.
#[derive(Debug, Serialize)]
struct Spread {
    mean_us: Option<f64>,
    p50_us: Option<f64>,
    p90_us: Option<f64>,
    p99_us: Option<f64>,
    p999_us: Option<f64>,
    max_us: Option<f64>,
}

impl Spread {
    fn of(times: &Times) -> Spread {
        Spread {
            mean_us: times.mean(),
            p50_us: times.quantile(0.5),
            p90_us: times.quantile(0.9),
            p99_us: times.quantile(0.99),
            p999_us: times.quantile(0.999),
            max_us: times.max(),
        }
    }
}

/// The results of holding many locks.
#[derive(Debug, Serialize)]
struct Held {
    held: u64,
    lost: u64,
    /// Until all were acquired.
    taking_s: f64,
    lease_s: f64,
    /// How often each is renewed: a third of the lease.
    period_s: f64,
    /// Of single locks, estimated.
    renewals: f64,
    /// The shortest remaining lease.
    least_left_s: Option<f64>,
    /// The memory for the holds, in all processes.
    memory_mb: Option<f64>,
    bytes_per_hold: Option<f64>,
    server_commands_per_period: Option<f64>,
    server_cpu_percent: Option<f64>,
    /// Locks a second.
    released_per_s: Option<f64>,
}

impl Held {
    fn of(outcomes: &[Outcome], counters: Option<Counters>) -> Option<Held> {
        let all: Vec<Holding> = outcomes.iter().filter_map(|outcome| outcome.holding).collect();
        let first = all.first()?;
        let held = all.iter().map(|one| one.held).sum();
        let longest = |of: fn(&Holding) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let (seconds, releasing) = (longest(|one| one.seconds), longest(|one| one.releasing));
        let memory: Option<i64> = all.iter().map(|one| one.memory).sum();
        let per_second = |count: f64, seconds: f64| (seconds > 0.0).then(|| count / seconds);
        let period = first.lease / 3.0;
        Some(Held {
            held,
            lost: all.iter().map(|one| one.lost).sum(),
            taking_s: outcomes.iter().map(|outcome| outcome.counted).fold(0.0, f64::max),
            lease_s: first.lease,
            period_s: period,
            renewals: all.iter().map(|one| one.renewals).sum::<f64>().round(),
            least_left_s: all
                .iter()
                .map(|one| one.least_left)
                .reduce(f64::min)
                .filter(|_| held > 0),
            memory_mb: memory.map(|bytes| bytes as f64 / 1e6),
            bytes_per_hold: memory
                .filter(|_| held > 0)
                .map(|bytes| bytes as f64 / held as f64),
            server_commands_per_period: counters
                .and_then(|server| per_second(server.sent as f64 * period, seconds)),
            server_cpu_percent: counters.and_then(|server| per_second(server.cpu_s * 100.0, seconds)),
            released_per_s: per_second(all.iter().map(|one| one.released).sum::<u64>() as f64, releasing),
        })
    }
}

impl Report {
    pub(super) fn new(plan: &Plan, outcomes: &[Outcome], around: Around, interrupted: bool) -> Report {
        let mut sums = Sums::default();
        for outcome in outcomes {
            sums.add(&outcome.sums);
        }
        let times = match plan.workload {
            Workload::Wakeup => {
                let all = outcomes.iter().flat_map(|outcome| &outcome.handoffs);
                wakeups(all.copied().collect())
            }
            _ => sums.times(Series::Main).clone(),
        };
        let by_process: Vec<u64> = outcomes
            .iter()
            .map(|outcome| outcome.counts.iter().sum())
            .collect();
        let by_task = outcomes.iter().flat_map(|outcome| outcome.counts.iter().copied());
        let pairs: u64 = by_process.iter().sum();
        // Each process by its own clock: they do not stop at the same instant.
        let rate = outcomes
            .iter()
            .zip(&by_process)
            .filter(|(outcome, _)| outcome.counted > 0.0)
            .map(|(outcome, pairs)| *pairs as f64 / outcome.counted);
        let seconds = outcomes.iter().map(|outcome| outcome.seconds).fold(0.0, f64::max);
        let cpu: Option<f64> = outcomes.iter().map(|outcome| outcome.cpu_s).sum();
        let memory = |outcome: &Outcome| outcome.memory.map(|bytes| bytes as f64 / 1e6);
        let share = |count: Option<u64>| {
            count
                .filter(|_| pairs > 0)
                .map(|count| count as f64 / pairs as f64)
        };
        let server = around.counters;
        let per_pair = |seconds: fn(Counters) -> f64| {
            let server = server.filter(|_| pairs > 0 && plan.workload != Workload::Held)?;
            Some(seconds(server) * 1e6 / pairs as f64)
        };
        let spread = |series| sums.times.get(&series).map(Spread::of);
        let (main, bare, replay) = (Spread::of(&times), spread(Series::Bare), spread(Series::Replay));
        Report {
            added_us: bare
                .as_ref()
                .and_then(|bare: &Spread| Some(main.p50_us? - bare.p50_us?)),
            bare,
            replay,
            held: Held::of(outcomes, server),
            workload: plan.workload,
            kind: plan.kind,
            server: match plan.is_memory() {
                true => Some("memory".to_owned()),
                false => around.server,
            },
            tasks: plan.tasks,
            processes: plan.processes,
            threads: plan.threads,
            keys: (plan.workload != Workload::Idempotency).then_some(plan.keys),
            await_release: plan.await_release,
            local_handoffs: plan.local_handoffs,
            seconds,
            interrupted,
            pairs,
            pairs_per_s: rate.sum(),
            spread: main,
            share_min: share(by_task.clone().min()),
            share_max: share(by_task.max()),
            process_share_min: share(by_process.iter().min().copied()),
            process_share_max: share(by_process.iter().max().copied()),
            errors: sums.errors.values().sum(),
            errors_by_kind: sums.errors.clone(),
            client_cpu_s: cpu,
            client_cpu_percent: cpu.filter(|_| seconds > 0.0).map(|cpu| cpu / seconds * 100.0),
            rss_mb: outcomes.iter().map(memory).sum(),
            rss_mb_by_process: outcomes.iter().map(memory).collect(),
            server_commands: server.map(|server| server.sent),
            server_commands_in_scripts_too: server.map(|server| server.all),
            server_cpu_s: server.map(|server| server.cpu_s),
            server_us_per_pair: per_pair(|server| server.cpu_s),
            server_script_us_per_pair: per_pair(|server| server.script_s),
            sums,
            times,
        }
    }

    /// The picture of the times.
    pub(super) fn plot(&self) -> String {
        let title = format!(
            "{} on {}, {} {}",
            self.workload.name(),
            self.server.as_deref().unwrap_or(NAMELESS),
            grouped(self.pairs_per_s, 0),
            self.rate()
        );
        let mut lines = vec![(self.what().to_owned(), &self.times)];
        for (series, name) in [(Series::Replay, "replay"), (Series::Bare, "without the layer")] {
            lines.extend(self.sums.times.get(&series).map(|times| (name.to_owned(), times)));
        }
        plot::draw(&title, &lines)
    }

    /// The unit of the count per second.
    fn rate(&self) -> &'static str {
        match self.workload {
            Workload::Held => "locks taken per second",
            Workload::Layer => "requests per second",
            Workload::Idempotency => "first runs per second",
            _ => "pairs per second",
        }
    }

    /// What the times measure.
    fn what(&self) -> &'static str {
        match self.workload {
            Workload::Wakeup => "wake-up",
            Workload::Reentrant => "re-entry",
            Workload::Layer => "request",
            Workload::Idempotency => "first run",
            _ => "acquire",
        }
    }

    /// Whether nothing was counted.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs == 0
    }
}

/// The table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.headline(f)?;
        for (name, value) in self.rows() {
            writeln!(f, "  {name:<28}{value:>14}")?;
        }
        Ok(())
    }
}

impl Report {
    fn headline(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |count: u64, one: &str, many: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{} {many}", grouped(count as f64, 0)),
        };
        write!(f, "{}", self.workload.name())?;
        if self.kind != KindArg::Lock {
            write!(f, " ({})", dlock::LockKind::from(self.kind))?;
        }
        write!(f, " on {}: ", self.server.as_deref().unwrap_or(NAMELESS))?;
        if self.processes > 1 {
            write!(f, "{} processes, each with ", self.processes)?;
        }
        let tasks = of(self.tasks as u64, "task", "tasks");
        let threads = of(self.threads as u64, "thread", "threads");
        write!(f, "{tasks} on {threads}; ")?;
        if let Some(keys) = self.keys {
            write!(f, "{}, ", of(keys, "key", "keys"))?;
        }
        writeln!(f, "{:.1} s", self.seconds)?;
        if !self.await_release {
            writeln!(f, "  releases are not waited for")?;
        }
        if self.interrupted {
            writeln!(f, "  ended before its time")?;
        }
        writeln!(f)
    }

    fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Rows::default();
        rows.add(self.rate(), Some(whole(self.pairs_per_s)));
        rows.add_times(self.what(), &self.spread);
        if let Some(replay) = &self.replay {
            rows.add_times("replay", replay);
        }
        if let Some(bare) = &self.bare {
            rows.add("without the layer, median", bare.p50_us.map(time_of));
            let added = self.added_us.map(|added| time_of(added.max(0.0)));
            rows.add("the layer's own part", added);
        }
        if let Some(held) = &self.held {
            rows.add_held(held);
        }
        self.add_shares(&mut rows);
        rows.add("errors", Some(whole(self.errors as f64)));
        for (kind, times) in &self.errors_by_kind {
            let kind = format!("  {}", kind.replace('_', " "));
            rows.add(&kind, Some(whole(*times as f64)));
        }
        rows.add("client's CPU", self.client_cpu_percent.map(of_a_core));
        rows.add("client's memory", self.rss_mb.map(|mb| format!("{mb:.1} MB")));
        if self.server.as_deref() != Some("memory") {
            self.add_server(&mut rows);
        }
        rows.0
    }

    fn add_shares(&self, rows: &mut Rows) {
        let percent = |share: f64| format!("{:.2} %", share * 100.0);
        if self.workload != Workload::Held
            && (self.tasks * self.processes > 1 || self.workload == Workload::Wakeup)
        {
            rows.add("busiest task's share", self.share_max.map(percent));
            rows.add("idlest task's share", self.share_min.map(percent));
        }
        if self.processes > 1 {
            rows.add("busiest process's share", self.process_share_max.map(percent));
            rows.add("idlest process's share", self.process_share_min.map(percent));
        }
    }

    fn add_server(&self, rows: &mut Rows) {
        let cpu = self.server_cpu_s.filter(|_| self.seconds > 0.0);
        let cpu = cpu.map(|cpu| of_a_core(cpu / self.seconds * 100.0));
        rows.add("server's CPU", cpu);
        if let Some(held) = &self.held {
            let period = format!("commands in {}", time_of(held.period_s * 1e6));
            rows.add(&period, held.server_commands_per_period.map(whole));
        } else {
            rows.add("server's CPU per pair", self.server_us_per_pair.map(time_of));
            rows.add(
                "of that in scripts and commands",
                self.server_script_us_per_pair.map(time_of),
            );
            let sent = self.server_commands.map(|sent| whole(sent as f64));
            rows.add("commands sent to it", sent);
        }
    }
}

/// The table of a report: names and values.
#[derive(Default)]
struct Rows(Vec<(String, String)>);

impl Rows {
    fn add(&mut self, name: &str, value: Option<String>) {
        let value = value.unwrap_or_else(|| "not known".to_owned());
        self.0.push((name.to_owned(), value));
    }

    fn add_times(&mut self, name: &str, spread: &Spread) {
        for (at, time) in [
            ("median", spread.p50_us),
            ("90 %", spread.p90_us),
            ("99 %", spread.p99_us),
            ("99.9 %", spread.p999_us),
            ("longest", spread.max_us),
        ] {
            let time = time.map_or_else(|| "none".to_owned(), time_of);
            self.add(&format!("{name}, {at}"), Some(time));
        }
    }

    fn add_held(&mut self, held: &Held) {
        self.add("locks held", Some(whole(held.held as f64)));
        self.add("lost", Some(whole(held.lost as f64)));
        self.add("renewals, estimated", Some(whole(held.renewals)));
        let left = held.least_left_s.map(|left| time_of(left * 1e6));
        self.add("least left of a lease", left);
        let memory = held.bytes_per_hold.map(|bytes| format!("{bytes:.0} bytes"));
        self.add("memory for each", memory);
        self.add("locks released per second", held.released_per_s.map(whole));
    }
}

fn whole(number: f64) -> String {
    grouped(number, 0)
}

fn of_a_core(percent: f64) -> String {
    format!("{percent:.1} % of a core")
}

/// For a server that may not be asked.
const NAMELESS: &str = "a server that does not say what it is";
