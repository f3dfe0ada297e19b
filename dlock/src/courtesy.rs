//! Letting others go first.
//!
//! A process that gives a lock back and asks for it again has always an advantage over one that waits
//! elsewhere: its next acquire is on its way when the other only hears of the release. So where the store
//! says that others heard, the process asks again when another holder was seen, or after a short time in
//! which the others could have come. Those who never come (stopped, slow, gone without a word) are waited
//! for ever more rarely.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::backend::Watch;
use crate::clock;
use crate::waiters::Name;

/// The shortest time for which a process lets others go first: enough for one that is slow to wake up. It ends
/// when they have come, so it costs only where nobody does.
const SHORT: Duration = Duration::from_millis(10);
/// The longest, however slow the store is.
const LONG: Duration = Duration::from_millis(100);
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

/// Four round trips of the store, but no less than `least`.
pub(crate) fn some_round_trips(sent: Instant, answered: Instant, least: Duration) -> Duration {
    (answered.saturating_duration_since(sent) * 4).clamp(least, LONG)
}

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

    /// Whether there are others, once the store has answered.
    pub(crate) async fn pause(self) -> Option<Pause> {
        let heard = tokio::time::timeout(ANSWER, self.heard).await.ok()?.ok()?;
        let own = u64::from(self.news.is_some() && !self.others_here);
        if heard.is_some_and(|heard| heard <= own) {
            return None;
        }
        let now = clock::now();
        Some(Pause {
            until: now + some_round_trips(self.sent, now, SHORT),
            // The first is our own release, the second that of another.
            news: self.news.map(|news| news + 2),
            due: false,
        })
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
    known: HashMap<Name, Courtesy>,
    /// How many there may be before it is looked which of them can be forgotten.
    room: usize,
}

#[derive(Debug)]
struct Courtesy {
    /// Others are to go first until then.
    until: Option<Instant>,
    /// How many times in a row nobody came.
    in_vain: u32,
    /// How many pauses are left out yet.
    skip: u32,
    forgotten: Instant,
}

impl Courtesy {
    /// Whether this pause is one of those that are left out.
    fn is_left_out(&mut self) -> bool {
        let left_out = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        left_out
    }
}

impl Courtesies {
    /// A lock that nobody else here waits for was given back, and others heard of it.
    pub(crate) fn owe(&self, of: Name, sent: Instant) {
        let now = clock::now();
        self.with(of, now, |courtesy| {
            if !courtesy.is_left_out() {
                courtesy.until = Some(now + some_round_trips(sent, now, SHORT));
            }
        });
    }

    /// Whether [`owed`](Self::owed) has something to say.
    pub(crate) fn owes(&self, of: &Name) -> bool {
        self.any.load(Ordering::Relaxed) && self.keys.lock().known.get(of).is_some_and(|c| c.until.is_some())
    }

    /// Whether others are to go first.
    pub(crate) fn owed(&self, of: &Name) -> Option<Pause> {
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let until = self.keys.lock().known.get_mut(of)?.until.take()?;
        Some(Pause {
            until,
            news: None,
            due: true,
        })
    }

    /// Waits until another holder was seen, or could have come; not at all where those who wait elsewhere
    /// never come, or where there is no time for it before `end`.
    pub(crate) async fn pause(
        &self,
        of: &Name,
        pause: Pause,
        watch: &mut Option<Watch>,
        listen: impl FnOnce() -> Watch,
        end: Option<Instant>,
    ) {
        let now = clock::now();
        if pause.until <= now || end.is_some_and(|end| end <= pause.until) {
            return;
        }
        if !pause.due && self.with(of.clone(), now, Courtesy::is_left_out) {
            return;
        }
        let watch = watch.get_or_insert_with(listen);
        let other = async {
            let enough = match pause.news {
                Some(news) => news,
                None => {
                    // The first that one who begins to listen hears is "subscribed", at once where somebody
                    // listened already.
                    watch.changed().await;
                    watch.count() + 1
                }
            };
            while watch.count() < enough {
                watch.changed().await;
            }
        };
        let left = pause.until.saturating_duration_since(now);
        let came = tokio::time::timeout(left, other).await.is_ok();
        self.with(of.clone(), clock::now(), |courtesy| {
            courtesy.in_vain = if came {
                0
            } else {
                courtesy.in_vain.saturating_add(1)
            };
            courtesy.skip = (1 << courtesy.in_vain.saturating_sub(PATIENCE).min(RAREST)) - 1;
        });
    }

    /// Somebody else has the lock: whoever waits elsewhere does come.
    pub(crate) fn came(&self, of: &Name) {
        if self.any.load(Ordering::Relaxed)
            && let Some(courtesy) = self.keys.lock().known.get_mut(of)
        {
            courtesy.in_vain = 0;
            courtesy.skip = 0;
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
            until: None,
            in_vain: 0,
            skip: 0,
            forgotten: now,
        });
        if courtesy.forgotten <= now {
            (courtesy.until, courtesy.in_vain, courtesy.skip) = (None, 0, 0);
        }
        courtesy.forgotten = now + MEMORY;
        self.any.store(true, Ordering::Relaxed);
        change(courtesy)
    }
}
