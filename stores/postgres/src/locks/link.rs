//! One connection that is kept up, and serves the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::store::{DoubtSender, Lane, Reason, StoreError};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::perform::Performing;
use super::pins::Pins;
use super::queue::{Next, Queue, Wave};
use super::statements::Statements;
use super::table::Table;
use crate::connect::{Connector, Session};
use crate::failure::Failure;

/// Between two attempts to connect, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// What all connections of a store have in common.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) connector: Connector,
    pub(crate) table: Arc<Table>,
    pub(crate) queue: Queue,
    pub(crate) doubts: DoubtSender,
    /// Locks that were found held by a transaction.
    pub(crate) pins: Pins,
    /// Whether notifications go through the server.
    pub(crate) tell: bool,
    /// Whether a transaction pooler is in between: nothing is prepared.
    pub(crate) pooled: Arc<AtomicBool>,
    /// Why there is no connection, for messages.
    pub(crate) trouble: Mutex<Option<String>>,
}

impl Setup {
    /// Why no answer came in time.
    pub(crate) fn silence(&self) -> String {
        let trouble = self.trouble.lock().clone();
        trouble.unwrap_or_else(|| self.no_answer())
    }

    fn no_answer(&self) -> String {
        let Connector { address, timeout, .. } = &self.connector;
        format!("{address} did not answer within {timeout:?}")
    }

    async fn connect(&self) -> Result<Session, StoreError> {
        match self.pooled.load(Ordering::Relaxed) {
            true => self.connector.connect_plain().await,
            false => self.connector.connect().await,
        }
    }
}

/// A connection, or what will be one.
#[derive(Debug)]
pub(crate) struct Link {
    setup: Arc<Setup>,
    /// It had a connection: grants may have been lost until there is the next.
    broke: bool,
    /// Its connection could be used.
    served: bool,
    /// The next pause between two attempts.
    pause: Duration,
    /// The trouble was told; no need to say it again until it is over.
    told: bool,
}

impl Link {
    pub(crate) fn new(setup: Arc<Setup>) -> Link {
        Link {
            setup,
            broke: false,
            served: false,
            pause: PAUSE.0,
            told: false,
        }
    }

    /// Serves the queue until the store is gone. It connects when there is something to do.
    pub(crate) async fn run(mut self, mut first: Option<Session>) {
        let setup = self.setup.clone();
        loop {
            let session = match first.take() {
                Some(session) => session,
                None => match self.connect().await {
                    Some(session) => session,
                    None => return,
                },
            };
            setup.queue.connected();
            let ended = self.serve(session).await;
            setup.queue.disconnected();
            let Some(trouble) = ended else { return };
            self.tell_trouble(&trouble);
            if !std::mem::take(&mut self.served) {
                // The table is missing, say: not as fast as connections can be made.
                self.pause().await;
            }
        }
    }

    fn tell_trouble(&mut self, trouble: &str) {
        let address = &self.setup.connector.address;
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(server = %address, %trouble, "no connection to the lock store, trying again");
        }
        *self.setup.trouble.lock() = Some(trouble.to_owned());
    }

    async fn pause(&mut self) {
        tokio::time::sleep(self.pause.mul_f64(0.5 + fastrand::f64())).await;
        self.pause = (2 * self.pause).min(PAUSE.1);
    }

    /// Tries until there is a connection; `None` when it is not needed any more.
    async fn connect(&mut self) -> Option<Session> {
        let setup = self.setup.clone();
        // After a loss at once, so that holders learn soon what became of their grants.
        while !self.broke && !setup.queue.is_wanted() {
            setup.queue.woken().await;
        }
        loop {
            if setup.queue.is_ended() {
                return None;
            }
            match setup.connect().await {
                Ok(session) => return Some(session),
                Err(error) => {
                    self.tell_trouble(&error.message);
                    if error.reason == Reason::Refused {
                        setup.queue.refused(&error);
                    }
                }
            }
            self.pause().await;
        }
    }

    /// Serves until the connection is of no use any more, and tells why; `None` when it is not needed any more.
    async fn serve(&mut self, session: Session) -> Option<String> {
        let Session {
            client,
            mut notifications,
            driver,
        } = session;
        let setup = self.setup.clone();
        let limit = setup.connector.timeout;
        let preparing = Statements::new(client, setup.table.clone(), &setup.pooled);
        let on = match timeout(limit, preparing).await {
            Ok(Ok(on)) => on,
            // The table is missing, or may not be used.
            Ok(Err(Failure::Answered(error))) => {
                setup.queue.fail_all(&error);
                return Some(error.message);
            }
            Ok(Err(Failure::Broken(error))) => return Some(error.message),
            Err(_) => return Some("the statements could not be prepared in time".to_owned()),
        };
        *setup.trouble.lock() = None;
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %setup.connector.address, "connected to the lock store again");
        }
        if std::mem::replace(&mut self.broke, true) {
            setup.doubts.tell(Lane::default());
        }
        self.served = true;
        self.pause = PAUSE.0;
        loop {
            if on.is_closed() {
                return Some(CLOSED.to_owned());
            }
            let due = match setup.queue.next(Instant::now()) {
                Next::Send(wave) => {
                    if let Err(error) = perform(&setup, &on, wave).await {
                        return Some(error.message);
                    }
                    continue;
                }
                Next::End => {
                    // Nothing is under way: it says good-bye.
                    driver.detach();
                    return None;
                }
                Next::Wait(due) => due,
            };
            let due = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = setup.queue.woken() => {}
                () = due => {}
                notification = notifications.recv() => if notification.is_none() {
                    return Some(CLOSED.to_owned());
                },
            }
        }
    }
}

const CLOSED: &str = "the server closed the connection";

async fn perform(setup: &Setup, on: &Statements, wave: Wave) -> Result<(), StoreError> {
    let performing = Performing {
        on,
        queue: &setup.queue,
        pins: &setup.pins,
        tell: setup.tell,
        deadline: Instant::now() + setup.connector.timeout,
        silence: &setup.no_answer(),
    };
    performing.perform(wave).await
}
