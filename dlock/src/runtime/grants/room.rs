//! The holds inside a grant, and the branches of its frames that wait to enter.
//!
//! Branches of a frame that ask for its lock exclude each other, and are served in order of arrival. A branch that must
//! wait stands behind one of the holds that keep it out, and is checked again when that hold has left; so a leaving
//! hold costs nothing for branches that wait for other holds. The first waiter that may enter then is *called*, and the
//! others of the same line stand behind it from then on. A called waiter that is not polled in time is passed over,
//! until it is polled.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::end::Signals;
use super::span::HoldSpan;
use crate::base::chance::{HashMap, next_id};
use crate::base::clock;
use crate::base::int_hash::BuildIntHasher;
use crate::base::waking::waking;
use crate::engine::timing::FRAME_POLL_DEADLINE;
use crate::runtime::scope::Scope;

/// A hold inside, and the source line at which it entered.
pub(super) type Inside = (u64, &'static Location<'static>);

type Numbered<T> = HashMap<u64, T, BuildIntHasher>;

/// The request of a caller to enter.
pub(crate) struct EntryRequest<'a> {
    /// The id that its hold will have.
    pub(crate) id: u64,
    pub(crate) by: &'static Location<'static>,
    pub(crate) around: OuterHolds<'a>,
    pub(crate) mode: EntryMode,
}

/// The holds that are around a caller: those of its frames.
#[derive(Clone, Copy)]
pub(crate) enum OuterHolds<'a> {
    /// A second guard made from a first one: nothing blocks it.
    All,
    /// The holds of these frames, and these.
    Frames(&'a Scope, &'a [u64]),
}

/// What a caller does if it is blocked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EntryMode {
    /// It waits, in the order of arrival.
    Wait,
    /// It does not wait.
    Try,
    /// It does not wait, but goes before called waiters, because it has waited.
    TryFirst,
}

/// The hold or waiter that keeps a caller out.
pub(crate) struct Blocker {
    /// Where it entered, or wants to enter.
    pub(crate) line: &'static Location<'static>,
    /// When it is passed over, if it is not inside yet.
    pub(crate) until: Option<Instant>,
}

impl OuterHolds<'_> {
    fn has(self, id: u64) -> bool {
        match self {
            OuterHolds::All => true,
            OuterHolds::Frames(scope, besides) => besides.contains(&id) || scope.contains(id),
        }
    }

    /// Whether these are all of `many` holds, each of which `is_there` checks.
    fn are_all(self, many: usize, is_there: impl Fn(u64) -> bool) -> bool {
        match self {
            OuterHolds::All => true,
            // A scope lists each hold once, but a hold may occur again outside of it.
            OuterHolds::Frames(scope, _) => {
                many == 0 || scope.holds().filter(|id| is_there(*id)).count() == many
            }
        }
    }
}

/// Wakers to wake or drop when no mutex is held.
#[derive(Default)]
pub(super) struct Wakeups {
    wakers: SmallVec<[Waker; 2]>,
    left: Option<Waiter>,
}

impl Wakeups {
    pub(super) fn wake(self) {
        for waker in self.wakers {
            waking(|| waker.wake());
        }
        drop(self.left);
    }
}

#[derive(Default)]
pub(super) struct Room {
    /// One of the holds.
    first: Option<Inside>,
    /// Created on demand.
    more: Option<Box<More>>,
}

/// Rarely needed fields.
#[derive(Default)]
struct More {
    signals: Option<Arc<Signals>>,
    note: Option<Arc<str>>,
    trace: Option<Box<HoldSpan>>,
    /// The other holds.
    holds: Numbered<&'static Location<'static>>,
    /// The reads under this write grant.
    readers: Numbered<&'static Location<'static>>,
    gate: Option<Box<Gate>>,
}

/// The waiters that want to enter.
#[derive(Default)]
struct Gate {
    /// By the id that their hold will have, which is the order of arrival.
    waiters: Numbered<Waiter>,
    lines: Numbered<WaitLine>,
    /// The number of the line behind a hold, or behind a waiter that is or was called.
    behind: Numbered<u64>,
    /// The called waiters, and until when they are expected: one writer, or several readers.
    called: BTreeMap<u64, Instant>,
}

struct WaitLine {
    of: u64,
    waiters: BTreeSet<u64>,
}

/// A waiter that wants to enter.
struct Waiter {
    reads: bool,
    by: &'static Location<'static>,
    scope: Scope,
    besides: SmallVec<[u64; 1]>,
    state: WaiterState,
    waker: Option<Waker>,
}

#[derive(Clone, Copy)]
enum WaiterState {
    /// In the line of this number.
    InLine(u64),
    Called,
    /// In no line: it was called, and checks again when it is polled.
    Passed,
}

impl Waiter {
    fn around(&self) -> OuterHolds<'_> {
        OuterHolds::Frames(&self.scope, &self.besides)
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

    pub(super) fn note(&self) -> Option<Arc<str>> {
        self.more.as_ref()?.note.clone()
    }

