//! All locks that are held, joined with what the clients say of themselves.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dlock::operations::{ClientReport, HoldReport, WaitReport};
use dlock::store::{Holder, Kind};
use dlock::{Error, LockClient, LockKey};
use futures_util::future::join_all;
use serde_json::{Map, Value, json};

use super::text::{clean, fits, millis, time};

/// What is held and waited for.
pub(super) struct Survey {
    pub(super) rows: Vec<Row>,
    /// The longest wait first.
    pub(super) waits: Vec<(Arc<ClientReport>, WaitReport)>,
}

/// A hold, as the store and its client see it.
pub(super) struct Row {
    pub(super) key: LockKey,
    pub(super) holder: Holder,
    /// How many calls are known to wait for it.
    pub(super) waiters: usize,
}

impl Survey {
    /// Looks at the locks whose names fit a pattern.
    pub(super) async fn of(client: &LockClient, pattern: &str) -> Result<Survey, Error> {
        let locks = client.list(super::text::begin_of(pattern)).await?;
        let reports = clients(client).await?;
        let holds_of = |report: &ClientReport| {
            locks
                .iter()
                .any(|(_, holder)| holder.id.starts_with(&report.client))
        };
        // What is younger than what they wrote down, those say that answer.
        let asked = reports.into_iter().map(|report| async {
            let is_asked = report.answers && !report.is_overdue() && holds_of(&report);
            let answer = match is_asked {
                true => client.ask(&report.client).await.ok().flatten(),
                false => None,
            };
            Arc::new(answer.unwrap_or(report))
        });
        let reports = join_all(asked).await;
        let by_id: HashMap<_, _> = reports
            .iter()
            .map(|report| (report.client.as_str(), report))
            .collect();
        let mut waiting: BTreeMap<LockKey, usize> = BTreeMap::new();
        let mut waits = Vec::new();
        for report in &reports {
            for wait in &report.waits {
                *waiting.entry(wait.key.clone()).or_default() += 1;
                if fits(pattern, wait.key.as_str()) {
                    waits.push((report.clone(), wait.clone()));
                }
            }
        }
        waits.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.waited));
        let named = locks.into_iter().filter(|(key, _)| fits(pattern, key.as_str()));
        let rows = named.map(|(key, mut holder)| {
            let report = holder.id.split_once(':').and_then(|(id, _)| by_id.get(id));
            holder.client = report.map(|report| Arc::clone(report));
            holder.hold = report.and_then(|report| hold_in(report, &holder.id)).cloned();
            let waiters = waiting.get(&key).copied().unwrap_or_default();
            Row { key, holder, waiters }
        });
        Ok(Survey {
            rows: rows.collect(),
            waits,
        })
    }
}

/// What clients wrote down, where the store keeps that.
async fn clients(client: &LockClient) -> Result<Vec<ClientReport>, Error> {
    match client.clients().await {
        // Then all that is known is what the store itself says.
        Err(Error::Unsupported { .. } | Error::Refused { .. }) => Ok(Vec::new()),
        reports => reports,
    }
}

/// The hold of this id, as its client reports it.
pub(super) fn hold_in<'a>(report: &'a ClientReport, id: &str) -> Option<&'a HoldReport> {
    report.holds.iter().find(|hold| hold.grant == id)
}

impl Row {
    /// The kind, which for fair locks only the holder knows.
    pub(super) fn kind(&self) -> Kind {
        self.holder
            .hold
            .as_ref()
            .map_or(self.holder.kind, |hold| hold.kind)
    }

    pub(super) fn held(&self) -> Option<Duration> {
        self.holder.hold.as_ref().map(|hold| hold.held)
    }

