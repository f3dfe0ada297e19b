//! Draws what users do.

use fastrand::Rng;

use crate::chance::Draws;
use crate::plan::{Call, Change, End, Habit, Kind, LatchStep, Lock, Millis, Task, User, Work};

/// Kinds of lock that share their names: other kinds refuse them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Plain,
    Fair,
    ReadWrite,
    Fenced,
}

/// What the users of a world are like.
pub(super) struct Habits {
    /// A few keys, so that each has many waiters.
    keys: Vec<Family>,
    pub(super) semaphores: Vec<u32>,
    pub(super) unowned: Vec<u32>,
    has_latches: bool,
    /// Whether some processes shut their clients down.
    shuts_down: bool,
    has_posts: bool,
    lease: Millis,
    /// Whether some acquires are kept unpolled here.
    unpolled: bool,
    /// Whether some take several locks at once.
    takes_sets: bool,
    pub(super) crowd: bool,
}

impl Habits {
    pub(super) fn draw(rng: &mut Rng, lease: Millis, is_quorum: bool) -> Habits {
        let family = |rng: &mut Rng| match rng.u32(..7) {
            0 | 1 => Family::ReadWrite,
            2 if !is_quorum => Family::Fair,
            3 if !is_quorum => Family::Fenced,
            _ => Family::Plain,
        };
        let keys = rng.usize(1..=4);
        let semaphores = match rng.u32(..4) {
            0 if !is_quorum => rng.usize(1..=2),
            _ => 0,
        };
        let unowned = match rng.u32(..5) {
            0 if !is_quorum => 1,
            _ => 0,
        };
        Habits {
            unowned: (0..unowned).map(|_| rng.u32(1..=4)).collect(),
            has_latches: !is_quorum && rng.permille(220),
            shuts_down: rng.permille(90),
            keys: (0..keys).map(|_| family(rng)).collect(),
            semaphores: (0..semaphores).map(|_| rng.u32(1..=5)).collect(),
            has_posts: rng.permille(150),
            lease,
            unpolled: rng.permille(150),
            takes_sets: rng.permille(500),
            crowd: rng.bool(),
        }
    }

    pub(super) fn user(&self, rng: &mut Rng) -> User {
        let count = rng.usize(1..=12);
        let mut tasks: Vec<_> = (0..count).map(|_| self.task(rng)).collect();
        if self.shuts_down && rng.u32(..6) == 0 {
            tasks.insert(
                rng.usize(..tasks.len()),
                Task::ShutDown(rng.between(1, self.lease)),
            );
        }
        User {
            begins: rng.between(0, 50),
            tasks,
        }
    }

    fn task(&self, rng: &mut Rng) -> Task {
        match rng.u32(..24) {
            0..3 => Task::Pause(rng.between(1, self.lease / 2)),
            3..10 if !self.semaphores.is_empty() => self.permits(rng),
            14..18 if !self.unowned.is_empty() => Task::Unowned {
                semaphore: 0,
                amount: rng.u32(1..=self.unowned[0]),
                wait: rng.between(1, 4 * self.lease),
                lasts: rng.between(0, 20),
                habit: self.habit(rng),
            },
            18..22 if self.has_latches => Task::Latch {
                latch: 0,
                step: match rng.u32(..8) {
                    0 | 1 => LatchStep::SetCount(rng.u64(1..=4)),
                    2..6 => LatchStep::CountDown,
                    _ => LatchStep::Wait(rng.between(1, 4 * self.lease)),
                },
            },
            10..14 if self.has_posts => Task::Lock(
                Lock {
                    kind: Kind::Leader,
                    key: 0,
                    ..self.lock(rng, 0, 0)
                }
                .fitting(),
            ),
            _ => Task::Lock(self.lock(rng, 0, 0)),
        }
    }

