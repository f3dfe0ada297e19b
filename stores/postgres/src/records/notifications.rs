//! The connection on which this process is notified of completions and releases.
//!
//! It is opened for the first waiter, and listens to one channel for the whole table. After each connect all waiters
//! ask once, because a notification may have been missed. While there is no connection, or notifications are switched
//! off, waiters poll.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lane::Setup;
use crate::connect::{Session, answered};
use dlock::record::RecordKey;
use dlock::store::Hub;
use dlock::store::Watch;

/// How often the connection is tested while there are waiters.
const PING: Duration = Duration::from_secs(5);
/// How often waiters poll while they get no notifications.
const POLL: Duration = Duration::from_millis(250);

/// The waiters in this process, and how they are notified.
#[derive(Debug, Clone)]
pub(super) struct RecordNotifications {
    hub: Arc<Hub>,
    live: Arc<AtomicBool>,
    wanted: Arc<Notify>,
}

impl RecordNotifications {
    /// Starts the listening task, which connects for the first waiter and runs until `ended`.
    pub(super) fn start(
        setup: Arc<Setup>,
        ended: CancellationToken,
        runtime: &runtime::Handle,
    ) -> RecordNotifications {
        let notifications = RecordNotifications {
            hub: Arc::default(),
            live: Arc::default(),
            wanted: Arc::default(),
        };
        let listener = Listener {
            notifications: notifications.clone(),
            setup,
            told: false,
        };
        runtime.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = listener.run() => {}
            }
        });
        notifications
    }

    pub(super) fn watch(&self, key: &RecordKey) -> Watch {
        let notifications = self.clone();
        let first = move |_: &Arc<str>| {
            notifications.wanted.notify_one();
            notifications.live.load(Ordering::SeqCst)
        };
        self.hub.listen(key.as_str().into(), first, |_| {})
    }

    /// Notifies the waiters in this process at once.
    pub(super) fn tell(&self, key: &RecordKey) {
        self.hub.tell(key.as_str());
    }
}

struct Listener {
    notifications: RecordNotifications,
    setup: Arc<Setup>,
    /// Whether the trouble was logged; it is logged once until notifications work again.
    told: bool,
}

impl Listener {
    async fn run(mut self) {
        loop {
            self.notifications.wanted.notified().await;
            while !self.notifications.hub.names().is_empty() {
                if self.setup.tell {
                    let trouble = self.listen().await;
                    if !std::mem::replace(&mut self.told, true) {
                        tracing::warn!(
                            server = %self.setup.connector.address, %trouble,
                            "no notifications of records: waiters look now and then until there are some"
                        );
                    }
                }
                self.notifications.live.store(false, Ordering::SeqCst);
                self.notifications.hub.tell_all(false);
                tokio::time::sleep(POLL.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
            }
        }
    }

    /// Listens until the connection is unusable, and returns the reason.
    async fn listen(&mut self) -> String {
        let limit = self.setup.connector.timeout;
        let mut session = match self.subscribe().await {
            Ok(session) => session,
            Err(trouble) => return trouble,
        };
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %self.setup.connector.address, "notifications of records again");
        }
        // In this order, so that a waiter that arrives in between is confirmed as well.
        self.notifications.live.store(true, Ordering::SeqCst);
        for name in self.notifications.hub.names() {
            self.notifications.hub.confirm(&name);
        }
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                notification = session.notifications.recv() => {
                    let Some(notification) = notification else {
                        return "the server closed the connection".to_owned();
                    };
                    self.notifications.hub.tell(notification.payload());
                    heard = Instant::now();
                }
                () = tokio::time::sleep_until(heard + PING) => {
                    match answered(limit, session.hears()).await {
                        Ok(Ok(())) => heard = Instant::now(),
                        Ok(Err(trouble)) => return trouble.to_owned(),
                        Err(trouble) => return trouble,
                    }
                }
            }
        }
    }

    async fn subscribe(&self) -> Result<Session, String> {
        let Setup { connector, table, .. } = &*self.setup;
        let session = connector.connect().await.map_err(|error| error.message)?;
        let listen = format!("LISTEN \"{}\"", table.name);
        answered(connector.timeout, session.client.batch_execute(&listen)).await?;
        answered(connector.timeout, session.hears()).await??;
        Ok(session)
    }
}
