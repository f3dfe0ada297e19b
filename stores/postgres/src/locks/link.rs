//! A connection that serves the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dlock::store::StoreError;
use dlock::store::queue::{Connect, Link, Next};
use tokio::task::yield_now;
use tokio::time::{Instant, timeout};

use super::job::{Queue, Step};
use super::perform::Performing;
use super::pins::Pins;
use super::statements::Statements;
use super::table::Table;
use super::wave::{Room, Sort, Wave};
use crate::connect::{Connector, Session};
use crate::failure::Failure;

/// The state that all connections of a store share.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) connector: Connector,
    pub(crate) table: Arc<Table>,
    pub(crate) queue: Arc<Queue>,
    /// Locks that a transaction holds.
    pub(crate) pins: Pins,
    /// Whether releases notify waiters through the server.
    pub(crate) tell: bool,
    /// Whether a transaction pooler is in between, so that no statement is prepared.
    pub(crate) pooled: Arc<AtomicBool>,
}

impl Connect<Step> for Setup {
    type Session = Session;

    async fn connect(&self) -> Result<Session, StoreError> {
        match self.pooled.load(Ordering::Relaxed) {
            true => self.connector.connect_plain().await,
            false => self.connector.connect().await,
        }
    }

    async fn serve(&self, session: Session, link: &mut Link<Step>) -> Option<String> {
        let Session {
            client,
            mut notifications,
            driver: _driver,
        } = session;
        let preparing = Statements::new(client, self.table.clone(), &self.pooled);
        let on = match timeout(self.connector.timeout, preparing).await {
            Ok(Ok(on)) => on,
            // The table does not exist, or the user lacks rights on it.
            Ok(Err(Failure::Answered(error))) => {
                self.queue.fail_all(&error);
                return Some(error.message);
            }
            Ok(Err(Failure::Broken(error))) => return Some(error.message),
            Err(_) => return Some("the statements could not be prepared in time".to_owned()),
        };
        link.is_ready();
        let mut was_shared = false;
        let mut turn = None;
        loop {
            if was_shared {
                // The callers that have just been answered may queue their next steps first.
                yield_now().await;
            }
            if on.is_closed() {
                return Some(CLOSED.to_owned());
            }
            let due = match self.next(&mut turn) {
                Next::Send(jobs) => {
                    was_shared = jobs.len() > 1;
                    if let Err(error) = self.perform(&on, jobs.into()).await {
                        return Some(error.message);
                    }
                    continue;
                }
                Next::End => return None,
                Next::Wait(due) => due,
            };
            let due = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.queue.woken() => {}
                () = due => {}
                notification = notifications.recv() => if notification.is_none() {
                    return Some(CLOSED.to_owned());
                },
            }
        }
    }
}

impl Setup {
    /// Takes the steps of a wave. After acquires the other steps have their turn, and the reverse: those are what the callers
    /// queue that were answered together, and they stay together.
    fn next(&self, turn: &mut Option<Sort>) -> Next<Step> {
        let mut room = Room::of(turn.take());
        let mut next = self.queue.next(Instant::now(), |job| room.has(job));
        if matches!(next, Next::Wait(_)) && room.sort.is_some() {
            room = Room::of(None);
            next = self.queue.next(Instant::now(), |job| room.has(job));
        }
        *turn = room.sort.map(Sort::other);
        next
    }

    async fn perform(&self, on: &Statements, wave: Wave) -> Result<(), StoreError> {
        let performing = Performing {
            on,
            queue: &self.queue,
            pins: &self.pins,
            tell: self.tell,
            deadline: Instant::now() + self.connector.timeout,
            silence: &self.queue.no_answer(),
        };
        performing.perform(wave).await
    }
}

const CLOSED: &str = "the server closed the connection";