    fn permits(&self, rng: &mut Rng) -> Task {
        let key = rng.usize(..self.semaphores.len());
        let (semaphore, total) = (key as u32, self.semaphores[key]);
        if rng.permille(150) {
            let change = match rng.u32(..3) {
                0 => Change::Set(rng.u32(1..=total + 2)),
                1 => Change::Add(rng.u32(1..=2)),
                _ => Change::Remove(1),
            };
            return Task::Permits { semaphore, change };
        }
        let lock = Lock {
            kind: Kind::Permit,
            key: semaphore,
            ..self.lock(rng, 0, 0)
        }
        .fitting();
        Task::Lock(Lock {
            // `run` takes one.
            more_permits: match lock.call == Call::Acquire && rng.u32(..3) == 0 {
                true => rng.u32(0..=total),
                false => 0,
            },
            // There may never be enough permits.
            wait: Some(rng.between(1, 4 * self.lease)),
            ..lock
        })
    }

    fn kind(&self, key: u32, rng: &mut Rng) -> Kind {
        match self.keys[key as usize] {
            Family::Plain => Kind::Plain,
            Family::Fair => Kind::Fair,
            Family::Fenced => Kind::Fenced,
            Family::ReadWrite => match rng.u32(..3) {
                0 => Kind::Write,
                _ => Kind::Read,
            },
        }
    }

    /// A lock of a key from this one on: nested locks are taken in one order, or they dead-lock.
    fn lock(&self, rng: &mut Rng, from: u32, depth: u32) -> Lock {
        let key = rng.u32(from..(self.keys.len() as u32).max(from + 1));
        let kind = self.kind(key, rng);
        let lease = self.lease;
        let fixed = rng.permille(100);
        let max_hold = rng.permille(60);
        let others = (key + 1..self.keys.len() as u32)
            .filter(|other| self.keys[*other as usize] == self.keys[key as usize]);
        let min_hold = rng.permille(80).then(|| match rng.bool() {
            true => rng.between(1, lease / 2),
            // It lasts longer than some renewals.
            false => rng.between(lease / 2, 2 * lease),
        });
        let mut works = self.works(rng, key, depth);
        if let Some(min_hold) = min_hold.filter(|min_hold| *min_hold > lease / 2) {
            works.insert(0, Work::Sleep(rng.between(lease / 3, min_hold)));
        }
        let lock = Lock {
            key,
            kind,
            also: match self.takes_sets && rng.bool() {
                true => others.filter(|_| rng.u32(..4) > 0).collect(),
                false => Vec::new(),
            },
            call: match rng.u32(..10) {
                0 => Call::Run,
                1 => Call::Attribute,
                2 if rng.bool() => Call::AttributeRunsOn,
                _ => Call::Acquire,
            },
            more_permits: 0,
            handoffs: rng.permille(50).then(|| rng.u32(0..3)),
            once: rng.permille(100),
            wait: (depth > 0 || rng.permille(500)).then(|| rng.between(1, 4 * lease)),
            fixed_lease: fixed.then(|| rng.between(lease / 2, 2 * lease).max(100)),
            min_hold,
            max_hold: max_hold.then(|| rng.between(lease, 2 * lease)),
            max_waiters: rng.permille(50).then(|| rng.usize(0..6)),
            preferred: kind == Kind::Write && rng.bool(),
            habit: self.habit(rng),
            work: works,
            end: match rng.u32(..25) {
                0..5 => End::Drop,
                5..7 => End::ReleaseUnawaited,
                7 => End::Panic,
                8 => End::ReleaseTwice,
                9 => End::Elsewhere(rng.between(0, lease / 4)),
                10..14 if kind == Kind::Write => End::Downgrade,
                14 => End::GivenAway,
                _ => End::Release,
            },
            reading: Vec::new(),
        };
        Lock {
            reading: match lock.end {
                End::Downgrade => self.works(rng, key, depth),
                _ => Vec::new(),
            },
            ..lock.fitting()
        }
    }

