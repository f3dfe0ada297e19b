//! `dlock why`: from a lock to its holder, to the lock that the holder waits for, and so on.

use std::collections::HashSet;
use std::process::ExitCode;
use std::vec;

use dlock::store::Holder;
use dlock::{Error, LockClient, LockKey};
use serde_json::{Value, json};

use super::NOT_HELD;
use super::args::WhyArgs;
use super::diagnosis::{Diagnoses, Diagnosis};
use super::survey::Row;
use super::text::{clean, json_line, time};

/// Exit code if holders wait for each other.
const DEADLOCK: u8 = 3;
/// The maximum length of a chain.
const MOST: usize = 32;
/// The maximum number of locks that are looked at.
const MOST_IN_ALL: usize = 128;

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

/// A lock on the way, with its holders.
struct Step {
    key: LockKey,
    /// The holders that were not looked at yet.
    left: vec::IntoIter<Holder>,
    /// Those that were, by their places among all links. The way goes on from the last one.
    links: Vec<usize>,
    /// Whether the next caller has to wait for each of the holders. Of a semaphore any may let it on.
    needs_all: bool,
}

impl Step {
    async fn of(client: &LockClient, key: LockKey) -> Result<Step, Error> {
        let holders = client.holders(key.clone()).await?;
        let lets_on = |holder: &Holder| holder.kind.lock_kind().is_none() && holder.waits_for.is_none();
        Ok(Step {
            key,
            needs_all: !holders.iter().any(lets_on),
            left: holders.into_iter(),
            links: Vec::new(),
        })
    }
}

impl Link {
    async fn of(diagnoses: &mut Diagnoses<'_>, key: LockKey, holder: Holder) -> Result<Link, Error> {
        let (holder, diagnosis) = diagnoses.of(holder).await?;
        let of_client = holder.client.as_ref().map_or(0, |report| report.waits.len());
        let others = of_client - usize::from(holder.waits_for.is_some());
        let row = Row {
            key,
            holder,
            waiters: 0,
        };
        Ok(Link {
            row,
            diagnosis,
            others,
        })
    }

    fn waits_for(&self) -> Option<&LockKey> {
        self.row.holder.waits_for.as_ref().map(|wait| &wait.key)
    }
}

/// Returns the chain from this lock on, and the names of the locks that form a cycle. Of several readers, each that waits
/// is followed until there is a cycle; without one, the chain is that of the first.
async fn follow(client: &LockClient, key: LockKey) -> Result<(Vec<Link>, Option<Vec<LockKey>>), Error> {
    let mut links: Vec<Link> = Vec::new();
    let mut diagnoses = Diagnoses::new(client);
    let mut first = None;
    let mut seen = HashSet::from([key.clone()]);
    let mut way = vec![Step::of(client, key).await?];
    while let Some(step) = way.last_mut() {
        let Some(holder) = step.left.next() else {
            first.get_or_insert_with(|| chain(&way));
            way.pop();
            continue;
        };
        // Each look at a holder may ask its client. Once there is a chain, only those are of interest that may close a cycle.
        if first.is_some() && holder.waits_for.is_none() {
            continue;
        }
        let link = Link::of(&mut diagnoses, step.key.clone(), holder).await?;
        let waited_for = link.waits_for().cloned();
        step.links.push(links.len());
        links.push(link);
        let Some(next) = waited_for else { continue };
        if let Some(at) = way.iter().position(|step| step.key == next) {
            if is_cycle(client, &way[at..], &links).await? {
                let cycle = way[at..].iter().map(|step| step.key.clone()).collect();
                return Ok((picked(links, &chain(&way)), Some(cycle)));
            }
        } else if way.len() < MOST && seen.len() < MOST_IN_ALL && seen.insert(next.clone()) {
            way.push(Step::of(client, next).await?);
        }
    }
    Ok((picked(links, &first.unwrap_or_default()), None))
}

/// Whether the last lock of this part of the way has a holder that waits for the first one, for ever.
async fn is_cycle(client: &LockClient, part: &[Step], links: &[Link]) -> Result<bool, Error> {
    let (Some(first), true) = (part.first(), part.iter().all(|step| step.needs_all)) else {
        return Ok(false);
    };
    if part.len() == 1 {
        // A task that waits for its own hold may do so beside work that will end it. Two readers wait for each other.
        let waits = |at: &&usize| links[**at].waits_for() == Some(&first.key);
        return Ok(first.links.iter().filter(waits).count() > 1);
    }
    // It may have been released meanwhile.
    let holders = client.holders(first.key.clone()).await?;
    let passed = first.links.last().map(|at| links[*at].row.holder.id.as_str());
    Ok(holders.iter().any(|holder| Some(holder.id.as_str()) == passed))
}

/// The places of all links of the way.
fn chain(way: &[Step]) -> Vec<usize> {
    way.iter().flat_map(|step| step.links.iter().copied()).collect()
}

/// The links at these places, which are in order.
fn picked(links: Vec<Link>, places: &[usize]) -> Vec<Link> {
    let links = links.into_iter().enumerate();
    let picked = links.filter(|(at, _)| places.binary_search(at).is_ok());
    picked.map(|(_, link)| link).collect()
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
