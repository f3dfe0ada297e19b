//! Three independent servers of which two make a majority; one is restarted without its data. Two clients that want
//! the lock several times.
//!
//! The steps follow `stores/quorum`: all members are asked for one grant, the highest token of a majority is written
//! to a majority that still has the grant, and the deadline counts from before the first was asked; a member that
//! does not have a grant which is held is asked for it again; renewals and releases go to all. What a member says and
//! does is its own step, at any time after it was asked: so requests and answers are as late as they like.

mod step;
mod tell;

use std::hash::{Hash, Hasher};

use stateright::{Model, Property};

use crate::check::{self, Told};

/// How long a member keeps a grant, in ticks.
pub const LEASE: u8 = 3;
/// What a holder's deadline is earlier.
pub const MARGIN: u8 = 1;
/// The longest lease there is: for so long a member does not vote that may have lost its data.
pub const MAX_LEASE: u8 = LEASE;
/// By how much the clocks of the members, which fencing tokens are made of, go on in a tick.
pub const TICK: Token = 2;
/// A fencing token, or what the clock shows that it is made of.
pub type Token = i16;
/// How many members there are.
pub const MEMBERS: usize = 3;
/// How many make a majority.
pub const MAJORITY: u32 = 2;

/// A rule of the protocol that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A member that may have lost its data does not vote.
    FreshMembersWait,
    /// It waits for the longest lease, and not for less.
    TheyWaitLongEnough,
    /// A holder's deadline is counted from before the first member was asked.
    DeadlineFromSend,
    /// The highest token of the majority is written to a majority.
    TokenIsRaised,
    /// Assumed: the clocks of the members differ by less than the longest lease.
    ClocksAgree,
}

impl check::Rule for Rule {
    type World = Quorum;
    const MODEL: &'static str = "quorum";
    const ALL: &'static [Rule] = &[
        Rule::FreshMembersWait,
        Rule::TheyWaitLongEnough,
        Rule::DeadlineFromSend,
        Rule::TokenIsRaised,
        Rule::ClocksAgree,
    ];

    fn worlds() -> Vec<(&'static str, Quorum)> {
        let world = |[restarts, crashes, late]: [u8; 3], asks: Option<u8>| Quorum {
            without: None,
            faults: Faults {
                restarts,
                crashes,
                late,
                asks,
            },
            tokens: asks.is_some(),
        };
        vec![
            ("exclusion", world([1, 1, 1], None)),
            ("two restarts", world([2, 0, 0], None)),
            ("tokens", world([1, 0, 0], Some(2))),
            ("tokens of three", world([0, 0, 0], Some(3))),
        ]
    }

    fn prevents(self) -> &'static str {
        match self {
            Rule::FreshMembersWait | Rule::TheyWaitLongEnough | Rule::DeadlineFromSend => ONE_HOLDER,
            Rule::TokenIsRaised | Rule::ClocksAgree => TOKENS_GROW,
        }
    }

    fn taken_out(self) -> Quorum {
        let restarts = match self {
            Rule::FreshMembersWait | Rule::TheyWaitLongEnough | Rule::ClocksAgree => 1,
            Rule::DeadlineFromSend | Rule::TokenIsRaised => 0,
        };
        Quorum {
            without: Some(self),
            faults: Faults {
                restarts,
                crashes: 0,
                late: 0,
                asks: Some(2),
            },
            tokens: matches!(self, Rule::TokenIsRaised | Rule::ClocksAgree),
        }
    }
}

/// Two never hold the lock at the same time, each by its own clock.
pub const ONE_HOLDER: &str = "two never hold";
/// Each holder has a token above those of all earlier holders.
pub const TOKENS_GROW: &str = "tokens grow";

/// How much may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Members that are restarted and have lost all data.
    pub restarts: u8,
    /// Clients that die.
    pub crashes: u8,
    /// Acquires that arrive at a member after they were given up.
    pub late: u8,
    /// How often the lock is asked for; without end where it is not said. Not a fault, but as finite.
    pub asks: Option<u8>,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Quorum {
    /// The rule that does not hold.
    pub without: Option<Rule>,
    /// What may go wrong.
    pub faults: Faults,
    /// With fencing tokens, and a clock of which they are made; otherwise there are fewer states.
    pub tokens: bool,
}

/// A client, by its place.
pub type Who = usize;
/// A member, by its place.
pub type Where = usize;

/// Whose grant it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Grant {
    /// The client.
    pub client: Who,
    /// It is the grant that the client asks for or holds; otherwise one that it releases, or has died with.
    pub current: bool,
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// The servers.
    pub members: [Member; MEMBERS],
    /// The clients that want the lock.
    pub clients: [Client; 2],
    /// What the clocks of those members show that are not ahead.
    pub now: Token,
    /// How often the lock was asked for in this tick: no more often than the clock goes on.
    pub asked: Token,
    /// The highest token of all holders.
    pub highest: Token,
    /// What may still go wrong.
    pub left: Faults,
    /// A client has got the lock with a token that is not above all others.
    pub went_back: bool,
    /// By how much the clock of each member is ahead of `now`.
    pub ahead: [Token; MEMBERS],
}

