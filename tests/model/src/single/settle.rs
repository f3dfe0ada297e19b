//! Whether all comes to its end, once nothing more goes wrong.

use stateright::Model;

use super::{Action, Fate, LEASE, Mode, Single, State, TIMEOUT, Task};

/// In how many ticks all who wait have had the lock: the lease of one that is stopped or dead is over, and what was
/// not answered has been given up.
const SOON: u8 = LEASE + TIMEOUT;

impl Single {
    /// Whether all tasks of all clients that act are through soon, if from now on all messages arrive at once, those who
    /// have the lock leave, and who is stopped stays so.
    pub(super) fn settles(&self, state: &State) -> bool {
        let mut state = state.clone();
        let mut ticks = 0;
        loop {
            let through = state
                .clients
                .iter()
                .all(|client| client.mode != Mode::Up || client.tasks == [Task::Done; 2]);
            if through {
                return true;
            }
            match self.goes_on(&state) {
                Some(next) => state = next,
                None if ticks < SOON => {
                    ticks += 1;
                    self.tick(&mut state, None);
                    self.tidy(&mut state);
                }
                None => return false,
            }
        }
    }

    /// The next thing that happens when nothing goes wrong, if it does not take time.
    fn goes_on(&self, state: &State) -> Option<State> {
        let mut actions = Vec::new();
        self.actions(state, &mut actions);
        let is_in_order = |action: &Action| {
            use Action as A;
            matches!(
                action,
                A::Land(_, Fate::InTime)
                    | A::AskFails(_, _, Fate::InTime)
                    | A::RenewalFails(..)
                    | A::Again(_, _, Fate::InTime)
                    | A::Leave(_, _, Fate::InTime)
                    | A::Ask(_, Fate::InTime)
            )
        };
        let all = actions.into_iter().filter(is_in_order);
        all.filter_map(|action| self.next_state(state, action)).next()
    }
}
