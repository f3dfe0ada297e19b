//! `dlock why`: from a lock to its holder, to what that waits for, and so on.

use std::process::ExitCode;

use dlock::operations::{ClientReport, WaitReport};
use dlock::{Error, LockClient, LockKey};
use serde_json::{Value, json};

use super::NOT_HELD;
use super::args::WhyArgs;
use super::diagnosis::Diagnosis;
use super::show::know;
use super::survey::{Row, hold_in};
use super::text::{clean, json_line, time};

/// Exit code where holders wait for each other.
const DEADLOCK: u8 = 3;
/// How long a chain may be.
const MOST: usize = 32;

/// A lock, its holder, and what that waits for.
struct Link {
    row: Row,
    diagnosis: Diagnosis,
    waits: Option<WaitReport>,
    /// How many other calls of the same client wait, of which it is not known that this hold is theirs.
    others: usize,
}

pub(super) async fn why(client: &LockClient, args: &WhyArgs) -> Result<ExitCode, Error> {
    let (links, cycle) = follow(client, LockKey::raw(args.key.as_str())).await?;
    if args.json {
        say!("{}", json_line(&all_json(&args.key, &links, cycle.as_deref())));
    } else if links.is_empty() {
        say!("{}  free", clean(&args.key));
    } else {
        links.iter().for_each(print);
        print_end(&links, cycle.as_deref());
    }
    Ok(match (links.is_empty(), cycle.is_some()) {
        (true, _) => ExitCode::from(NOT_HELD),
        (_, true) => ExitCode::from(DEADLOCK),
        _ => ExitCode::SUCCESS,
    })
}

/// The chain from this lock on, and the names of the locks that form a circle.
async fn follow(client: &LockClient, key: LockKey) -> Result<(Vec<Link>, Option<Vec<LockKey>>), Error> {
    let mut links: Vec<Link> = Vec::new();
    let mut next = Some(key);
    while let Some(key) = next.take().filter(|_| links.len() < MOST) {
        let holders = client.holders(key.clone()).await?;
        for mut holder in holders {
            let diagnosis = Diagnosis::of(client, &holder).await?;
            know(&mut holder, &diagnosis);
            if let Some(at) = links.iter().position(|link| link.row.holder.id == holder.id) {
                let cycle = links[at..].iter().map(|link| link.row.key.clone()).collect();
                return Ok((links, Some(cycle)));
            }
            let report = diagnosis.report.as_ref();
            let waits = report.and_then(|report| wait_of(report, &holder.id)).cloned();
            let others = report.map_or(0, |report| report.waits.len()) - usize::from(waits.is_some());
            let row = Row {
                key: key.clone(),
                holder,
                waiters: 0,
            };
            let waited_for = waits.as_ref().map(|wait| wait.key.clone());
            links.push(Link {
                row,
                diagnosis,
                waits,
                others,
            });
            // Of several readers the first that waits.
            if waited_for.is_some() {
                next = waited_for;
                break;
            }
        }
    }
    Ok((links, None))
}

/// The call that the holder of this grant waits in: inside the frame of the hold, or in the task that has it.
fn wait_of<'a>(report: &'a ClientReport, grant: &str) -> Option<&'a WaitReport> {
    let inside = report
        .waits
        .iter()
        .find(|wait| wait.inside.iter().any(|id| id == grant));
    let task = hold_in(report, grant).and_then(|hold| hold.task);
    inside.or_else(|| {
        report
            .waits
            .iter()
            .find(|wait| wait.task.is_some() && wait.task == task)
    })
}

fn print(link: &Link) {
    say!("{}", link.row.line());
    say!("  {}", link.diagnosis.line());
    if let Some(wait) = &link.waits {
        let (key, location) = (clean(wait.key.as_str()), clean(&wait.location));
        say!("  it waits for {key} since {} at {location}", time(wait.waited));
    } else if link.others > 0 {
        say!(
            "  other calls of its process wait: {}, none of them known to be under this hold",
            link.others
        );
    }
}

fn print_end(links: &[Link], cycle: Option<&[LockKey]>) {
    if let Some(cycle) = cycle {
        let first = cycle.first().into_iter();
        let names: Vec<_> = cycle.iter().chain(first).map(|key| clean(key.as_str())).collect();
        say!(
            "deadlock: {} (each holder waits for the next lock)",
            names.join(" -> ")
        );
        say!(
            "take them together with LockClient::multi, or in the same order everywhere; break one hold to go on"
        );
    } else if let Some(last) = links.last()
        && last.waits.is_none()
    {
        let key = clean(last.row.key.as_str());
        say!("the end of the chain: whoever holds {key} waits for no lock that is known");
    }
}

fn all_json(key: &str, links: &[Link], cycle: Option<&[LockKey]>) -> Value {
    let chain = links.iter().map(|link| {
        let mut object = link.row.json();
        if let Some(object) = object.as_object_mut() {
            object.remove("waiters");
        }
        object["diagnosis"] = link.diagnosis.json();
        object["waits_for"] = match &link.waits {
            Some(wait) => json!({
                "key": wait.key.as_str(),
                "waited_ms": super::text::millis(wait.waited),
                "location": wait.location,
            }),
            None => Value::Null,
        };
        object
    });
    let cycle = cycle.map(|cycle| {
        cycle
            .iter()
            .map(|key| key.as_str().to_owned())
            .collect::<Vec<_>>()
    });
    json!({ "key": key, "chain": chain.collect::<Vec<_>>(), "cycle": cycle })
}
