//! The steps of the other kinds of locks, and their arguments.

use tokio::time::Instant;

use super::command::Command;
use super::permits;
use super::script::{self, id, left, millis, prefixed};
use crate::store::{
    AcquireRequest, Announce, GrantId, Kind, Reason, ReleaseRequest, RenewRequest, StoreError,
};

/// A step of a single kind. Its arguments are stored separately, so that they take no space in other steps.
#[derive(Debug, Clone)]
pub(crate) enum KindStep {
    Acquire(Box<AcquireRequest>),
    Release {
        request: Box<ReleaseRequest>,
        /// Until when the key stays held.
        keep_until: Option<Instant>,
    },
    Renew(Box<RenewRequest>),
}

impl KindStep {
    /// The ids under which this takes something: the grant, and the queue position of the waiter.
    pub(super) fn acquires(&self) -> impl Iterator<Item = GrantId> + use<> {
        let request = match self {
            KindStep::Acquire(request) => Some((request.grant, request.waiter)),
            _ => None,
        };
        request
            .into_iter()
            .flat_map(|(grant, waiter)| [grant].into_iter().chain(waiter))
    }

    fn kind(&self) -> Kind {
        match self {
            KindStep::Acquire(request) => request.kind,
            KindStep::Release { request, .. } => request.kind,
            KindStep::Renew(request) => request.kind,
        }
    }

    /// The grant that this releases.
    pub(super) fn releases(&self) -> Option<GrantId> {
        match self {
            KindStep::Release { request, .. } => Some(request.grant),
            _ => None,
        }
    }

    /// Whether many such steps on one lock cost the server little more than one, and none is in a hurry: waiters of a fair lock
    /// join the queue and leave it, or leave the lock. The next waiter's request, which follows a release, takes all along.
    pub(super) fn is_cheaper_in_company(&self) -> bool {
        match self {
            KindStep::Acquire(_) => self.joins_queue(),
            KindStep::Release { request, .. } => request.kind == Kind::Fair,
            KindStep::Renew(_) => false,
        }
    }

    /// Whether this is the first request of a waiter: refused, it has joined the queue, and is told of the next release.
    pub(super) fn joins_queue(&self) -> bool {
        match self {
            KindStep::Acquire(request) => {
                request.kind == Kind::Fair && request.queue && request.last_asked.is_none()
            }
            KindStep::Release { .. } | KindStep::Renew(_) => false,
        }
    }

    /// See [`Call::has_companions`](super::script::Call::has_companions).
    pub(super) fn has_companions(&self) -> bool {
        match self.kind() {
            // Its queue; the leases of its readers and its waiting writers; its counter of tokens.
            Kind::Fair | Kind::Read | Kind::Write | Kind::Fenced => true,
            // Their holders.
            Kind::Permit | Kind::Unowned | Kind::Latch => true,
            Kind::Mutex => false,
        }
    }

    /// How many permits it concerns, each of which costs the server work; 1 for all other kinds.
    pub(super) fn work(&self) -> usize {
        match self.kind() {
            Kind::Permit => self.amount().max(1) as usize,
            Kind::Mutex | Kind::Fair | Kind::Read | Kind::Write | Kind::Fenced => 1,
            Kind::Unowned | Kind::Latch => 1,
        }
    }

    fn amount(&self) -> u32 {
        match self {
            KindStep::Acquire(request) => request.amount,
            KindStep::Release { request, .. } => request.amount,
            KindStep::Renew(request) => request.amount,
        }
    }

    /// How many bytes it adds to a call, in addition to those of every step.
    pub(super) fn weight(&self) -> usize {
        permits::weight(self.kind(), self.amount())
    }

