//! Steps of counters whose outcome is unknown.

use std::collections::HashMap;
use std::time::Duration;

use dlock::store::GrantId;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::session::Epoch;

/// The sessions in which steps without a reply were sent.
#[derive(Debug, Default)]
pub(crate) struct Steps(Mutex<HashMap<GrantId, (Epoch, Instant)>>);

impl Steps {
    /// Records a step without a reply, until it can come no more.
    pub(crate) fn began(&self, id: GrantId, epoch: Epoch, repeated_for: Duration) {
        let now = Instant::now();
        let mut steps = self.0.lock();
        steps.retain(|_, (_, until)| *until > now);
        steps.entry(id).or_insert((epoch, now + repeated_for));
    }

    /// Whether the step was sent in a session before this one, and had no reply.
    pub(crate) fn began_before(&self, id: GrantId, epoch: Epoch) -> bool {
        self.0.lock().get(&id).is_some_and(|(began, _)| *began < epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_without_a_reply_belongs_to_its_session() {
        let (steps, id) = (Steps::default(), GrantId::from_parts(1, 1));
        assert!(!steps.began_before(id, 5));
        steps.began(id, 3, Duration::from_secs(60));
        steps.began(id, 4, Duration::from_secs(60));
        assert!(!steps.began_before(id, 3) && steps.began_before(id, 4));
        steps.began(GrantId::from_parts(1, 2), 4, Duration::ZERO);
        steps.began(GrantId::from_parts(1, 3), 4, Duration::ZERO);
        assert_eq!(steps.0.lock().len(), 2);
    }
}
