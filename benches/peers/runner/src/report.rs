//! `BENCHMARKS.md` and its charts, made from the committed results and nothing else.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::curve::Curve;
use crate::entrant::Entrant;
use crate::figures::{count, memory, percent, percent_fine, ratio_of_shares, time, times};
use crate::markdown::{table, wrapped};
use crate::peer::Peer;
use crate::results::{Median, Results, Run};
use crate::workload::{PERIOD, Workload};
use crate::{chart, curve_chart, curve_report, stores};

/// Where the results lie, in the repository.
const RESULTS: &str = "benches/peers/results";
/// Where those on stores beside Redis lie.
const STORES: &str = "benches/peers/stores";
/// Where the curves lie.
const CURVES: &str = "benches/peers/curves";
/// The servers whose results are shown, when they are there.
const SERVERS: [&str; 2] = ["redis", "valkey"];
/// Where the page goes.
const PAGE: &str = "BENCHMARKS.md";

/// The page and its charts, by their paths in the repository at `root`.
///
/// # Errors
/// When there are no results, or they cannot be read.
pub fn files(root: &Path) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut all = Vec::new();
    for server in SERVERS {
        let path = root.join(RESULTS).join(format!("{server}.json"));
        if path.exists() {
            all.push((
                format!("benches/peers/charts/{server}.svg"),
                Results::read(&path)?,
            ));
        }
    }
    anyhow::ensure!(!all.is_empty(), "there are no results in {RESULTS}");
    let mut curves = Vec::new();
    for server in SERVERS {
        let path = root.join(CURVES).join(format!("{server}.json"));
        if path.exists() {
            let chart = format!("benches/peers/charts/curve-{server}.svg");
            curves.push((server, chart, Curve::read(&path)?));
        }
    }
    let others = stores::read(&root.join(STORES))?;
    let mut files = vec![(PathBuf::from(PAGE), page(&all, &curves, &others))];
    for (_, chart, curve) in &curves {
        files.push((chart.into(), curve_chart::draw(curve)));
    }
    files.extend(
        all.iter()
            .map(|(path, results)| (PathBuf::from(path), chart::draw(results))),
    );
    Ok(files)
}

fn page(
    all: &[(String, Results)],
    curves: &[(&str, String, Curve)],
    others: &[(stores::Store, Results)],
) -> String {
    let mut page = String::new();
    page.push_str(HEAD);
    page.push_str(&how(all));
    page.push_str(&curve_report::section(curves));
    for (chart, results) in all {
        let server = &results.server;
        let _ = write!(
            page,
            "\n## On {server}\n\n![{}]({chart})\n",
            chart::title(results)
        );
        page.push_str(&behind(results));
        for workload in Workload::ALL {
            page.push_str(&section(results, workload));
        }
        page.push_str(&left_out(results));
    }
    page.push_str(&stores::section(others));
    page.push_str(TAIL);
    page
}

const HEAD: &str = "\
# Benchmarks

dlock beside the locks that people use now. This page is made from the raw results in
[`benches/peers`](benches/peers) (`results`, `curves`, `stores`); nothing in it is written by hand but the explanations.
Absolute figures do not travel between machines; the ratios, taken in turns on one machine, mostly do.

Make it again, on a machine that does nothing else:

```sh
benches/peers/run            # the tables of each server
benches/peers/run --curve    # the curve over tasks
benches/peers/stores.sh      # etcd, ZooKeeper and PostgreSQL
```

";