    pub(super) fn set_note(&mut self, note: Option<Arc<str>>) {
        self.more().note = note;
    }

    pub(super) fn span(&self) -> Option<&HoldSpan> {
        self.more.as_ref()?.trace.as_deref()
    }

    pub(super) fn span_mut(&mut self) -> Option<&mut HoldSpan> {
        self.more.as_mut()?.trace.as_deref_mut()
    }

    /// Records a confirmed renewal with this much of the lease left; reported later, if there is a span.
    pub(super) fn renewed_with(&mut self, left: Duration) {
        if let Some(HoldSpan::Own(_, renewed)) = self.span_mut() {
            *renewed = Some(left);
        }
    }

    pub(super) fn set_span(&mut self, span: HoldSpan) {
        self.more().trace = Some(Box::new(span));
    }

    pub(super) fn take_span(&mut self) -> Option<HoldSpan> {
        let span = self.more.as_mut()?.trace.take();
        span.map(|span| *span)
    }

    /// Where its holds entered, in order.
    pub(super) fn lines(&self) -> Vec<&'static Location<'static>> {
        let mut holds: Vec<_> = self.holds().collect();
        holds.sort_unstable_by_key(|(id, _)| *id);
        holds.into_iter().map(|(_, line)| line).collect()
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

    /// Lets the caller in, as a read under this write grant or as a hold, unless it is blocked.
    pub(super) fn enter(
        &mut self,
        request: &EntryRequest<'_>,
        reads: bool,
        wakeups: &mut Wakeups,
    ) -> Result<(), Blocker> {
        self.pass_over(wakeups);
        let waits_for_called = request.mode != EntryMode::TryFirst;
        if let Some((id, way)) = self.blocker(request.id, request.around, reads, waits_for_called) {
            if request.mode == EntryMode::Wait {
                self.add_waiter(request, reads);
                self.queue_behind(request.id, id);
            }
            return Err(way);
        }
        wakeups.left = self.remove_waiter(request.id);
        match reads {
            true => drop(self.more().readers.insert(request.id, request.by)),
            false => drop(self.more().holds.insert(request.id, request.by)),
        }
        if !waits_for_called {
            self.call_back(request.id, reads);
        }
        Ok(())
    }

    /// Adds a hold, whatever is inside: reads do not exclude each other.
    pub(super) fn add(&mut self, (hold, line): Inside) {
        self.more().holds.insert(hold, line);
    }

    /// Returns what blocks the caller: the oldest of the holds, or any of the reads.
    fn blocker(
        &self,
        own: u64,
        around: OuterHolds<'_>,
        reads: bool,
        waits_for_called: bool,
    ) -> Option<(u64, Blocker)> {
        let inside = |(id, line): Inside| (id, Blocker { line, until: None });
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
            Blocker {
                line: waiter.by,
                until,
            },
        ))
    }

    /// Adds the caller to the waiters, if it is not one of them.
    fn add_waiter(&mut self, request: &EntryRequest<'_>, reads: bool) {
        let OuterHolds::Frames(scope, besides) = request.around else {
            return;
        };
        let gate = self.more().gate.get_or_insert_default();
        gate.waiters.entry(request.id).or_insert_with(|| Waiter {
            reads,
            by: request.by,
            scope: scope.clone(),
            besides: besides.into(),
            state: WaiterState::Passed,
            waker: None,
        });
    }

    /// Puts a waiter behind another waiter or a hold, in order of arrival.
    fn queue_behind(&mut self, id: u64, other: u64) {
        let Some(gate) = self.gate_mut() else { return };
        gate.leave_line(id);
        let number = *gate.behind.entry(other).or_insert_with(next_id);
        let line = gate.lines.entry(number).or_insert_with(|| WaitLine {
            of: other,
            waiters: BTreeSet::new(),
        });
        line.waiters.insert(id);
        if let Some(waiter) = gate.waiters.get_mut(&id) {
            waiter.state = WaiterState::InLine(number);
        }
    }

    /// Removes a waiter.
    fn remove_waiter(&mut self, id: u64) -> Option<Waiter> {
        let gate = self.gate_mut()?;
        gate.leave_line(id);
        gate.waiters.remove(&id)
    }

    /// Takes back the call of waiters after a caller has entered out of turn.
    fn call_back(&mut self, id: u64, reads: bool) {
        let Some(gate) = self.gate_mut() else { return };
        let kept_out = |called: &&u64| !reads || gate.waiters.get(called).is_some_and(|waiter| !waiter.reads);
        let kept_out: SmallVec<[u64; 1]> = gate.called.keys().filter(kept_out).copied().collect();
        for called in kept_out {
            self.queue_behind(called, id);
        }
    }

    /// Passes over the called waiters that were not polled in time.
    fn pass_over(&mut self, wakeups: &mut Wakeups) {
        let Some(gate) = self.gate_mut().filter(|gate| !gate.called.is_empty()) else {
            return;
        };
        let now = clock::now();
        // In order of arrival, which is nearly the order of their calls.
        let overdue = gate.called.iter().take_while(|(_, until)| now >= **until);
        let overdue: SmallVec<[u64; 1]> = overdue.map(|(id, _)| *id).collect();
        for id in &overdue {
            gate.leave_line(*id);
        }
        for id in overdue {
            self.has_left(id, wakeups);
        }
    }

    /// Checks the waiters behind a hold, a reader or a waiter that has left.
    fn has_left(&mut self, id: u64, wakeups: &mut Wakeups) {
        let Some((number, mut line)) = self.gate_mut().and_then(|gate| gate.take_line(id)) else {
            return;
        };
        while let Some(next) = line.waiters.pop_first() {
            let Some(waiter) = self.gate().and_then(|gate| gate.waiters.get(&next)) else {
                continue;
            };
            let reads = waiter.reads;
            if let Some((other, _)) = self.blocker(next, waiter.around(), reads, true) {
                self.queue_behind(next, other);
                continue;
            }
            let Some(gate) = self.gate_mut() else { return };
            wakeups.wakers.extend(gate.call(next));
            if !reads && !line.waiters.is_empty() {
                return gate.follow(next, number, line);
            }
        }
    }

    /// Removes a hold, and checks the waiters behind it. Returns whether it was the last.
    pub(super) fn remove_hold(&mut self, hold: u64, wakeups: &mut Wakeups) -> bool {
        if self.first.is_some_and(|(id, _)| id == hold) {
            self.first = None;
        } else if let Some(more) = &mut self.more {
            more.holds.remove(&hold);
        }
        let last = self.is_empty();
        if !last {
            self.has_left(hold, wakeups);
        }
        last
    }

    /// Removes a read, and checks the waiters behind it. Returns whether it existed.
    pub(super) fn remove_reader(&mut self, reader: u64, wakeups: &mut Wakeups) -> bool {
        let was_there = self
            .more
            .as_mut()
            .is_some_and(|more| more.readers.remove(&reader).is_some());
        if was_there {
            self.has_left(reader, wakeups);
        }
        was_there
    }

    /// Removes a waiter that has gone or entered.
    pub(super) fn vacate(&mut self, id: u64, wakeups: &mut Wakeups) {
        wakeups.left = self.remove_waiter(id);
        if wakeups.left.is_some() {
            self.has_left(id, wakeups);
        }
    }

    /// Ends the room with its grant: all waiters find another way.
    pub(super) fn close(&mut self, wakeups: &mut Wakeups) {
        let Some(gate) = self.gate_mut() else { return };
        for waiter in gate.waiters.values_mut() {
            waiter.state = WaiterState::Passed;
            wakeups.wakers.extend(waiter.waker.take());
        }
        gate.lines.clear();
        gate.behind.clear();
        gate.called.clear();
    }

    /// Whether a waiter is to check again; otherwise registers its waker. Also returns the waker to drop.
    pub(super) fn is_called(&mut self, id: u64, waker: Waker) -> (bool, Option<Waker>) {
        let Some(waiter) = self.gate_mut().and_then(|gate| gate.waiters.get_mut(&id)) else {
            return (true, Some(waker));
        };
        match waiter.state {
            WaiterState::InLine(_) => (false, waiter.waker.replace(waker)),
            WaiterState::Called | WaiterState::Passed => (true, Some(waker)),
        }
    }
}

