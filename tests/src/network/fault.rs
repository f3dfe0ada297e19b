//! Faults that strike one request.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

/// How long a test waits for a fault to strike.
const PATIENCE: Duration = Duration::from_secs(60);

/// What becomes of the connection whose reply is swallowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swallow {
    /// It stays open and nothing more comes back on it, whatever is sent: the client must time out. (Were later
    /// replies let through, a client would take them for answers to other commands, which no network brings about.)
    Hang,
    /// Both its sides are closed, after the replies before the swallowed one were delivered.
    Cut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deed {
    /// The server does it, and the client does not learn.
    Swallow(Swallow),
    /// The connection is cut before the server gets it.
    Lose,
    /// It is kept.
    Hold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Armed,
    Caught,
    Released,
    Delivered,
    Swallowed,
}

/// A fault of one request. It stays armed when this is dropped.
#[derive(Debug, Clone)]
pub struct NetFault(watch::Sender<Stage>);

impl NetFault {
    /// Whether a client has sent the request that it is for.
    pub fn fired(&self) -> bool {
        *self.0.borrow() > Stage::Armed
    }

    /// Waits until a client has sent the request that it is for.
    ///
    /// # Panics
    /// After a minute.
    pub async fn caught(&self) {
        self.reached(Stage::Caught).await;
    }

    /// Lets a request go on to the server that is held.
    pub fn release(&self) {
        self.reach(Stage::Released);
    }

    /// Waits until a request that was held is written to the server's connection, or that is gone.
    ///
    /// # Panics
    /// After a minute.
    pub async fn delivered(&self) {
        self.reached(Stage::Delivered).await;
    }

    /// Waits until the server's reply was swallowed; of a request that was held, until the server has replied.
    ///
    /// # Panics
    /// After a minute.
    pub async fn swallowed(&self) {
        self.reached(Stage::Swallowed).await;
    }

    async fn reached(&self, stage: Stage) {
        let mut stages = self.0.subscribe();
        let reached = tokio::time::timeout(PATIENCE, stages.wait_for(|now| *now >= stage)).await;
        assert!(reached.is_ok(), "the fault does not get to {stage:?}");
    }

    fn reach(&self, stage: Stage) {
        self.0.send_modify(|now| *now = stage.max(*now));
    }

    /// Waits until the test lets it go.
    pub(crate) async fn is_released(&self) {
        let _ = self.0.subscribe().wait_for(|now| *now >= Stage::Released).await;
    }

    pub(crate) fn is_swallowed(&self) {
        self.reach(Stage::Swallowed);
    }
}

/// A request that is held, until it is written or its connection is gone.
pub(crate) struct Undelivered(pub(crate) NetFault);

impl Drop for Undelivered {
    fn drop(&mut self) {
        self.0.reach(Stage::Delivered);
    }
}

struct Rule<R> {
    left: u64,
    matches: Box<dyn Fn(&R) -> bool + Send>,
    deed: Deed,
    fault: NetFault,
}

/// The faults that are armed.
pub(crate) struct Rules<R>(Mutex<Vec<Rule<R>>>);

impl<R> Default for Rules<R> {
    fn default() -> Self {
        Rules(Mutex::default())
    }
}

impl<R> Rules<R> {
    pub(crate) fn arm(&self, k: u64, deed: Deed, matches: impl Fn(&R) -> bool + Send + 'static) -> NetFault {
        assert!(k > 0, "the first request that matches is k = 1");
        let fault = NetFault(watch::Sender::new(Stage::Armed));
        self.0.lock().push(Rule {
            left: k,
            matches: Box::new(matches),
            deed,
            fault: fault.clone(),
        });
        fault
    }

    /// What is to become of a request.
    pub(crate) fn strike(&self, request: &R) -> Option<(Deed, NetFault)> {
        let mut rules = self.0.lock();
        let mut struck = None;
        for (at, rule) in rules.iter_mut().enumerate() {
            if (rule.matches)(request) {
                rule.left -= 1;
                if rule.left == 0 && struck.is_none() {
                    struck = Some(at);
                }
            }
        }
        let rule = rules.remove(struck?);
        rules.retain(|rule| rule.left > 0);
        rule.fault.reach(Stage::Caught);
        Some((rule.deed, rule.fault))
    }

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}
