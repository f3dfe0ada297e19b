//! The presence entries of clients, on all members. A majority replies for all; where fewer can be reached, one suffices,
//! except for the audit log.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Answer, Answers, Quorum};
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

    /// Runs the same operation on all members that keep entries, queued now.
    fn ask_boards<T: Send + 'static>(
        &self,
        step: impl Fn(Arc<dyn Operations>) -> StoreFuture<T>,
    ) -> Answers<T> {
        let members = self.members.iter().enumerate();
        let answers = members.filter_map(|(at, member)| {
            let step = step(member.store.clone().operations()?);
            let answer: Answer<T> = Box::pin(async move { (at, step.await) });
            Some(answer)
        });
        answers.collect()
    }

    /// Returns the replies of a majority, and of the members that are no slower; of fewer if the others failed, at least
    /// one.
    async fn replies<T>(&self, asked: &mut Answers<T>) -> Result<Vec<T>, StoreError> {
        let (answers, trouble) = self.gather(asked, |_, _| true).await;
        match trouble {
            _ if !answers.is_empty() => Ok(answers),
            Some(error) => Err(error),
            None => Err(StoreError::not_done(
                Reason::Unsupported,
                "no member of the quorum keeps entries",
            )),
        }
    }

    /// Runs the same operation on all members and combines their [replies](Self::replies). The other members run it too,
    /// but no caller waits for them.
    fn on_boards<T: Send + 'static, U: Send + 'static>(
        self: Arc<Self>,
        step: impl Fn(Arc<dyn Operations>) -> StoreFuture<T>,
        fold: impl FnOnce(Vec<T>) -> U + Send + 'static,
    ) -> StoreFuture<U> {
        let mut asked = self.ask_boards(step);
        Box::pin(async move { self.replies(&mut asked).await.map(fold) })
    }

    /// Keeps the messages that all members return, and announces those that a caller of `mail` does not wait for.
    async fn collect_mail(
        self: Arc<Self>,
        mailbox: EntryName,
        mut asked: Answers<Vec<Vec<u8>>>,
        collected: oneshot::Sender<Result<(), StoreError>>,
    ) {
        let replies = self.replies(&mut asked).await;
        let mut told: Vec<_> = replies.iter().flatten().flatten().cloned().collect();
        self.late_mail.put(&mailbox, told.clone());
        let is_dropped = collected.send(replies.map(drop)).is_err();
        if is_dropped && !told.is_empty() {
            self.notifications.tell_entry(&mailbox);
        }
        while let Some((_, answer)) = asked.next().await {
            let mut late = answer.unwrap_or_default();
            late.retain(|message| !told.contains(message));
            if !late.is_empty() {
                told.extend(late.iter().cloned());
                self.late_mail.put(&mailbox, late);
                self.notifications.tell_entry(&mailbox);
            }
        }
    }
}

impl Operations for Quorum {
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()> {
        self.on_boards(|board| board.put(name.clone(), value.clone(), ttl, tell), drop)
    }

    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
        // The entry that was written last.
        let last = |entries: Vec<Option<Entry>>| {
            let entries = entries.into_iter().flatten();
            entries.max_by_key(|entry| entry.remaining)
        };
        self.on_boards(|board| board.get(name.clone()), last)
    }

    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
        self.on_boards(|board| board.remove(name.clone()), drop)
    }

    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64> {
        self.on_boards(
            |board| board.post(name.clone(), id.clone(), message.clone(), ttl),
            |heard| heard.into_iter().max().unwrap_or(0),
        )
    }

    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
        let asked = self.ask_boards(|board| board.mail(name.clone()));
        let (collected, is_collected) = oneshot::channel();
        // Runs to its end also if the caller gives up: a member has deleted what it returns.
        self.runtime
            .spawn(self.clone().collect_mail(name.clone(), asked, collected));
        Box::pin(async move {
            let over = |_| StoreError::unknown("the runtime of the quorum is shut down");
            is_collected.await.map_err(over)??;
            Ok(self.late_mail.take(&name))
        })
    }

    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
        let merged = |clients: Vec<Vec<Uuid>>| {
            let mut clients: Vec<_> = clients.into_iter().flatten().collect();
            clients.sort_unstable();
            clients.dedup();
            clients
        };
        self.on_boards(|board| board.clients(), merged)
    }

    fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
        self.notifications.watch_entry(name)
    }

    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
        let asked = self.ask_boards(|board| board.audit(fields.clone()));
        // On a majority, or it may be lost with one member.
        Box::pin(async move { self.looks(asked, |_, _| true).await.map(drop) })
    }

    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
        let asked = self.ask_boards(|board| board.end(key.clone(), holder.clone()));
        Box::pin(self.ended(asked))
    }

    fn connections(self: Arc<Self>, client: Uuid) -> StoreFuture<Option<Vec<Connection>>> {
        let merged = |seen: Vec<Option<Vec<Connection>>>| {
            let all_tell = seen.iter().all(Option::is_some);
            let known: Vec<_> = seen.into_iter().flatten().collect();
            let all: HashMap<String, Connection> = known
                .iter()
                .flatten()
                .map(|connection| (connection.address.clone(), connection.clone()))
                .collect();
            let is_known = !all.is_empty() || all_tell && !known.is_empty();
            is_known.then(|| all.into_values().collect())
        };
        self.on_boards(|board| board.connections(client), merged)
    }

    fn local_address(&self) -> Option<String> {
        self.boards().iter().find_map(|board| board.local_address())
    }
}