    fn habit(&self, rng: &mut Rng) -> Option<Habit> {
        match rng.u32(..16) {
            0 => Some(Habit::DropsAfterPolls(rng.u32(1..12))),
            1 => Some(Habit::DropsAfter(rng.between(1, self.lease))),
            2 if self.unpolled => Some(Habit::PollsNot {
                after: rng.u32(1..8),
                lasts: rng.between(10, (3 * self.lease).max(8_000)),
            }),
            3 if rng.bool() => Some(Habit::Races),
            _ => None,
        }
    }

    fn works(&self, rng: &mut Rng, key: u32, depth: u32) -> Vec<Work> {
        let steps = rng.usize(0..=3);
        (0..steps).map(|_| self.work(rng, key, depth)).collect()
    }

    fn work(&self, rng: &mut Rng, key: u32, depth: u32) -> Work {
        match rng.u32(..32) {
            0..12 => Work::Sleep(match rng.u32(..20) {
                // Too long: the lease must be renewed, or expires.
                0 => rng.between(self.lease / 2, 2 * self.lease),
                1..5 => rng.between(1, self.lease / 10),
                _ => rng.between(1, 8),
            }),
            12..16 => Work::Write,
            16..18 => Work::Ensure(self.lease / 3),
            18 => Work::Ask,
            19 => Work::Reenter(rng.between(1, self.lease / 5)),
            21..24 if depth < 2 => Work::Nest(Box::new(self.lock(rng, key, depth + 1))),
            24 | 25 if depth < 2 => {
                let branches = rng.usize(1..=3);
                Work::Join((0..branches).map(|_| self.lock(rng, key, depth + 1)).collect())
            }
            26 if depth < 2 => Work::Carry(Box::new(self.lock(rng, key, depth + 1))),
            27 | 28 if depth < 2 => Work::Spawn(Box::new(self.lock(rng, 0, depth + 1))),
            20 if depth < 1 => Work::Cross(Box::new(self.lock(rng, key, depth + 1))),
            29 | 30 if depth < 2 => Work::Run(self.works(rng, key, depth + 1)),
            _ => Work::Sleep(1),
        }
    }
}

impl Lock {
    /// Removes options that are invalid for the kind.
    fn fitting(mut self) -> Lock {
        let is_plain = self.kind == Kind::Plain;
        if matches!(self.kind, Kind::Permit | Kind::Leader | Kind::Fair) {
            self.also.clear();
        }
        let has_function = match self.kind {
            Kind::Permit | Kind::Leader => false,
            _ => self.also.is_empty() || is_plain,
        };
        self.call = match self.call {
            Call::Attribute | Call::AttributeRunsOn if !has_function => Call::Run,
            Call::AttributeRunsOn if !is_plain || !self.also.is_empty() => Call::Attribute,
            call => call,
        };
        if self.call != Call::Acquire {
            self.once = false;
        }
        // It would be refused.
        let least = self.min_hold.unwrap_or(0);
        self.max_hold = self.max_hold.filter(|most| least <= *most);
        self.fixed_lease = self.fixed_lease.filter(|lease| least <= *lease);
        if matches!(self.kind, Kind::Permit | Kind::Leader) {
            (self.preferred, self.handoffs) = (false, None);
        }
        if self.kind == Kind::Leader && self.call == Call::Run {
            // Work that lasts longer than a term would restart again and again.
            self.max_hold = None;
        }
        // What is in its frame then would be judged as if it had none.
        let is_simple =
            |work: &Work| matches!(work, Work::Sleep(_) | Work::Write | Work::Ensure(_) | Work::Ask);
        if self.end == End::GivenAway && !self.work.iter().all(is_simple) {
            self.end = End::Release;
        }
        if self.end == End::Downgrade
            && (self.kind != Kind::Write || self.call != Call::Acquire || !self.also.is_empty())
        {
            self.end = End::Release;
        }
        self
    }
}
