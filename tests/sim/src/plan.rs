//! A world as data: processes, the actions of their users, and faults. Times are milliseconds of the world.
//!
//! Everything that a plan leaves open (the order of polls, the delay of each message) follows from its seed.

pub(crate) mod record;

use serde::{Deserialize, Serialize};

use self::record::{Ask, Once, Record, Records};

pub(crate) type Millis = u64;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) runtimes: Runtimes,
    pub(crate) network: Network,
    pub(crate) stores: Stores,
    pub(crate) settings: Settings,
    /// The clocks of the stores; stores that are not listed use the clock of the world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) store_clocks: Vec<StoreClock>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) scheduler: Scheduler,
    /// How many permits each semaphore has in the beginning.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) semaphores: Vec<u32>,
    /// The same of those whose permits have no owner.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) unowned: Vec<u32>,
    /// Where records are used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) records: Option<Records>,
    pub(crate) processes: Vec<Process>,
    pub(crate) faults: Vec<Fault>,
}

/// Whose clock is whose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Runtimes {
    /// All processes in one runtime, by one clock: fast.
    One,
    /// Each process in its own runtime, with its own clock: it can stop, crash, and run fast or slow.
    Each,
}

/// The order of events that are due at the same moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Scheduler {
    /// In a random order; sometimes a user that is ready is left for later.
    #[default]
    Random,
    /// In the order in which they became due.
    InOrder,
}

/// Delays of a message, one way.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Network {
    pub(crate) least: Millis,
    pub(crate) most: Millis,
}

impl Network {
    pub(crate) fn round_trip(self) -> Millis {
        2 * self.most
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stores {
    One,
    /// A majority of so many.
    Quorum(usize),
}

impl Stores {
    pub(crate) fn count(self) -> usize {
        match self {
            Stores::One => 1,
            Stores::Quorum(members) => members,
        }
    }
}

/// What a store's clock shows beside the world's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreClock {
    /// How many millionths it is too fast, or too slow.
    pub(crate) drift: i64,
    /// How many milliseconds it is ahead at the beginning.
    pub(crate) ahead: i64,
}

/// Settings of all clients.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) lease: Millis,
    pub(crate) retry_for: Millis,
    /// After this time without a reply the outcome of a request is unknown.
    pub(crate) timeout: Millis,
    /// Members of a quorum that may have lost their data do not vote for as long as the longest lease.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) members_abstain: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) sets: Sets,
}

impl Settings {
    /// The longest lease on a quorum.
    pub(crate) fn max_lease(self) -> Millis {
        2 * self.lease
    }
}

/// Which locks a store takes together by one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sets {
    #[default]
    InOneStep,
    /// Those of a shard: keys with an even number, and the others.
    ByShard,
    OneByOne,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its clock runs so many millionths too fast, or too slow. Only where each process has a runtime.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) drift: i64,
    pub(crate) users: Vec<User>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct User {
    /// When it begins.
    pub(crate) begins: Millis,
    pub(crate) tasks: Vec<Task>,
}

/// What a user does, one after the other.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Task {
    Pause(Millis),
    Lock(Lock),
    Record(Record),
    Once(Once),
    Ask(Ask),
    /// Takes permits without an owner, keeps them for this time, and releases them.
    Unowned {
        semaphore: u32,
        amount: u32,
        wait: Millis,
        lasts: Millis,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        habit: Option<Habit>,
    },
    Latch {
        latch: u32,
        step: LatchStep,
    },
    /// Shuts the client of the process down; guards have so long to be released.
    ShutDown(Millis),
    /// The same as soon as some call has a part of its set, within so long.
    ShutDownAmidSet {
        within: Millis,
        deadline: Millis,
    },
    /// Changes how many permits a semaphore has.
    Permits {
        semaphore: u32,
        change: Change,
    },
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LatchStep {
    SetCount(u64),
    CountDown,
    /// For at most so long.
    Wait(Millis),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Set(u32),
    Add(u32),
    Remove(u32),
}

/// Acquires a lock, works, and releases it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Lock {
    pub(crate) key: u32,
    pub(crate) kind: Kind,
    /// Other keys that are taken together with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) also: Vec<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) call: Call,
    /// Permits: how many besides one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) more_permits: u32,
    /// How many times it is handed off in the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) handoffs: Option<u32>,
    /// Asks once.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) once: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fixed_lease: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) min_hold: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_hold: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_waiters: Option<usize>,
    /// Write locks: new readers wait while it waits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) preferred: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) habit: Option<Habit>,
    /// What is done while it is held.
    pub(crate) work: Vec<Work>,
    pub(crate) end: End,
    /// What is done after a write lock became a read lock.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) reading: Vec<Work>,
}

/// The call of the library that acquires a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Call {
    /// One that returns a guard.
    #[default]
    Acquire,
    /// `run` with a closure, or `lead`.
    Run,
    /// A function with the attribute.
    Attribute,
    /// The same, and its body runs on when the lock is lost.
    AttributeRunsOn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Plain,
    Fair,
    Fenced,
    Read,
    Write,
    /// Permits of a semaphore.
    Permit,
    /// The lead of a post.
    Leader,
}

