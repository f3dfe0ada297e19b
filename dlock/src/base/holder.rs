//! Holders as the store and their clients report them.

use std::sync::Arc;
use std::time::Duration;

use crate::base::chance::HashMap;
use crate::base::kind::Kind;
use crate::base::report::{ClientReport, HoldReport, WaitReport};

/// A holder of a lock, as the store sees it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let _guard = client.lock("order:42").acquire().await?;
///
/// let holder = client.inspect("order:42").await?.expect("the lock is held");
/// assert!(holder.id.starts_with(&client.id()));
/// println!("the lease ends in {:?}", holder.remaining);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The kind of the hold as the store sees it; for the store a fair lock is a [`Kind::Mutex`].
    pub kind: Kind,
    /// The id on the wire, `<client uuid>:<number>` for dlock and Redisson alike; for a permit in memory, on
    /// Redis and on Valkey, Redisson's permit id: 32 hexadecimal digits, the first eight of which are those of dlock's
    /// client. A transaction that holds a lock on PostgreSQL has no such id, but the words `transaction of process 4711`
    /// or `prepared transaction`.
    pub id: String,
    /// How many holds the store counts: for dlock 1, since re-entry is counted in the process, and 0 while a released
    /// lock is kept by its `min_hold`. For a permit on Redis and Valkey always 1.
    pub holds: u64,
    /// The remaining lease; `None` if the hold does not expire, or [not by a lease](Self::ends_with).
    pub remaining: Option<Duration>,
    /// What ends the hold if it has no lease, as in `its session with the store`; `None` if it has a lease, or nothing
    /// ends it.
    pub ends_with: Option<&'static str>,
    /// The client of the hold, as that client published it. Filled in by [`LockClient::inspect`] and
    /// [`LockClient::holders`]; `None` if that client published nothing: it is gone, cannot reach the store, began to
    /// hold something a moment ago, or is not dlock's.
    ///
    /// [`LockClient::inspect`]: crate::LockClient::inspect
    /// [`LockClient::holders`]: crate::LockClient::holders
    pub client: Option<Arc<ClientReport>>,
    /// The hold, as that client published it: since when, where in the code, its note. `None` if it did not publish
    /// this hold: the hold is younger than a second or two, or one of many.
    pub hold: Option<HoldReport>,
    /// The call that the holder waits in, as its client reports it: inside the frame of the hold, or in the task that
    /// has it.
    pub waits_for: Option<Arc<WaitReport>>,
}

impl Holder {
    /// Creates a holder, for a store that reports one.
    #[must_use]
    pub fn new(kind: Kind, id: String, holds: u64, remaining: Option<Duration>) -> Holder {
        Holder {
            kind,
            id,
            holds,
            remaining,
            ends_with: None,
            client: None,
            hold: None,
            waits_for: None,
        }
    }

    /// Sets what [ends](Self::ends_with) the hold, for a store without leases.
    #[must_use]
    pub fn ending_with(mut self, what: &'static str) -> Holder {
        self.ends_with = Some(what);
        self
    }

    /// Adds its client's report, if there is one.
    #[must_use]
    pub fn known(mut self, client: Option<Arc<ClientReport>>) -> Holder {
        (self.client, self.hold, self.waits_for) = (None, None, None);
        match &client {
            Some(client) => Said::by(client).tell(self),
            None => self,
        }
    }

    /// Returns the kind as its client reports it: only the client knows that a lock is fair. Without a report, the kind
    /// of the store.
    #[must_use]
    pub fn known_kind(&self) -> Kind {
        self.hold.as_ref().map_or(self.kind, |hold| hold.kind)
    }

    /// Returns whether the id names its client: that of a permit does only on stores that Redisson does not share.
    #[must_use]
    pub fn names_client(&self) -> bool {
        self.id.contains(':')
    }

    /// Returns whether the lease was not renewed when due: whether less than one and a half times the interval is left at
    /// which its client publishes (a third of the client's lease, 1 s at least and 5 s at most; 5 s where it publishes
    /// nothing). A renewed lease has two thirds left, except before the end of its `max_hold`, when it may count; one of a few
    /// seconds that a lock has by itself may count always. A hold that its holder reports as suspect counts, too; a lock that
    /// is only kept for its `min_hold` does not: it ends as it should.
    #[must_use]
    pub fn is_near_its_end(&self) -> bool {
        /// How often a client publishes, at most every third of its lease; usually this often.
        const USUALLY_WRITTEN: Duration = Duration::from_secs(5);
        let every = self
            .client
            .as_ref()
            .map_or(USUALLY_WRITTEN, |client| client.every);
        let is_suspect = self.hold.as_ref().is_some_and(|hold| hold.suspect);
        let is_short = self.remaining.is_some_and(|left| left < every * 3 / 2);
        self.holds > 0 && (is_suspect || is_short)
    }

