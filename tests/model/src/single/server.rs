//! The server, the network and the clocks.

use super::state::{Client, Message, Mode, Packet, Resource, State, Task};
use super::{Action, BLOCK, Fate, Id, LEASE, MARGIN, Rule, Single, TIMEOUT, UNDER_WAY, Who};

impl Single {
    /// What the server does with a request, and its answer. `None` for a write, which has none.
    pub(super) fn carry_out(&self, state: &mut State, id: Id, packet: Packet) -> Option<Packet> {
        let store = &mut state.store;
        let is_held = store.holder == Some(id);
        Some(match packet {
            Packet::Acquire(0) if self.keeps(Rule::LateIsRefused) => Packet::Refused,
            Packet::Acquire(_) if store.holder.is_none() || (is_held && !self.keeps(Rule::SentOnce)) => {
                store.holder = Some(id);
                store.lease = LEASE;
                store.orphaned = 0;
                let first = store.last + 1;
                store.last += BLOCK;
                Packet::Acquired(first)
            }
            Packet::Acquire(_) => Packet::Refused,
            Packet::Renew
                if is_held || (store.holder.is_none() && !self.keeps(Rule::RenewalNeverCreates)) =>
            {
                store.holder = Some(id);
                store.lease = LEASE;
                store.orphaned = 0;
                Packet::Renewed
            }
            Packet::Renew => Packet::Gone,
            Packet::Release if is_held || !self.keeps(Rule::OwnerIsChecked) => {
                store.holder = None;
                store.lease = 0;
                store.orphaned = 0;
                Packet::Released
            }
            Packet::Release => {
                let client = &state.clients[id.who()];
                let may_come = |release: &super::Release| release.id == id && release.open > 0;
                Packet::NotHeld(!client.releases.iter().any(may_come))
            }
            Packet::Write(token) => {
                self.write(&mut state.resource, token);
                return None;
            }
            _ => return None,
        })
    }

    /// A holder's write arrives.
    pub(super) fn write(&self, resource: &mut Resource, token: u8) {
        if token >= resource.token {
            resource.token = token;
        } else if !self.keeps(Rule::TokenIsChecked) {
            resource.token = token;
            resource.went_back = true;
        }
    }

    /// Something is late from now on, if that may be.
    pub(super) fn delay(&self, state: &mut State, id: Id, packet: Packet) -> Option<()> {
        state.left.late = state.left.late.checked_sub(1)?;
        let heard = !matches!(packet, Packet::Write(_));
        state.net.push(Message { id, packet, heard });
        (state.net.len() <= UNDER_WAY).then_some(())
    }

    /// Sends a request, which fares like this.
    pub(super) fn send(&self, state: &mut State, id: Id, packet: Packet, fate: Fate) -> Option<()> {
        match fate {
            Fate::InTime => {
                if let Some(answer) = self.carry_out(state, id, packet) {
                    self.hear(state, id, answer, Fate::InTime)?;
                }
                Some(())
            }
            Fate::Late => self.delay(state, id, packet),
            Fate::LateAnswer => match self.carry_out(state, id, packet)? {
                // The same as a request that is late and then lost.
                Packet::Refused => None,
                answer => self.delay(state, id, answer),
            },
        }
    }

    /// What can happen to messages that are under way.
    pub(super) fn actions_of_net(&self, state: &State, actions: &mut Vec<Action>) {
        for (at, message) in state.net.iter().enumerate() {
            if at > 0 && state.net[at - 1] == *message {
                continue;
            }
            let listens = state.clients[message.id.who()].mode == Mode::Up;
            if !message.packet.is_answer() {
                actions.push(Action::Land(*message, Fate::InTime));
                if message.heard && listens {
                    actions.push(Action::Land(*message, Fate::LateAnswer));
                }
            } else if listens {
                for fate in Fate::ALL {
                    actions.push(Action::Land(*message, fate));
                }
            }
            if state.left.lost > 0 {
                actions.push(Action::Lose(*message));
            }
        }
    }

    /// A late message arrives.
    pub(super) fn land(&self, state: &mut State, message: Message, fate: Fate) -> Option<()> {
        take(state, message)?;
        let Message { id, packet, heard } = message;
        if packet.is_answer() {
            return self.hear(state, id, packet, fate);
        }
        let Some(answer) = self.carry_out(state, id, packet).filter(|_| heard) else {
            return Some(());
        };
        match (state.clients[id.who()].mode, fate) {
            (Mode::Up, Fate::InTime) => self.hear(state, id, answer, Fate::InTime),
            (Mode::Up, _) if answer == Packet::Refused => None,
            (Mode::Up, _) => self.delay(state, id, answer),
            // It waits until the process goes on.
            _ => {
                state.net.push(Message {
                    id,
                    packet: answer,
                    heard,
                });
                Some(())
            }
        }
    }

