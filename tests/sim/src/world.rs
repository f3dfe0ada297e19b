//! The world: its clock, the messages in flight, and all processes and stores in it. There is one world for each
//! thread; everything in it happens on that thread, one event after the other.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::GrantId;
use fastrand::Rng;
use tokio::time::Instant;

use crate::chance::stream;
use crate::check::Checks;
use crate::count::Counts;
use crate::drift;
use crate::events::Events;
use crate::fault::Weather;
use crate::net::{Arrival, Links};
use crate::plan::{Millis, Plan, Runtimes, Scheduler, Trouble};
use crate::store::SimStore;
use crate::trace::{Trace, Who};

/// Writes a line of the trace, if a trace is kept.
macro_rules! tell {
    ($world:expr, $who:expr, $($what:tt)*) => {
        if $world.trace.is_on() {
            let line = format!($($what)*);
            $world.trace.write($world.now, $who, line);
        }
    };
}

pub(crate) use tell;

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Names of random streams.
pub(crate) mod streams {
    pub(crate) const LINK: u64 = 1;
    pub(crate) const TIES: u64 = 2;
    pub(crate) const HOST: u64 = 3;
    pub(crate) const PROCESS: u64 = 4;
    pub(crate) const RUNTIME: u64 = 5;
    pub(crate) const PLAN: u64 = 6;
    pub(crate) const STEPS: u64 = 7;
    pub(crate) const RECORDS: u64 = 8;
    pub(crate) const THREADS: u64 = 9;
    pub(crate) const PLAN_OF_STORES: u64 = 20;
    pub(crate) const PLAN_OF_BUSY: u64 = 21;
    pub(crate) const PLAN_OF_SETS: u64 = 22;
    pub(crate) const ONCE: u64 = 23;
}

pub(crate) struct World {
    pub(crate) plan: Rc<Plan>,
    pub(crate) now: Millis,
    /// What the clocks of stores show at the beginning.
    epoch: Instant,
    events: Events,
    ties: Rng,
    pub(crate) clocks: Vec<LocalClock>,
    pub(crate) links: Links,
    pub(crate) stores: Vec<SimStore>,
    pub(crate) weather: Weather,
    pub(crate) checks: Checks,
    pub(crate) looks: crate::look::Looks,
    pub(crate) counts: Counts,
    pub(crate) trace: Trace,
    /// The process with a runtime of its own that runs now: the world's time follows its clock.
    pub(crate) running: Option<usize>,
    /// Runs the world: woken where something is to happen earlier than it was told.
    pub(crate) driver: Option<(Millis, std::task::Waker)>,
    /// Users that are not done, and what they have spawned.
    pub(crate) at_work: usize,
    /// How many tasks each user of each process has done.
    pub(crate) progress: Vec<Vec<usize>>,
}

/// What a process knows of the time: `epoch` is what its clock showed when it and the world began.
#[derive(Debug, Clone)]
pub(crate) struct LocalClock {
    pub(crate) epoch: Instant,
    pub(crate) drift: i64,
    /// What the process is: another one after each crash.
    pub(crate) incarnation: u32,
    pub(crate) alive: bool,
    /// What keeps it from running, and since when.
    pub(crate) stopped: Option<(Stillness, Millis)>,
    /// For how long its machine was suspended, which the clock of its timers does not count.
    pub(crate) suspended: Millis,
    /// The source of its random numbers and its moments.
    pub(crate) context: Option<dlock::sim::Process>,
}

/// Why a process does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stillness {
    Stopped,
    /// With its machine, and the clock of its timers.
    Suspended,
}

impl LocalClock {
    /// Milliseconds of this clock since the world began.
    pub(crate) fn millis(&self, now: Millis) -> Millis {
        drift::shows(now, self.drift)
    }

    /// The same by the clock of its timers.
    pub(crate) fn tokio_millis(&self, now: Millis) -> Millis {
        self.millis(now).saturating_sub(self.suspended)
    }

