//! A server that loses data: it is restarted or flushed, or a replica takes over that has not seen the last writes.
//! Two clients with two tasks each.
//!
//! Then two may hold the lock at the same time, and only the fencing tokens protect: what is shown here is that these
//! grow whatever is lost, and that a process that has seen its server change hands nothing off that is not there any
//! more. Requests are carried out at once; what takes time are pauses of all processes, and writes that are late.

mod step;
mod tell;

use smallvec::SmallVec;
use stateright::{Model, Property};

use crate::check::{self, Told};

/// How long the server keeps a grant, in ticks.
pub const LEASE: u8 = 3;
/// What a holder's deadline is earlier.
pub const MARGIN: u8 = 1;
/// By how much the server's clock, which fencing tokens are made of, goes on in a tick.
pub const TICK: u8 = 2;
/// By how much it goes on while an acquire is carried out: tokens are microseconds, and an acquire takes longer.
pub const ACQUIRE: u8 = 1;
/// Fencing tokens that an acquire asks for: one for a handoff.
pub const BLOCK: u8 = 2;
/// By how much it goes on while a replica takes over: longer than a block reaches back, which is 5 ms (lua/run.lua).
pub const FAIL_OVER: u8 = BLOCK;
/// Writes that are late at the same time.
pub const UNDER_WAY: usize = 2;

/// A rule of the protocol that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A fencing token is no less than the server's clock, so that a server without data goes on where it was.
    TokensFollowClock,
    /// The tokens that are reserved for handoffs reach back from the present, and never beyond it.
    BlocksReachBack,
    /// Where there is no last token, one may have been given a moment ago: nothing reaches back.
    NotWithoutLast,
    /// A process that has connected anew hands nothing on before the server has confirmed it.
    SuspectIsNotHandedOn,
    /// The answer to a question that was asked before that does not confirm anything.
    AnswersGetOld,
    /// The resource refuses a token older than the last one.
    TokenIsChecked,
    /// Assumed: a server that loses data has a clock that did not go back.
    ClockGoesOn,
    /// Assumed: a replica takes over later than a block of tokens reaches back.
    FailOverTakesTime,
    /// Assumed: when a replica has taken over, the old master grants nothing any more.
    OldMasterIsGone,
}

impl check::Rule for Rule {
    type World = Failover;
    const MODEL: &'static str = "failover";
    const ALL: &'static [Rule] = &[
        Rule::TokensFollowClock,
        Rule::BlocksReachBack,
        Rule::NotWithoutLast,
        Rule::SuspectIsNotHandedOn,
        Rule::AnswersGetOld,
        Rule::TokenIsChecked,
        Rule::ClockGoesOn,
        Rule::FailOverTakesTime,
        Rule::OldMasterIsGone,
    ];

    fn worlds() -> Vec<(&'static str, Failover)> {
        let world = |[late, flushed, failed_over, ticks]: [u8; 4]| Failover {
            without: None,
            faults: Faults {
                late,
                flushed,
                failed_over,
            },
            ticks,
        };
        vec![
            ("data are lost twice", world([1, 1, 1, 5])),
            ("data are lost three times", world([1, 2, 1, 3])),
        ]
    }

    fn prevents(self) -> &'static str {
        match self {
            Rule::TokensFollowClock
            | Rule::BlocksReachBack
            | Rule::NotWithoutLast
            | Rule::ClockGoesOn
            | Rule::FailOverTakesTime
            | Rule::OldMasterIsGone => TOKENS_GROW,
            Rule::SuspectIsNotHandedOn | Rule::AnswersGetOld => NOT_IN_DOUBT,
            Rule::TokenIsChecked => IN_ORDER,
        }
    }

    fn taken_out(self) -> Failover {
        let (late, flushed, failed_over) = match self {
            Rule::TokenIsChecked => (1, 0, 1),
            Rule::AnswersGetOld => (1, 1, 0),
            Rule::FailOverTakesTime | Rule::OldMasterIsGone => (0, 0, 1),
            _ => (0, 1, 0),
        };
        Failover {
            without: Some(self),
            faults: Faults {
                late,
                flushed,
                failed_over,
            },
            ticks: 4,
        }
    }
}

