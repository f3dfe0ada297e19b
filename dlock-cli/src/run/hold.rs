//! What is held while the command runs: locks, or a permit.

use std::time::Duration;

use dlock::{Error, Held, LockClient, MultiGuard, Permit};

use super::args::{Plan, Wanted};
use super::end::{End, NOT_HAD};
use super::say::Say;

/// Ends when it is released or dropped.
pub(super) enum Hold {
    Locks(MultiGuard),
    Permit(Permit),
}

/// Has what both offer, and takes it.
macro_rules! take {
    ($of:expr, $client:ident, $plan:ident, $say:ident) => {{
        let of = $of.options($plan.options.clone());
        match $plan.once {
            true => of.try_acquire().await,
            false => $say.while_waiting($client, $plan, of.acquire()).await,
        }
    }};
}

impl Hold {
    /// Takes it. The grace is known only with the lease.
    pub(super) async fn take(client: &LockClient, plan: &Plan, say: Say) -> Result<(Hold, Duration), End> {
        let grace = plan.grace(client.lease()).map_err(End::Misused)?;
        let taken = match plan.kind {
            Wanted::Lock(kind) => {
                let mut locks = client.multi(plan.keys.clone()).kind(kind);
                if plan.prefer_writers {
                    locks = locks.prefer_writers();
                }
                take!(locks, client, plan, say).map(Hold::Locks)
            }
            Wanted::Permit(_) if plan.prefer_writers => {
                let why = "--prefer-writers goes with --kind write: a semaphore has no readers and writers";
                return Err(End::Misused(why.to_owned()));
            }
            Wanted::Permit(permits) => {
                let key = plan.only_key().map_err(End::Misused)?;
                let semaphore = client.semaphore(key.clone()).permits(permits);
                take!(semaphore, client, plan, say).map(Hold::Permit)
            }
        };
        taken
            .map(|hold| (hold, grace))
            .map_err(|error| not_had(&error, plan, say))
    }

    pub(super) fn held(&self) -> Held {
        match self {
            Hold::Locks(guard) => guard.held(),
            Hold::Permit(permit) => permit.held(),
        }
    }

    async fn release(self) -> Result<(), Error> {
        match self {
            Hold::Locks(guard) => guard.release().await,
            Hold::Permit(permit) => permit.release().await,
        }
    }

    /// The command has ended, and what becomes of the lock changes nothing about how.
    pub(super) async fn give_back(self, say: Say) {
        let was_held = self.held().is_held();
        match self.release().await {
            Err(error) if was_held => say.line(&error.to_string()),
            _ => {}
        }
    }
}

/// The end of a command whose lock was not acquired.
pub(super) fn not_had(error: &Error, plan: &Plan, say: Say) -> End {
    let status = match error {
        Error::NotAcquired { .. } => plan.conflict,
        error if error.is_unavailable() => NOT_HAD,
        error => return End::Misused(error.to_string()),
    };
    say.line(&error.to_string());
    End::With(status)
}
