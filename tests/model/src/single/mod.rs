//! One server that keeps its data; two clients with two tasks each.
//!
//! The steps follow the library: `acquire.rs` and `waiters.rs` (only the first in line of a process talks to the
//! store), `grants.rs` and `watchdog.rs` (deadlines and renewals), `handoff.rs`, `release.rs` (releases are repeated
//! until they are answered or the lease is over), `stores/redis/node/responses.rs` (what is of unknown outcome is
//! released until the server's clock is past refuse-after), and the script's three steps.

mod client;
mod server;
mod settle;
mod state;
mod tell;

use smallvec::SmallVec;
use stateright::{Model, Property};

pub use self::state::{
    Attempt, Client, Hold, Id, Message, Mode, Packet, Release, Resource, State, Store, Task, Which, Who,
};
use crate::check::{self, Told};

/// How long the server keeps a grant.
pub const LEASE: u8 = 4;
/// What a holder's deadline is earlier.
pub const MARGIN: u8 = 1;
/// A third of the lease: when to renew.
pub const RENEW_AFTER: u8 = 1;
/// How much must be left of a grant that is handed off: a third of the lease, rounded up.
pub const HANDED_ON_WITH: u8 = 2;
/// For how long an answer is waited for.
pub const TIMEOUT: u8 = 2;
/// Messages that are late at the same time.
pub const UNDER_WAY: usize = 2;
/// Fencing tokens that an acquire reserves: one for a handoff.
pub const BLOCK: u8 = 2;

/// A rule of the protocol that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// A holder's deadline is counted from before the acquire or renewal was sent.
    DeadlineFromSend,
    /// The deadline is earlier by a margin, for clocks that go at different rates.
    Margin,
    /// Whether a lock is held is seen by looking at the clock, not by waiting to be told.
    ClockIsAsked,
    /// A renewal whose answer comes after the deadline heals nothing.
    LostIsFinal,
    /// A release ends its own grant and no other.
    OwnerIsChecked,
    /// A renewal of a grant that is not there does not make it again.
    RenewalNeverCreates,
    /// An acquire is sent once: the next attempt is another grant.
    SentOnce,
    /// An acquire of unknown outcome is released.
    UnknownIsUndone,
    /// The server refuses an acquire that comes too late.
    LateIsRefused,
    /// The release of an acquire of unknown outcome counts once the acquire would be refused.
    ReleasedAfterThat,
    /// The number of a grant is never used again.
    IdsAreNew,
    /// A grant whose release is queued is not handed off.
    HandedOnBeforeRelease,
    /// A grant is handed off only while a third of its lease is left.
    HandedOnInTime,
    /// Every grant has a lease.
    LeasesEnd,
    /// The resource refuses a token older than the last one.
    TokenIsChecked,
}

impl check::Rule for Rule {
    type World = Single;
    const MODEL: &'static str = "single";
    const ALL: &'static [Rule] = &[
        Rule::DeadlineFromSend,
        Rule::Margin,
        Rule::ClockIsAsked,
        Rule::LostIsFinal,
        Rule::OwnerIsChecked,
        Rule::RenewalNeverCreates,
        Rule::SentOnce,
        Rule::UnknownIsUndone,
        Rule::LateIsRefused,
        Rule::ReleasedAfterThat,
        Rule::IdsAreNew,
        Rule::HandedOnBeforeRelease,
        Rule::HandedOnInTime,
        Rule::LeasesEnd,
        Rule::TokenIsChecked,
    ];

    fn worlds() -> Vec<(&'static str, Single)> {
        let world = |[late, lost, pauses, crashes, slow, cancelled]: [u8; 6], to_the_end| Single {
            without: None,
            tasks: 2,
            faults: Faults {
                late,
                lost,
                pauses,
                crashes,
                slow,
                cancelled,
            },
            to_the_end,
        };
        vec![
            ("everything", world([2, 1, 1, 1, 0, 0], false)),
            ("a slow clock", world([1, 0, 1, 0, 1, 1], false)),
            ("bad network", world([3, 2, 0, 0, 0, 0], false)),
            ("to the end", world([1, 1, 1, 1, 0, 1], true)),
        ]
    }

    fn prevents(self) -> &'static str {
        use Rule as R;
        match self {
            R::DeadlineFromSend
            | R::Margin
            | R::ClockIsAsked
            | R::OwnerIsChecked
            | R::IdsAreNew
            | R::HandedOnBeforeRelease => ONE_HOLDER,
            R::RenewalNeverCreates
            | R::SentOnce
            | R::UnknownIsUndone
            | R::LateIsRefused
            | R::ReleasedAfterThat => NO_GHOST,
            R::LostIsFinal => LOST_IS_FINAL,
            R::HandedOnInTime => NOT_IN_VAIN,
            R::LeasesEnd => FREE_IN_TIME,
            R::TokenIsChecked => IN_ORDER,
        }
    }

    fn taken_out(self) -> Single {
        use Rule as R;
        let [mut late, mut lost, mut pauses, mut crashes, mut slow] = [0; 5];
        match self {
            R::DeadlineFromSend | R::LostIsFinal => (late, pauses) = (1, 1),
            R::Margin => (pauses, slow) = (1, 1),
            R::ClockIsAsked => pauses = 1,
            R::OwnerIsChecked => pauses = 1,
            R::TokenIsChecked => (late, pauses) = (1, 1),
            R::SentOnce
            | R::UnknownIsUndone
            | R::LateIsRefused
            | R::ReleasedAfterThat
            | R::RenewalNeverCreates
            | R::HandedOnInTime
            | R::IdsAreNew => late = 1,
            R::LeasesEnd => crashes = 1,
            R::HandedOnBeforeRelease => lost = 0,
        }
        Single {
            without: Some(self),
            tasks: match self {
                R::OwnerIsChecked | R::HandedOnBeforeRelease | R::HandedOnInTime | R::IdsAreNew => 2,
                _ => 1,
            },
            faults: Faults {
                late,
                lost,
                pauses,
                crashes,
                slow,
                cancelled: 0,
            },
            to_the_end: false,
        }
    }
}

