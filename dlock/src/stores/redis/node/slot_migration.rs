//! Slots that move between servers of a Cluster, and their steps.
//!
//! Steps of a slot keep their order during the move. The receiving server is told first, and sends none of its steps
//! until those of the other server have arrived; that one transfers them as soon as none of its calls of the slot is in
//! flight any more.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::actor::Actor;
use super::{Node, Request, Step};
use crate::stores::redis::cluster::slot::Slot;

/// Slots with the same source and target.
pub(in super::super) type Slots = Arc<[Slot]>;

/// A message to a server.
pub(super) enum Move {
    /// These slots come here, once another server has transferred them.
    Expect(Slots),
    /// These slots go there.
    Give(Slots, Node),
    /// Steps from another server.
    Arrive(Parcel),
    /// The server has no slots any more, and will not get any.
    Retire,
}

/// What a server transfers.
#[derive(Default)]
pub(super) struct Parcel {
    /// The slots that come with it; none for steps that are only passed on.
    slots: Vec<Slot>,
    steps: Vec<Step>,
    /// Releases that have failed, see [`SendQueue::keep`](super::send_queue::SendQueue::keep).
    kept: Vec<Step>,
}

/// Pending slot changes, in order.
#[derive(Default)]
pub(super) struct SlotMigrations(HashMap<Slot, VecDeque<Pending>>);

enum Pending {
    Arrival,
    Departure(Node),
}

impl SlotMigrations {
    /// Whether steps of this slot may be sent.
    pub(super) fn is_settled(&self, slot: Option<Slot>) -> bool {
        self.0.is_empty() || slot.is_none_or(|slot| !self.0.contains_key(&slot))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn push(&mut self, slot: Slot, pending: Pending) {
        self.0.entry(slot).or_default().push_back(pending);
    }

    /// Performs the change now, if possible.
    fn done(&mut self, slot: Slot, is_it: impl FnOnce(&Pending) -> bool) -> Option<Pending> {
        let queue = self.0.get_mut(&slot)?;
        let done = match queue.front().is_some_and(is_it) {
            true => queue.pop_front(),
            false => None,
        };
        if queue.is_empty() {
            self.0.remove(&slot);
        }
        done
    }
}

impl Node {
    fn tell(&self, order: Move) {
        self.queue.send(Request::Move(Box::new(order)));
    }

    /// These slots go from here to another server.
    pub(in super::super) fn give(&self, slots: &Slots, to: &Node) {
        to.tell(Move::Expect(slots.clone()));
        self.tell(Move::Give(slots.clone(), to.clone()));
    }

    /// Passes on steps that belong here.
    pub(in super::super) fn pass_on(&self, steps: Vec<Step>) {
        self.tell(Move::Arrive(Parcel {
            steps,
            ..Parcel::default()
        }));
    }

    /// Ends the connection and transfers what is left.
    pub(in super::super) fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
        self.tell(Move::Retire);
    }
}

impl Actor {
    pub(super) fn take_order(&mut self, order: Move) {
        match order {
            Move::Expect(slots) => {
                for slot in slots.iter() {
                    self.moves.push(*slot, Pending::Arrival);
                }
            }
            Move::Give(slots, to) => {
                for slot in slots.iter() {
                    self.moves.push(*slot, Pending::Departure(to.clone()));
                }
                self.give_slots(&slots);
            }
            Move::Arrive(Parcel { slots, steps, kept }) => {
                self.send_queue.put_back(steps);
                kept.into_iter().for_each(|release| self.send_queue.keep(release));
                for slot in &slots {
                    self.moves.done(*slot, |next| matches!(next, Pending::Arrival));
                }
                self.give_slots(&slots);
            }
            Move::Retire => self.retired = true,
        }
    }

    /// Transfers the steps of these slots that go to other servers and are not in flight.
    pub(super) fn give_slots(&mut self, slots: &[Slot]) {
        if self.moves.is_empty() {
            return;
        }
        let under_way: HashSet<_> = self.calls.iter().filter_map(|call| call.slot).collect();
        let mut parcels: Vec<(Node, HashSet<Slot>)> = Vec::new();
        for slot in slots.iter().filter(|slot| !under_way.contains(slot)) {
            let leaves = |next: &Pending| matches!(next, Pending::Departure(_));
            // One change at a time: what follows a departure has to arrive first.
            let Some(Pending::Departure(to)) = self.moves.done(*slot, leaves) else {
                continue;
            };
            match parcels.iter_mut().find(|(node, _)| node.queue.is(&to.queue)) {
                Some((_, with)) => drop(with.insert(*slot)),
                None => parcels.push((to, HashSet::from([*slot]))),
            }
        }
        for (to, slots) in parcels {
            let (mut steps, mut kept) = self.send_queue.drain(&slots);
            steps.iter_mut().for_each(|step| step.asking = false);
            // Steps sent here can no longer take effect, so there is nothing to wait for.
            let is_theirs = |step: &Step| step.call.slot.is_some_and(|slot| slots.contains(&slot));
            let later = self.later.iter().filter(|(_, step)| is_theirs(step));
            let later: Vec<_> = later.map(|(at, _)| *at).collect();
            kept.extend(later.iter().filter_map(|at| self.later.remove(at)));
            to.tell(Move::Arrive(Parcel {
                slots: slots.into_iter().collect(),
                steps,
                kept,
            }));
        }
    }

    /// The same for all slots.
    pub(super) fn give_all_slots(&mut self) {
        let slots: Vec<_> = self.moves.0.keys().copied().collect();
        self.give_slots(&slots);
    }

    /// The end of a retired server: transfers what is left, as soon as it has arrived here itself.
    pub(super) async fn wind_up(mut self) {
        loop {
            self.give_all_slots();
            if self.moves.is_empty() {
                break;
            }
            let due = self.due();
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.take_in(request),
                    None => break,
                },
                () = super::alarm::sleep_until(due) => self.look_at_the_clock(),
            }
        }
        self.requests.close();
        while let Some(request) = self.requests.try_recv() {
            self.take_in(request);
        }
        // Slots of other servers: their steps were passed on to this server only for a moment.
        if let Some(cluster) = self.cluster() {
            let later = std::mem::take(&mut self.later).into_values();
            cluster.reroute(self.send_queue.drain_all().chain(later).collect());
        }
    }
}