/// What was measured, on what, and the versions.
fn how(all: &[(String, Results)]) -> String {
    let mut text =
        String::from("| server | cores | rounds | seconds each | measured on |\n|---|---|---|---|---|\n");
    for (_, results) in all {
        let Results {
            server,
            cores,
            rounds,
            seconds,
            day,
            ..
        } = results;
        let _ = writeln!(text, "| {server} | {cores} | {rounds} | {seconds} | {day} |");
    }
    text.push_str(
        "\nServer and clients share these cores. The server is started for the measurement and keeps nothing on disk. In \
         each\nround the libraries take turns within a workload, another one first each time. Figures are medians over the \
         rounds;\n*spread* is the distance from the lowest to the highest, in percent of the median.\n\n\
         | library | version | runs on | set up |\n|---|---|---|---|\n",
    );
    for peer in Peer::ALL {
        let runs = || all.iter().flat_map(|(_, results)| &results.runs);
        let of_peer = |run: &&Run| run.entrant == peer.name();
        let Some(run) = runs().find(of_peer) else { continue };
        // a library may run in two ways
        let mut runtimes: Vec<&str> = Vec::new();
        for run in runs().filter(of_peer) {
            if !run.runtime.is_empty() && !runtimes.contains(&&*run.runtime) {
                runtimes.push(&run.runtime);
            }
        }
        let runtime = match runtimes.is_empty() {
            true => "Rust".to_owned(),
            false => runtimes.join("; "),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {runtime} | {} |",
            peer.title(),
            run.version,
            set_up(peer)
        );
    }
    text.push_str(
        "\nEvery other setting is the library's default, the delays between the tries of those that poll among them: they \
         decide\nwhat a waiter waits.\n",
    );
    text
}

/// What is not the library's default.
fn set_up(peer: Peer) -> &'static str {
    match peer {
        Peer::Redisson => {
            "threads and blocking calls, a connection for each; `nettyThreads` 0, which is two for each core: with many \
             tasks faster here than the default 32; 5 s of warm-up"
        }
        Peer::RedissonDefaults => "nothing but the address; 5 s of warm-up",
        Peer::Redsync => "a pool with a connection for each goroutine",
        Peer::NodeRedlock => {
            "automatic pipelining of ioredis where there are many tasks: without, it is slower"
        }
        Peer::RedisPy => {
            "asyncio for many locks at once, threads for all else: each the faster of the two there; a connection for \
             each task"
        }
        Peer::Rslock => "tokio on all cores, one manager, optimized build",
        Peer::Dlock => "tokio with one thread, optimized build; measured by `dlock bench`",
        Peer::DlockUnawaited => {
            "the guard is dropped, which releases in the background: `--no-await-release`"
        }
    }
}

/// What a workload measures, and what to bear in mind.
fn explain(workload: Workload) -> &'static str {
    match workload {
        Workload::Sequential => {
            "It takes its lock and releases it, over and over, with no work between. Both are a round trip; what is \
             compared is the way there and back."
        }
        Workload::Parallel => {
            "No client waits for another. What is compared is how much of the server one process can use."
        }
        Workload::Contended => {
            "All want the same lock all the time. Those that poll let the task that has just released take it again at \
             once, while the others sleep: much of their rate is of few tasks, as *busiest / idlest* shows, and the \
             p99.9 is what the others wait. dlock hands the lock on inside the process, in the order of arrival, for as long as \
             that is safe and fair to other processes."
        }
        Workload::Fair => {
            "The same in the order of arrival over all processes, which only two of them offer."
        }
        Workload::Processes => {
            "The same key is wanted by two processes, so no handoff inside of one is enough. Times are those of the \
             process that waited longer."
        }
        Workload::Lone => {
            "Does a crowd that hands its lock on leave a place for one that stands outside? The rate is that of the \
             crowd."
        }
        Workload::Wakeup => {
            "One client holds a lock for a while and releases it; how long until the other one, which waits, has it? \
             From the call that releases to the return of the call that acquires, over two connections."
        }
        Workload::Held => {
            "With a lease of 30 s, so each is renewed every 10 s. Only two of them renew by themselves the locks that \
             are plainly acquired."
        }
    }
}

fn section(results: &Results, workload: Workload) -> String {
    let entrants = measured(results, workload);
    if entrants.is_empty() {
        return String::new();
    }
    let table = match workload {
        Workload::Wakeup => wakeups(results, &entrants),
        Workload::Held => held(results, &entrants),
        Workload::Lone => lone(results, &entrants),
        _ => rates(results, workload, &entrants),
    };
    format!(
        "\n### {}\n\n{}\n\n{table}",
        workload.title(),
        wrapped(explain(workload))
    )
}

