//! Who waits in this process, in arrival order.
//!
//! Of all who wait for a key here only the first talks to the store. It has the *turn*, and with it the
//! subscription to the key's releases. Both pass on to the next when the first has the lock or goes away,
//! and the next looks at the store at once: a wake-up that the one before had consumed is not lost.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::backend::{Kind, Watch};
use crate::grants::next_id;
use crate::{Error, LockKey};

/// The queues of a client, one for each key that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    queues: Mutex<HashMap<(Kind, LockKey), Queue>>,
}

#[derive(Debug, Default)]
struct Queue {
    behind: VecDeque<Waiter>,
    /// The one in front knows that it has to wait.
    front_waits: bool,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    limit: Option<usize>,
    turn: oneshot::Sender<Turn>,
}

/// A place in the queue of a key.
#[derive(Debug)]
pub(crate) struct Ticket {
    place: Place,
    /// The turn, for the first to come.
    now: Option<Turn>,
    /// Where the turn arrives, for everybody else.
    later: Option<oneshot::Receiver<Turn>>,
    limit: Option<usize>,
    id: u64,
}

#[derive(Debug, Clone)]
struct Place {
    waiters: Arc<Waiters>,
    of: (Kind, LockKey),
}

/// The right to talk to the store for everybody who waits for the key in this process.
#[derive(Debug)]
pub(crate) struct Turn {
    place: Place,
    /// The subscription, once somebody needed it.
    pub(crate) watch: Option<Watch>,
}

impl Waiters {
    /// Takes a place in the queue of a key.
    ///
    /// At most `limit` callers wait. One that has not yet been told to wait does not count; if it is, and
    /// they are too many by then, the last to come are turned away.
    pub(crate) fn join(
        self: &Arc<Self>,
        kind: Kind,
        key: &LockKey,
        limit: Option<usize>,
    ) -> Result<Ticket, Error> {
        let place = Place {
            waiters: self.clone(),
            of: (kind, key.clone()),
        };
        let id = next_id();
        let mut queues = self.queues.lock();
        let later = match queues.get_mut(&place.of) {
            None => {
                queues.insert(place.of.clone(), Queue::default());
                None
            }
            Some(queue) => {
                let waiting = queue.behind.len() + usize::from(queue.front_waits);
                if let Some(limit) = limit.filter(|limit| waiting >= *limit) {
                    return Err(Error::TooManyWaiters {
                        key: key.clone(),
                        limit,
                    });
                }
                let (turn, later) = oneshot::channel();
                queue.behind.push_back(Waiter { id, limit, turn });
                Some(later)
            }
        };
        drop(queues);
        let now = later.is_none().then(|| Turn {
            place: place.clone(),
            watch: None,
        });
        Ok(Ticket {
            place,
            now,
            later,
            limit,
            id,
        })
    }

    /// How many keys are waited for.
    pub(crate) fn len(&self) -> usize {
        self.queues.lock().len()
    }
}

impl Ticket {
    /// Waits for the turn.
    pub(crate) async fn turn(mut self) -> Result<Turn, Error> {
        if let Some(turn) = self.now.take() {
            return Ok(turn);
        }
        let turn = match &mut self.later {
            Some(later) => later.await.ok(),
            None => None,
        };
        self.later = None;
        // Turned away: a sender is only ever dropped without a turn by `Turn::waits`.
        turn.ok_or_else(|| Error::TooManyWaiters {
            key: self.place.of.1.clone(),
            limit: self.limit.unwrap_or_default(),
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(mut later) = self.later.take() else {
            return;
        };
        let mut queues = self.place.waiters.queues.lock();
        let left = queues.get_mut(&self.place.of).and_then(|queue| {
            let at = queue.behind.iter().position(|waiter| waiter.id == self.id)?;
            queue.behind.remove(at)
        });
        // Before the rest: dropping a place wakes whoever waited there.
        drop(queues);
        drop(left);
        // A turn that arrived and was not taken goes on to the next.
        later.close();
        drop(later.try_recv());
    }
}

impl Turn {
    /// The one in front has to wait and counts from now on: whoever is behind and too many goes. It goes
    /// itself where nobody may wait.
    pub(crate) fn waits(&self, limit: Option<usize>) -> Result<(), Error> {
        if limit == Some(0) {
            return Err(Error::TooManyWaiters {
                key: self.place.of.1.clone(),
                limit: 0,
            });
        }
        let mut queues = self.place.waiters.queues.lock();
        let Some(queue) = queues.get_mut(&self.place.of) else {
            return Ok(());
        };
        let mut turned_away = Vec::new();
        if !std::mem::replace(&mut queue.front_waits, true) {
            let mut ahead = 0;
            for waiter in std::mem::take(&mut queue.behind) {
                ahead += 1;
                if waiter.limit.is_none_or(|limit| ahead < limit) {
                    queue.behind.push_back(waiter);
                } else {
                    ahead -= 1;
                    turned_away.push(waiter);
                }
            }
        }
        // They are woken by this, which must not be under the lock.
        drop(queues);
        drop(turned_away);
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let watch = self.watch.take();
        let mut queues = self.place.waiters.queues.lock();
        let next = queues.get_mut(&self.place.of).and_then(|queue| {
            queue.front_waits = true;
            queue.behind.pop_front()
        });
        if next.is_none() {
            queues.remove(&self.place.of);
        }
        // Before the rest: ending a subscription calls into the backend, and a turn that is not taken
        // comes back here to go on to the one after.
        drop(queues);
        if let Some(next) = next {
            drop(next.turn.send(Turn {
                place: self.place.clone(),
                watch,
            }));
        }
    }
}
