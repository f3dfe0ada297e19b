//! The presence entries of clients, in memory.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use super::MemoryStore;
use crate::LockKey;
use crate::base::chance::HashMap;
use crate::base::clock;
use crate::store::operations::{AUDITED, Entry, EntryName, MAILBOX, Operations};
use crate::store::{Reason, StoreError, StoreFuture, Watch};

#[derive(Debug, Default)]
pub(super) struct Bulletin {
    board: Mutex<Board>,
}

#[derive(Debug, Default)]
struct Board {
    entries: HashMap<String, (Vec<u8>, Instant)>,
    mailboxes: HashMap<String, Mailbox>,
    audit: VecDeque<Vec<(String, String)>>,
}

#[derive(Debug)]
struct Mailbox {
    messages: Vec<(String, Vec<u8>)>,
    until: Instant,
}

impl Board {
    fn purge(&mut self, now: Instant) {
        self.entries.retain(|_, (_, until)| *until > now);
        self.mailboxes.retain(|_, mailbox| mailbox.until > now);
    }
}

impl MemoryStore {
    fn board<T>(&self, step: impl FnOnce(&mut Board, Instant) -> T) -> T {
        let now = clock::now();
        let mut board = self.store.bulletin.board.lock();
        board.purge(now);
        step(&mut board, now)
    }

    fn heard(&self, name: &str) -> u64 {
        self.store.hub.tell(&channel(name)) as u64
    }
}

/// No lock has a name with a line break.
fn channel(name: &str) -> String {
    format!("{name}\n")
}

impl Operations for MemoryStore {
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()> {
        let name = name.with_prefix("");
        self.board(|board, now| board.entries.insert(name.clone(), (value, now + ttl)));
        if tell {
            self.heard(&name);
        }
        Box::pin(ready(Ok(())))
    }

    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
        let entry = self.board(|board, now| {
            let (value, until) = board.entries.get(&name.with_prefix(""))?;
            Some(Entry::new(value.clone(), until.saturating_duration_since(now)))
        });
        Box::pin(ready(Ok(entry)))
    }

    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
        self.board(|board, _| board.entries.remove(&name.with_prefix("")));
        Box::pin(ready(Ok(())))
    }

    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64> {
        let name = name.with_prefix("");
        let is_posted = self.board(|board, now| {
            let mailbox = board.mailboxes.entry(name.clone()).or_insert_with(|| Mailbox {
                messages: Vec::new(),
                until: now,
            });
            mailbox.until = now + ttl;
            mailbox.messages.retain(|(other, _)| *other != id);
            let has_room = mailbox.messages.len() < MAILBOX;
            if has_room {
                mailbox.messages.push((id, message));
            }
            has_room
        });
        Box::pin(ready(match is_posted {
            true => Ok(self.heard(&name)),
            false => Err(StoreError::not_done(Reason::Refused, "the mailbox is full")),
        }))
    }

    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
        let mailbox = self.board(|board, _| board.mailboxes.remove(&name.with_prefix("")));
        let messages = mailbox.map_or_else(Vec::new, |mailbox| mailbox.messages);
        Box::pin(ready(Ok(messages
            .into_iter()
            .map(|(_, message)| message)
            .collect())))
    }

    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
        let mut clients: Vec<_> = self.board(|board, _| {
            let names = board.entries.keys();
            names
                .filter_map(|name| Uuid::try_parse(name.strip_prefix("dlock:client:")?).ok())
                .collect()
        });
        clients.sort_unstable();
        Box::pin(ready(Ok(clients)))
    }

    fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
        let channel = channel(&name.with_prefix(""));
        self.store.hub.listen(channel.into(), |_| true, |_| ())
    }

    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
        let ended = self.take_if(&key, |holders| {
            let is_there = holders.iter().any(|other| other.id == holder);
            match holders.len() {
                0 | 1 => Ok(is_there),
                _ if is_there => Err(StoreError::not_done(Reason::Refused, "it has other holders")),
                _ => Ok(false),
            }
        });
        Box::pin(ready(ended))
    }

    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
        self.board(|board, _| {
            board.audit.push_back(fields);
            if board.audit.len() > AUDITED {
                board.audit.pop_front();
            }
        });
        Box::pin(ready(Ok(())))
    }
}
