//! The waiters, one for each name.

use dlock::store::Kind;
use dlock::{Error, LockGuard, Permit};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::{Halt, NEVER, RENEWED, Real, World, lock_kind, wrong};
use crate::property::model::{Answer, Span, Wanted};
use crate::property::ops::KEYS;

#[derive(Debug)]
pub(super) enum Got {
    Lock(LockGuard),
    Permit(Permit),
    Nothing,
}

pub(super) struct Waiter {
    pub(super) wanted: Wanted,
    pub(super) task: JoinHandle<Result<Got, Error>>,
}

impl World<'_> {
    /// Begins to wait, if it must and the name has no waiter yet.
    pub(super) fn wait(&mut self, owner: usize, key: usize, kind: Kind) {
        let wanted = Wanted {
            owner,
            key,
            kind,
            amount: 1,
            fixed: false,
        };
        let blocked = self.model.in_the_way(&wanted, None);
        let is_permits = matches!(kind, Kind::Permit | Kind::Unowned);
        // Where there is no semaphore the name may become a lock, and then there is nothing to wait for.
        if self.waiters[key].is_some()
            || (is_permits && !self.model.has_permits(key))
            || !matches!(blocked, Some(Answer::Busy { .. }))
        {
            return;
        }
        let task = match kind {
            Kind::Permit => {
                let acquire = self.semaphore(owner, key).acquire();
                tokio::spawn(async move { acquire.await.map(Got::Permit) })
            }
            Kind::Unowned => {
                let acquire = self.unowned(owner, key).acquire();
                tokio::spawn(async move { acquire.await.map(|()| Got::Nothing) })
            }
            Kind::Latch => {
                let latch = self.latch(owner, key);
                tokio::spawn(async move { latch.wait().await.map(|()| Got::Nothing) })
            }
            _ => {
                let acquire = self.clients[owner]
                    .lock(self.name(key))
                    .kind(lock_kind(kind))
                    .acquire();
                tokio::spawn(async move { acquire.await.map(Got::Lock) })
            }
        };
        self.waiters[key] = Some(Waiter { wanted, task });
    }

    /// The first waiter for a free name has it, and none for a busy one. Whether there was one; time
    /// may have gone on then.
    pub(super) async fn serve(&mut self) -> Result<bool, Halt> {
        for key in 0..KEYS {
            let Some(Waiter { wanted, task }) = self.waiters[key].take() else {
                continue;
            };
            if let Some(in_the_way) = self.model.in_the_way(&wanted, None) {
                if task.is_finished() {
                    self.in_time()?;
                    return wrong(in_the_way, task.await);
                }
                self.waiters[key] = Some(Waiter { wanted, task });
                continue;
            }
            let got = match timeout(NEVER, task).await {
                Ok(Ok(Ok(got))) => got,
                other => return wrong(format!("that the waiter has it: {wanted:?}"), other),
            };
            // It was asked for before; if it was handed off, the lease goes back to then.
            let at = Span::new(self.began, Instant::now());
            let Wanted {
                owner, kind, amount, ..
            } = wanted;
            let (token, real) = match got {
                Got::Lock(guard) => (guard.fencing_token(), Real::Lock(guard)),
                Got::Permit(permit) => (permit.fencing_token(), Real::Permit(permit)),
                Got::Nothing => {
                    if kind == Kind::Unowned {
                        self.model.take_unowned(key, amount);
                    }
                    return Ok(true);
                }
            };
            let of = self.granted(wanted, token, at, (RENEWED, RENEWED))?;
            self.hold(owner, real, vec![of]);
            return Ok(true);
        }
        Ok(false)
    }
}
