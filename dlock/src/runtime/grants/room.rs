//! Who is inside a grant, and who of its frames waits to come in.
//!
//! Branches of a frame that ask for its lock exclude each other, and are served in the order in which they asked. One who
//! must wait stands behind one of those that keep it out, and is looked at again when that one has left; so a hold that
//! leaves costs nothing for those who wait for others. The first who may come in then is *called*, and those who stood in
//! the same line stand behind it from then on. One who is called and not polled in time is passed over, until it is polled.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Signals;
use crate::base::chance::{HashMap, next_id};
use crate::base::clock;
use crate::base::int_hash::BuildIntHasher;
use crate::engine::timing::FRAME_POLL_DEADLINE;
use crate::runtime::scope::Scope;

/// Somebody inside, and since which line.
pub(super) type Inside = (u64, &'static Location<'static>);

type Numbered<T> = HashMap<u64, T, BuildIntHasher>;

/// One who wants to come in.
pub(crate) struct Asker<'a> {
    /// The id that its hold will have.
    pub(crate) id: u64,
    pub(crate) by: &'static Location<'static>,
    pub(crate) around: Around<'a>,
    pub(crate) mode: EntryMode,
}

/// Whom an asker is inside of.
#[derive(Clone, Copy)]
pub(crate) enum Around<'a> {
    /// A second guard that is made of a first one: nobody is in its way.
    Everybody,
    /// The holds of these frames, and these.
    Frames(&'a Scope, &'a [u64]),
}

/// What an asker does about those in its way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryMode {
    /// It waits, in the order of those who do.
    Wait,
    /// It does not wait.
    Try,
    /// The same, but before those who are called: it has waited before.
    TryFirst,
}

/// Who keeps an asker out.
pub(crate) struct InTheWay {
    /// Where it came in, or wants to.
    pub(crate) line: &'static Location<'static>,
    /// When it is passed over, if it is not inside yet.
    pub(crate) until: Option<Instant>,
}

impl Around<'_> {
    fn has(self, id: u64) -> bool {
        match self {
            Around::Everybody => true,
            Around::Frames(scope, besides) => besides.contains(&id) || scope.contains(id),
        }
    }

    /// Whether nobody but these is among so many, of whom `is_there` knows each.
    fn are_all(self, many: usize, is_there: impl Fn(u64) -> bool) -> bool {
        match self {
            Around::Everybody => true,
            // Each hold is there once in a scope, but may be there again besides.
            Around::Frames(scope, _) => many == 0 || scope.holds().filter(|id| is_there(*id)).count() == many,
        }
    }
}

/// To be told, and dropped, when no lock is held.
#[derive(Default)]
pub(super) struct Told {
    wakers: SmallVec<[Waker; 2]>,
    left: Option<Waiter>,
}

impl Told {
    pub(super) fn tell(self) {
        self.wakers.into_iter().for_each(Waker::wake);
        drop(self.left);
    }
}

#[derive(Default)]
pub(super) struct Room {
    /// One of the holds.
    first: Option<Inside>,
    /// Made when there is something to be kept there.
    more: Option<Box<More>>,
}

/// What is rarely there.
#[derive(Default)]
struct More {
    signals: Option<Arc<Signals>>,
    /// The other holds.
    holds: Numbered<&'static Location<'static>>,
    /// Those who read under this write grant.
    readers: Numbered<&'static Location<'static>>,
    gate: Option<Box<Gate>>,
}

/// Those who wait to come in.
#[derive(Default)]
struct Gate {
    /// By the id that their hold will have, which is the order in which they came.
    waiters: Numbered<Waiter>,
    lines: Numbered<WaitLine>,
    /// The number of the line behind somebody: a hold, or one who is called or was.
    behind: Numbered<u64>,
    /// Those who are called, and until when they are waited for: one who writes, or several who read.
    called: BTreeMap<u64, Instant>,
}

struct WaitLine {
    of: u64,
    waiters: BTreeSet<u64>,
}

