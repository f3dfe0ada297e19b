//! Notifications of a key from all members of a quorum.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Member;
use crate::LockKey;
use crate::base::chance::{self, HashMap};
use crate::store::Hub;
use crate::store::operations::EntryName;
use crate::store::{GrantId, Kind, Watch};

/// Every member notifies of a release, and the lock is available when a majority has carried it out. So after the first
/// notification a waiter waits for the others, each waiter for a different time, so that not all ask at once without a
/// majority.
const GATHERED: Duration = Duration::from_millis(1);
const AT_MOST: Duration = Duration::from_millis(6);

pub(super) struct MemberNotifications {
    hub: Arc<Hub>,
    members: Vec<Member>,
    /// By name; dropping it ends the forwarding.
    forwarded: Arc<Mutex<HashMap<Arc<str>, DropGuard>>>,
    runtime: Handle,
}

impl MemberNotifications {
    pub(super) fn new(members: Vec<Member>, runtime: Handle) -> MemberNotifications {
        MemberNotifications {
            hub: Arc::default(),
            members,
            forwarded: Arc::default(),
            runtime,
        }
    }

    pub(super) fn watch(&self, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let watches = || {
            let members = self.members.iter();
            members
                .map(|member| member.store.clone().watch(kind, key, grant))
                .collect()
        };
        self.gathered(format!("{kind}:{key}").into(), watches)
    }

    /// Notifications of an entry, which some of the members may not keep.
    pub(super) fn watch_entry(&self, entry: &EntryName) -> Watch {
        let watches = || {
            let boards = self.members.iter();
            boards
                .filter_map(|member| Some(member.store.clone().operations()?.watch(entry)))
                .collect()
        };
        self.gathered(topic(entry).into(), watches)
    }

    /// Notifies the watches of an entry.
    pub(super) fn tell_entry(&self, entry: &EntryName) {
        self.hub.tell(&topic(entry));
    }

    fn gathered(&self, name: Arc<str>, watches: impl FnOnce() -> Vec<Watch>) -> Watch {
        let first = |name: &Arc<str>| {
            let over = CancellationToken::new();
            self.forwarded
                .lock()
                .insert(name.clone(), over.clone().drop_guard());
            let watches = watches();
            let (hub, name) = (self.hub.clone(), name.clone());
            self.runtime
                .spawn(async move { over.run_until_cancelled(forward(watches, &hub, &name)).await });
            false
        };
        let forwarded = self.forwarded.clone();
        self.hub.listen(name, first, move |name| {
            forwarded.lock().remove(&name);
        })
    }
}

/// No kind has this name.
fn topic(entry: &EntryName) -> String {
    format!("entry:{}", entry.with_prefix(""))
}

/// How long the call of a member waits for one of another member, if it was alone before: from the second time on, and the
/// longest.
const ALONE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));

/// The member that alone has called last, and how often in a row. A release that matters is told by several: one member
/// alone has lost its subscription, and has its listeners ask a few times a second.
#[derive(Debug, Default)]
struct Alone {
    member: usize,
    times: u32,
}

impl Alone {
    /// Returns how long a call of the member waits for one of another member.
    fn patience(&self, member: usize) -> Duration {
        match self.times {
            times if times > 0 && self.member == member => (ALONE.0 * (1 << (times - 1).min(8))).min(ALONE.1),
            _ => Duration::ZERO,
        }
    }

    /// Records a call of the member that none of another member followed.
    fn record(&mut self, member: usize) {
        if self.member != member {
            *self = Alone { member, times: 0 };
        }
        self.times = self.times.saturating_add(1);
    }
}

async fn forward(watches: Vec<Watch>, hub: &Hub, name: &str) {
    let next = |(at, mut watch): (usize, Watch)| async move {
        watch.changed().await;
        (at, watch)
    };
    let mut all: FuturesUnordered<_> = watches.into_iter().enumerate().map(next).collect();
    let mut alone = Alone::default();
    while let Some((first, watch)) = all.next().await {
        all.push(next((first, watch)));
        let another = async {
            while let Some((at, watch)) = all.next().await {
                all.push(next((at, watch)));
                if at != first {
                    return;
                }
            }
        };
        let mut is_alone = tokio::time::timeout(alone.patience(first), another)
            .await
            .is_err();
        let pause = GATHERED + (AT_MOST - GATHERED).mul_f64(chance::fraction());
        let others = async {
            while let Some((at, watch)) = all.next().await {
                all.push(next((at, watch)));
                is_alone &= at == first;
            }
        };
        let _ = tokio::time::timeout(pause, others).await;
        match is_alone {
            true => alone.record(first),
            false => alone = Alone::default(),
        }
        hub.confirm(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_that_calls_alone_waits_longer_each_time_until_another_one_calls() {
        let ms = Duration::from_millis;
        let mut alone = Alone::default();
        let waits = |alone: &mut Alone, member| {
            let patience = alone.patience(member);
            alone.record(member);
            patience
        };
        let waited = [0; 7].map(|member| waits(&mut alone, member));
        assert_eq!(waited, [0, 250, 500, 1000, 2000, 4000, 4000].map(ms));
        let waited = [1, 1, 0, 0].map(|member| waits(&mut alone, member));
        assert_eq!(waited, [0, 250, 0, 250].map(ms));
    }
}
