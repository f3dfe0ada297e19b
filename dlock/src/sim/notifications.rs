//! The listeners of a simulated connection.

use std::sync::Arc;

use crate::store::Hub;
use crate::store::Watch;

/// The listeners at the client's end of a simulated connection. Clones are the same ones.
#[derive(Debug, Clone, Default)]
pub struct Notifications(Arc<Hub>);

impl Notifications {
    /// Without listeners.
    #[must_use]
    pub fn new() -> Notifications {
        Notifications::default()
    }

    /// Listens for a topic. `first` is called for its first listener: notifications are uncertain until they are
    /// [confirmed](Self::confirm). `last` is called when the last listener is gone. `first` must not call back.
    #[must_use]
    pub fn listen(
        &self,
        topic: Arc<str>,
        first: impl FnOnce(),
        last: impl FnOnce() + Send + Sync + 'static,
    ) -> Watch {
        let first = |_: &Arc<str>| {
            first();
            false
        };
        self.0.listen(topic, first, |_| last())
    }

    /// From now on notifications of the topic are certain; its listeners look once.
    pub fn confirm(&self, topic: &str) {
        self.0.confirm(topic);
    }

    /// Something changed; how many listen.
    pub fn tell(&self, topic: &str) -> usize {
        self.0.tell(topic)
    }

    /// Another process has taken the lock that came free.
    pub fn taken(&self, topic: &str) {
        self.0.taken(topic);
    }

    /// The connection is broken: all listeners look, and no notification is certain until it is confirmed again.
    pub fn doubt_all(&self) {
        self.0.tell_all(false);
    }

    /// All that is listened for, sorted.
    #[must_use]
    pub fn topics(&self) -> Vec<Arc<str>> {
        let mut topics = self.0.names();
        topics.sort();
        topics
    }
}