/// One who waits.
struct Waiter {
    reads: bool,
    by: &'static Location<'static>,
    scope: Scope,
    besides: SmallVec<[u64; 1]>,
    stands: Stands,
    waker: Option<Waker>,
}

#[derive(Clone, Copy)]
enum Stands {
    /// In the line of this number.
    InLine(u64),
    Called,
    /// Nowhere: it was called, and looks again when it is polled.
    Passed,
}

impl Waiter {
    fn around(&self) -> Around<'_> {
        Around::Frames(&self.scope, &self.besides)
    }
}

impl Room {
    pub(super) fn of(hold: Inside) -> Room {
        Room {
            first: Some(hold),
            more: None,
        }
    }

    fn more(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }

    pub(super) fn signals(&self) -> Option<Arc<Signals>> {
        self.more.as_ref()?.signals.clone()
    }

    pub(super) fn make_signals(&mut self) -> Arc<Signals> {
        self.more().signals.get_or_insert_default().clone()
    }

    pub(super) fn has(&self, hold: u64) -> bool {
        let first = self.first.is_some_and(|(id, _)| id == hold);
        first
            || self
                .more
                .as_ref()
                .is_some_and(|more| more.holds.contains_key(&hold))
    }

    fn is_reader(&self, id: u64) -> bool {
        self.more
            .as_ref()
            .is_some_and(|more| more.readers.contains_key(&id))
    }

    fn hold_count(&self) -> usize {
        usize::from(self.first.is_some()) + self.more.as_ref().map_or(0, |more| more.holds.len())
    }

    fn reader_count(&self) -> usize {
        self.more.as_ref().map_or(0, |more| more.readers.len())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.hold_count() == 0
    }

    pub(super) fn has_readers(&self) -> bool {
        self.reader_count() > 0
    }

    pub(super) fn holds(&self) -> impl Iterator<Item = Inside> {
        let others = self.more.iter().flat_map(|more| &more.holds);
        self.first
            .into_iter()
            .chain(others.map(|(id, line)| (*id, *line)))
    }

    fn gate(&self) -> Option<&Gate> {
        self.more.as_ref()?.gate.as_deref()
    }

    fn gate_mut(&mut self) -> Option<&mut Gate> {
        self.more.as_mut()?.gate.as_deref_mut()
    }

    /// Lets the asker in, as one who reads under this write grant or as one who holds it, where nobody is in the way.
    pub(super) fn enter(&mut self, asker: &Asker<'_>, reads: bool, told: &mut Told) -> Result<(), InTheWay> {
        self.pass_over(told);
        let waits_for_called = asker.mode != EntryMode::TryFirst;
        if let Some((id, way)) = self.in_the_way(asker.id, asker.around, reads, waits_for_called) {
            if asker.mode == EntryMode::Wait {
                self.add_waiter(asker, reads);
                self.stand_behind(asker.id, id);
            }
            return Err(way);
        }
        told.left = self.remove_waiter(asker.id);
        match reads {
            true => drop(self.more().readers.insert(asker.id, asker.by)),
            false => drop(self.more().holds.insert(asker.id, asker.by)),
        }
        if !waits_for_called {
            self.call_back(asker.id, reads);
        }
        Ok(())
    }

    /// One hold more, whoever is inside: those who read do not mind each other.
    pub(super) fn add(&mut self, (hold, line): Inside) {
        self.more().holds.insert(hold, line);
    }

