//! Steps on numbers that no grant stands for.

use dlock::LockClient;

use super::Me;
use super::holder::key_of;
use crate::plan::{Change, Kind};
use crate::words;
use crate::world::with;

/// Changes how many permits a semaphore has.
pub(super) async fn change(me: Me, client: &LockClient, semaphore: u32, change: Change) {
    let key = key_of(Kind::Permit, semaphore);
    me.says(|| words::change(&key, change));
    let semaphore = client.semaphore(key);
    let outcome = match change {
        Change::Set(total) => semaphore.set_permits(total).await.map(drop),
        Change::Add(permits) => semaphore.add_permits(permits).await.map(drop),
        Change::Remove(permits) => semaphore.remove_permits(permits).await.map(drop),
    };
    match outcome {
        Ok(()) => with(|world| world.counts.sometimes("a semaphore whose permits were changed")),
        Err(error) => me.says(|| format!("cannot: {error}")),
    }
}