/// Whatever is lost, each acquire has tokens above all that were given or reserved before.
pub const TOKENS_GROW: &str = "tokens grow";
/// A write of an earlier holder never comes after that of a later one.
pub const IN_ORDER: &str = "writes are taken in the order of the holders";
/// A process that knows that its server has changed hands off no grant that this does not have.
pub const NOT_IN_DOUBT: &str = "nothing lost is handed off in doubt";

/// How much may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Writes to the resource, and answers of the server, that take longer than an instant, for as long as they like.
    pub late: u8,
    /// How often the server loses all data.
    pub flushed: u8,
    /// How often the replica takes over.
    pub failed_over: u8,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Failover {
    /// The rule that does not hold.
    pub without: Option<Rule>,
    /// What may go wrong.
    pub faults: Faults,
    /// How long it is looked at.
    pub ticks: u8,
}

/// A client, by its place.
pub type Who = usize;
/// A task of a client, by its place.
pub type Which = usize;

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The server.
    pub master: Data,
    /// What its replica has seen.
    pub replica: Data,
    /// A master that another has replaced and that goes on, for the clients that have not noticed.
    pub old: Option<Data>,
    /// The server's clock.
    pub now: u8,
    /// Ticks that are left.
    pub ticks: u8,
    /// How many acquires were granted: what orders the holders.
    pub granted: u8,
    /// The highest of all tokens that were given or reserved.
    pub highest: u8,
    /// The clients that want the lock.
    pub clients: [Client; 2],
    /// Writes that are under way.
    pub net: SmallVec<[Write; 2]>,
    /// The last write that the resource took.
    pub resource: Write,
    /// What may still go wrong.
    pub left: Faults,
    /// What went wrong that must not.
    pub wrong: Wrong,
}

/// What must not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Wrong {
    /// An acquire was given a token that was not above all others.
    pub token: bool,
    /// A write was taken after one of a later holder.
    pub order: bool,
    /// A grant that was lost was handed off by a process that had reason to doubt it.
    pub doubt: bool,
}

/// What a server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Data {
    /// The grant that has the key, by its order.
    pub holder: Option<u8>,
    /// What is left of its lease.
    pub lease: u8,
    /// The last fencing token.
    pub last: Option<u8>,
}

/// A process with two tasks that want the lock once each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Client {
    /// Its connection is to the server as it is now.
    pub connected: bool,
    /// Served in their order.
    pub tasks: [Task; 2],
}

/// A client that wants the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// Waits for it.
    Waiting,
    /// The server has granted it, which is not heard yet.
    Answered(Hold),
    /// Is inside.
    Holding(Hold),
    /// Is through.
    Done,
}

/// A grant as its holder has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The grant, by its order.
    pub grant: u8,
    /// How often it was handed off.
    pub handed: u8,
    /// Its fencing token.
    pub token: u8,
    /// Tokens that are left for those to whom it is handed off.
    pub reserved: u8,
    /// When it is lost, by the holder's clock; 0 when it is.
    pub deadline: u8,
    /// The process has connected anew since the question was asked that confirmed the grant last.
    pub old: bool,
    /// It sees the grant in doubt because of that.
    pub suspect: bool,
    /// The answer to a renewal that is not heard yet.
    pub renewal: Option<Renewal>,
}

/// An answer that is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Renewal {
    /// The server had the grant.
    pub done: bool,
    /// What is left of the lease since it was asked for.
    pub deadline: u8,
    /// The process has connected anew since.
    pub old: bool,
}

