//! What is sent next, how, and when.

use tokio::time::Instant;

use super::Step;
use super::actor::Actor;
use super::by_commands;
use super::flow_control::{CALLS, NEAR};
use super::in_flight::{Batch, CallForm, InFlight};
use super::late_copies::micros;
use super::replicas::{ConnectionRole, Wires};
use crate::base::clock;
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::command::Packed;
use crate::stores::redis::script::{self, By};

/// The maximum number of calls in flight in a Cluster, where each carries steps of one slot only.
pub(in super::super) const CALLS_IN_ALL: usize = 128;

impl Actor {
    /// Sends what may be sent now.
    pub(super) fn depart(&mut self, wires: &mut Wires) {
        if self.has_nothing_to_send() {
            return;
        }
        let may_wait = self.waits_for_company() || self.waits_for_more();
        // No step comes any more once no handle is left.
        self.holds_back = may_wait && self.plain.is_empty() && !self.requests.is_over();
        if self.holds_back {
            return;
        }
        let _reading = clock::one_reading();
        while let Some((batch, form, role)) = self.next_batch() {
            self.send(batch, form, role, wires);
        }
    }

    fn has_nothing_to_send(&self) -> bool {
        self.send_queue.is_empty() && self.plain.is_empty()
    }

    /// Whether all that would be sent is cheaper together with what follows, and the last call in flight is about the same lock:
    /// the server would carry it out after that call anyway.
    fn waits_for_company(&self) -> bool {
        let Some(Batch::Steps(steps)) = self.calls.back().map(|call| &call.batch) else {
            return false;
        };
        let gathers = self.replicas.is_none() && self.flow_control.gathers();
        let last = steps.last().filter(|_| gathers);
        last.is_some_and(|last| self.send_queue.company_on() == Some(&*last.call.key))
    }

    /// Whether the queued steps are too few for a call of their own. They do not wait once the oldest call has been in flight
    /// for a millisecond.
    fn waits_for_more(&self) -> bool {
        let Some(oldest) = self.calls.front() else {
            return false;
        };
        (self.flow_control).waits_for_more(self.send_queue.len(), self.in_flight())
            && clock::now().saturating_duration_since(oldest.sent_at) < NEAR
    }

    /// How many calls may be in flight on a connection: in a Cluster there are many anyway, and with acknowledgements
    /// by replicas each call waits for those before it.
    fn calls(&self) -> usize {
        match (&self.part.cluster, &self.replicas) {
            (Some(_), _) => CALLS_IN_ALL,
            (None, Some(_)) => CALLS,
            (None, None) => self.flow_control.calls(),
        }
    }

    /// Chooses what to send next, how, which is nothing to a plain command, and on which connection.
    fn next_batch(&mut self) -> Option<(Batch, CallForm, ConnectionRole)> {
        if self.has_nothing_to_send() {
            return None;
        }
        let by_hash = CallForm::Script(By::Hash);
        let role = match self.plain.front() {
            Some(plain) => plain.role,
            None => self.role(),
        };
        let under_way = self.calls.iter().filter(|call| call.role == role);
        if under_way.count() >= self.calls() {
            return None;
        }
        if let Some(plain) = self.plain.pop_front() {
            return Some((Batch::Plain(plain), by_hash, role));
        }
        // Else steps that only the script can do might wait for ever.
        let script_is_next =
            std::mem::take(&mut self.script_is_next) && !self.send_queue.may_begin_with_untold_release();
        if !script_is_next && let Some((steps, form)) = self.next_by_commands() {
            return Some((Batch::Steps(steps), form, role));
        }
        if let Some(steps) = self.next_by_script(role) {
            return Some((Batch::Steps(steps), by_hash, role));
        }
        let (steps, form) = self.next_by_commands()?;
        Some((Batch::Steps(steps), form, role))
    }

