//! The survey as JSON. The names of the fields are those of `dlock list --json`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::Health;
use dlock::operations::{ClientReport, ProcessState, SurveyedLock, WaitReport};
use dlock::store::Holder;
use serde_json::{Value, json};

use super::filter::{Filter, Only};
use super::survey::{Gap, Survey};

/// The maximum number of locks shown.
const MOST_LOCKS: usize = 500;
/// The maximum number of holders, and of waiters, of a lock in the list.
const FEW: usize = 5;
/// The maximum number of them for a single lock.
const MANY: usize = 100;
/// The longest text shown, in characters. Names of locks have at most 512 bytes; other keys under the store's prefix
/// can have any length.
const MOST_CHARS: usize = 600;

/// Returns the survey, with the most urgent of the matching locks.
pub(super) fn of_survey(survey: &Survey, filter: &Filter) -> Value {
    let own = survey.own.client.as_str();
    let mut fitting = survey.locks.iter().filter(|lock| filter.fits(lock));
    let shown = fitting.by_ref().take(MOST_LOCKS);
    let locks: Vec<_> = shown.map(|lock| few_of_lock(lock, own, FEW)).collect();
    let counts = Only::ALL.map(|only| {
        let of = survey.locks.iter().filter(|lock| only.fits(lock));
        (only.name().to_owned(), json!(of.count()))
    });
    let clients = survey.clients.iter().map(|client| of_client(client, own));
    let deadlocks = survey
        .deadlocks
        .iter()
        .map(|circle| circle.iter().map(|key| short(key.as_str())).collect::<Vec<_>>());
    json!({
        "at_ms": since_epoch(survey.at),
        "locks": locks,
        "locks_left_out": fitting.count(),
        "counts": Value::Object(counts.into_iter().collect()),
        "clients": clients.collect::<Vec<_>>(),
        "clients_left_out": survey.clients_left_out,
        "deadlocks": deadlocks.collect::<Vec<_>>(),
        "unknown": survey.gaps.iter().map(of_gap).collect::<Vec<_>>(),
        "process": of_process(&survey.own, &survey.health),
    })
}

/// Returns a lock with its holders and waiters, and why other holders are unknown; `own` is the id of the client of this
/// process.
pub(super) fn of_lock(lock: &SurveyedLock, unknown: Option<&str>, own: &str) -> Value {
    let mut of = few_of_lock(lock, own, MANY);
    of["unknown"] = json!(unknown.map(short));
    of
}

fn few_of_lock(lock: &SurveyedLock, own: &str, most: usize) -> Value {
    let holders = lock.holders.iter().take(most);
    let holders: Vec<_> = holders.map(|holder| of_holder(holder, own, lock)).collect();
    let kind = lock.holders.first().map(|holder| holder.known_kind().to_string());
    let kind = kind.or_else(|| lock.waits.first().map(|(_, wait)| wait.kind.to_string()));
    let waiters = lock.waits.iter().take(most);
    let waiters: Vec<_> = waiters.map(|(client, wait)| of_wait(client, wait, own)).collect();
    let name = lock.key.as_str();
    json!({
        "key": short(name),
        "key_bytes": name.len(),
        // A key that is not a valid lock name is shown, but can be neither looked up nor broken.
        "is_lock": lock.key.check().is_ok(),
        "kind": kind,
        "holders": holders,
        "holders_in_all": lock.holders.len(),
        "waiters": waiters,
        "waiters_in_all": lock.waits.len(),
    })
}

