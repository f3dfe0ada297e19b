//! The presence entries of clients, on all members: one reachable member suffices.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use uuid::Uuid;

use super::Quorum;
use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::operations::{Connection, Entry, EntryName, Operations};
use crate::store::{Reason, StoreError, StoreFuture, Watch};

impl Quorum {
    pub(super) fn boards(&self) -> Vec<Arc<dyn Operations>> {
        let members = self.members.iter();
        members
            .filter_map(|member| member.store.clone().operations())
            .collect()
    }

    /// Runs the same operation on all members; returns the replies of those that could be asked, at least one.
    fn on_boards<T: Send + 'static>(
        &self,
        step: impl Fn(Arc<dyn Operations>) -> StoreFuture<T>,
    ) -> StoreFuture<Vec<T>> {
        let steps: Vec<_> = self.boards().into_iter().map(step).collect();
        Box::pin(async move {
            let (mut answers, mut trouble) = (Vec::new(), None);
            for answer in join_all(steps).await {
                match answer {
                    Ok(answer) => answers.push(answer),
                    Err(error) => trouble = Some(error),
                }
            }
            match trouble {
                _ if !answers.is_empty() => Ok(answers),
                Some(error) => Err(error),
                None => Err(StoreError::not_done(
                    Reason::Unsupported,
                    "no member of the quorum keeps entries",
                )),
            }
        })
    }
}

fn each<T: Send + 'static, U: Send + 'static>(
    answers: StoreFuture<Vec<T>>,
    fold: impl FnOnce(Vec<T>) -> U + Send + 'static,
) -> StoreFuture<U> {
    Box::pin(async move { answers.await.map(fold) })
}

impl Operations for Quorum {
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()> {
        let answers = self.on_boards(|board| board.put(name.clone(), value.clone(), ttl, tell));
        each(answers, drop)
    }

    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
        let answers = self.on_boards(|board| board.get(name.clone()));
        // The entry that was written last.
        each(answers, |entries| {
            let entries = entries.into_iter().flatten();
            entries.max_by_key(|entry| entry.remaining)
        })
    }

    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
        each(self.on_boards(|board| board.remove(name.clone())), drop)
    }

    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64> {
        let answers = self.on_boards(|board| board.post(name.clone(), id.clone(), message.clone(), ttl));
        each(answers, |heard| heard.into_iter().max().unwrap_or(0))
    }

    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
        each(self.on_boards(|board| board.mail(name.clone())), |mail| {
            let mut messages: Vec<_> = mail.into_iter().flatten().collect();
            messages.sort_unstable();
            messages.dedup();
            messages
        })
    }

    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
        each(self.on_boards(|board| board.clients()), |clients| {
            let mut clients: Vec<_> = clients.into_iter().flatten().collect();
            clients.sort_unstable();
            clients.dedup();
            clients
        })
    }

    fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
        self.notifications.watch_entry(name)
    }

    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
        each(self.on_boards(|board| board.audit(fields.clone())), drop)
    }

    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
        let answers = self.on_boards(|board| board.end(key.clone(), holder.clone()));
        each(answers, |ended| ended.contains(&true))
    }

    fn connections(self: Arc<Self>, client: Uuid) -> StoreFuture<Option<Vec<Connection>>> {
        each(self.on_boards(|board| board.connections(client)), |seen| {
            let known: Vec<_> = seen.into_iter().flatten().collect();
            let all: HashMap<String, Connection> = known
                .iter()
                .flatten()
                .map(|connection| (connection.address.clone(), connection.clone()))
                .collect();
            (!known.is_empty()).then(|| all.into_values().collect())
        })
    }

    fn local_address(&self) -> Option<String> {
        self.boards().iter().find_map(|board| board.local_address())
    }
}