    /// Somebody who keeps the asker out: of those who hold the one who came first, of those who read any.
    fn in_the_way(
        &self,
        own: u64,
        around: Around<'_>,
        reads: bool,
        waits_for_called: bool,
    ) -> Option<(u64, InTheWay)> {
        let inside = |(id, line): Inside| (id, InTheWay { line, until: None });
        if !around.are_all(self.hold_count(), |id| self.has(id)) {
            let others = self.holds().filter(|(id, _)| !around.has(*id));
            if let Some(first) = others.min_by_key(|(id, _)| *id) {
                return Some(inside(first));
            }
        }
        if !reads && !around.are_all(self.reader_count(), |id| self.is_reader(id)) {
            let mut readers = self.more.iter().flat_map(|more| &more.readers);
            if let Some((id, line)) = readers.find(|(id, _)| !around.has(**id)) {
                return Some(inside((*id, *line)));
            }
        }
        let gate = self.gate().filter(|_| waits_for_called)?;
        let mut called = gate.called.iter().filter(|(id, _)| **id != own);
        let (id, until) = called.next()?;
        let waiter = gate.waiters.get(id).filter(|waiter| !(reads && waiter.reads))?;
        let until = Some(*until);
        Some((
            *id,
            InTheWay {
                line: waiter.by,
                until,
            },
        ))
    }

    /// Adds the asker to the waiters, if it is not one of them.
    fn add_waiter(&mut self, asker: &Asker<'_>, reads: bool) {
        let Around::Frames(scope, besides) = asker.around else {
            return;
        };
        let gate = self.more().gate.get_or_insert_default();
        gate.waiters.entry(asker.id).or_insert_with(|| Waiter {
            reads,
            by: asker.by,
            scope: scope.clone(),
            besides: besides.into(),
            stands: Stands::Passed,
            waker: None,
        });
    }

    /// Has one who waits stand behind another one, in the order in which they came.
    fn stand_behind(&mut self, id: u64, other: u64) {
        let Some(gate) = self.gate_mut() else { return };
        gate.leave_place(id);
        let number = *gate.behind.entry(other).or_insert_with(next_id);
        let line = gate.lines.entry(number).or_insert_with(|| WaitLine {
            of: other,
            waiters: BTreeSet::new(),
        });
        line.waiters.insert(id);
        if let Some(waiter) = gate.waiters.get_mut(&id) {
            waiter.stands = Stands::InLine(number);
        }
    }

    /// Removes a waiter.
    fn remove_waiter(&mut self, id: u64) -> Option<Waiter> {
        let gate = self.gate_mut()?;
        gate.leave_place(id);
        gate.waiters.remove(&id)
    }

    /// One who has come in out of turn keeps out those who are called.
    fn call_back(&mut self, id: u64, reads: bool) {
        let Some(gate) = self.gate_mut() else { return };
        let kept_out = |called: &&u64| !reads || gate.waiters.get(called).is_some_and(|waiter| !waiter.reads);
        let kept_out: SmallVec<[u64; 1]> = gate.called.keys().filter(kept_out).copied().collect();
        for called in kept_out {
            self.stand_behind(called, id);
        }
    }

    /// Passes over those who were called and not polled in time.
    fn pass_over(&mut self, told: &mut Told) {
        let Some(gate) = self.gate_mut().filter(|gate| !gate.called.is_empty()) else {
            return;
        };
        let now = clock::now();
        // In the order in which they came, which nearly is that in which they were called.
        let overdue = gate.called.iter().take_while(|(_, until)| now >= **until);
        let overdue: SmallVec<[u64; 1]> = overdue.map(|(id, _)| *id).collect();
        for id in &overdue {
            gate.leave_place(*id);
        }
        for id in overdue {
            self.has_left(id, told);
        }
    }

    /// A hold, a reader, or one who waited has left: those behind it are looked at.
    fn has_left(&mut self, id: u64, told: &mut Told) {
        let Some((number, mut line)) = self.gate_mut().and_then(|gate| gate.take_line(id)) else {
            return;
        };
        while let Some(next) = line.waiters.pop_first() {
            let Some(waiter) = self.gate().and_then(|gate| gate.waiters.get(&next)) else {
                continue;
            };
            let reads = waiter.reads;
            if let Some((other, _)) = self.in_the_way(next, waiter.around(), reads, true) {
                self.stand_behind(next, other);
                continue;
            }
            let Some(gate) = self.gate_mut() else { return };
            told.wakers.extend(gate.call(next));
            if !reads && !line.waiters.is_empty() {
                return gate.follow(next, number, line);
            }
        }
    }

