//! `dlock why`: from a lock to its holder, to the lock that the holder waits for, and so on.

use std::process::ExitCode;

use dlock::{Error, LockClient, LockKey};
use serde_json::{Value, json};

use super::NOT_HELD;
use super::args::WhyArgs;
use super::diagnosis::Diagnosis;
use super::survey::Row;
use super::text::{clean, json_line, time};

/// Exit code if holders wait for each other.
const DEADLOCK: u8 = 3;
/// The maximum length of a chain.
const MOST: usize = 32;

/// A lock, its holder, and what the holder waits for.
struct Link {
    row: Row,
    diagnosis: Diagnosis,
    /// How many other calls of the same client wait; they may or may not belong to this hold.
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

/// Returns the chain from this lock on, and the names of the locks that form a cycle.
async fn follow(client: &LockClient, key: LockKey) -> Result<(Vec<Link>, Option<Vec<LockKey>>), Error> {
    let mut links: Vec<Link> = Vec::new();
    let mut next = Some(key);
    while let Some(key) = next.take().filter(|_| links.len() < MOST) {
        let holders = client.holders(key.clone()).await?;
        for holder in holders {
            let (holder, diagnosis) = Diagnosis::of(client, holder).await?;
            if let Some(at) = links.iter().position(|link| link.row.holder.id == holder.id) {
                // A task that waits for its own hold may do so beside work that will end it.
                if at + 1 == links.len() {
                    continue;
                }
                let cycle = links[at..].iter().map(|link| link.row.key.clone()).collect();
                return Ok((links, Some(cycle)));
            }
            let waits = &holder.waits_for;
            let of_client = holder.client.as_ref().map_or(0, |report| report.waits.len());
            let others = of_client - usize::from(waits.is_some());
            let waited_for = waits.as_ref().map(|wait| wait.key.clone());
            let row = Row {
                key: key.clone(),
                holder,
                waiters: 0,
            };
            links.push(Link {
                row,
                diagnosis,
                others,
            });
            // For several readers, the first that waits.
            if waited_for.is_some() {
                next = waited_for;
                break;
            }
        }
    }
    Ok((links, None))
}

fn print(link: &Link) {
    say!("{}", link.row.line());
    say!("  {}", link.diagnosis.line());
    if let Some(wait) = &link.row.holder.waits_for {
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
        && last.row.holder.waits_for.is_none()
    {
        let key = clean(last.row.key.as_str());
        say!("the end of the chain: the holder of {key} waits for no lock that is known");
    }
}

fn all_json(key: &str, links: &[Link], cycle: Option<&[LockKey]>) -> Value {
    let chain = links.iter().map(|link| {
        let mut object = link.row.json();
        if let Some(object) = object.as_object_mut() {
            object.remove("waiters");
        }
        object["diagnosis"] = link.diagnosis.json();
        object["waits_for"] = match &link.row.holder.waits_for {
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