fn measured(results: &Results, workload: Workload) -> Vec<Entrant> {
    let mut entrants = Entrant::all_of(workload);
    entrants.retain(|entrant| results.of(workload.name(), &entrant.name()).next().is_some());
    entrants
}

fn rates(results: &Results, workload: Workload, entrants: &[Entrant]) -> String {
    let two = workload == Workload::Processes;
    let many = workload.tasks() > 1;
    let unawaited = entrants
        .iter()
        .any(|entrant| entrant.peer == Peer::DlockUnawaited);
    let mut head = vec!["", "pairs/s", "spread", "dlock ÷ it"];
    if unawaited {
        head.push("not awaited ÷ it");
    }
    head.extend(["p50", "p99", "p99.9"]);
    if many {
        head.push("busiest / idlest task");
    }
    if two {
        head.push("idler process");
    }
    head.extend(["failed", "client CPU per pair", "memory"]);
    let rate_of = |name: &str| results.median(workload.name(), name, |run| run.pairs_per_s);
    let rows = entrants.iter().map(|entrant| {
        let name = entrant.name();
        let get = |value: fn(&Run) -> Option<f64>| results.median(workload.name(), &name, value);
        let rate = rate_of(&name);
        let ratio = |of: Peer| match (rate_of(of.name()), rate) {
            (Some(of), Some(rate)) if !entrant.peer.is_dlock() => times(of.value / rate.value),
            _ => String::new(),
        };
        let mut row = vec![
            title(*entrant),
            show(rate, count),
            show(rate.map(|rate| rate.spread()), percent),
            ratio(Peer::Dlock),
        ];
        if unawaited {
            row.push(ratio(Peer::DlockUnawaited));
        }
        row.push(show(get(|run| run.p50_us), time));
        row.push(show(get(|run| run.p99_us), time));
        row.push(show(get(|run| run.p999_us), time));
        if many {
            row.push(show(get(unevenness), ratio_of_shares));
        }
        if two {
            row.push(show(get(|run| run.process_share_min), percent));
        }
        row.push(show(get(|run| Some(run.errors as f64)), count));
        let cpu = |run: &Run| Some(run.client_cpu_s? / run.seconds / run.pairs_per_s? * 1e6);
        row.push(show(results.median(workload.name(), &name, cpu), time));
        row.push(show(get(|run| run.rss_mb), memory));
        row
    });
    table(&head, rows)
}

fn unevenness(run: &Run) -> Option<f64> {
    Some(run.share_max? / run.share_min?)
}

fn wakeups(results: &Results, entrants: &[Entrant]) -> String {
    let name = Workload::Wakeup.name();
    let median_of = |peer: &str| results.median(name, peer, |run| run.p50_us);
    let dlock = median_of(Peer::Dlock.name());
    let rows = entrants.iter().map(|entrant| {
        let peer = entrant.name();
        let median = median_of(&peer);
        let ratio = match (dlock, median) {
            (Some(dlock), Some(median)) if entrant.peer != Peer::Dlock => times(dlock.value / median.value),
            _ => String::new(),
        };
        vec![
            title(*entrant),
            show(median, time),
            show(median.map(Median::spread), percent),
            ratio,
            show(results.median(name, &peer, |run| run.p99_us), time),
            show(results.median(name, &peer, |run| Some(run.errors as f64)), count),
        ]
    });
    table(&["", "median", "spread", "dlock ÷ it", "p99", "failed"], rows)
}

fn held(results: &Results, entrants: &[Entrant]) -> String {
    let name = Workload::Held.name();
    let rows = entrants.iter().map(|entrant| {
        let peer = entrant.name();
        vec![
            title(*entrant),
            show(results.median(name, &peer, cpu_share), percent_fine),
            show(results.median(name, &peer, |run| run.rss_mb), memory),
            show(results.median(name, &peer, commands), count),
            show(results.median(name, &peer, |run| Some(run.errors as f64)), count),
        ]
    });
    table(
        &[
            "",
            "client CPU, of a core",
            "memory",
            "commands per 10 s",
            "lost or failed",
        ],
        rows,
    )
}

fn cpu_share(run: &Run) -> Option<f64> {
    Some(run.client_cpu_s? / run.seconds)
}