/// Two never hold the lock at the same time, each by its own clock.
pub const ONE_HOLDER: &str = "two never hold";
/// Who holds the lock by its own clock has it at the server.
pub const HELD_IS_HELD: &str = "who holds has it at the server";
/// Who was told that the lock is lost is never told that it is held.
pub const LOST_IS_FINAL: &str = "lost is final";
/// A write of an earlier holder never comes after that of a later one.
pub const IN_ORDER: &str = "writes are taken in the order of the holders";
/// What the server holds for a client that lives, this holds, asks for or gives back.
pub const NO_GHOST: &str = "no ghost holds";
/// The key is free within a lease after its holder is gone and the last of its renewals has landed.
pub const FREE_IN_TIME: &str = "free within a lease";
/// When nothing more goes wrong, everybody has soon had the lock. Looked at only where it is asked for.
pub const NOBODY_IS_STUCK: &str = "nobody is stuck";

/// Who takes the lock over from another task has it for a tick at least.
pub const NOT_IN_VAIN: &str = "who takes over has time";

/// How much may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Requests and answers that take longer than an instant, for as long as they like.
    pub late: u8,
    /// Those of them that never arrive.
    pub lost: u8,
    /// Processes that are stopped for a while.
    pub pauses: u8,
    /// Processes that die.
    pub crashes: u8,
    /// Ticks that a client's clock misses.
    pub slow: u8,
    /// Calls that are given up, while they wait or while they write.
    pub cancelled: u8,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Single {
    /// The rule that does not hold.
    pub without: Option<Rule>,
    /// How many tasks each client has, two at the most.
    pub tasks: usize,
    /// What may go wrong.
    pub faults: Faults,
    /// Whether it is looked at each state if nobody is stuck: that takes longer.
    pub to_the_end: bool,
}

/// How a request fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is carried out and answered at once.
    InTime,
    /// It is under way for a while.
    Late,
    /// It is carried out at once, and the answer is under way for a while.
    LateAnswer,
}

impl Fate {
    const ALL: [Fate; 3] = [Fate::InTime, Fate::Late, Fate::LateAnswer];
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Time goes on, perhaps not by the clock of this client.
    Tick(Option<Who>),
    /// A task wants the lock.
    Arrive(Who, Which),
    /// It goes away while it waits.
    Cancel(Who, Which),
    /// The first in line asks for the lock.
    Ask(Who, Fate),
    /// An acquire was not answered in time.
    AskFails(Who, Id, Fate),
    /// A holder writes to the resource once more, if it still holds; that is under way for a while.
    Write(Who, Which),
    /// It hands the lock on to the next task.
    HandOff(Who, Which),
    /// It gives the lock back.
    Leave(Who, Which, Fate),
    /// The grant of a task is renewed.
    Renew(Who, Which, Fate),
    /// That was not answered in time.
    RenewalFails(Who, Which),
    /// The watchdog tells a task that its time is up.
    Notice(Who, Which),
    /// A release is sent again.
    Again(Who, Id, Fate),
    /// Something late arrives; a request that this leads to, or the answer to it, fares so.
    Land(Message, Fate),
    /// It never will.
    Lose(Message),
    /// A process is stopped, and time goes on.
    Pause(Who),
    /// It goes on.
    Resume(Who),
    /// It dies.
    Crash(Who),
}