/// An unusual way to await an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Habit {
    /// Drops it after so many polls without an outcome.
    DropsAfterPolls(u32),
    /// Drops it after this time.
    DropsAfter(Millis),
    /// After so many polls it does not poll for a while.
    PollsNot { after: u32, lasts: Millis },
    /// Makes two concurrent calls, and drops the other one when one has the lock.
    Races,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Work {
    Sleep(Millis),
    /// Writes to the resource that the lock protects, with the fencing token.
    Write,
    /// Makes sure that this much of the lease is left.
    Ensure(Millis),
    /// Inside the frame of the lock.
    Nest(Box<Lock>),
    /// Concurrently, inside the frame.
    Join(Vec<Lock>),
    /// In a task of its own, made inside the frame, which it must not inherit.
    Spawn(Box<Lock>),
    /// In a task of its own, into which the frame is carried.
    Carry(Box<Lock>),
    /// In a future that is dropped when the lock is lost.
    Run(Vec<Work>),
    /// Checks the guard.
    Ask,
    /// A second guard, which another task keeps for so long.
    Reenter(Millis),
    /// Takes a second lock inside, and makes a task there that is in the frame of the first alone, and wants the second.
    Cross(Box<Lock>),
}

/// How a user leaves its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Release,
    /// The release is dropped after its first poll.
    ReleaseUnawaited,
    Drop,
    Panic,
    /// A second guard is released after the first.
    ReleaseTwice,
    /// The guard is moved to another task, and dropped there after this time.
    Elsewhere(Millis),
    /// A write lock becomes a read lock; see [`Lock::reading`].
    Downgrade,
    /// Another thread drops the guard at any moment, while the lock is acquired again in its frame.
    GivenAway,
}

/// A fault that lasts for a while.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) at: Millis,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) lasts: Millis,
    pub(crate) what: Trouble,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Trouble {
    /// Messages of all links are lost, delayed, doubled, or break their connection; chances in a thousand.
    Storm {
        lost: u32,
        late: u32,
        doubled: u32,
        broken: u32,
        /// By how much at most, where they are late.
        by: Millis,
    },
    /// No message passes between a process and a store; `None` means all stores.
    Cut {
        process: Option<usize>,
        store: Option<usize>,
        way: Way,
    },
    /// The store is away, and comes back with its data or without.
    StoreStops { store: usize, loses_data: bool },
    /// The store forgets everything.
    StoreLosesData { store: usize },
    /// The store refuses everything, or acquires alone since it is full.
    StoreRefuses { store: usize, full: bool },
    /// The store takes this long for each request, one after the other.
    StoreIsSlow { store: usize, each: Millis },
    /// The store's clock steps.
    StoreClockSteps { store: usize, by: i64 },
    /// The store is away, and a replica takes its place: what the store did within the last so many milliseconds is lost.
    StoreFailsOver { store: usize, lag: Millis },
    /// An operator forces a lock open.
    ForcedOpen { key: u32 },
    /// The machine of the process sleeps, and the clock of its timers does not count that.
    ProcessSuspended { process: usize },
    /// The process stalls; the clocks go on.
    ProcessStops { process: usize },
    /// The process crashes, and restarts with the remaining tasks of its users.
    ProcessCrashes { process: usize },
    /// The same in good order, as far as destructors can: nothing keeps it from sending.
    ProcessEnds { process: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    Both,
    ToStore,
    ToProcess,
}

impl Plan {
    /// The size of the plan, for people.
    pub(crate) fn size(&self) -> String {
        let users = self.processes.iter().flat_map(|process| &process.users);
        let tasks: usize = users.clone().map(|user| user.tasks.len()).sum();
        format!(
            "{} processes, {} users, {tasks} tasks, {} faults",
            self.processes.len(),
            users.count(),
            self.faults.len()
        )
    }

    /// Looks at each lock that is taken, those inside of others too.
    pub(crate) fn each_lock(&self, look: &mut impl FnMut(&Lock)) {
        let users = self.processes.iter().flat_map(|process| &process.users);
        for task in users.flat_map(|user| &user.tasks) {
            if let Task::Lock(lock) = task {
                lock.each(look);
            }
        }
    }

    /// Whether some acquire is kept and not polled.
    pub(crate) fn has_unpolled(&self) -> bool {
        let mut any = false;
        self.each_lock(&mut |lock| any |= matches!(lock.habit, Some(Habit::PollsNot { .. })));
        any
    }

    /// When the faults have no effect any more.
    pub(crate) fn settled_after(&self) -> Millis {
        match self.faults.is_empty() {
            true => 0,
            false => self.faults_end() + 2 * (self.settings.lease + self.settings.timeout) + 6_000,
        }
    }

    /// When the last fault is over.
    pub(crate) fn faults_end(&self) -> Millis {
        self.faults
            .iter()
            .map(|fault| fault.at + fault.lasts)
            .max()
            .unwrap_or(0)
    }
}

impl Lock {
    fn each(&self, look: &mut impl FnMut(&Lock)) {
        look(self);
        self.work
            .iter()
            .chain(&self.reading)
            .for_each(|work| work.each_lock(look));
    }
}

impl Work {
    fn each_lock(&self, look: &mut impl FnMut(&Lock)) {
        match self {
            Work::Nest(lock) | Work::Spawn(lock) | Work::Carry(lock) | Work::Cross(lock) => lock.each(look),
            Work::Join(locks) => locks.iter().for_each(|lock| lock.each(look)),
            Work::Run(works) => works.iter().for_each(|work| work.each_lock(look)),
            _ => {}
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_zero(value: &i64) -> bool {
    *value == 0
}