    /// Chooses the next steps that commands can do.
    fn next_by_commands(&mut self) -> Option<(Vec<Step>, CallForm)> {
        if !self.connector.releases_by_commands() {
            return None;
        }
        let now = clock::now();
        let server_time = self.late_copies.server_time(now);
        let with_acquires =
            self.former_connections.may_have_acquires() && self.token_draws.are_possible(now, server_time);
        let (steps, needs_script) = self.send_queue.take_by_commands(now, with_acquires);
        if steps.is_empty() {
            return None;
        }
        self.script_is_next = needs_script;
        let acquires = &steps[by_commands::releases(&steps)..];
        if !acquires.is_empty() {
            self.former_connections.has_acquires();
        }
        let in_flight = self.calls.iter().map(|call| match call.form {
            CallForm::Commands { tokens } => tokens,
            CallForm::Script(_) => 0,
        });
        let tokens = self.token_draws.count_for(acquires, now, in_flight.sum());
        Some((steps, CallForm::Commands { tokens }))
    }

    /// Chooses the next steps for the script, whether or not commands can do them.
    fn next_by_script(&mut self, role: ConnectionRole) -> Option<Vec<Step>> {
        let gate = self.gate(role);
        let (calls, moves) = (&self.calls, &self.moves);
        let mut last = None;
        let may_send = |slot: Option<Slot>| {
            // Many waiters for the same acknowledgement are counted once.
            if let Some((same, may)) = last
                && same == slot
            {
                return may;
            }
            let is_there = |call: &&InFlight| call.role == role && call.slot == slot;
            let under_way = calls.iter().filter(is_there);
            // Without slots, that was counted already.
            let has_room = slot.is_none() || under_way.count() < CALLS;
            let may = has_room && moves.is_settled(slot);
            last = Some((slot, may));
            may
        };
        self.send_queue.take(clock::now(), gate, may_send)
    }

    pub(super) fn send(&mut self, mut batch: Batch, form: CallForm, role: ConnectionRole, wires: &mut Wires) {
        let now = clock::now();
        let (command, due, until) = match &mut batch {
            // Handled separately.
            Batch::Wait => return,
            Batch::Plain(plain) => (Packed::from(&plain.cmd), plain.deadline, plain.deadline),
            Batch::Steps(steps) => {
                let server_now = self.late_copies.server_time(now);
                let due = steps.iter().map(|step| step.deadline).min().unwrap_or(now);
                let until = steps.iter().map(|step| step.deadline).max().unwrap_or(now);
                let refuse = |deadline: Instant| {
                    server_now.saturating_add(micros(deadline.saturating_duration_since(now)))
                };
                for step in steps.iter_mut() {
                    step.permit = None;
                    step.sent += 1;
                    // Acquires share one deadline.
                    step.refuse_after = refuse(match step.call.is_acquire() {
                        true => until,
                        false => step.deadline,
                    });
                }
                let room = std::mem::take(&mut self.room);
                let command = match form {
                    CallForm::Commands { tokens } => {
                        by_commands::write(steps, tokens, &self.part.fence, room)
                    }
                    CallForm::Script(by) => script::call(
                        by,
                        &self.run_id,
                        &self.part.fence,
                        steps.iter().map(|step| (&step.call, step.refuse_after)),
                        room,
                    ),
                };
                (command, due, until)
            }
        };
        let round = match (&mut self.replicas, &batch) {
            (Some(replicas), Batch::Steps(steps)) => replicas.send(role, steps),
            _ => 0,
        };
        let (slot, asking) = match &batch {
            Batch::Steps(steps) => steps
                .first()
                .map_or((None, false), |step| (step.call.slot, step.asking)),
            Batch::Plain(_) | Batch::Wait => (None, false),
        };
        self.calls.push_back(InFlight {
            number: wires.send(role, &command, asking),
            batch,
            role,
            round,
            slot,
            form,
            sent_at: now,
            due,
            until,
            overtook: false,
        });
        self.room = command.into_room();
    }
}
