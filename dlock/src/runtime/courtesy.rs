//! Letting others go first.
//!
//! A process that gives a lock back and asks for it again has always an advantage over one that waits
//! elsewhere: its next acquire is on its way when the other only hears of the release. So where the store
//! says that others heard, the process asks again when another holder was seen, or after a short time in
//! which the others could have come. Where several have heard, all of them go first, one after the other: who
//! waits longest may well be the last to hear, and would otherwise never be served. Those who never come (stopped,
//! slow, gone without a word) are waited for ever more rarely.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::clock;
use crate::base::name::{ByName, Name};
use crate::engine::fairness::some_round_trips;
use crate::store::{Kind, Watch};

/// The shortest time for which a process lets others go first: enough for one that is slow to wake up. It ends
/// when they have come, so it costs only where nobody does.
const SHORT: Duration = Duration::from_millis(10);
/// The same for each of those who go first besides: whoever is late competes with this process, as before.
const NEXT: Duration = Duration::from_millis(2);
/// For how long the answer to a release is waited for: whoever released may not be polled for a while.
const ANSWER: Duration = Duration::from_secs(1);
/// For how long it is remembered who did not come.
const MEMORY: Duration = Duration::from_secs(1);
/// How many times in a row nobody may come before pauses are left out.
const PATIENCE: u32 = 2;
/// As many keys are remembered without looking which can be forgotten.
const LEAST_ROOM: usize = 64;
/// Of how many pauses all but one are left out at the most, as a power of two.
const RAREST: u32 = 6;

/// A release that went to the store while others wait here.
#[derive(Debug)]
pub(crate) struct After {
    sent: Instant,
    /// How many news there had been, where this process had a subscription.
    news: Option<u64>,
    /// There are others in this process, with the same subscription.
    others_here: bool,
    /// How many heard of it.
    heard: oneshot::Receiver<Option<u64>>,
}

/// Others are to go first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    until: Instant,
    /// How many news there will have been when another holder has come and gone.
    news: Option<u64>,
    /// How many have heard.
    others: u64,
    /// For how long each of them is waited for, but for the first.
    patience: Duration,
    /// That it is not one of those which are left out is known.
    due: bool,
}

impl After {
    pub(crate) fn new(news: Option<u64>, others_here: bool, heard: oneshot::Receiver<Option<u64>>) -> After {
        After {
            sent: clock::now(),
            news,
            others_here,
            heard,
        }
    }

    /// When the release was sent.
    pub(crate) fn sent(&self) -> Instant {
        self.sent
    }

    /// Whether there are others, once the store has answered; the outer `None` where it does not.
    pub(crate) async fn pause(self) -> Option<Option<Pause>> {
        let heard = tokio::time::timeout(ANSWER, self.heard).await.ok()?.ok()?;
        Some(Pause::of(self.sent, self.news, self.others_here, heard))
    }
}

impl Pause {
    /// What follows from a release that was sent then, and heard of by so many.
    fn of(sent: Instant, news: Option<u64>, others_here: bool, heard: Option<u64>) -> Option<Pause> {
        let own = u64::from(news.is_some() && !others_here);
        if heard.is_some_and(|heard| heard <= own) {
            return None;
        }
        let now = clock::now();
        let patience = some_round_trips(now.saturating_duration_since(sent), NEXT);
        Some(Pause {
            until: now + some_round_trips(now.saturating_duration_since(sent), SHORT),
            // The first is our own release, the second that of another.
            news: news.map(|news| news + 2),
            others: match others_here {
                true => 1,
                false => heard.map_or(1, |heard| heard - own),
            },
            patience,
            due: false,
        })
    }
}

/// Those who waited when this process gave the lock back, and have not all had it since.
#[derive(Debug)]
pub(crate) struct Debt {
    /// How many news there will have been when all have come and gone.
    all: u64,
    patience: Duration,
    /// Whether they came, when they were last let go first.
    came: Option<bool>,
}

impl Debt {
    /// The lock has come free: lets those go first whose turn it is, until nobody comes.
    pub(crate) async fn let_go_first(&mut self, watch: &mut Watch) {
        while watch.count() < self.all {
            let came = tokio::time::timeout(self.patience, watch.changed()).await.is_ok();
            self.came = Some(came);
            if !came {
                return;
            }
        }
    }
}

/// What is known of those who wait elsewhere, of the keys where there are some.
#[derive(Debug, Default)]
pub(crate) struct Courtesies {
    any: AtomicBool,
    keys: Mutex<Keys>,
}

#[derive(Debug, Default)]
struct Keys {
    known: ByName<Courtesy>,
    /// How many there may be before it is looked which of them can be forgotten.
    room: usize,
}

#[derive(Debug)]
struct Courtesy {
    /// Others are to go first.
    owed: Option<Pause>,
    /// Whether anybody comes after a release of ours.
    first: Record,
    /// Whether those come who heard of it besides.
    rest: Record,
    forgotten: Instant,
}