    /// A late message does not arrive.
    pub(super) fn lose(&self, state: &mut State, message: Message) -> Option<()> {
        state.left.lost = state.left.lost.checked_sub(1)?;
        take(state, message)
    }

    /// Whether and how time can go on: only when nobody who acts has something to do at once.
    pub(super) fn actions_of_time(&self, state: &State, actions: &mut Vec<Action>) {
        let clients = || state.clients.iter().filter(|client| client.mode != Mode::Down);
        let mut urgent = (0..state.clients.len()).filter(|who| {
            let client = &state.clients[*who];
            client.mode == Mode::Up && self.is_urgent(client)
        });
        match (urgent.next(), urgent.next()) {
            (None, _) => {}
            // Unless it is stopped in this moment.
            (Some(who), None) if state.left.pauses > 0 => return actions.push(Action::Pause(who)),
            _ => return,
        }
        let runs = |client: &Client| {
            !client.attempts.is_empty()
                || !client.releases.is_empty()
                || client.holds().any(|hold| hold.deadline > 0)
        };
        let open = |message: &Message| matches!(message.packet, Packet::Acquire(1..));
        if state.store.holder.is_none() && !clients().any(runs) && !state.net.iter().any(open) {
            return;
        }
        actions.push(Action::Tick(None));
        if state.left.pauses > 0 {
            for who in 0..state.clients.len() {
                if state.clients[who].mode == Mode::Up && runs(&state.clients[who]) {
                    actions.push(Action::Pause(who));
                }
            }
        }
        if state.left.slow > 0 {
            for who in 0..state.clients.len() {
                if runs(&state.clients[who]) {
                    actions.push(Action::Tick(Some(who)));
                }
            }
        }
    }

    /// Whether a client has something to do at once.
    fn is_urgent(&self, client: &Client) -> bool {
        let hold_is = |hold: &super::Hold| {
            let lives = hold.deadline > 0;
            match hold.renewal {
                Some(age) => lives && age >= TIMEOUT,
                None if lives => hold.due == 0,
                None => !hold.ended && !self.keeps(Rule::ClockIsAsked),
            }
        };
        let release_is = |release: &super::Release| match release.asked {
            Some(age) => age >= TIMEOUT,
            None => release.open == 0,
        };
        client.attempts.iter().any(|attempt| attempt.age >= TIMEOUT)
            || client.holds().any(hold_is)
            || client.releases.iter().any(release_is)
    }

    /// A tick passes; not by the clock of the one who is slow.
    pub(super) fn tick(&self, state: &mut State, slow: Option<Who>) -> Option<()> {
        if slow.is_some() {
            state.left.slow = state.left.slow.checked_sub(1)?;
        }
        for (who, client) in state.clients.iter_mut().enumerate() {
            // Counted by the server's clock.
            for attempt in &mut client.attempts {
                attempt.open = attempt.open.saturating_sub(1);
            }
            for release in &mut client.releases {
                release.open = release.open.saturating_sub(1);
            }
            if slow == Some(who) {
                continue;
            }
            for attempt in &mut client.attempts {
                attempt.age = (attempt.age + 1).min(LEASE - MARGIN);
            }
            for release in &mut client.releases {
                release.asked = release.asked.map(|age| (age + 1).min(TIMEOUT));
            }
            for task in &mut client.tasks {
                if let Task::Holding(hold) = task {
                    hold.deadline = hold.deadline.saturating_sub(1);
                    hold.fresh &= hold.deadline == 0;
                    hold.ended |= hold.deadline == 0 && self.keeps(Rule::ClockIsAsked);
                    hold.due = hold.due.saturating_sub(1);
                    hold.renewal = hold.renewal.map(|age| (age + 1).min(LEASE - MARGIN));
                }
            }
        }
        for message in &mut state.net {
            if let Packet::Acquire(open) = &mut message.packet {
                *open = open.saturating_sub(1);
            }
        }
        if let Some(id) = state.store.holder {
            if self.keeps(Rule::LeasesEnd) {
                state.store.lease -= 1;
            }
            let mut holds = state.clients[id.who()].holds();
            let is_alone = !holds.any(|hold| hold.id == id && self.believes(hold));
            state.store.orphaned = match is_alone {
                true => (state.store.orphaned + 1).min(LEASE + 1),
                false => 0,
            };
            if state.store.lease == 0 {
                state.store.holder = None;
                state.store.orphaned = 0;
            }
        }
        Some(())
    }
}

fn take(state: &mut State, message: Message) -> Option<()> {
    let at = state.net.iter().position(|other| *other == message)?;
    state.net.remove(at);
    Some(())
}
