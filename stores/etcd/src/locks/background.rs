//! The tasks of a store that run as long as it exists.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::{DoubtSender, Lane};
use tokio::time::sleep;

use super::grants::Grants;
use super::inner::{Abandoned, Inner};
use super::positions::Positions;
use super::release;
use crate::client::Links;

/// The pause between attempts to end an expired grant.
const AGAIN: Duration = Duration::from_millis(500);

/// Ends grants when their time is over, as long as the store exists: their sessions continue for other locks.
pub(crate) async fn sweep(store: Weak<Inner>, grants: Arc<Grants>) {
    loop {
        let (ended, next) = grants.take_ended();
        if !ended.is_empty() {
            let Some(inner) = store.upgrade() else { return };
            for (id, name) in ended {
                let step = inner.step([name], Abandoned::Goes, move |inner, deadline| async move {
                    release::expire(inner, id, deadline).await
                });
                let grants = grants.clone();
                // Also if it was not carried out because earlier operations took too long.
                inner.runtime.spawn(async move {
                    if step.await.is_err() {
                        grants.look_again(id, AGAIN);
                    }
                });
            }
        }
        tokio::select! {
            () = grants.changed() => {}
            () = async {
                match next {
                    Some(next) => sleep(next).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    }
}

/// Ends positions of waiters that send no requests, as long as the store exists.
pub(crate) async fn end_silent(store: Weak<Inner>, positions: Arc<Positions>) {
    loop {
        let silent = positions.become_silent().await;
        let Some(inner) = store.upgrade() else { return };
        for (id, name) in silent {
            let step = inner.step(
                [name.clone()],
                Abandoned::Goes,
                move |inner, deadline| async move { release::end_silent(inner, name, id, deadline).await },
            );
            drop(step);
        }
    }
}

/// Makes holders confirm their locks after each new connection.
pub(crate) async fn doubt(links: Arc<Links>, doubts: DoubtSender) {
    let mut changes = links.changes();
    changes.mark_unchanged();
    while changes.changed().await.is_ok() {
        if *changes.borrow_and_update() != 0 {
            doubts.tell(Lane::default());
        }
    }
}