impl Single {
    /// Whether a rule holds.
    fn keeps(&self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    fn margin(&self) -> u8 {
        if self.keeps(Rule::Margin) { MARGIN } else { 0 }
    }

    /// Whether the guard says "held" when it is asked now.
    pub fn believes(&self, hold: &Hold) -> bool {
        match self.keeps(Rule::ClockIsAsked) {
            true => hold.deadline > 0,
            false => !hold.ended,
        }
    }

    fn believers<'a>(&'a self, state: &'a State) -> impl Iterator<Item = &'a Hold> {
        let holds = state.clients.iter().flat_map(Client::holds);
        holds.filter(|hold| self.believes(hold))
    }

    /// Puts everything into one order, and takes out what can have no effect any more.
    fn tidy(&self, state: &mut State) {
        let ids_are_new = self.keeps(Rule::IdsAreNew);
        let alike = ids_are_new && self.keeps(Rule::OwnerIsChecked) && self.keeps(Rule::RenewalNeverCreates);
        let store = state.store;
        let acquires: SmallVec<[Id; 3]> = state
            .net
            .iter()
            .filter(|message| matches!(message.packet, Packet::Acquire(open) if open > 0 || !self.keeps(Rule::LateIsRefused)))
            .map(|message| message.id)
            .collect();
        let is_possible = |id: Id| store.holder == Some(id) || acquires.contains(&id);
        state.net.retain(|Message { id, packet, heard }| match packet {
            Packet::Acquire(_) => *heard || acquires.contains(id),
            Packet::Renew | Packet::Release => *heard || !alike || is_possible(*id),
            _ => true,
        });
        if self.without.is_none() {
            state.tokens_from_zero();
        }
        state.net.sort_unstable();
        for client in &mut state.clients {
            for task in &mut client.tasks {
                if let Task::Holding(hold) = task
                    && hold.deadline == 0
                {
                    // Lost, and never otherwise again.
                    (hold.due, hold.suspect) = (0, false);
                }
            }
            client.attempts.sort_unstable();
            client.releases.sort_unstable();
        }
    }
}

impl Model for Single {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            mode: Mode::Up,
            tasks: [0, 1].map(|which| {
                if which < self.tasks {
                    Task::Fresh
                } else {
                    Task::Done
                }
            }),
            attempts: SmallVec::new(),
            releases: SmallVec::new(),
        };
        vec![State {
            store: Store {
                holder: None,
                lease: 0,
                last: 0,
                orphaned: 0,
            },
            clients: [client.clone(), client],
            net: SmallVec::new(),
            resource: Resource {
                token: 0,
                went_back: false,
            },
            left: self.faults,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for who in 0..state.clients.len() {
            self.actions_of(state, who, actions);
        }
        self.actions_of_net(state, actions);
        self.actions_of_time(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        self.step(&mut next, action)?;
        self.tidy(&mut next);
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_HOLDER, |model: &Single, state: &State| {
                model.believers(state).count() <= 1
            }),
            Property::always(HELD_IS_HELD, |model: &Single, state: &State| {
                model
                    .believers(state)
                    .all(|hold| state.store.holder == Some(hold.id))
            }),
            Property::always(LOST_IS_FINAL, |_, state: &State| {
                let mut holds = state.clients.iter().flat_map(Client::holds);
                !holds.any(|hold| hold.ended && hold.deadline > 0)
            }),
            Property::always(IN_ORDER, |_, state: &State| !state.resource.went_back),
            Property::always(NO_GHOST, |_, state: &State| {
                let Some(id) = state.store.holder else { return true };
                let client = &state.clients[id.who()];
                client.mode == Mode::Down
                    || client.holds().any(|hold| hold.id == id)
                    || client.attempts.iter().any(|attempt| attempt.id == id)
                    || client.releases.iter().any(|release| release.id == id)
            }),
            Property::always(NOT_IN_VAIN, |_, state: &State| {
                let mut holds = state.clients.iter().flat_map(Client::holds);
                !holds.any(|hold| hold.fresh && hold.deadline == 0)
            }),
            Property::always(FREE_IN_TIME, |_, state: &State| state.store.orphaned <= LEASE),
            Property::always(NOBODY_IS_STUCK, |model: &Single, state: &State| {
                !model.to_the_end || model.settles(state)
            }),
            Property::sometimes("a lock is handed off", |_, state: &State| {
                let mut holds = state.clients.iter().flat_map(Client::holds);
                holds.any(|hold| hold.reserved == 0)
            }),
            Property::sometimes(
                "a holder loses the lock to the other client",
                |_, state: &State| {
                    let of = |who: Who| state.holds(who).any(|hold| hold.deadline > 0);
                    state.holds(0).any(|hold| hold.deadline == 0) && of(1)
                },
            ),
            Property::sometimes("an acquire is undone before it lands", |_, state: &State| {
                let is_under_way = |id| {
                    let mut net = state.net.iter();
                    net.any(|message| message.id == id && matches!(message.packet, Packet::Acquire(1..)))
                };
                let mut releases = state.clients.iter().flat_map(|client| &client.releases);
                releases.any(|release| release.open > 0 && is_under_way(release.id))
            }),
            Property::sometimes("a write comes too late", |_, state: &State| {
                let mut net = state.net.iter();
                net.any(
                    |message| matches!(message.packet, Packet::Write(token) if token < state.resource.token),
                )
            }),
        ]
    }
}

impl Told for Single {
    fn step(&self, before: &State, action: &Action) -> Option<String> {
        tell::step(self, before, *action)
    }

    fn situation(&self, state: &State) -> String {
        tell::situation(self, state)
    }

    fn is_tick(&self, action: &Action) -> bool {
        matches!(action, Action::Tick(_) | Action::Pause(_))
    }
}
