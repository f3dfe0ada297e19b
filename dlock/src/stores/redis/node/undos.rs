//! Releases that undo acquires by commands whose calls are not answered: the next connection sends them first.

use std::collections::BTreeMap;

use crate::store::GrantId;
use crate::stores::redis::script::Call;

/// Instead of the number of a call: no answer on this connection tells that its steps were carried out.
pub(super) const NO_CALL: u64 = u64::MAX;

/// One undo for each grant, with the number of the call that has the acquire.
#[derive(Default)]
pub(super) struct Undos(BTreeMap<GrantId, (u64, Call)>);

impl Undos {
    pub(super) fn remember(&mut self, call: u64, undo: Call) {
        let Some(grant) = undo.releases() else { return };
        let (last, _) = self.0.entry(grant).or_insert((call, undo));
        *last = call.max(*last);
    }

    /// Records that all calls up to this one were carried out: the undos of their callers come behind them.
    pub(super) fn answered(&mut self, call: u64) {
        self.0.retain(|_, (number, _)| *number > call);
    }

    /// Records that a release of this grant was carried out.
    pub(super) fn released(&mut self, grant: GrantId) {
        self.0.remove(&grant);
    }

    pub(super) fn take(&mut self) -> impl Iterator<Item = Call> + use<> {
        std::mem::take(&mut self.0).into_values().map(|(_, undo)| undo)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_steps::{grant, undo};
    use super::*;

    fn keys(mut undos: Undos) -> Vec<String> {
        undos.take().map(|undo| undo.key.to_string()).collect()
    }

    #[tokio::test]
    async fn undo_is_remembered_once_and_until_its_grant_is_released() {
        let mut undos = Undos::default();
        for (call, key, number) in [(1, "a", 1), (NO_CALL, "a", 1), (NO_CALL, "b", 2), (2, "a", 1)] {
            undos.remember(call, undo(key, number).call.clone());
        }
        undos.answered(7);
        undos.released(grant(2));
        undos.released(grant(3));
        assert_eq!(keys(undos), ["a"]);
    }

    #[tokio::test]
    async fn undo_is_needless_once_a_later_call_is_answered() {
        let mut undos = Undos::default();
        for (call, key, number) in [(1, "a", 1), (2, "b", 2), (3, "c", 3), (4, "a", 1)] {
            undos.remember(call, undo(key, number).call.clone());
        }
        undos.answered(2);
        assert_eq!(keys(undos), ["a", "c"]);
    }
}
