//! What a process does: its tasks, its watchdog, its releases.

use super::state::{Attempt, Client, Hold, Mode, Packet, Release, State, Task};
use super::{Action, BLOCK, Fate, HANDED_ON_WITH, Id, LEASE, RENEW_AFTER, Rule, Single, TIMEOUT, Which, Who};

impl Single {
    /// What a client can do now.
    pub(super) fn actions_of(&self, state: &State, who: Who, actions: &mut Vec<Action>) {
        let client = &state.clients[who];
        match client.mode {
            Mode::Down => return,
            Mode::Paused => {
                if state.left.crashes > 0 {
                    actions.push(Action::Crash(who));
                }
                return actions.push(Action::Resume(who));
            }
            Mode::Up => {}
        }
        for (which, task) in client.tasks.iter().enumerate() {
            match task {
                // Clients are alike, and so are their tasks: the first to come has the first number.
                Task::Fresh if which == 1 && client.is_inside() => actions.push(Action::Arrive(who, which)),
                Task::Waiting if state.left.cancelled > 0 && client.asking().is_some() => {
                    actions.push(Action::Cancel(who, which));
                }
                Task::Holding(hold) => self.actions_of_holder(state, who, which, hold, actions),
                _ => {}
            }
        }
        if client.asking().is_none() && self.who_asks(state, who).is_some() {
            actions.extend(Fate::ALL.map(|fate| Action::Ask(who, fate)));
        }
        for attempt in client.attempts.iter().filter(|attempt| attempt.age >= TIMEOUT) {
            actions.extend(Fate::ALL.map(|fate| Action::AskFails(who, attempt.id, fate)));
        }
        for release in &client.releases {
            let again = match release.asked {
                Some(age) => age >= TIMEOUT,
                None => release.open == 0,
            };
            if again {
                actions.extend(Fate::ALL.map(|fate| Action::Again(who, release.id, fate)));
            }
        }
        let is_fresh = client.tasks[0] == Task::Fresh;
        let is_through =
            client.tasks == [Task::Done; 2] && client.attempts.is_empty() && client.releases.is_empty();
        if !is_fresh && !is_through && state.left.crashes > 0 {
            actions.push(Action::Crash(who));
        }
    }

    fn actions_of_holder(
        &self,
        state: &State,
        who: Who,
        which: Which,
        hold: &Hold,
        actions: &mut Vec<Action>,
    ) {
        let lives = hold.deadline > 0;
        let writes = state.is_written_by(hold);
        // Who leaves while its write is under way has been given up.
        let may_leave = !writes || state.left.cancelled > 0;
        if self.believes(hold) && !writes {
            actions.push(Action::Write(who, which));
        }
        if lives
            && may_leave
            && !hold.suspect
            && (hold.deadline >= HANDED_ON_WITH || !self.keeps(Rule::HandedOnInTime))
            && hold.reserved > 0
            && state.clients[who].front().is_some()
        {
            actions.push(Action::HandOff(who, which));
        }
        if may_leave {
            actions.extend(Fate::ALL.map(|fate| Action::Leave(who, which, fate)));
        }
        match hold.renewal {
            None if lives && hold.due == 0 => {
                actions.extend(Fate::ALL.map(|fate| Action::Renew(who, which, fate)));
            }
            Some(age) if lives && age >= TIMEOUT => actions.push(Action::RenewalFails(who, which)),
            _ => {}
        }
        if !self.keeps(Rule::ClockIsAsked) && hold.deadline == 0 && !hold.ended {
            actions.push(Action::Notice(who, which));
        }
    }