impl Hash for State {
    /// What makes no difference to what can happen is left out, so that such states are one.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let mut alike = self.clone();
        alike.tokens_from_now();
        alike.sort_members();
        let State {
            members,
            clients,
            now: _,
            asked,
            highest,
            left,
            went_back,
            ahead: _,
        } = alike;
        (members, clients, asked, highest, left, went_back).hash(hasher);
    }
}

/// A server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    /// The holder of the key there.
    pub holder: Option<Grant>,
    /// What is left of its lease.
    pub lease: u8,
    /// The last fencing token.
    pub last: Token,
    /// For how long its data have been there, as it was first asked; up to the longest lease.
    pub since: Option<u8>,
}

/// A process that wants the lock, again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Client {
    /// What it does.
    pub phase: Phase,
}

/// What a client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Nothing.
    Idle,
    /// Has asked all members for a grant.
    Asking {
        /// How long ago.
        age: u8,
        /// What they say.
        votes: [Vote; MEMBERS],
        /// The highest token of the members that have granted it.
        token: Token,
    },
    /// Has a majority, and writes the fencing token to the members that granted it.
    Raising {
        /// How long ago the members were asked for it.
        age: u8,
        /// The token.
        token: Token,
        /// The members that are to have it.
        granted: Set,
        /// The members that have it.
        raised: Set,
    },
    /// Has the lock.
    Holding {
        /// The token.
        token: Token,
        /// When it is lost, by the holder's clock; 0 when it is.
        deadline: u8,
        /// The renewal that is under way: how long ago it was sent, the members that have renewed, the members without
        /// the grant.
        renewal: Option<(u8, Set, Set)>,
    },
    /// It is gone.
    Dead,
}

impl Phase {
    /// What a client has heard from a member.
    fn said_at(&self, at: Where) -> (Option<Vote>, [bool; 2]) {
        match *self {
            Phase::Asking { votes, .. } => (Some(votes[at]), [false; 2]),
            Phase::Raising { granted, raised, .. } => (None, [granted.has(at), raised.has(at)]),
            Phase::Holding {
                renewal: Some((_, renewed, gone)),
                ..
            } => (None, [renewed.has(at), gone.has(at)]),
            _ => (None, [false; 2]),
        }
    }
}

/// What a member says to an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Vote {
    /// Nothing yet.
    Open,
    /// Yes.
    Granted,
    /// Another client has it, or it does not vote.
    Refused,
}

/// Some of the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Set(u8);

impl Set {
    /// Whether one is among them.
    pub fn has(self, at: Where) -> bool {
        self.0 & (1 << at) != 0
    }

    /// With one more.
    pub fn with(self, at: Where) -> Set {
        Set(self.0 | (1 << at))
    }

    /// Without one.
    pub fn without(self, at: Where) -> Set {
        Set(self.0 & !(1 << at))
    }

    /// The same, of members that stand in another order.
    fn reordered(self, order: [Where; MEMBERS]) -> Set {
        let places = order.iter().enumerate().filter(|(_, was)| self.has(**was));
        places.fold(Set::default(), |set, (at, _)| set.with(at))
    }

    /// Whether they are a majority.
    pub fn is_majority(self) -> bool {
        self.0.count_ones() >= MAJORITY
    }
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Time goes on.
    Tick,
    /// A client asks all members for the lock.
    Ask(Who),
    /// Such a request arrives at a member: an acquire, or a second one for a grant that is held.
    Vote(Who, Where),
    /// An acquire arrives at a member that was given up.
    Late(Who, Where),
    /// The token arrives at a member.
    Raise(Who, Where),
    /// A client has too few votes, or has waited too long.
    GiveUp(Who),
    /// A holder has its grant renewed.
    Renew(Who),
    /// That arrives at a member.
    RenewAt(Who, Where),
    /// It was not answered in time.
    RenewalFails(Who),
    /// A holder leaves.
    Leave(Who),
    /// The release of a grant that its client does not want any more arrives at a member.
    Free(Where),
    /// A member is restarted without its data.
    Restart(Where),
    /// A client dies.
    Crash(Who),
}