    /// Why something is not known.
    fn unknown(&self) -> Option<&'static str> {
        let is_ours = self.holder.id.split_once(':').is_some();
        match (&self.holder.client, &self.holder.hold) {
            (Some(_), Some(_)) => None,
            (Some(report), None) if report.held > report.holds.len() => {
                Some("its client holds more than it writes down, or holds this for less than a second or two")
            }
            (Some(_), None) => Some("it is held for less than a second or two"),
            (None, _) if !is_ours => Some("a permit, whose id does not name its client"),
            (None, _) => Some(
                "its client wrote nothing down: it has gone, is cut off, began a moment ago, may not write, is of an \
                 older version, or is Redisson",
            ),
        }
    }

    /// For programs.
    pub(super) fn json(&self) -> Value {
        let Holder {
            id,
            client,
            hold,
            remaining,
            holds,
            ..
        } = &self.holder;
        let (client, hold) = (client.as_deref(), hold.as_ref());
        let address = client.and_then(|client| client.address.clone());
        let note = hold.and_then(|hold| hold.note.clone());
        let mut unknown = Map::new();
        if let Some(why) = self.unknown() {
            let of_client = ["service", "host", "process", "version"]
                .iter()
                .filter(|_| client.is_none());
            for name in of_client.chain(&["location", "note", "held_ms", "token"]) {
                unknown.insert((*name).to_owned(), json!(why));
            }
        }
        if address.is_none() {
            let why = match client {
                Some(_) => "its client does not know by which address it reaches the store",
                None => self.unknown().unwrap_or_default(),
            };
            unknown.insert("address".to_owned(), json!(why));
        }
        if remaining.is_none() {
            let why = match self.holder.ends_with {
                Some(what) => format!("it has no lease, and ends with {what}"),
                None => "the lease does not end".to_owned(),
            };
            unknown.insert("lease_left_ms".to_owned(), json!(why));
        }
        if hold.is_some() && note.is_none() {
            unknown.insert("note".to_owned(), json!("the holder gave none"));
        }
        let unknown = match unknown.is_empty() {
            true => Value::Null,
            false => Value::Object(unknown),
        };
        json!({
            "key": self.key.as_str(),
            "kind": self.kind().to_string(),
            "holder": {
                "id": id,
                "service": client.map(|client| &client.service),
                "host": client.map(|client| &client.host),
                "address": address,
                "process": client.map(|client| client.process),
                "version": client.map(|client| &client.version),
                "location": hold.map(|hold| &hold.location),
                "note": note,
                "last_heard_ms": client.map(|client| millis(client.age)),
                "unknown": unknown,
            },
            "released": *holds == 0,
            "token": hold.map(|hold| hold.token),
            "held_ms": self.held().map(millis),
            "lease_left_ms": remaining.map(millis),
            "waiters": self.waiters,
        })
    }

    /// For people, in one line.
    pub(super) fn line(&self) -> String {
        let key = clean(self.key.as_str());
        let held = match self.kind() {
            _ if self.holder.holds == 0 => "released, kept for its min_hold",
            Kind::Read => "held to read",
            Kind::Write => "held to write",
            Kind::Fair => "held (fair)",
            _ => "held",
        };
        let left = match (self.holder.remaining, self.holder.ends_with) {
            (Some(left), _) => format!("{} left", time(left)),
            (None, Some(what)) => format!("ends with {what}"),
            (None, None) => "no end".to_owned(),
        };
        let mut line = format!("{key}  {held} by {}  {left}", clean(&self.holder.id));
        if self.holder.holds > 1 {
            line += &format!("  {} holds", self.holder.holds);
        }
        if let Some(client) = &self.holder.client {
            line += &format!("  {}", place(client));
        }
        if let Some(hold) = &self.holder.hold {
            line += &format!("  since {}  {}", time(hold.held), clean(&hold.location));
            if let Some(note) = &hold.note {
                line += &format!("  \"{}\"", clean(note));
            }
        }
        match self.waiters {
            0 => {}
            1 => line += "  1 waits",
            many => line += &format!("  {many} wait"),
        }
        line
    }
}

/// Where a client is, for people.
pub(super) fn place(client: &ClientReport) -> String {
    let address = client.address.as_deref().unwrap_or("address unknown");
    let (service, host) = (clean(&client.service), clean(&client.host));
    format!(
        "{service} on {host} ({}), process {}",
        clean(address),
        client.process
    )
}

/// A wait, for programs.
pub(super) fn wait_json(client: &ClientReport, wait: &WaitReport) -> Value {
    json!({
        "key": wait.key.as_str(),
        "kind": wait.kind.to_string(),
        "waited_ms": millis(wait.waited),
        "location": wait.location,
        "note": wait.note,
        "client": client.client,
        "service": client.service,
        "host": client.host,
        "address": client.address,
        "process": client.process,
    })
}

/// A wait, for people, in one line.
pub(super) fn wait_line(client: &ClientReport, wait: &WaitReport) -> String {
    let (key, location) = (clean(wait.key.as_str()), clean(&wait.location));
    let note = wait.note.as_deref().map(|note| format!("  \"{}\"", clean(note)));
    let waited = time(wait.waited);
    let (place, note) = (place(client), note.unwrap_or_default());
    format!("{key}  waited for since {waited} by {place}  {location}{note}")
}
