//! Gathers renewals: those of a client with many grants wait for each other, so that few writes renew all grants.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::queues::Renew;

/// The most nodes and the most bytes of paths in one write: servers accept a million bytes by default, and each change
/// has some overhead.
pub(crate) const MOST_NODES: usize = 1000;
pub(crate) const MOST_BYTES: usize = 400_000;
/// The number of grants from which on renewals wait for each other.
const MANY: usize = 256;
/// How long a renewal waits for others; at most a sixtieth of its lease.
const WAIT: Duration = Duration::from_millis(100);

/// The renewals in one write, each with its lock.
pub(crate) type Batch = Vec<(Arc<str>, Renew)>;

/// Renewals that were not sent yet.
#[derive(Default)]
pub(crate) struct Gathered {
    renewals: Batch,
    due: Option<Instant>,
}

impl Gathered {
    /// Adds a renewal of a client that has `grants` grants.
    pub(crate) fn push(&mut self, lock: Arc<str>, renew: Renew, grants: usize) {
        let wait = match grants >= MANY {
            true => (renew.lease / 60).min(WAIT),
            false => Duration::ZERO,
        };
        let due = renew.called + wait;
        self.due = Some(self.due.map_or(due, |first| first.min(due)));
        self.renewals.push((lock, renew));
    }

    /// Makes all renewals due, because an operation may wait for one of them.
    pub(crate) fn hurry(&mut self) {
        self.due = self.due.map(|due| due.min(Instant::now()));
    }

    /// When the renewals are due, if there are any.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Takes as many renewals as fit into one write, if they fill it or are due. `bytes` is the length of the path of a
    /// lock's node without its name.
    pub(crate) fn take(&mut self, bytes: usize, now: Instant) -> Option<Batch> {
        if self.renewals.len() < MOST_NODES && self.due.is_none_or(|due| due > now) {
            return None;
        }
        let mut sum = 0;
        let fits = self.renewals.iter().take(MOST_NODES).take_while(|(lock, _)| {
            sum += bytes + lock.len() + 80;
            sum <= MOST_BYTES
        });
        let count = fits.count().clamp(1, self.renewals.len());
        let batch = self.renewals.drain(..count).collect();
        self.due = self.due.filter(|_| !self.renewals.is_empty());
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dlock::store::GrantId;
    use tokio::sync::oneshot;

    const LEASE: Duration = Duration::from_secs(30);

    fn gathered(count: usize, lease: Duration, grants: usize, called: Instant) -> Gathered {
        let mut gathered = Gathered::default();
        for _ in 0..count {
            let (reply, _) = oneshot::channel();
            let grant = GrantId::from_parts(1, 1);
            gathered.push(
                "k".into(),
                Renew {
                    grant,
                    called,
                    lease,
                    reply,
                },
                grants,
            );
        }
        gathered
    }

    #[test]
    fn renewals_of_many_grants_wait_for_each_other() {
        let now = Instant::now();
        for (lease, grants, wait) in [
            (LEASE, MANY, WAIT),
            (LEASE, MANY - 1, Duration::ZERO),
            (LEASE / 5, MANY, WAIT),
            (LEASE / 10, MANY, WAIT / 2),
        ] {
            let mut gathered = gathered(3, lease, grants, now);
            assert_eq!(gathered.due(), Some(now + wait), "{lease:?} {grants}");
            let before = now + wait - Duration::from_nanos(1);
            assert!(gathered.take(0, before).is_none());
            assert_eq!(gathered.take(0, now + wait).map(|batch| batch.len()), Some(3));
            assert!(gathered.due().is_none() && gathered.take(0, now + LEASE).is_none());
        }
    }

    #[test]
    fn full_write_and_one_that_others_wait_for_are_sent_at_once() {
        let called = Instant::now();
        let mut gathered = gathered(MOST_NODES + 1, LEASE, MANY, called);
        assert_eq!(
            gathered.take(0, called).map(|batch| batch.len()),
            Some(MOST_NODES)
        );
        assert!(gathered.take(0, called).is_none());
        gathered.hurry();
        assert_eq!(gathered.take(0, Instant::now()).map(|batch| batch.len()), Some(1));
    }

    #[test]
    fn write_has_as_many_renewals_as_the_servers_accept() {
        let called = Instant::now();
        let mut gathered = gathered(10, LEASE, 1, called);
        let half = MOST_BYTES / 2 - 81;
        assert_eq!(gathered.take(half, called).map(|batch| batch.len()), Some(2));
        assert_eq!(
            gathered.take(MOST_BYTES, called).map(|batch| batch.len()),
            Some(1)
        );
    }
}