impl Quorum {
    fn keeps(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// By how much the clock of each member is ahead of that of the first.
    fn ahead(&self) -> [Token; MEMBERS] {
        let most = Token::from(MAX_LEASE);
        match (self.tokens, self.keeps(Rule::ClocksAgree)) {
            (false, _) => [0; MEMBERS],
            (true, true) => [0, 0, TICK * (most - 1)],
            (true, false) => [0, 0, TICK * most],
        }
    }

    /// Whether a member votes.
    fn votes(&self, member: &Member) -> bool {
        let after = match self.keeps(Rule::TheyWaitLongEnough) {
            true => MAX_LEASE,
            false => 1,
        };
        !self.keeps(Rule::FreshMembersWait) || member.since.is_some_and(|since| since >= after)
    }
}

impl State {
    /// Tokens are counted from the present, and those that are too old to matter are all alike.
    fn tokens_from_now(&mut self) {
        let now = std::mem::take(&mut self.now);
        for (at, member) in self.members.iter_mut().enumerate() {
            // The next token is no less than the clock, whatever the last one was.
            member.last = (member.last - now).max(self.ahead[at] - 1);
        }
        // A client that can still get the lock was given its token in this time.
        let oldest = -TICK * Token::from(LEASE);
        let put = |token: &mut Token| *token = (*token - now).max(oldest);
        put(&mut self.highest);
        for client in &mut self.clients {
            match &mut client.phase {
                Phase::Asking { token, .. } | Phase::Raising { token, .. } => put(token),
                Phase::Holding { token, .. } => *token = 0,
                Phase::Idle | Phase::Dead => {}
            }
        }
    }

    /// Members with the same clock are alike: only which of them are how says anything.
    fn sort_members(&mut self) {
        let mut order = [0, 1, 2];
        order.sort_by_key(|at| {
            let said = self.clients.map(|client| client.phase.said_at(*at));
            (self.ahead[*at], self.members[*at], said)
        });
        if order.is_sorted() {
            return;
        }
        self.members = order.map(|at| self.members[at]);
        for client in &mut self.clients {
            match &mut client.phase {
                Phase::Asking { votes, .. } => *votes = order.map(|at| votes[at]),
                Phase::Raising { granted, raised, .. } => {
                    (*granted, *raised) = (granted.reordered(order), raised.reordered(order));
                }
                Phase::Holding {
                    renewal: Some((_, renewed, gone)),
                    ..
                } => (*renewed, *gone) = (renewed.reordered(order), gone.reordered(order)),
                _ => {}
            }
        }
    }

    /// Forgets what says nothing any more.
    fn tidy(&mut self) {
        for member in &mut self.members {
            if let Some(Grant { client, current }) = &mut member.holder {
                *current &= !matches!(self.clients[*client].phase, Phase::Idle | Phase::Dead);
            }
        }
    }
}

/// The clients that hold by their own clock.
fn believers(state: &State) -> impl Iterator<Item = Who> {
    let holds = |client: &Client| matches!(client.phase, Phase::Holding { deadline: 1.., .. });
    (0..state.clients.len()).filter(move |who| holds(&state.clients[*who]))
}

impl Model for Quorum {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let member = Member {
            holder: None,
            lease: 0,
            last: 0,
            since: Some(MAX_LEASE),
        };
        let client = Client { phase: Phase::Idle };
        vec![State {
            members: [member; MEMBERS],
            clients: [client; 2],
            now: 1,
            asked: 0,
            highest: 0,
            left: self.faults,
            went_back: false,
            ahead: self.ahead(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.all_actions(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action)?;
        next.tidy();
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_HOLDER, |_, state: &State| believers(state).count() <= 1),
            Property::always(TOKENS_GROW, |_, state: &State| !state.went_back),
            Property::sometimes(
                "a lock is held while a member waits",
                |model: &Quorum, state: &State| {
                    let waits = |member: &Member| member.since.is_none_or(|since| since < MAX_LEASE);
                    model.faults.restarts == 0
                        || believers(state).count() == 1 && state.members.iter().any(waits)
                },
            ),
            Property::sometimes(
                "a member that was restarted votes for a holder",
                |model: &Quorum, state: &State| {
                    let restarted = state.left.restarts < model.faults.restarts;
                    let all_vote = state.members.iter().all(|member| member.since == Some(MAX_LEASE));
                    model.faults.restarts == 0
                        || restarted
                            && all_vote
                            && believers(state).any(|who| {
                                let mut members = state.members.iter();
                                members.all(|member| {
                                    member.holder
                                        == Some(Grant {
                                            client: who,
                                            current: true,
                                        })
                                })
                            })
                },
            ),
            Property::sometimes(
                "two ask at the same time and neither gets it",
                |_, state: &State| {
                    let refused = |client: &Client| match client.phase {
                        Phase::Asking { votes, .. } => {
                            votes.iter().filter(|vote| **vote == Vote::Refused).count() == 2
                        }
                        _ => false,
                    };
                    state.clients.iter().all(refused)
                },
            ),
        ]
    }
}

impl Told for Quorum {
    fn step(&self, before: &State, action: &Action) -> Option<String> {
        tell::step(self, before, *action)
    }

    fn situation(&self, state: &State) -> String {
        tell::situation(state)
    }

    fn is_tick(&self, action: &Action) -> bool {
        matches!(action, Action::Tick)
    }
}
