//! What must be true of readers that were writers, or want to be.

use dlock::store::Kind;
use dlock::{Error, LockKey};

use super::{EXCLUSION, Frame, Section, WAITING, Waiter};
use crate::world::World;

impl World {
    /// The read section of this key in whose frame is asked, where none of these frames writes.
    pub(crate) fn reads_around(&self, key: &LockKey, around: &[Frame]) -> Option<u64> {
        let of_key = || around.iter().rev().filter(|frame| frame.key == *key);
        if of_key().any(|frame| frame.kind == Kind::Write) {
            return None;
        }
        let reads = of_key().find(|frame| frame.kind == Kind::Read)?.section;
        self.reads(reads).then_some(reads)
    }

    fn reads(&self, section: u64) -> bool {
        let section = self.checks.sections.get(&section);
        section.is_some_and(|section| self.is_held(section))
    }

    /// A reader asked to write inside its own frame, and this came of it: with an error, or with the lock.
    pub(crate) fn upgraded(&mut self, reads: u64, waiter: &Waiter, error: Option<&Error>) {
        if !self.reads(reads) {
            return;
        }
        let Waiter {
            process,
            user,
            key,
            since,
            ..
        } = waiter;
        match error {
            // A store that cannot do it refuses it for that reason.
            Some(Error::WouldDeadlock { .. } | Error::ClientClosed | Error::Unsupported { .. }) => {}
            Some(error) => {
                let story = format!(
                    "p{process}/u{user} reads {key} and asks to write since {since} ms, which can never be, and is told \
                     so by another error: {error}"
                );
                self.violated(WAITING, story);
            }
            None => {
                let story = format!("p{process}/u{user} writes {key} while it reads it in a frame around");
                self.violated(EXCLUSION, story);
            }
        }
    }

    /// A writer reads on: no other writer wrote in between.
    pub(super) fn nobody_wrote(&mut self, section: &Section) {
        let newest = self.checks.begun.get(&section.key).copied();
        if let (Some(write), Some(newest)) = (section.stands_for, newest)
            && self.checks.assumes.exclusion
            && newest > write
        {
            let Section {
                process, user, key, ..
            } = section;
            let story = format!(
                "p{process}/u{user} wrote {key} with token {write} and reads on, and another one wrote with token \
                 {newest} in between"
            );
            self.violated(EXCLUSION, story);
        }
    }
}
