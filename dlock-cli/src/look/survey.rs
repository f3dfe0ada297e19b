//! Locks and waits as they are printed.

use std::sync::Arc;
use std::time::Duration;

use dlock::operations::{ClientReport, SurveyedLock, WaitReport};
use dlock::store::{Holder, Kind};
use dlock::{Error, LockClient, LockKey};
use serde_json::{Map, Value, json};

use super::text::{begin_of, clean, fits, millis, time};

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
    /// Surveys the locks whose names match a pattern.
    pub(super) async fn of(client: &LockClient, pattern: &str) -> Result<Survey, Error> {
        let survey = client.survey(begin_of(pattern), true).await;
        match survey.clients_unknown {
            // Then only the store's own data is known.
            None | Some(Error::Unsupported { .. } | Error::Refused { .. }) => {}
            Some(error) => return Err(error),
        }
        if let Some(error) = survey.locks_unknown {
            return Err(error);
        }
        let (mut rows, mut waits) = (Vec::new(), Vec::new());
        let fitting = survey
            .locks
            .into_iter()
            .filter(|lock| fits(pattern, lock.key.as_str()));
        for SurveyedLock {
            key,
            holders,
            waits: of_key,
            ..
        } in fitting
        {
            rows.extend(holders.into_iter().map(|holder| Row {
                key: key.clone(),
                holder,
                waiters: of_key.len(),
            }));
            waits.extend(of_key);
        }
        waits.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.waited));
        Ok(Survey { rows, waits })
    }
}

impl Row {
    pub(super) fn held(&self) -> Option<Duration> {
        self.holder.hold.as_ref().map(|hold| hold.held)
    }

    /// As JSON, for programs.
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
        if let Some(why) = self.holder.unknown() {
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
                None => self.holder.unknown().unwrap_or_default(),
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
            "kind": self.holder.known_kind().to_string(),
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

    /// As one line, for people.
    pub(super) fn line(&self) -> String {
        let key = clean(self.key.as_str());
        let held = match self.holder.known_kind() {
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

/// The location of a client, for people.
pub(super) fn place(client: &ClientReport) -> String {
    let address = client.address.as_deref().unwrap_or("address unknown");
    let (service, host) = (clean(&client.service), clean(&client.host));
    format!(
        "{service} on {host} ({}), process {}",
        clean(address),
        client.process
    )
}

/// A wait as JSON, for programs.
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

/// A wait as one line, for people.
pub(super) fn wait_line(client: &ClientReport, wait: &WaitReport) -> String {
    let (key, location) = (clean(wait.key.as_str()), clean(&wait.location));
    let note = wait.note.as_deref().map(|note| format!("  \"{}\"", clean(note)));
    let waited = time(wait.waited);
    let (place, note) = (place(client), note.unwrap_or_default());
    format!("{key}  waited for since {waited} by {place}  {location}{note}")
}