/// How it went with waiting for others.
#[derive(Debug, Default)]
struct Record {
    /// How many times in a row nobody came.
    in_vain: u32,
    /// How many times it is left out yet.
    skip: u32,
}

impl Record {
    /// Whether this time is one of those that are left out.
    fn is_left_out(&mut self) -> bool {
        let left_out = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        left_out
    }

    fn enter(&mut self, came: bool) {
        self.in_vain = match came {
            true => 0,
            false => self.in_vain.saturating_add(1),
        };
        self.skip = (1 << self.in_vain.saturating_sub(PATIENCE).min(RAREST)) - 1;
    }
}

impl Courtesies {
    /// A lock that nobody else here waits for was given back, and so many others heard of it.
    pub(crate) fn owe(&self, of: Name, sent: Instant, others: u64) {
        let now = clock::now();
        let patience = some_round_trips(now.saturating_duration_since(sent), NEXT);
        let others = if of.kind == Kind::Read { 1 } else { others };
        self.with(of, now, |courtesy| {
            if !courtesy.first.is_left_out() {
                courtesy.owed = Some(Pause {
                    until: now + some_round_trips(now.saturating_duration_since(sent), SHORT),
                    news: None,
                    others,
                    patience,
                    due: true,
                });
            }
        });
    }

    /// Whether [`owed`](Self::owed) has something to say.
    pub(crate) fn owes(&self, of: &Name) -> bool {
        self.any.load(Ordering::Relaxed) && self.keys.lock().known.get(of).is_some_and(|c| c.owed.is_some())
    }

    /// Whether others are to go first.
    pub(crate) fn owed(&self, of: &Name) -> Option<Pause> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        self.keys.lock().known.get_mut(of)?.owed.take()
    }

    /// Waits until another holder was seen, or could have come; not at all where those who wait elsewhere
    /// never come, or where there is no time for it before `end`. Says who else is to go first after that.
    pub(crate) async fn pause(
        &self,
        of: &Name,
        pause: Pause,
        watch: &mut Option<Watch>,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
    ) -> Option<Debt> {
        let now = clock::now();
        if pause.until <= now || end.is_some_and(|end| end <= pause.until) {
            return None;
        }
        if !pause.due && self.with(of.clone(), now, |courtesy| courtesy.first.is_left_out()) {
            return None;
        }
        let watch = watch.get_or_insert_with(listen);
        let mut news = pause.news;
        let other = async {
            let enough = match news {
                Some(news) => news,
                None => {
                    // The first that one who begins to listen hears is "subscribed", at once where somebody
                    // listened already.
                    watch.changed().await;
                    *news.insert(watch.count() + 1)
                }
            };
            while watch.count() < enough {
                watch.changed().await;
            }
        };
        let left = pause.until.saturating_duration_since(now);
        let came = tokio::time::timeout(left, other).await.is_ok();
        let goes_on = self.with(of.clone(), clock::now(), |courtesy| {
            courtesy.first.enter(came);
            pause.others > 1 && !courtesy.rest.is_left_out()
        });
        let mut debt = Debt {
            all: news.filter(|_| goes_on)? + (pause.others - 1),
            patience: pause.patience,
            came: None,
        };
        if came {
            debt.let_go_first(watch).await;
        }
        Some(debt)
    }

    /// This process has the lock, after others should have gone first.
    pub(crate) fn had(&self, of: &Name, debt: Option<Debt>) {
        if let Some(came) = debt.and_then(|debt| debt.came) {
            self.with(of.clone(), clock::now(), |courtesy| courtesy.rest.enter(came));
        }
    }

    /// Somebody else has the lock: whoever waits elsewhere does come.
    pub(crate) fn came(&self, of: &Name) {
        if self.any.load(Ordering::Relaxed)
            && let Some(courtesy) = self.keys.lock().known.get_mut(of)
        {
            courtesy.first = Record::default();
            courtesy.rest = Record::default();
        }
    }

    fn with<T>(&self, of: Name, now: Instant, change: impl FnOnce(&mut Courtesy) -> T) -> T {
        let mut keys = self.keys.lock();
        let Keys { known, room } = &mut *keys;
        // Swept when it has doubled: every key has paid for its part of that.
        if known.len() >= *room {
            known.retain(|_, courtesy| now < courtesy.forgotten);
            *room = (known.len() * 2).max(LEAST_ROOM);
            known.shrink_to(*room);
        }
        let courtesy = known.entry(of).or_insert(Courtesy {
            owed: None,
            first: Record::default(),
            rest: Record::default(),
            forgotten: now,
        });
        if courtesy.forgotten <= now {
            (courtesy.owed, courtesy.first, courtesy.rest) = (None, Record::default(), Record::default());
        }
        courtesy.forgotten = now + MEMORY;
        self.any.store(true, Ordering::Relaxed);
        change(courtesy)
    }
}
