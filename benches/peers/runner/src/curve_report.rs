//! The curves as text.

use std::fmt::Write as _;

use crate::curve::{Curve, Line, Point, TASKS};
use crate::curve_chart;
use crate::figures::{count, runtime, times};
use crate::markdown::{table, wrapped};

const EXPLANATION: &str = "From one task to a crowd, each with a lock of its own, which it takes and releases with no work \
    between. *Two bare scripts* are the acquire and the release of a Redisson-style lock, sent one by one through the \
    multiplexed connection of the `redis` crate, with nothing else. Each row says on which runtime: that of \
    `#[tokio::main]`, with as many worker threads as there are cores, or one thread. Medians over the rounds.";

/// What the page says of them; by the server, the path of the chart.
pub(crate) fn section(curves: &[(&str, String, Curve)]) -> String {
    if curves.is_empty() {
        return String::new();
    }
    let mut text = format!("\n## From one task to 256\n\n{}\n", wrapped(EXPLANATION));
    for (name, chart, curve) in curves {
        let Curve {
            server,
            rounds,
            seconds,
            day,
            cores,
            ..
        } = curve;
        let _ = write!(
            text,
            "\n### {server}\n\n{cores} cores, {rounds} rounds of {seconds} s, {day}; made again by `benches/peers/run \
             --curve --server {name}`.\n\n![{}]({chart})\n",
            curve_chart::title(curve)
        );
        if let Some(note) = &curve.note {
            let _ = write!(text, "\n{}\n", wrapped(note));
        }
        let tables = [
            ("Pairs/s:", rates(curve)),
            ("Ratios of these:", ratios(curve)),
            ("CPU for a pair, client + server, in µs:", cpu(curve)),
            (
                "Time for a pair in scripts, and in the commands that dlock sends instead, by the server's own count, in µs:",
                scripts(curve),
            ),
        ];
        for (head, rows) in tables {
            let _ = write!(text, "\n{head}\n\n{}", with_tasks(rows));
        }
    }
    text
}

fn with_tasks(rows: Vec<Vec<String>>) -> String {
    let mut head = vec!["".to_owned(), "runtime".to_owned()];
    head.extend(TASKS.map(|tasks| match tasks {
        1 => "1 task".to_owned(),
        tasks => tasks.to_string(),
    }));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    table(&head, rows)
}

fn title(line: Line) -> String {
    match line.is_dlock() {
        true => format!("**{}**", line.title()),
        false => line.title().to_owned(),
    }
}

/// A row of each of these lines on each runtime.
fn rows(
    curve: &Curve,
    lines: &[Line],
    cell: impl Fn(Line, usize, usize) -> Option<String>,
) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for threads in curve.runtimes() {
        for line in lines {
            let mut row = vec![title(*line), runtime(threads)];
            row.extend(TASKS.map(|tasks| cell(*line, threads, tasks).unwrap_or_else(|| "–".to_owned())));
            rows.push(row);
        }
    }
    rows
}

fn rate(curve: &Curve, line: Line, threads: usize, tasks: usize) -> Option<f64> {
    let median = curve.median(line, threads, tasks, |point| point.pairs_per_s)?;
    Some(median.value)
}

fn rates(curve: &Curve) -> Vec<Vec<String>> {
    rows(curve, &Line::ALL, |line, threads, tasks| {
        rate(curve, line, threads, tasks).map(count)
    })
}

fn ratios(curve: &Curve) -> Vec<Vec<String>> {
    let pairs = [
        ("dlock ÷ rslock", Line::Dlock, Line::Rslock),
        ("dlock ÷ two bare scripts", Line::Dlock, Line::Scripts),
        ("dlock, not awaited ÷ rslock", Line::DlockUnawaited, Line::Rslock),
    ];
    let mut rows = Vec::new();
    for threads in curve.runtimes() {
        for (name, ours, theirs) in pairs {
            let mut row = vec![name.to_owned(), runtime(threads)];
            row.extend(TASKS.map(|tasks| {
                let of = |line| rate(curve, line, threads, tasks);
                let both = of(ours).zip(of(theirs));
                both.map_or("–".to_owned(), |(ours, theirs)| times(ours / theirs))
            }));
            rows.push(row);
        }
    }
    rows
}

fn cpu(curve: &Curve) -> Vec<Vec<String>> {
    rows(curve, &Line::ALL, |line, threads, tasks| {
        let of = |value: fn(&Point) -> f64| Some(curve.median(line, threads, tasks, value)?.value);
        let (client, server) = of(|point| point.client_us).zip(of(|point| point.server_us))?;
        Some(format!("{} + {}", count(client), count(server)))
    })
}

fn scripts(curve: &Curve) -> Vec<Vec<String>> {
    let lines = [Line::Scripts, Line::Dlock, Line::DlockUnawaited];
    rows(curve, &lines, |line, threads, tasks| {
        let median = curve.median(line, threads, tasks, |point| point.script_us)?;
        Some(count(median.value))
    })
}