    /// Its name, the number of its arguments, and these.
    pub(super) fn write(&self, _key: &str, cmd: &mut Command) {
        let mut buffer = [0; 57];
        match self {
            KindStep::Acquire(request) if request.kind.is_permits() => {
                permits::acquire(request, cmd.arg(request.kind.to_string()));
            }
            KindStep::Release { request, keep_until } if request.kind.is_permits() => {
                permits::release(request, *keep_until, cmd.arg(format!("release_{}", request.kind)));
            }
            KindStep::Renew(request) if request.kind.is_permits() => {
                permits::renew(request, cmd.arg(format!("renew_{}", request.kind)));
            }
            KindStep::Acquire(request) if request.announce != Announce::Nothing => {
                cmd.arg("crowded").arg(4);
                cmd.arg(id(request.grant, &mut buffer)).arg(millis(request.lease));
                cmd.arg(request.tokens.max(1));
                cmd.arg(u8::from(request.announce == Announce::Taken));
            }
            KindStep::Acquire(request) => {
                let more = match request.kind {
                    Kind::Read | Kind::Write => 1,
                    Kind::Fair => 2,
                    Kind::Mutex | Kind::Fenced => 0,
                    // Written above, and never acquired.
                    Kind::Permit | Kind::Unowned | Kind::Latch => 0,
                };
                cmd.arg(request.kind.to_string()).arg(3 + more);
                cmd.arg(id(request.grant, &mut buffer)).arg(millis(request.lease));
                cmd.arg(request.tokens.max(1));
                if request.kind.is_read_write() {
                    let mut buffer = [0; 57];
                    let other = match request.kind {
                        Kind::Read => request.nested_in,
                        _ => request.waiter,
                    };
                    cmd.arg(other.map_or(&[][..], |other| id(other, &mut buffer)));
                }
                if request.kind == Kind::Fair {
                    let last = request.last_asked.map_or(-1, |ago| ago.as_millis() as i64);
                    cmd.arg(u8::from(request.queue)).arg(last);
                }
            }
            KindStep::Release { request, keep_until } => {
                cmd.arg(format!("release_{}", request.kind)).arg(2);
                cmd.arg(id(request.grant, &mut buffer));
                cmd.arg(millis(left(*keep_until)));
            }
            KindStep::Renew(request) => {
                cmd.arg(format!("renew_{}", request.kind)).arg(2);
                cmd.arg(id(request.grant, &mut buffer)).arg(millis(request.lease));
            }
        }
    }
}

/// The field of a grant in the hash of its lock.
pub(super) fn field(kind: Kind, grant: GrantId) -> String {
    match kind {
        Kind::Write => format!("{grant}:write"),
        Kind::Mutex | Kind::Fair | Kind::Read | Kind::Fenced => grant.to_string(),
        Kind::Permit | Kind::Unowned | Kind::Latch => grant.to_string(),
    }
}

/// Refuses kinds that are not acquired.
pub(super) fn exists(kind: Kind) -> Result<(), StoreError> {
    match kind {
        Kind::Mutex | Kind::Fair | Kind::Fenced | Kind::Read | Kind::Write | Kind::Permit | Kind::Unowned => {
            Ok(())
        }
        Kind::Latch => Err(StoreError::not_done(
            Reason::Unsupported,
            format!("a {kind} is not acquired"),
        )),
    }
}

/// The channel for releases of a kind.
pub(super) fn channel(kind: Kind, key: &str, grant: GrantId) -> String {
    match kind {
        Kind::Read | Kind::Write => prefixed("redisson_rwlock", key),
        // The waiters are woken one by one.
        Kind::Fair => format!("{}:{grant}", script::channel(key)),
        Kind::Permit | Kind::Unowned => prefixed("redisson_sc", key),
        // In separate braces, whatever the name has.
        Kind::Latch => format!("redisson_countdownlatch__channel__{{{key}}}"),
        Kind::Mutex | Kind::Fenced => script::channel(key),
    }
}

/// The names of the semaphores to one of which a key with holders belongs: those of `x` and of `{x}` have one key.
pub(super) fn semaphores_of(held_key: &str) -> impl Iterator<Item = &str> {
    let tag = held_key.strip_suffix(":timeout");
    let inner = tag.and_then(in_braces);
    let inner = inner.filter(|inner| !inner.contains(['{', '}']));
    inner.into_iter().chain(tag)
}

/// What a name that is wholly in braces has in them.
pub(super) fn in_braces(name: &str) -> Option<&str> {
    name.strip_prefix('{')?.strip_suffix('}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::AcquireRequest;

    /// A copy of an acquire in flight may take the queue position of its waiter as well as the lock: the releases of
    /// both count only once it cannot take effect any more.
    #[test]
    fn acquire_takes_its_grant_and_the_position_of_its_waiter() {
        let id = |number| GrantId::from_parts(1, number);
        let lease = std::time::Duration::from_secs(1);
        let mut request = AcquireRequest::new(Kind::Write, "k".into(), id(1), lease);
        let takes = |request: &AcquireRequest| {
            let step = KindStep::Acquire(Box::new(request.clone()));
            step.acquires().collect::<Vec<_>>()
        };
        assert_eq!(takes(&request), [id(1)]);
        request.waiter = Some(id(2));
        assert_eq!(takes(&request), [id(1), id(2)]);
    }
}