    /// When the clock of its timers shows this.
    fn when(&self, shown: Instant) -> Millis {
        let shown = drift::whole_millis(shown.saturating_duration_since(self.epoch));
        drift::lasts(shown + self.suspended, self.drift)
    }

    pub(crate) fn instant(&self, now: Millis) -> Instant {
        self.epoch + Duration::from_millis(self.millis(now))
    }
}

/// What happens at a moment of the world.
#[derive(Debug)]
pub(crate) enum Event {
    Arrival(Arrival),
    FaultBegins(usize),
    FaultEnds(usize),
    Check(crate::check::Due),
    Look,
    /// The lease of a grant may be over at a store.
    Lapses(usize, LockKey, GrantId),
    /// The `max_hold` of a section is over, and its grant gone.
    MustBeFree(LockKey, GrantId, u64),
    /// What a store kept for a `min_hold` is free by now.
    KeptNoMore(usize, LockKey, GrantId),
    /// A replica of the store that fails over by this fault is like it for the last time.
    Replicates(usize),
}

/// Looks at the world, or changes it.
pub(crate) fn with<T>(look: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(|world| look(world.as_mut().expect("a world on this thread")))
}

/// The same when there may be no world: values that are dropped after the end of a world find none.
pub(crate) fn if_any<T>(look: impl FnOnce(&mut World) -> T) -> Option<T> {
    WORLD.with(|world| world.try_borrow_mut().ok()?.as_mut().map(look))
}

impl World {
    /// Puts a new world on this thread.
    pub(crate) fn begin(plan: Rc<Plan>, epoch: Instant, trace: Trace) {
        let clock = |process: &crate::plan::Process| LocalClock {
            epoch,
            drift: match plan.runtimes {
                Runtimes::One => 0,
                Runtimes::Each => process.drift,
            },
            incarnation: 0,
            alive: true,
            stopped: None,
            suspended: 0,
            context: None,
        };
        let clocks: Vec<_> = plan.processes.iter().map(clock).collect();
        let stores = (0..plan.stores.count())
            .map(|store| SimStore::new(&plan, store))
            .collect();
        let world = World {
            now: 0,
            epoch,
            events: Events::default(),
            ties: stream(plan.seed, &[streams::TIES]),
            links: Links::new(&plan),
            clocks,
            stores,
            weather: Weather::new(&plan),
            checks: Checks::new(&plan),
            looks: crate::look::Looks::default(),
            counts: Counts::default(),
            trace,
            running: None,
            driver: None,
            at_work: plan.processes.iter().map(|process| process.users.len()).sum(),
            progress: plan
                .processes
                .iter()
                .map(|process| vec![0; process.users.len()])
                .collect(),
            plan,
        };
        WORLD.with_borrow_mut(|slot| *slot = Some(world));
        with(|world| {
            world.looks_again();
            let assumes = world.checks.assumes.told();
            tell!(world, Who::World, "{assumes}");
            for index in 0..world.plan.faults.len() {
                let at = world.plan.faults[index].at;
                world.schedule(at, Event::FaultBegins(index));
                if let Trouble::StoreFailsOver { lag: lag @ 1.., .. } = world.plan.faults[index].what {
                    world.schedule(at.saturating_sub(lag), Event::Replicates(index));
                }
            }
        });
    }

    /// Takes the world from this thread.
    pub(crate) fn end() -> World {
        WORLD
            .with_borrow_mut(Option::take)
            .expect("a world on this thread")
    }

    pub(crate) fn schedule(&mut self, at: Millis, event: Event) {
        let tie = match self.plan.scheduler {
            Scheduler::Random => self.ties.u32(..),
            Scheduler::InOrder => 0,
        };
        self.schedule_in_order(at, tie, event);
    }