fn of_holder(holder: &Holder, own: &str, lock: &SurveyedLock) -> Value {
    let (client, hold) = (holder.client.as_deref(), holder.hold.as_ref());
    let (state, because) = match holder.holds {
        0 => (
            "released",
            "the work is over, and the min_hold of the lock is not".to_owned(),
        ),
        _ => state_of(client, own),
    };
    let waits_for = holder.waits_for.as_ref().map(|wait| {
        json!({
            "key": short(wait.key.as_str()),
            "waited_ms": millis(wait.waited),
            "location": short(&wait.location),
        })
    });
    let mut of = json!({
        "id": short(&holder.id),
        "kind": holder.known_kind().to_string(),
        "unknown": holder.unknown(),
        "state": state,
        "because": because,
        "released": holder.holds == 0,
        "near_miss": holder.is_near_its_end(),
        "suspect": hold.map(|hold| hold.suspect),
        "token": hold.map(|hold| hold.token.to_string()),
        "held_ms": hold.map(|hold| millis(hold.held)),
        "lease_left_ms": holder.remaining.map(millis),
        "ends_with": holder.ends_with,
        "location": hold.map(|hold| short(&hold.location)),
        "reentered": hold.map(|hold| hold.reentered.iter().map(|at| short(at)).collect::<Vec<_>>()),
        "note": hold.and_then(|hold| hold.note.as_deref()).map(short),
        "waits_for": waits_for,
        "can_be_broken": lock.key.check().is_ok() && holder.names_client() && holder.holds > 0,
    });
    place(&mut of, client, own);
    of
}

fn of_wait(client: &ClientReport, wait: &WaitReport, own: &str) -> Value {
    let mut of = json!({
        "kind": wait.kind.to_string(),
        "waited_ms": millis(wait.waited),
        "location": short(&wait.location),
        "note": wait.note.as_deref().map(short),
    });
    place(&mut of, Some(client), own);
    of
}

fn of_client(client: &ClientReport, own: &str) -> Value {
    let (state, because) = state_of(Some(client), own);
    let mut of = json!({
        "started_ms": since_epoch(client.started),
        "answers": client.answers,
        "held": client.held,
        "waiting": client.waiting,
        "state": state,
        "because": because,
    });
    place(&mut of, Some(client), own);
    of
}

/// Adds the client.
fn place(of: &mut Value, client: Option<&ClientReport>, own: &str) {
    of["client"] = json!(client.map(|client| short(&client.client)));
    of["is_own"] = json!(client.is_some_and(|client| client.client == own));
    of["service"] = json!(client.map(|client| short(&client.service)));
    of["host"] = json!(client.map(|client| short(&client.host)));
    of["address"] = json!(client.and_then(|client| client.address.as_deref()).map(short));
    of["process"] = json!(client.map(|client| client.process));
    of["version"] = json!(client.map(|client| short(&client.version)));
    of["last_heard_ms"] = json!(client.map(|client| millis(client.age)));
}

/// Whether a client is alive, as far as its published report tells, and why.
fn state_of(client: Option<&ClientReport>, own: &str) -> (&'static str, String) {
    let Some(client) = client else {
        return ("unknown", "its client has published nothing".to_owned());
    };
    if client.client == own {
        return ("alive", "this process".to_owned());
    }
    let heard = client.age.as_secs();
    if !client.is_overdue() {
        return ("alive", format!("it published its report {heard} s ago"));
    }
    let process = client.process;
    match client.process_state() {
        ProcessState::Gone => (
            "killed",
            format!("process {process} no longer exists on this machine"),
        ),
        ProcessState::Stopped => (
            "stopped",
            format!("process {process} is stopped on this machine; SIGCONT resumes it"),
        ),
        _ => (
            "silent",
            format!(
                "last report {heard} s ago: killed, stopped, hung or cut off; `dlock show KEY` on its machine tells"
            ),
        ),
    }
}

fn of_gap(gap: &Gap) -> Value {
    json!({ "what": gap.unknown, "why": short(&gap.why), "remedy": gap.remedy })
}

fn of_process(own: &ClientReport, health: &Health) -> Value {
    json!({
        "client": own.client,
        "service": short(&own.service),
        "host": short(&own.host),
        "process": own.process,
        "draining": health.is_draining,
        "last_reply_ms": health.last_reply.map(millis),
        "held": health.held,
        "suspect": health.suspect,
        "least_lease_left_ms": health.least_lease_left.map(millis),
        "reconnects": health.reconnects,
    })
}

/// Shortens a foreign text to what is shown.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn since_epoch(at: SystemTime) -> u64 {
    millis(at.duration_since(UNIX_EPOCH).unwrap_or_default())
}