    /// Has one who holds leave, and looks at those behind it. Whether it was the last.
    pub(super) fn remove_hold(&mut self, hold: u64, told: &mut Told) -> bool {
        if self.first.is_some_and(|(id, _)| id == hold) {
            self.first = None;
        } else if let Some(more) = &mut self.more {
            more.holds.remove(&hold);
        }
        let last = self.is_empty();
        if !last {
            self.has_left(hold, told);
        }
        last
    }

    /// The same for one who reads. Whether it was there.
    pub(super) fn remove_reader(&mut self, reader: u64, told: &mut Told) -> bool {
        let was_there = self
            .more
            .as_mut()
            .is_some_and(|more| more.readers.remove(&reader).is_some());
        if was_there {
            self.has_left(reader, told);
        }
        was_there
    }

    /// One who waited goes away, or has come in.
    pub(super) fn vacate(&mut self, id: u64, told: &mut Told) {
        told.left = self.remove_waiter(id);
        if told.left.is_some() {
            self.has_left(id, told);
        }
    }

    /// It is over: all who wait look for another way.
    pub(super) fn close(&mut self, told: &mut Told) {
        let Some(gate) = self.gate_mut() else { return };
        for waiter in gate.waiters.values_mut() {
            waiter.stands = Stands::Passed;
            told.wakers.extend(waiter.waker.take());
        }
        gate.lines.clear();
        gate.behind.clear();
        gate.called.clear();
    }

    /// Whether one who waits is to look again; else it is told by this waker. With the waker to be dropped.
    pub(super) fn is_called(&mut self, id: u64, waker: Waker) -> (bool, Option<Waker>) {
        let Some(waiter) = self.gate_mut().and_then(|gate| gate.waiters.get_mut(&id)) else {
            return (true, Some(waker));
        };
        match waiter.stands {
            Stands::InLine(_) => (false, waiter.waker.replace(waker)),
            Stands::Called | Stands::Passed => (true, Some(waker)),
        }
    }
}

impl Gate {
    /// Has one who waits stand nowhere.
    fn leave_place(&mut self, id: u64) {
        let Some(waiter) = self.waiters.get_mut(&id) else {
            return;
        };
        let stood = std::mem::replace(&mut waiter.stands, Stands::Passed);
        match stood {
            Stands::InLine(number) => {
                if let Some(line) = self.lines.get_mut(&number)
                    && line.waiters.remove(&id)
                    && line.waiters.is_empty()
                {
                    let of = line.of;
                    self.lines.remove(&number);
                    self.behind.remove(&of);
                }
            }
            Stands::Called => drop(self.called.remove(&id)),
            Stands::Passed => {}
        }
    }

    fn take_line(&mut self, of: u64) -> Option<(u64, WaitLine)> {
        let number = self.behind.remove(&of)?;
        Some((number, self.lines.remove(&number)?))
    }

    fn call(&mut self, id: u64) -> Option<Waker> {
        let waiter = self.waiters.get_mut(&id)?;
        waiter.stands = Stands::Called;
        self.called.insert(id, clock::now() + FRAME_POLL_DEADLINE);
        waiter.waker.take()
    }

    /// Has a whole line stand behind one of them.
    fn follow(&mut self, id: u64, number: u64, line: WaitLine) {
        let Some(other) = self.behind.get(&id).copied() else {
            self.behind.insert(id, number);
            self.lines.insert(number, WaitLine { of: id, ..line });
            return;
        };
        // It was called before, and others have stood behind it since.
        for follower in line.waiters {
            if let Some(waiter) = self.waiters.get_mut(&follower) {
                waiter.stands = Stands::InLine(other);
            }
            if let Some(line) = self.lines.get_mut(&other) {
                line.waiters.insert(follower);
            }
        }
    }
}