fn commands(run: &Run) -> Option<f64> {
    Some(run.server_commands? as f64 / run.seconds * PERIOD)
}

fn lone(results: &Results, entrants: &[Entrant]) -> String {
    let name = Workload::Lone.name();
    let rows = entrants.iter().map(|entrant| {
        let peer = entrant.name();
        let rate = results.median(name, &peer, |run| run.pairs_per_s);
        let lone = |value: fn(&crate::results::Lone) -> f64| {
            results.median(name, &peer, |run| run.lone.as_ref().map(value))
        };
        vec![
            title(*entrant),
            show(rate, count),
            show(rate.map(Median::spread), percent),
            show(results.median(name, &peer, unevenness), ratio_of_shares),
            show(lone(|lone| lone.pairs_per_s), count),
            show(lone(|lone| lone.p50_us), time),
            show(lone(|lone| lone.p99_us), time),
            show(
                results.median(name, &peer, |run| {
                    Some((run.errors + run.lone.as_ref()?.errors) as f64)
                }),
                count,
            ),
        ]
    });
    let head = [
        "crowd, lone one",
        "crowd's pairs/s",
        "spread",
        "busiest / idlest in it",
        "lone one's pairs/s",
        "its wait, p50",
        "its wait, p99",
        "failed",
    ];
    table(&head, rows)
}

fn title(entrant: Entrant) -> String {
    let title = match entrant.lone {
        Some(lone) => format!("{}, {}", entrant.peer.title(), lone.title()),
        None => entrant.peer.title().to_owned(),
    };
    match entrant.peer.is_dlock() {
        true => format!("**{title}**"),
        false => title,
    }
}

type Value = fn(&Run) -> Option<f64>;
type Unit = fn(f64) -> String;

/// Where another one is ahead.
fn behind(results: &Results) -> String {
    let mut lines = Vec::new();
    for workload in Workload::ALL {
        // more is better of the value
        let (value, unit): (Value, Unit) = match workload {
            Workload::Wakeup => (|run| run.p50_us.map(|time| 1.0 / time), |rate| time(1.0 / rate)),
            Workload::Held => continue,
            _ => (|run| run.pairs_per_s, count),
        };
        let of = |name: &str| {
            results
                .median(workload.name(), name, value)
                .map(|median| median.value)
        };
        let entrants = measured(results, workload);
        for entrant in entrants.iter().filter(|entrant| entrant.peer.is_dlock()) {
            let Some(ours) = of(&entrant.name()) else { continue };
            let ahead = entrants
                .iter()
                .filter(|other| !other.peer.is_dlock())
                .filter_map(|other| {
                    let theirs = of(&other.name()).filter(|theirs| *theirs > ours)?;
                    Some(format!("{} {}", other.peer.title(), unit(theirs)))
                });
            let ahead: Vec<String> = ahead.collect();
            if !ahead.is_empty() {
                lines.push(format!(
                    "- {}{}: {}; {} {}.",
                    workload.title(),
                    if workload == Workload::Wakeup {
                        ""
                    } else {
                        ", pairs/s"
                    },
                    ahead.join(", "),
                    entrant.peer.title(),
                    unit(ours)
                ));
            }
        }
        if workload == Workload::Lone {
            let wait = |name: &str| {
                let p99 = |run: &Run| run.lone.as_ref().map(|lone| lone.p99_us);
                results
                    .median(workload.name(), name, p99)
                    .map(|median| median.value)
            };
            let theirs = entrants.iter().find(|entrant| !entrant.peer.is_dlock());
            let theirs = theirs.and_then(|entrant| wait(&entrant.name()));
            for entrant in entrants.iter().filter(|entrant| entrant.peer.is_dlock()) {
                if let (Some(ours), Some(theirs)) = (wait(&entrant.name()), theirs)
                    && theirs < ours
                {
                    lines.push(format!(
                        "- A lone {} beside a crowd of dlock waits {} at p99, beside one of Redisson {}.",
                        entrant.lone.map_or("", Peer::title),
                        time(ours),
                        time(theirs)
                    ));
                }
            }
        }
    }
    let held: [(&str, Value, Unit); 3] = [
        ("CPU", cpu_share, percent_fine),
        ("memory", |run| run.rss_mb, memory),
        ("commands per period", commands, count),
    ];
    for (what, value, unit) in held {
        let of = |peer: Peer| {
            results
                .median(Workload::Held.name(), peer.name(), value)
                .map(|median| median.value)
        };
        if let (Some(ours), Some(theirs)) = (of(Peer::Dlock), of(Peer::Redisson))
            && theirs < ours
        {
            lines.push(format!(
                "- {}: Redisson needs less {what} than dlock, {} to {}.",
                Workload::Held.title(),
                unit(theirs),
                unit(ours)
            ));
        }
    }
    match lines.is_empty() {
        true => "\nIn none of these is another one ahead of dlock.\n".to_owned(),
        false => format!("\nWhere another one is ahead:\n\n{}\n", lines.join("\n")),
    }
}

