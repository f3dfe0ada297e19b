//! What a measurement has given: for programs as one JSON object, for people as a table.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::args::{LockKind, Plan, Workload};
use super::messages::Outcome;
use super::plot;
use super::process::Around;
use super::tally::{Series, Sums, Times};
use super::workloads::wakeups;

/// The result. Times are in microseconds, memory in MB of 10⁶ bytes; what could not be measured is null.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    workload: Workload,
    kind: LockKind,
    /// `Redis 7.0.15`, `memory`.
    server: Option<String>,
    /// In each process.
    tasks: usize,
    processes: usize,
    threads: usize,
    keys: u64,
    await_release: bool,
    /// How long it was measured.
    seconds: f64,
    /// Ended before its time, by Ctrl-C.
    interrupted: bool,
    /// Acquisitions with their releases.
    pairs: u64,
    pairs_per_s: f64,
    mean_us: Option<f64>,
    p50_us: Option<f64>,
    p90_us: Option<f64>,
    p99_us: Option<f64>,
    p999_us: Option<f64>,
    max_us: Option<f64>,
    /// Of all acquisitions, those of the task that had the fewest.
    share_min: Option<f64>,
    /// Of all acquisitions, those of the task that had the most.
    share_max: Option<f64>,
    process_share_min: Option<f64>,
    process_share_max: Option<f64>,
    errors: u64,
    errors_by_kind: BTreeMap<String, u64>,
    /// Of all processes.
    client_cpu_s: Option<f64>,
    /// The same in percent of one core.
    client_cpu_percent: Option<f64>,
    /// Of all processes.
    rss_mb: Option<f64>,
    rss_mb_by_process: Vec<Option<f64>>,
    /// Commands that were sent to the server, a script counting as one.
    server_commands: Option<u64>,
    /// The server's own count, in which what a script does counts as well.
    server_commands_in_scripts_too: Option<u64>,
    server_cpu_s: Option<f64>,
    /// Of the server, per pair.
    server_us_per_pair: Option<f64>,
    #[serde(skip)]
    times: Times,
}