impl Gate {
    /// Removes a waiter from its line.
    fn leave_line(&mut self, id: u64) {
        let Some(waiter) = self.waiters.get_mut(&id) else {
            return;
        };
        let stood = std::mem::replace(&mut waiter.state, WaiterState::Passed);
        match stood {
            WaiterState::InLine(number) => {
                if let Some(line) = self.lines.get_mut(&number)
                    && line.waiters.remove(&id)
                    && line.waiters.is_empty()
                {
                    let of = line.of;
                    self.lines.remove(&number);
                    self.behind.remove(&of);
                }
            }
            WaiterState::Called => drop(self.called.remove(&id)),
            WaiterState::Passed => {}
        }
    }

    fn take_line(&mut self, of: u64) -> Option<(u64, WaitLine)> {
        let number = self.behind.remove(&of)?;
        Some((number, self.lines.remove(&number)?))
    }

    fn call(&mut self, id: u64) -> Option<Waker> {
        let waiter = self.waiters.get_mut(&id)?;
        waiter.state = WaiterState::Called;
        self.called.insert(id, clock::now() + FRAME_POLL_DEADLINE);
        waiter.waker.take()
    }

    /// Moves a whole line behind one of its waiters.
    fn follow(&mut self, id: u64, number: u64, line: WaitLine) {
        let Some(other) = self.behind.get(&id).copied() else {
            self.behind.insert(id, number);
            self.lines.insert(number, WaitLine { of: id, ..line });
            return;
        };
        // It was called before, and others stand behind it since.
        for follower in line.waiters {
            if let Some(waiter) = self.waiters.get_mut(&follower) {
                waiter.state = WaiterState::InLine(other);
            }
            if let Some(line) = self.lines.get_mut(&other) {
                line.waiters.insert(follower);
            }
        }
    }
}