    /// Returns whether a client of Redisson holds it: its UUID has a version that those of dlock's clients never have.
    #[doc(hidden)]
    #[must_use]
    pub fn is_of_redisson(&self) -> bool {
        self.client_id()
            .is_some_and(|client| client.get_version_num() == 4)
    }

    /// Returns why something about it is unknown, in words; `None` if its client and its hold are known.
    #[must_use]
    pub fn unknown(&self) -> Option<&'static str> {
        match (&self.client, &self.hold) {
            (Some(_), Some(_)) => None,
            _ if self.holds == 0 => Some("it was released, and its min_hold keeps it"),
            (Some(client), None) if client.held > client.holds.len() => {
                Some("its client holds more than it publishes, or holds this for less than a second or two")
            }
            (Some(_), None) => Some("it is held for less than a second or two"),
            (None, _) if self.is_of_redisson() => Some("its client is Redisson, which publishes nothing"),
            (None, _) if self.names_client() => Some(
                "its client published nothing: presence is off there, or it has gone, is cut off, began a moment ago, \
                 may not publish, or is of an older version",
            ),
            (None, _) if self.kind.is_permits() => Some("a permit, whose id does not name its client"),
            (None, _) => Some("its id names no client of dlock"),
        }
    }

    /// The UUID of its client, if the id has one.
    pub(crate) fn client_id(&self) -> Option<uuid::Uuid> {
        let (client, _) = self.id.split_once(':')?;
        uuid::Uuid::try_parse(client).ok()
    }
}

/// A client's report of its holds, by their ids.
pub(crate) struct Said<'a> {
    client: &'a Arc<ClientReport>,
    holds: HashMap<&'a str, &'a HoldReport>,
    /// By the holds in whose frames they wait, and by the task that waits.
    inside: HashMap<&'a str, &'a WaitReport>,
    tasks: HashMap<u64, &'a WaitReport>,
}

impl<'a> Said<'a> {
    pub(crate) fn by(client: &'a Arc<ClientReport>) -> Said<'a> {
        let waits = || client.waits.iter().rev();
        let inside = waits().flat_map(|wait| wait.inside.iter().map(move |id| (id.as_str(), wait)));
        Said {
            client,
            holds: client
                .holds
                .iter()
                .map(|hold| (hold.grant.as_str(), hold))
                .collect(),
            // Of several, the longest wait: it is inserted last.
            inside: inside.collect(),
            tasks: waits().filter_map(|wait| Some((wait.task?, wait))).collect(),
        }
    }

    /// Adds the report to a holder of this client.
    pub(crate) fn tell(&self, mut holder: Holder) -> Holder {
        let hold = self.holds.get(holder.id.as_str()).copied();
        let wait = self.inside.get(holder.id.as_str());
        let wait = wait.or_else(|| self.tasks.get(&hold?.task?));
        holder.waits_for = wait.map(|wait| Arc::new((*wait).clone()));
        holder.hold = hold.cloned();
        holder.client = Some(self.client.clone());
        holder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_lock_that_is_kept_is_not_near_its_end() {
        let second = Some(Duration::from_secs(1));
        let near = |holds| Holder::new(Kind::Mutex, "a:1".to_owned(), holds, second).is_near_its_end();
        assert!(near(1) && !near(0));
    }

    #[test]
    fn reason_why_a_holder_is_unknown_is_its_own() {
        let unknown = |id: &str, holds| {
            let holder = Holder::new(Kind::Mutex, id.to_owned(), holds, None);
            holder.unknown().unwrap_or_default()
        };
        let (dlock, java) = (
            "0192f3a4-0000-8000-8000-000000000001:1",
            "0192f3a4-0000-4000-8000-000000000001:1",
        );
        assert!(unknown(dlock, 1).contains("presence is off"));
        assert!(unknown(java, 1).contains("Redisson"));
        assert!(unknown(dlock, 0).contains("min_hold") && unknown(java, 0).contains("min_hold"));
    }
}