impl Report {
    pub(super) fn new(plan: &Plan, outcomes: &[Outcome], around: Around, interrupted: bool) -> Report {
        let mut sums = Sums::default();
        for outcome in outcomes {
            sums.add(&outcome.sums);
        }
        let times = match plan.workload {
            Workload::Wakeup => {
                let all = outcomes.iter().flat_map(|outcome| &outcome.handovers);
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
            .filter(|(outcome, _)| outcome.seconds > 0.0)
            .map(|(outcome, pairs)| *pairs as f64 / outcome.seconds);
        let seconds = outcomes.iter().map(|outcome| outcome.seconds).fold(0.0, f64::max);
        let cpu: Option<f64> = outcomes.iter().map(|outcome| outcome.cpu_s).sum();
        let memory = |outcome: &Outcome| outcome.memory.map(|bytes| bytes as f64 / 1e6);
        let share = |count: Option<u64>| {
            count
                .filter(|_| pairs > 0)
                .map(|count| count as f64 / pairs as f64)
        };
        let server = around.counters;
        Report {
            workload: plan.workload,
            kind: plan.kind,
            server: match plan.is_memory() {
                true => Some("memory".to_owned()),
                false => around.server,
            },
            tasks: plan.tasks,
            processes: plan.processes,
            threads: plan.threads,
            keys: plan.keys,
            await_release: plan.await_release,
            seconds,
            interrupted,
            pairs,
            pairs_per_s: rate.sum(),
            mean_us: times.mean(),
            p50_us: times.quantile(0.5),
            p90_us: times.quantile(0.9),
            p99_us: times.quantile(0.99),
            p999_us: times.quantile(0.999),
            max_us: times.max(),
            share_min: share(by_task.clone().min()),
            share_max: share(by_task.max()),
            process_share_min: share(by_process.iter().min().copied()),
            process_share_max: share(by_process.iter().max().copied()),
            errors: sums.errors.values().sum(),
            errors_by_kind: sums.errors,
            client_cpu_s: cpu,
            client_cpu_percent: cpu.filter(|_| seconds > 0.0).map(|cpu| cpu / seconds * 100.0),
            rss_mb: outcomes.iter().map(memory).sum(),
            rss_mb_by_process: outcomes.iter().map(memory).collect(),
            server_commands: server.map(|server| server.sent),
            server_commands_in_scripts_too: server.map(|server| server.all),
            server_cpu_s: server.map(|server| server.cpu_s),
            server_us_per_pair: server
                .filter(|_| pairs > 0)
                .map(|server| server.cpu_s * 1e6 / pairs as f64),
            times,
        }
    }

    /// The picture of the times.
    pub(super) fn plot(&self) -> String {
        let title = format!(
            "{} on {}, {} pairs per second",
            self.workload.name(),
            self.server.as_deref().unwrap_or("a server without a name"),
            grouped(self.pairs_per_s, 0)
        );
        plot::draw(&title, &[(self.what().to_owned(), &self.times)])
    }

    /// What the times are of.
    fn what(&self) -> &'static str {
        match self.workload {
            Workload::Wakeup => "wake-up",
            _ => "acquire",
        }
    }

    /// Nothing was counted.
    pub(super) fn is_empty(&self) -> bool {
        self.pairs == 0
    }
}

/// The table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |count: u64, one: &str, many: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{} {many}", grouped(count as f64, 0)),
        };
        write!(f, "{}", self.workload.name())?;
        if self.kind != LockKind::Lock {
            write!(f, " ({})", dlock::Kind::from(self.kind))?;
        }
        write!(
            f,
            " on {}: ",
            self.server.as_deref().unwrap_or("a server without a name")
        )?;
        if self.processes > 1 {
            write!(f, "{} processes, each with ", self.processes)?;
        }
        let tasks = of(self.tasks as u64, "task", "tasks");
        let keys = of(self.keys, "key", "keys");
        let threads = of(self.threads as u64, "thread", "threads");
        writeln!(f, "{tasks} on {threads}; {keys}, {:.1} s", self.seconds)?;
        if !self.await_release {
            writeln!(f, "  releases are not waited for")?;
        }
        if self.interrupted {
            writeln!(f, "  ended before its time")?;
        }
        writeln!(f)?;
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<26}{value:>14}");
        row("pairs per second", grouped(self.pairs_per_s, 0))?;
        let what = self.what();
        for (name, time) in [
            ("median", self.p50_us),
            ("90 %", self.p90_us),
            ("99 %", self.p99_us),
            ("99.9 %", self.p999_us),
            ("longest", self.max_us),
        ] {
            row(
                &format!("{what}, {name}"),
                time.map_or("none".to_owned(), time_of),
            )?;
        }
        let percent =
            |share: Option<f64>| share.map_or("none".to_owned(), |share| format!("{:.2} %", share * 100.0));
        if self.tasks * self.processes > 1 || self.workload == Workload::Wakeup {
            row("busiest task's share", percent(self.share_max))?;
            row("idlest task's share", percent(self.share_min))?;
        }
        if self.processes > 1 {
            row("busiest process's share", percent(self.process_share_max))?;
            row("idlest process's share", percent(self.process_share_min))?;
        }
        row("errors", grouped(self.errors as f64, 0))?;
        for (kind, times) in &self.errors_by_kind {
            row(
                &format!("  {}", kind.replace('_', " ")),
                grouped(*times as f64, 0),
            )?;
        }
        let unknown = || "not known".to_owned();
        let cpu = |cpu: f64| format!("{cpu:.0} % of a core");
        row("client's CPU", self.client_cpu_percent.map_or_else(unknown, cpu))?;
        row(
            "client's memory",
            self.rss_mb.map_or_else(unknown, |mb| format!("{mb:.1} MB")),
        )?;
        if self.server.as_deref() == Some("memory") {
            return Ok(());
        }
        let server_cpu = self.server_cpu_s.map(|cpu| cpu / self.seconds * 100.0);
        row("server's CPU", server_cpu.map_or_else(unknown, cpu))?;
        row(
            "server's CPU per pair",
            self.server_us_per_pair.map_or_else(unknown, time_of),
        )?;
        row(
            "commands sent to it",
            self.server_commands
                .map_or_else(unknown, |sent| grouped(sent as f64, 0)),
        )
    }
}

/// `12345.6` as `12,345.6`.
fn grouped(number: f64, digits: usize) -> String {
    let text = format!("{number:.digits$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut out = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

/// Microseconds in the unit that suits them, to three digits.
pub(super) fn time_of(micros: f64) -> String {
    let (value, unit) = match micros {
        m if m < 1.0 => (m * 1e3, "ns"),
        m if m < 1e3 => (m, "µs"),
        m if m < 1e6 => (m / 1e3, "ms"),
        m => (m / 1e6, "s"),
    };
    let digits = match value {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(grouped(0.0, 0), "0");
        assert_eq!(grouped(999.0, 0), "999");
        assert_eq!(grouped(1234567.89, 1), "1,234,567.9");
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        assert_eq!(time_of(0.25), "250 ns");
        assert_eq!(time_of(12.34), "12.3 µs");
        assert_eq!(time_of(1500.0), "1.50 ms");
        assert_eq!(time_of(2_000_000.0), "2.00 s");
    }
}
