//! The short call of steps on one fair lock, see `lua/always.lua`.

use super::call::{Call, Verb};
use super::{channel_of, left, millis, prefixed};
use crate::store::{AcquireRequest, GrantId, Kind};
use crate::stores::redis::command::Command;
use crate::stores::redis::fence::Fence;
use crate::stores::redis::kinds::KindStep;

/// One of the steps.
enum QueueStep<'a> {
    Acquire(&'a AcquireRequest),
    Release(GrantId),
}

impl<'a> QueueStep<'a> {
    fn of(call: &'a Call) -> Option<QueueStep<'a>> {
        match &call.verb {
            _ if call.slot.is_some() || call.vote_after.is_some() => None,
            Verb::As(KindStep::Acquire(request)) if request.kind == Kind::Fair => {
                Some(QueueStep::Acquire(request))
            }
            Verb::As(KindStep::Release { request, keep_until })
                if request.kind == Kind::Fair && left(*keep_until).is_zero() =>
            {
                Some(QueueStep::Release(request.grant))
            }
            _ => None,
        }
    }

    fn grant(&self) -> GrantId {
        match self {
            QueueStep::Acquire(request) => request.grant,
            QueueStep::Release(grant) => *grant,
        }
    }
}

/// The arguments that the acquires of a call share.
struct Terms {
    lease: u64,
    tokens: u32,
    waits: bool,
    /// Milliseconds since the last request, -1 for the first.
    last: i64,
}

impl Terms {
    fn of(request: &AcquireRequest) -> Terms {
        Terms {
            lease: millis(request.lease),
            tokens: request.tokens.max(1),
            waits: request.queue,
            last: request.last_asked.map_or(-1, |ago| ago.as_millis() as i64),
        }
    }

    /// Of both: several waiters that join.
    fn with(self, other: Terms) -> Option<Terms> {
        let joins = |terms: &Terms| terms.waits && terms.last == -1;
        let fit = self.lease == other.lease && joins(&self) && joins(&other);
        fit.then(|| Terms {
            tokens: self.tokens.min(other.tokens),
            ..self
        })
    }
}

/// Writes these steps as a short call, if they are what it is for; `late` is the server time in µs after which acquires refuse
/// themselves.
pub(super) fn write<'a>(
    calls: impl Iterator<Item = &'a Call> + Clone,
    late: u64,
    fence: &Fence,
    cmd: &mut Command,
) -> bool {
    let Some(first) = calls.clone().next() else {
        return false;
    };
    let Some(client) = QueueStep::of(first).map(|step| step.grant()) else {
        return false;
    };
    let (mut terms, mut count) = (None::<Terms>, 0);
    for call in calls.clone() {
        count += 1;
        let Some(step) = QueueStep::of(call) else {
            return false;
        };
        if call.key != first.key || !step.grant().is_of_client_of(client) {
            return false;
        }
        if let QueueStep::Acquire(request) = step {
            let its = Terms::of(request);
            terms = match terms {
                None => Some(its),
                Some(terms) => match terms.with(its) {
                    None => return false,
                    both => both,
                },
            };
        }
    }
    let terms = terms.unwrap_or(Terms {
        lease: 0,
        tokens: 1,
        waits: true,
        last: -1,
    });
    // A waiter that asks again may acquire the lock only after what comes before it.
    if count > 1 && terms.last != -1 {
        return false;
    }
    let key = &*first.key;
    cmd.arg(4).arg(fence.name()).arg(key);
    cmd.arg(prefixed("redisson_lock_queue", key));
    cmd.arg(prefixed("redisson_lock_timeout", key));
    cmd.arg("queue").arg(late).arg(format!("{}:", client.client()));
    cmd.arg(terms.lease).arg(terms.tokens);
    cmd.arg(u8::from(terms.waits)).arg(terms.last);
    cmd.joined(&channel_of(key));
    for step in calls.filter_map(QueueStep::of) {
        let name = match step {
            QueueStep::Acquire(_) => "fair",
            QueueStep::Release(_) => "release_fair",
        };
        cmd.arg(name).arg(step.grant().number());
    }
    true
}
