//! What can happen, and what comes of it.

use super::{
    Action, Grant, LEASE, MARGIN, MAX_LEASE, MEMBERS, Member, Phase, Quorum, Rule, Set, State, TICK, Token,
    Vote, Where, Who,
};

/// What a holder's deadline is, counted from before the first was asked.
const HELD_FOR: u8 = LEASE - MARGIN;

impl Quorum {
    pub(super) fn all_actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Tick);
        for (who, client) in state.clients.iter().enumerate() {
            let at_members = |action: fn(Who, Where) -> Action| (0..MEMBERS).map(move |at| action(who, at));
            match client.phase {
                Phase::Dead => continue,
                Phase::Idle => actions.push(Action::Ask(who)),
                Phase::Asking { age, votes, .. } => {
                    actions.extend(at_members(Action::Vote));
                    let refused = votes.iter().filter(|vote| **vote == Vote::Refused).count();
                    if age > 0 || refused > 1 {
                        actions.push(Action::GiveUp(who));
                    }
                }
                Phase::Raising { age, .. } => {
                    actions.extend(at_members(Action::Vote));
                    actions.extend(at_members(Action::Raise));
                    if age > 0 {
                        actions.push(Action::GiveUp(who));
                    }
                }
                Phase::Holding {
                    deadline, renewal, ..
                } => {
                    actions.push(Action::Leave(who));
                    actions.extend(at_members(Action::Vote));
                    match renewal {
                        Some((age, ..)) => {
                            actions.extend(at_members(Action::RenewAt));
                            if age > 0 {
                                actions.push(Action::RenewalFails(who));
                            }
                        }
                        None if (1..HELD_FOR).contains(&deadline) && !self.tokens => {
                            actions.push(Action::Renew(who))
                        }
                        None => {}
                    }
                }
            }
            actions.push(Action::Crash(who));
            if state.left.late > 0 {
                actions.extend(at_members(Action::Late));
            }
        }
        actions.extend((0..MEMBERS).map(Action::Free));
        actions.extend((0..MEMBERS).map(Action::Restart));
    }

    /// Takes a step; `None` if it is not one that can be taken.
    pub(super) fn step(&self, state: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Tick => self.tick(state),
            Action::Ask(who) => {
                if self.tokens {
                    if state.asked == 1 {
                        return None;
                    }
                    state.asked += 1;
                }
                if let Some(asks) = &mut state.left.asks {
                    *asks = asks.checked_sub(1)?;
                }
                state.clients[who].phase = Phase::Asking {
                    age: 0,
                    votes: [Vote::Open; MEMBERS],
                    token: Token::MIN / 2,
                };
            }
            Action::Vote(who, at) => self.vote(state, who, at)?,
            Action::Late(who, at) => {
                state.left.late = state.left.late.checked_sub(1)?;
                if self.grant(state, who, at) != Vote::Granted {
                    return None;
                }
                state.members[at].holder = Some(Grant {
                    client: who,
                    current: false,
                });
            }
            Action::Raise(who, at) => self.raise(state, who, at)?,
            Action::GiveUp(who) | Action::Leave(who) => leave(state, who),
            Action::Renew(who) => match &mut state.clients[who].phase {
                Phase::Holding { renewal, .. } => *renewal = Some((0, Set::default(), Set::default())),
                _ => return None,
            },
            Action::RenewAt(who, at) => self.renew_at(state, who, at)?,
            Action::RenewalFails(who) => match &mut state.clients[who].phase {
                Phase::Holding { renewal, .. } => *renewal = None,
                _ => return None,
            },
            Action::Free(at) => {
                let member = &mut state.members[at];
                let grant = member.holder.filter(|grant| !grant.current)?;
                if state.clients[grant.client].phase == Phase::Dead {
                    return None;
                }
                (member.holder, member.lease) = (None, 0);
            }
            Action::Restart(at) => {
                state.left.restarts = state.left.restarts.checked_sub(1)?;
                state.members[at] = Member {
                    holder: None,
                    lease: 0,
                    last: state.now - 1,
                    since: None,
                };
            }
            Action::Crash(who) => {
                state.left.crashes = state.left.crashes.checked_sub(1)?;
                state.clients[who].phase = Phase::Dead;
            }
        }
        Some(())
    }

    /// An acquire arrives at a member.
    fn vote(&self, state: &mut State, who: Who, at: Where) -> Option<()> {
        let Phase::Asking {
            age,
            mut votes,
            mut token,
        } = state.clients[who].phase
        else {
            // Late, after a majority of others; or asked again for a grant that is held, which this member lacks.
            let is_free = state.members[at].holder.is_none();
            return is_free.then(|| {
                self.grant(state, who, at);
            });
        };
        if votes[at] != Vote::Open {
            return None;
        }
        votes[at] = self.grant(state, who, at);
        let mut granted = Set::default();
        for at in (0..MEMBERS).filter(|at| votes[*at] == Vote::Granted) {
            granted = granted.with(at);
        }
        if votes[at] == Vote::Granted {
            token = token.max(state.members[at].last);
        }
        state.clients[who].phase = Phase::Asking { age, votes, token };
        if granted.is_majority() {
            if self.keeps(Rule::TokenIsRaised) {
                state.clients[who].phase = Phase::Raising {
                    age,
                    token,
                    granted,
                    raised: Set::default(),
                };
            } else {
                self.hold(state, who, age, token);
            }
        }
        Some(())
    }

    /// The token arrives at a member; one that does not have the grant is not asked again.
    fn raise(&self, state: &mut State, who: Who, at: Where) -> Option<()> {
        let Phase::Raising {
            age,
            token,
            granted,
            raised,
        } = state.clients[who].phase
        else {
            return None;
        };
        if !granted.has(at) || raised.has(at) {
            return None;
        }
        let member = &mut state.members[at];
        let (granted, raised) = match member.holder == Some(current(who)) {
            true => (granted, raised.with(at)),
            false => (granted.without(at), raised),
        };
        if raised.has(at) {
            member.last = member.last.max(token);
        }
        if raised.is_majority() {
            self.hold(state, who, age, token);
        } else if granted.is_majority() {
            state.clients[who].phase = Phase::Raising {
                age,
                token,
                granted,
                raised,
            };
        } else {
            leave(state, who);
        }
        Some(())
    }

    /// A client has the lock, unless it took too long.
    fn hold(&self, state: &mut State, who: Who, age: u8, token: Token) {
        let age = if self.keeps(Rule::DeadlineFromSend) {
            age
        } else {
            0
        };
        let deadline = HELD_FOR.saturating_sub(age);
        if deadline == 0 {
            return leave(state, who);
        }
        if self.tokens {
            state.went_back |= token <= state.highest;
            state.highest = state.highest.max(token);
        }
        state.clients[who].phase = Phase::Holding {
            token,
            deadline,
            renewal: None,
        };
    }

    /// A member grants what it is asked for, or does not.
    fn grant(&self, state: &mut State, who: Who, at: Where) -> Vote {
        let clock = state.now + state.ahead[at];
        let member = &mut state.members[at];
        // A client has asked: from now on the time counts.
        member.since.get_or_insert(0);
        if member.holder.is_some() || !self.votes(member) {
            return Vote::Refused;
        }
        if self.tokens {
            member.last = clock.max(member.last + 1);
        }
        (member.holder, member.lease) = (Some(current(who)), LEASE);
        Vote::Granted
    }

    /// A renewal arrives at a member.
    fn renew_at(&self, state: &mut State, who: Who, at: Where) -> Option<()> {
        let Phase::Holding {
            token,
            deadline,
            renewal: Some((age, renewed, gone)),
        } = state.clients[who].phase
        else {
            return None;
        };
        if renewed.has(at) || gone.has(at) {
            return None;
        }
        let member = &mut state.members[at];
        let (renewed, gone) = if member.holder == Some(current(who)) {
            member.lease = LEASE;
            (renewed.with(at), gone)
        } else {
            (renewed, gone.with(at))
        };
        let over = renewed.is_majority() || gone.is_majority();
        state.clients[who].phase = Phase::Holding {
            token,
            deadline: match deadline {
                // Too late is too late.
                0 => 0,
                _ if gone.is_majority() => 0,
                _ if renewed.is_majority() => deadline.max(HELD_FOR.saturating_sub(age)),
                _ => deadline,
            },
            renewal: (!over).then_some((age, renewed, gone)),
        };
        Some(())
    }

    fn tick(&self, state: &mut State) {
        state.asked = 0;
        if self.tokens {
            state.now += TICK;
        }
        for member in &mut state.members {
            member.since = member.since.map(|since| (since + 1).min(MAX_LEASE));
            member.lease = member.lease.saturating_sub(1);
            if member.lease == 0 {
                member.holder = None;
            }
        }
        for client in &mut state.clients {
            match &mut client.phase {
                Phase::Asking { age, .. } | Phase::Raising { age, .. } => {
                    *age += 1;
                    // What comes now comes too late, however long it lasts.
                    if *age == HELD_FOR && self.keeps(Rule::DeadlineFromSend) {
                        client.phase = Phase::Idle;
                    }
                }
                Phase::Holding {
                    deadline, renewal, ..
                } => {
                    *deadline = deadline.saturating_sub(1);
                    *renewal = renewal.map(|(age, renewed, gone)| ((age + 1).min(HELD_FOR), renewed, gone));
                }
                Phase::Idle | Phase::Dead => {}
            }
        }
    }
}

/// The grant that a client asks for or holds.
fn current(client: Who) -> Grant {
    Grant {
        client,
        current: true,
    }
}

/// Whatever a client has or may have of its grant is released.
fn leave(state: &mut State, who: Who) {
    state.clients[who].phase = Phase::Idle;
}