/// A write to the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Write {
    /// Which holder's it is: the order of the grant, and how often it had been handed off.
    pub by: (u8, u8),
    /// Its fencing token.
    pub token: u8,
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Time goes on.
    Tick,
    /// The first in line asks for the lock and gets it; whether it hears so at once.
    Acquire(Who, bool),
    /// It hears that it has got the lock, or that its grant is renewed or gone.
    Hear(Who, Which),
    /// A holder writes once more, if it still holds; that is under way for a while.
    Write(Who, Which),
    /// Such a write arrives.
    Land(Write),
    /// A holder hands the lock off to the next task.
    HandOff(Who, Which),
    /// It gives it back.
    Leave(Who, Which),
    /// Its grant is renewed, or found to be gone; whether it hears so at once.
    Renew(Who, Which, bool),
    /// The replica has seen everything.
    Replicate,
    /// The replica takes over.
    FailOver,
    /// The server loses all data.
    Flush,
    /// A client connects anew.
    Connect(Who),
}

impl Failover {
    fn keeps(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }
}

impl State {
    /// Puts everything into one order, and forgets what says nothing any more.
    fn tidy(&mut self) {
        self.net.sort_unstable();
        if self.left.failed_over == 0 {
            self.replica = Data::default();
        }
        let known = [self.master.holder, self.replica.holder];
        for client in &mut self.clients {
            for task in &mut client.tasks {
                if let Task::Holding(hold) | Task::Answered(hold) = task
                    && hold.deadline == 0
                    && !known.contains(&Some(hold.grant))
                {
                    *task = Task::Done;
                }
            }
            let is_idle = client.holds().all(|hold| hold.deadline == 0);
            client.connected |= is_idle && self.old.is_none();
        }
    }
}

impl Client {
    /// Its holds.
    pub fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.tasks.iter().filter_map(|task| match task {
            Task::Holding(hold) => Some(hold),
            _ => None,
        })
    }

    /// Whether the answer to an acquire is on its way.
    pub fn asks(&self) -> bool {
        self.tasks.iter().any(|task| matches!(task, Task::Answered(_)))
    }

    /// The first task in the queue.
    pub fn front(&self) -> Option<Which> {
        self.tasks.iter().position(|task| *task == Task::Waiting)
    }
}

/// The tasks that hold by their own clock.
fn believers(state: &State) -> impl Iterator<Item = &Hold> {
    let holds = state.clients.iter().flat_map(Client::holds);
    holds.filter(|hold| hold.deadline > 0)
}

impl Model for Failover {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            connected: true,
            tasks: [Task::Waiting; 2],
        };
        vec![State {
            master: Data::default(),
            replica: Data::default(),
            old: None,
            // Far enough from 0 for all that reaches back, and for a clock that is set back.
            now: 10,
            ticks: self.ticks,
            granted: 0,
            highest: 0,
            clients: [client.clone(), client],
            net: SmallVec::new(),
            resource: Write::default(),
            left: self.faults,
            wrong: Wrong::default(),
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
            Property::always(TOKENS_GROW, |_, state: &State| !state.wrong.token),
            Property::always(IN_ORDER, |_, state: &State| !state.wrong.order),
            Property::always(NOT_IN_DOUBT, |_, state: &State| !state.wrong.doubt),
            Property::sometimes("two hold after data were lost", |_, state: &State| {
                believers(state).count() == 2
            }),
            Property::sometimes("a late write is refused", |_, state: &State| {
                let mut net = state.net.iter();
                net.any(|write| write.token < state.resource.token)
            }),
            Property::sometimes(
                "an answer from before a reconnection is heard after it",
                |_, state: &State| {
                    let of = |task: &Task| match task {
                        Task::Answered(hold) => hold.old,
                        Task::Holding(hold) => hold.renewal.is_some_and(|renewal| renewal.old),
                        _ => false,
                    };
                    state
                        .clients
                        .iter()
                        .any(|client| client.connected && client.tasks.iter().any(of))
                },
            ),
            Property::sometimes(
                "a confirmed grant is handed off after a fail-over",
                |model: &Failover, state: &State| {
                    state.left.failed_over < model.faults.failed_over
                        && believers(state)
                            .any(|hold| hold.handed > 0 && state.master.holder == Some(hold.grant))
                },
            ),
        ]
    }
}

impl Told for Failover {
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
