//! What is held while the command runs: locks, or a permit.

use std::process::Command;
use std::time::Duration;

use dlock::{Error, Held, LockClient, LockKey, Loss, MultiGuard, OnceClaim, Permit};
use futures_util::future::BoxFuture;

use super::args::{Plan, Wanted};
use super::end::{End, NOT_ACQUIRED};
use super::say::Say;
use crate::look::told;

/// Ends when it is released or dropped.
pub(super) enum Hold {
    Locks(MultiGuard),
    Permit(Permit),
}

/// Applies the options and acquires, for locks and permits alike.
macro_rules! take {
    ($of:expr, $client:ident, $plan:ident, $say:ident) => {{
        let of = $of.options($plan.options.clone());
        match $plan.tries {
            true => of.try_acquire().await,
            false => $say.while_waiting($client, $plan, of.acquire()).await,
        }
    }};
}

impl Hold {
    /// Acquires it. The grace period is known only with the lease.
    pub(super) async fn take(client: &LockClient, plan: &Plan, say: Say) -> Result<(Hold, Duration), End> {
        // Misuse is reported before it waits; what the store gave is known only later.
        plan.grace(client.lease(), None).map_err(End::Misused)?;
        let taken = match plan.kind {
            Wanted::Lock(kind) => {
                let mut locks = client.multi(plan.keys.clone()).kind(kind);
                if plan.prefer_writers {
                    locks = locks.prefer_writers();
                }
                take!(locks, client, plan, say).map(Hold::Locks)
            }
            Wanted::Permit(permits) => {
                let key = plan.only_key().map_err(End::Misused)?;
                let semaphore = client.semaphore(key.clone()).permits(permits);
                take!(semaphore, client, plan, say).map(Hold::Permit)
            }
        };
        let hold = taken.map_err(|error| not_acquired(&error, plan, say))?;
        match plan.grace(client.lease(), Some(hold.view().remaining())) {
            Ok(grace) => Ok((hold, grace)),
            Err(why) => {
                hold.end(say).await;
                Err(End::Misused(why))
            }
        }
    }

    pub(super) fn view(&self) -> View {
        View::Hold(match self {
            Hold::Locks(guard) => guard.held(),
            Hold::Permit(permit) => permit.held(),
        })
    }

    async fn release(self) -> Result<(), Error> {
        match self {
            Hold::Locks(guard) => guard.release().await,
            Hold::Permit(permit) => permit.release().await,
        }
    }

    /// Releases it after the command has ended; a failure does not change the exit status.
    pub(super) async fn end(self, say: Say) {
        let was_held = self.view().is_held();
        match self.release().await {
            Err(error) if was_held => say.line(&told(&error)),
            _ => {}
        }
    }
}

/// The hold as seen while the command runs.
pub(super) enum View {
    Hold(Held),
    /// For work that is done once.
    Claim(OnceClaim),
}

impl View {
    pub(super) fn is_held(&self) -> bool {
        match self {
            View::Hold(held) => held.is_held(),
            View::Claim(claim) => claim.is_held(),
        }
    }

    /// How long it is certain to be held.
    pub(super) fn remaining(&self) -> Duration {
        match self {
            View::Hold(held) => held.remaining(),
            View::Claim(claim) => claim.remaining(),
        }
    }

    pub(super) fn lost(&self) -> BoxFuture<'static, Loss> {
        match self {
            View::Hold(held) => Box::pin(held.lost()),
            View::Claim(claim) => Box::pin(claim.lost()),
        }
    }

    /// Tells the command about its hold.
    pub(super) fn tell(&self, command: &mut Command, plan: &Plan) {
        for of_outer_run in ["DLOCK_ATTEMPT", "DLOCK_SLOT", "DLOCK_SKIPPED"] {
            command.env_remove(of_outer_run);
        }
        command.env("DLOCK_KEY", plan.lines(LockKey::to_string));
        match self {
            View::Hold(held) => {
                let token = |key: &LockKey| {
                    held.fencing_token_of(key.clone())
                        .unwrap_or_else(|| held.fencing_token())
                };
                command
                    .env("DLOCK_FENCING_TOKEN", plan.lines(token))
                    .env("DLOCK_KIND", plan.kind.kind().to_string());
            }
            View::Claim(claim) => {
                command
                    .env("DLOCK_FENCING_TOKEN", claim.fencing_token().to_string())
                    .env("DLOCK_KIND", "once")
                    .env("DLOCK_ATTEMPT", claim.attempt().to_string());
                if let Some(slot) = claim.slot() {
                    command
                        .env("DLOCK_SLOT", humantime::format_rfc3339(slot).to_string())
                        .env("DLOCK_SKIPPED", claim.skipped().to_string());
                }
            }
        }
    }
}

/// The end of a command whose lock was not acquired.
pub(super) fn not_acquired(error: &Error, plan: &Plan, say: Say) -> End {
    let status = match error {
        Error::NotAcquired { .. } => plan.conflict.unwrap_or(NOT_ACQUIRED),
        error if error.is_unavailable() => NOT_ACQUIRED,
        error => return End::Misused(told(error)),
    };
    say.line(&told(error));
    End::With(status)
}
