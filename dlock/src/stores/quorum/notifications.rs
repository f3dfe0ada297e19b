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

async fn forward(watches: Vec<Watch>, hub: &Hub, name: &str) {
    let next = |mut watch: Watch| async move {
        watch.changed().await;
        watch
    };
    let mut all: FuturesUnordered<_> = watches.into_iter().map(next).collect();
    while let Some(watch) = all.next().await {
        all.push(next(watch));
        let pause = GATHERED + (AT_MOST - GATHERED).mul_f64(chance::fraction());
        let others = async {
            while let Some(watch) = all.next().await {
                all.push(next(watch));
            }
        };
        let _ = tokio::time::timeout(pause, others).await;
        hub.confirm(name);
    }
}