    /// Schedules what must not overtake others of the same tie.
    pub(crate) fn schedule_in_order(&mut self, at: Millis, tie: u32, event: Event) {
        if let Some((_, driver)) = self.driver.take_if(|(sleeps_until, _)| at < *sleeps_until) {
            driver.wake();
        }
        self.events.push(at.max(self.now), tie, event);
    }

    /// Until when processes with their own runtimes can run one after the other: nothing that they send arrives
    /// before this time, and messages already in flight are late by less than the shortest delay.
    pub(crate) fn end_of_step(&self) -> Millis {
        let least = self.plan.network.least.max(1);
        // A request and what follows from it take two delays. What is left when all users are done is in no hurry.
        let most = if self.at_work > 0 { 2 } else { 4 };
        let next = self.next_event().unwrap_or(Millis::MAX);
        next.clamp(self.now + least, self.now + most * least)
    }

    pub(crate) fn next_event(&self) -> Option<Millis> {
        self.events.next_at()
    }

    /// What a store's clock shows.
    pub(crate) fn store_instant(&self, store: usize) -> Instant {
        self.epoch + self.stores[store].clock.shows(self.now)
    }

    /// When a store's clock shows this, unless it steps.
    pub(crate) fn when_at_store(&self, store: usize, shown: Instant) -> Millis {
        let left = shown.saturating_duration_since(self.store_instant(store));
        self.now + self.stores[store].clock.lasts(left)
    }

    /// What a process's clock shows.
    pub(crate) fn instant_of(&self, process: usize) -> Instant {
        self.clocks[process].instant(self.now)
    }

    pub(crate) fn lives(&self, process: usize, incarnation: u32) -> bool {
        let clock = &self.clocks[process];
        clock.alive && clock.incarnation == incarnation
    }

    /// Stops a process, unless it is already stopped.
    pub(crate) fn stands_still(&mut self, process: usize, stillness: Stillness) {
        let since = (stillness, self.now);
        self.clocks[process].stopped.get_or_insert(since);
    }

    /// Resumes a process, if this was the reason for its stop.
    pub(crate) fn goes_on(&mut self, process: usize, stillness: Stillness) -> bool {
        let now = self.now;
        let clock = &mut self.clocks[process];
        let Some((_, since)) = clock.stopped.take_if(|(why, _)| *why == stillness) else {
            return false;
        };
        if stillness == Stillness::Suspended {
            clock.suspended += clock.millis(now) - clock.millis(since);
            if let Some(context) = &clock.context {
                context.set_suspended(Duration::from_millis(clock.suspended));
            }
            self.counts.sometimes("a machine that was suspended");
        }
        self.reads_releases(process);
        true
    }

    fn next_due(&mut self, until: Millis) -> Option<Event> {
        if self.next_event()? > until {
            return None;
        }
        let (at, event) = self.events.pop()?;
        self.now = at;
        Some(event)
    }
}

/// Carries out all events up to this time, each at its moment.
pub(crate) fn carry_out_due(until: Millis) {
    while let Some(event) = with(|world| world.next_due(until)) {
        match event {
            Event::Arrival(arrival) => crate::net::arrive(arrival),
            Event::FaultBegins(index) => crate::fault::begin(index),
            Event::FaultEnds(index) => crate::fault::end(index),
            Event::Look => crate::look::look(),
            Event::Check(due) => with(|world| crate::check::due(world, due)),
            Event::KeptNoMore(store, key, grant) => crate::check::time::kept_no_more(store, &key, grant),
            Event::MustBeFree(key, grant, section) => crate::check::time::must_be_free(&key, grant, section),
            Event::Lapses(store, key, grant) => crate::check::time::lapses(store, &key, grant),
            Event::Replicates(index) => crate::fault::replicates(index),
        }
    }
    with(|world| world.now = until);
}

/// Has the world's time follow the clock of the process that runs now, after it slept.
pub(crate) fn follow() {
    if_any(|world| {
        if let Some(running) = world.running {
            world.now = world.clocks[running].when(Instant::now());
        }
    });
}