    /// Takes a step; `None` if it is not one that can be taken, or that leads nowhere new.
    pub(super) fn step(&self, state: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Tick(slow) => self.tick(state, slow)?,
            Action::Pause(who) => {
                state.left.pauses -= 1;
                state.clients[who].mode = Mode::Paused;
                self.tick(state, None)?;
            }
            Action::Arrive(who, which) => state.clients[who].tasks[which] = Task::Waiting,
            Action::Cancel(who, which) => {
                state.left.cancelled -= 1;
                if state.clients[who].front() == Some(which) {
                    abandon(&mut state.clients[who]);
                }
                state.clients[who].tasks[which] = Task::Done;
            }
            Action::Ask(who, fate) => {
                let id = match self.keeps(Rule::IdsAreNew) {
                    true => state.unused(who),
                    false => Id {
                        client: who as u8,
                        number: 0,
                    },
                };
                let which = self.who_asks(state, who)?;
                state.clients[who].tasks[which] = Task::Waiting;
                self.ask(state, id, fate)?;
            }
            Action::AskFails(who, id, fate) => {
                deafen(state, id, |packet| {
                    matches!(packet, Packet::Acquire(_) | Packet::Acquired(_) | Packet::Refused)
                });
                let attempt = remove(&mut state.clients[who].attempts, |attempt| attempt.id == id)?;
                if !self.keeps(Rule::SentOnce) && !attempt.abandoned {
                    self.ask(state, id, fate)?;
                } else if self.keeps(Rule::UnknownIsUndone) {
                    let open = if self.keeps(Rule::ReleasedAfterThat) {
                        attempt.open
                    } else {
                        0
                    };
                    self.give_back(state, id, open, fate)?;
                } else if fate != Fate::InTime {
                    return None;
                }
            }
            Action::Write(who, which) => {
                let hold = *hold(state, who, which)?;
                self.delay(state, hold.id, Packet::Write(hold.token))?;
            }
            Action::HandOff(who, which) => {
                let hold = leave(state, who, which)?;
                self.hand_off(state, who, hold);
                if !self.keeps(Rule::HandedOnBeforeRelease) {
                    self.give_back(state, hold.id, 0, Fate::InTime)?;
                }
            }
            Action::Leave(who, which, fate) => {
                let hold = leave(state, who, which)?;
                // The answer to a renewal that is under way says nothing any more.
                deafen(state, hold.id, is_about_renewal);
                self.give_back(state, hold.id, 0, fate)?;
            }
            Action::Renew(who, which, fate) => {
                let hold = hold(state, who, which)?;
                hold.renewal = Some(0);
                let id = hold.id;
                self.send(state, id, Packet::Renew, fate)?;
            }
            Action::RenewalFails(who, which) => {
                let hold = hold(state, who, which)?;
                hold.renewal = None;
                hold.suspect = true;
                hold.due = 0;
                let id = hold.id;
                deafen(state, id, is_about_renewal);
            }
            Action::Notice(who, which) => hold(state, who, which)?.ended = true,
            Action::Again(who, id, fate) => {
                deafen(state, id, is_about_release);
                let release = remove(&mut state.clients[who].releases, |release| release.id == id)?;
                self.give_back(state, id, release.open, fate)?;
            }
            Action::Land(message, fate) => self.land(state, message, fate)?,
            Action::Lose(message) => self.lose(state, message)?,
            Action::Resume(who) => state.clients[who].mode = Mode::Up,
            Action::Crash(who) => {
                state.left.crashes -= 1;
                state.net.retain(|message| {
                    let theirs = message.id.who() == who;
                    message.heard &= !theirs;
                    !(theirs && message.packet.is_answer())
                });
                state.clients[who] = Client {
                    mode: Mode::Down,
                    tasks: [Task::Done; 2],
                    attempts: Default::default(),
                    releases: Default::default(),
                };
            }
        }
        Some(())
    }

    /// Who asks for the lock next: the first in line, or one who comes while nobody of this client is inside.
    pub(super) fn who_asks(&self, state: &State, who: Who) -> Option<Which> {
        let client = &state.clients[who];
        let is_fresh = |task: &Task| *task == Task::Fresh;
        // Clients are alike: the first to come is the first.
        let may_come = !client.is_inside() && (who == 0 || !is_fresh(&state.clients[0].tasks[0]));
        let comes = || client.tasks.iter().position(is_fresh).filter(|_| may_come);
        client.front().or_else(comes)
    }

    /// Asks for the lock.
    fn ask(&self, state: &mut State, id: Id, fate: Fate) -> Option<()> {
        let open = TIMEOUT + 1;
        state.clients[id.who()].attempts.push(Attempt {
            id,
            age: 0,
            open,
            abandoned: false,
        });
        self.send(state, id, Packet::Acquire(open), fate)
    }

    /// Begins to give a grant back, or goes on with it.
    fn give_back(&self, state: &mut State, id: Id, open: u8, fate: Fate) -> Option<()> {
        state.clients[id.who()].releases.push(Release {
            id,
            open,
            asked: Some(0),
        });
        self.send(state, id, Packet::Release, fate)
    }

    /// A client has an answer. Where it sends a request because of that, this fares like `fate`; otherwise `fate` must
    /// be the first of them.
    pub(super) fn hear(&self, state: &mut State, id: Id, answer: Packet, fate: Fate) -> Option<()> {
        let client = &mut state.clients[id.who()];
        let mut sends = false;
        match answer {
            Packet::Acquired(token) => {
                let attempt = remove(&mut client.attempts, |attempt| attempt.id == id)?;
                let deadline = self.deadline(attempt.age);
                let hold = Hold {
                    id,
                    token,
                    deadline,
                    ended: false,
                    due: RENEW_AFTER.saturating_sub(attempt.age),
                    renewal: None,
                    suspect: false,
                    reserved: BLOCK - 1,
                    fresh: false,
                };
                if deadline == 0 || (attempt.abandoned && client.front().is_none()) {
                    // Dropped, which gives it back.
                    sends = true;
                    self.give_back(state, id, 0, fate)?;
                } else if !attempt.abandoned {
                    let front = client.front()?;
                    client.tasks[front] = Task::Holding(hold);
                    self.write(&mut state.resource, token);
                } else if deadline >= HANDED_ON_WITH {
                    self.hand_off(state, id.who(), hold);
                } else {
                    sends = true;
                    self.give_back(state, id, 0, fate)?;
                }
            }
            Packet::Refused => {
                remove(&mut client.attempts, |attempt| attempt.id == id)?;
            }
            Packet::Renewed | Packet::Gone => {
                let hold = client.hold_of(id)?;
                let age = hold.renewal.take()?;
                if hold.deadline == 0 && self.keeps(Rule::LostIsFinal) {
                    // Too late is too late.
                } else if answer == Packet::Gone {
                    (hold.ended, hold.deadline, hold.fresh) = (true, 0, false);
                } else {
                    hold.suspect = false;
                    hold.deadline = hold.deadline.max(self.deadline(age));
                    hold.due = RENEW_AFTER.saturating_sub(age);
                }
            }
            Packet::Released | Packet::NotHeld(true) => {
                remove(&mut client.releases, |release| release.id == id)?;
            }
            Packet::NotHeld(false) => {
                let release = client.releases.iter_mut().find(|release| release.id == id)?;
                release.asked = None;
            }
            _ => return None,
        }
        (sends || fate == Fate::InTime).then_some(())
    }

    /// The first in line takes the grant over, as it is.
    fn hand_off(&self, state: &mut State, who: Who, hold: Hold) {
        let client = &mut state.clients[who];
        let Some(next) = client.front() else { return };
        abandon(client);
        let token = hold.token + 1;
        client.tasks[next] = Task::Holding(Hold {
            token,
            reserved: hold.reserved - 1,
            fresh: true,
            ..hold
        });
        self.write(&mut state.resource, token);
    }

    /// What is left of a grant that was given or renewed by a step sent so long ago.
    fn deadline(&self, age: u8) -> u8 {
        let lease = LEASE - self.margin();
        match self.keeps(Rule::DeadlineFromSend) {
            true => lease.saturating_sub(age),
            false => lease,
        }
    }
}