fn left_out(results: &Results) -> String {
    if results.left_out.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n### Not measured\n\n");
    for left_out in &results.left_out {
        let workload = left_out
            .workload
            .as_deref()
            .and_then(|name| Workload::ALL.into_iter().find(|workload| workload.name() == name));
        let workload = workload.map_or("all".to_owned(), |workload| workload.title().to_owned());
        let title = match Peer::named(&left_out.entrant) {
            Some(peer) => peer.title(),
            None => &left_out.entrant,
        };
        let _ = writeln!(text, "- {title}, {workload}: {}", left_out.why);
    }
    text
}

trait Shown {
    fn number(self) -> f64;
}

impl Shown for f64 {
    fn number(self) -> f64 {
        self
    }
}

impl Shown for Median {
    fn number(self) -> f64 {
        self.value
    }
}

fn show(value: Option<impl Shown>, how: impl Fn(f64) -> String) -> String {
    value.map_or("–".to_owned(), |value| how(value.number()))
}

const TAIL: &str = "
## What each of them gives

A rate says little about what it is a rate of. This is what the measured locks do in the time, checked in the sources of
the measured versions:

| | dlock | Redisson | redsync | node-redlock | redis-py | rslock |
|---|---|---|---|---|---|---|
| re-entry | nested code; branches of a task exclude each other | per thread | no | no | no | no |
| renewed while held | yes | yes | by hand, `Extend` | by `using`; as measured by hand, `extend` | by hand, `extend` | by `using`; as measured by hand, `extend` |
| holder told of a loss | before the lock passes on | no | no | by `using`, after it expired | no | by `using`, when an extension fails |
| fencing token | with every acquisition | by `getFencedLock`; not as measured | no | no | no | no |
| a waiter | is woken, and looks again in case that was lost | is woken, and looks again when the lease ends | tries every 50 to 250 ms, 32 times | tries every 100 to 300 ms, 11 times | tries every 100 ms | tries 3 times, 0 to 200 ms apart |
| order of waiters | of arrival within a process | none; `getFairLock` of arrival | none | none | none | none |
| released when the holder's code fails | yes; also when dropped or cancelled | by `finally` | by `defer` | by `using` | by `with` | by hand |
| several servers | yes, by quorum | `getMultiLock` | yes, by quorum | yes, by quorum | no | yes, by quorum |

What is *awaited*: every library but the last row of dlock is measured with its release awaited, so that the next
acquisition begins when the server has confirmed it. A guard of dlock that is dropped is released in the background, and
the next acquisition of the same process keeps its place behind that.

## How it is measured

- `pairs/s` are acquisitions with their releases, over all tasks; *failed* are those that gave up or were refused, which a
  lock that polls does after its tries.
- p50, p99 and p99.9 are of the wait: from the call that acquires to its return. CPU and memory are of all client
  processes, memory as the kernel counts it (RSS) at the end.
- Each measurement has processes of its own and a warm-up that is not counted.
- One library, one workload, another length: `benches/peers/run --server redis --rounds 1 --seconds 2 --only dlock`.
- `dlock bench` measures dlock alone, on your own server: `cargo run --release -p dlock-cli -- bench --help`.
";
