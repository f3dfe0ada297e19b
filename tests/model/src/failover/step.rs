//! What can happen, and what comes of it.

use super::{
    ACQUIRE, Action, BLOCK, Data, FAIL_OVER, Failover, Hold, LEASE, MARGIN, Renewal, Rule, State, TICK, Task,
    UNDER_WAY, Which, Who, Write,
};

impl Failover {
    pub(super) fn all_actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.ticks > 0 {
            actions.push(Action::Tick);
        }
        for (who, client) in state.clients.iter().enumerate() {
            if !client.connected {
                actions.push(Action::Connect(who));
            }
            if (client.connected || state.old.is_some())
                && client.front().is_some()
                && !client.asks()
                && (who == 0 || state.granted > 0)
            {
                // Clients are alike: the first to come is the first.
                actions.extend([Action::Acquire(who, true), Action::Acquire(who, false)]);
            }
            for which in 0..client.tasks.len() {
                if let Task::Answered(_) | Task::Holding(Hold { renewal: Some(_), .. }) = client.tasks[which]
                {
                    actions.push(Action::Hear(who, which));
                }
                if let Task::Holding(_) = client.tasks[which] {
                    actions.extend([
                        Action::Write(who, which),
                        Action::HandOff(who, which),
                        Action::Leave(who, which),
                        Action::Renew(who, which, true),
                        Action::Renew(who, which, false),
                    ]);
                }
            }
        }
        actions.extend(state.net.iter().map(|write| Action::Land(*write)));
        actions.extend([Action::Replicate, Action::FailOver, Action::Flush]);
    }

    /// Takes a step; `None` if it is not one that can be taken.
    pub(super) fn step(&self, state: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Tick => tick(state),
            Action::Acquire(who, at_once) => self.acquire(state, who, at_once)?,
            Action::Hear(who, which) => self.hear(state, who, which)?,
            Action::Write(who, which) => {
                state.left.late = state.left.late.checked_sub(1)?;
                let hold = *hold(state, who, which).filter(|hold| hold.deadline > 0)?;
                let write = write(&hold);
                if state.net.len() == UNDER_WAY || state.net.contains(&write) {
                    return None;
                }
                state.net.push(write);
            }
            Action::Land(write) => {
                let at = state.net.iter().position(|other| *other == write)?;
                state.net.remove(at);
                self.take(state, write);
            }
            Action::HandOff(who, which) => {
                let had = *hold(state, who, which)?;
                let next = state.clients[who].front()?;
                let is_sure = !had.suspect || !self.keeps(Rule::SuspectIsNotHandedOn);
                // A third of the lease.
                if had.deadline == 0 || had.reserved == 0 || !is_sure {
                    return None;
                }
                state.wrong.doubt |= had.old && state.master.holder != Some(had.grant);
                let heir = Hold {
                    handed: had.handed + 1,
                    token: had.token + 1,
                    reserved: had.reserved - 1,
                    ..had
                };
                state.clients[who].tasks[which] = Task::Done;
                state.clients[who].tasks[next] = Task::Holding(heir);
                self.take(state, write(&heir));
            }
            Action::Leave(who, which) => {
                let had = *hold(state, who, which)?;
                leave(state, who, which, had);
            }
            Action::Renew(who, which, at_once) => {
                if !state.clients[who].connected {
                    return None;
                }
                if !at_once {
                    state.left.late = state.left.late.checked_sub(1)?;
                }
                let master = &mut state.master;
                let hold = match &mut state.clients[who].tasks[which] {
                    Task::Holding(hold)
                        if hold.renewal.is_none()
                            && (hold.deadline > 0 && hold.deadline < LEASE - MARGIN || hold.suspect) =>
                    {
                        hold
                    }
                    _ => return None,
                };
                let done = master.holder == Some(hold.grant);
                if done {
                    master.lease = LEASE;
                }
                hold.renewal = Some(Renewal {
                    done,
                    deadline: LEASE - MARGIN,
                    old: false,
                });
                if at_once {
                    self.hear(state, who, which)?;
                }
            }
            Action::Replicate => state.replica = state.master,
            Action::FailOver => {
                state.left.failed_over = state.left.failed_over.checked_sub(1)?;
                if !self.keeps(Rule::OldMasterIsGone) {
                    state.old = Some(state.master);
                }
                state.master = state.replica;
                if self.keeps(Rule::FailOverTakesTime) {
                    state.now += FAIL_OVER;
                }
                self.is_new(state);
            }
            Action::Flush => {
                state.left.flushed = state.left.flushed.checked_sub(1)?;
                state.master = Data::default();
                state.replica = Data::default();
                self.is_new(state);
            }
            Action::Connect(who) => {
                let client = &mut state.clients[who];
                client.connected = true;
                for task in &mut client.tasks {
                    match task {
                        Task::Holding(hold) => {
                            (hold.old, hold.suspect) = (hold.deadline > 0, hold.deadline > 0);
                            if let Some(renewal) = &mut hold.renewal {
                                renewal.old = true;
                            }
                        }
                        Task::Answered(hold) => hold.old = true,
                        _ => {}
                    }
                }
            }
        }
        Some(())
    }

    /// The server is another one than before.
    fn is_new(&self, state: &mut State) {
        for client in &mut state.clients {
            client.connected = false;
        }
        if !self.keeps(Rule::ClockGoesOn) {
            state.now -= 2 * TICK;
        }
    }

    /// The first in line gets the lock.
    fn acquire(&self, state: &mut State, who: Who, at_once: bool) -> Option<()> {
        if !at_once {
            state.left.late = state.left.late.checked_sub(1)?;
        }
        let data = match (state.clients[who].connected, &mut state.old) {
            (false, Some(old)) => old,
            _ => &mut state.master,
        };
        if data.holder.is_some() {
            return None;
        }
        let (first, count) = self.reserve(data.last, state.now);
        let last = first + count - 1;
        state.wrong.token |= first <= state.highest;
        state.highest = state.highest.max(last);
        state.granted += 1;
        *data = Data {
            holder: Some(state.granted),
            lease: LEASE,
            last: Some(last),
        };
        state.now += ACQUIRE;
        let hold = Hold {
            grant: state.granted,
            handed: 0,
            token: first,
            reserved: count - 1,
            deadline: LEASE - MARGIN,
            old: false,
            suspect: false,
            renewal: None,
        };
        let client = &mut state.clients[who];
        let front = client.front()?;
        client.tasks[front] = Task::Answered(hold);
        match at_once {
            true => self.hear(state, who, front),
            false => Some(()),
        }
    }

    /// An answer is heard.
    fn hear(&self, state: &mut State, who: Who, which: Which) -> Option<()> {
        let keeps = self.keeps(Rule::AnswersGetOld);
        match &mut state.clients[who].tasks[which] {
            // Too late is too late: dropped, which gives it back.
            Task::Answered(hold) if hold.deadline == 0 => {
                let had = *hold;
                leave(state, who, which, had);
            }
            Task::Answered(hold) => {
                let mut had = *hold;
                had.suspect = had.old && keeps;
                state.clients[who].tasks[which] = Task::Holding(had);
                self.take(state, write(&had));
            }
            Task::Holding(hold) => {
                let renewal = hold.renewal.take()?;
                if hold.deadline == 0 && !hold.suspect {
                    // Too late as well.
                } else if !renewal.done {
                    hold.deadline = 0;
                } else {
                    hold.deadline = hold.deadline.max(renewal.deadline);
                    hold.old = renewal.old;
                    hold.suspect &= renewal.old && keeps;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The tokens of an acquire: the first, and how many.
    fn reserve(&self, before: Option<u8>, now: u8) -> (u8, u8) {
        if !self.keeps(Rule::TokensFollowClock) {
            return (before.unwrap_or(0) + 1, BLOCK);
        }
        if !self.keeps(Rule::BlocksReachBack) {
            return (now.max(before.map_or(0, |last| last + 1)), BLOCK);
        }
        let least = match before {
            Some(last) => last + 1,
            None if self.keeps(Rule::NotWithoutLast) => now,
            None => 0,
        };
        let upto = now.max(least);
        let first = least.max(upto + 1 - BLOCK);
        (first, BLOCK.min(upto - first + 1))
    }

    /// A write arrives at the resource.
    fn take(&self, state: &mut State, write: Write) {
        let last = &mut state.resource;
        if write.token >= last.token || !self.keeps(Rule::TokenIsChecked) {
            state.wrong.order |= write.by < last.by;
            *last = write;
        }
    }
}

fn tick(state: &mut State) {
    state.ticks -= 1;
    state.now += TICK;
    for data in [&mut state.master, &mut state.replica]
        .into_iter()
        .chain(&mut state.old)
    {
        data.lease = data.lease.saturating_sub(1);
        if data.lease == 0 {
            data.holder = None;
        }
    }
    for task in state.clients.iter_mut().flat_map(|client| &mut client.tasks) {
        if let Task::Holding(hold) | Task::Answered(hold) = task {
            hold.deadline = hold.deadline.saturating_sub(1);
            hold.suspect &= hold.deadline > 0;
            if let Some(renewal) = &mut hold.renewal {
                renewal.deadline = renewal.deadline.saturating_sub(1);
            }
            if hold.deadline == 0 {
                // Lost, and never otherwise again.
                (hold.old, hold.renewal) = (false, None);
            }
        }
    }
}

/// A task leaves.
fn leave(state: &mut State, who: Who, which: Which, had: Hold) {
    state.clients[who].tasks[which] = Task::Done;
    // Without a connection it is left to the lease, which is worse than a release that comes later.
    if state.clients[who].connected && state.master.holder == Some(had.grant) {
        (state.master.holder, state.master.lease) = (None, 0);
    }
}

fn hold(state: &State, who: Who, which: Which) -> Option<&Hold> {
    match &state.clients[who].tasks[which] {
        Task::Holding(hold) => Some(hold),
        _ => None,
    }
}

fn write(hold: &Hold) -> Write {
    Write {
        by: (hold.grant, hold.handed),
        token: hold.token,
    }
}