/// Nobody waits for the acquire that is under way.
fn abandon(client: &mut Client) {
    for attempt in &mut client.attempts {
        attempt.abandoned = true;
    }
}

/// Nobody waits for the answer to these any more: requests that are under way arrive nevertheless.
fn deafen(state: &mut State, id: Id, which: impl Fn(Packet) -> bool) {
    state.net.retain(|message| {
        let meant = message.id == id && which(message.packet);
        message.heard &= !meant;
        !(meant && message.packet.is_answer())
    });
}

fn is_about_renewal(packet: Packet) -> bool {
    matches!(packet, Packet::Renew | Packet::Renewed | Packet::Gone)
}

fn is_about_release(packet: Packet) -> bool {
    matches!(packet, Packet::Release | Packet::Released | Packet::NotHeld(_))
}

/// Somebody leaves.
fn leave(state: &mut State, who: Who, which: Which) -> Option<Hold> {
    let hold = *hold(state, who, which)?;
    if state.is_written_by(&hold) {
        state.left.cancelled = state.left.cancelled.checked_sub(1)?;
    }
    state.clients[who].tasks[which] = Task::Done;
    Some(hold)
}

fn hold(state: &mut State, who: Who, which: Which) -> Option<&mut Hold> {
    match &mut state.clients[who].tasks[which] {
        Task::Holding(hold) => Some(hold),
        _ => None,
    }
}

fn remove<T, const N: usize>(all: &mut smallvec::SmallVec<[T; N]>, is_it: impl Fn(&T) -> bool) -> Option<T>
where
    [T; N]: smallvec::Array<Item = T>,
{
    let at = all.iter().position(is_it)?;
    Some(all.remove(at))
}
