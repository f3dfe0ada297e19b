//! The sessions of a store: for each lease length as many as needed, with up to a thousand locks each.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::{DoubtSender, Lane, Reason, StoreError};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::names::Names;
use super::session::{SHORTEST, Session};
use crate::client::Links;

/// The most keys on one lease: when it ends, the server deletes them one by one and does nothing else meanwhile.
const MOST: usize = 1000;

/// The sessions of a store.
#[derive(Debug)]
pub(crate) struct Pool {
    links: Arc<Links>,
    names: Names,
    service: String,
    /// Sessions by lease length in seconds.
    sessions: Mutex<HashMap<u64, Vec<Arc<Session>>>>,
    opening: tokio::sync::Mutex<()>,
    doubts: DoubtSender,
    ended: CancellationToken,
}

impl Pool {
    pub(crate) fn new(
        links: Arc<Links>,
        names: Names,
        service: String,
        doubts: DoubtSender,
        ended: CancellationToken,
    ) -> Pool {
        Pool {
            links,
            names,
            service,
            sessions: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            doubts,
            ended,
        }
    }

    /// Returns a session with this lease, and reserves room for `keys` keys. After an error nothing was done.
    pub(crate) async fn get(
        self: &Arc<Self>,
        lease: Duration,
        keys: usize,
        deadline: Instant,
    ) -> Result<Arc<Session>, StoreError> {
        let seconds = seconds(lease);
        if let Some(session) = self.pick(seconds, keys) {
            return Ok(session);
        }
        let late = |_| StoreError::not_done(Reason::Unreachable, self.links.silence());
        let _one = timeout_at(deadline, self.opening.lock()).await.map_err(late)?;
        if let Some(session) = self.pick(seconds, keys) {
            return Ok(session);
        }
        let epoch_key = |lease| self.names.epoch(lease);
        let session = Session::open(&self.links, epoch_key, &self.service, seconds, deadline).await?;
        session.reserve(keys);
        self.sessions
            .lock()
            .entry(seconds)
            .or_default()
            .push(session.clone());
        self.serve(session.clone());
        Ok(session)
    }

    /// Picks the fullest session with room, so that others become idle.
    fn pick(&self, seconds: u64, keys: usize) -> Option<Arc<Session>> {
        let mut sessions = self.sessions.lock();
        let all = sessions.get_mut(&seconds)?;
        all.retain(|session| !session.ended() && !session.is_retired());
        let room = all.iter().filter(|session| session.members() + keys <= MOST);
        let session = room.max_by_key(|session| session.members())?.clone();
        session.reserve(keys);
        Some(session)
    }

    fn serve(self: &Arc<Self>, session: Arc<Session>) {
        let pool = Arc::downgrade(self);
        let leave_idle = move |session: &Arc<Session>| match Weak::upgrade(&pool) {
            Some(pool) => pool.leave_idle(session),
            None => true,
        };
        let doubts = self.doubts.clone();
        // Holders learn at once that their locks are lost.
        let over = move || doubts.tell(Lane::default());
        let serving = session.serve(self.links.clone(), leave_idle, over);
        let ended = self.ended.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = serving => {}
            }
        });
    }

    /// Removes the session if it is idle. Returns whether it did.
    fn leave_idle(&self, session: &Arc<Session>) -> bool {
        let mut sessions = self.sessions.lock();
        if !session.is_idle() {
            return false;
        }
        sessions.retain(|_, all| {
            all.retain(|one| !Arc::ptr_eq(one, session));
            !all.is_empty()
        });
        true
    }
}

/// Converts a lease to the server's whole seconds, rounded up.
pub(crate) fn seconds(lease: Duration) -> u64 {
    lease
        .max(SHORTEST)
        .as_nanos()
        .div_ceil(1_000_000_000)
        .try_into()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_no_shorter_than_asked_and_at_least_two_seconds() {
        let ms = Duration::from_millis;
        assert_eq!(seconds(ms(0)), 2);
        assert_eq!(seconds(ms(2000)), 2);
        assert_eq!(seconds(ms(2001)), 3);
        assert_eq!(seconds(ms(30_000)), 30);
    }
}
