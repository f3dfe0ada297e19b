//! Runs the users of a process, in an order that the seed draws.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use fastrand::Rng;

use crate::chance::Draws;
use crate::plan::Scheduler;

/// How many times in a thousand a user that is ready is left for later.
const LATER: u32 = 100;

pub(crate) type User = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) struct Host {
    users: Vec<Slot>,
    bell: Arc<Bell>,
    scheduler: Scheduler,
    rng: Rng,
    ready: Vec<usize>,
}

struct Slot {
    future: Option<User>,
    flag: Arc<Flag>,
    waker: Waker,
}

/// Whether a user is to be polled.
struct Flag {
    ready: AtomicBool,
    bell: Arc<Bell>,
}

/// Whether there is a user to be polled.
struct Bell {
    rung: AtomicBool,
    host: Mutex<Option<Waker>>,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        if self.ready.swap(true, Ordering::Relaxed) || self.bell.rung.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(host) = &*self.bell.host.lock().expect("no user panics under it") {
            host.wake_by_ref();
        }
    }
}

impl Host {
    pub(crate) fn new(users: impl IntoIterator<Item = User>, scheduler: Scheduler, rng: Rng) -> Host {
        let bell = Arc::new(Bell {
            rung: AtomicBool::new(true),
            host: Mutex::new(None),
        });
        let slot = |future| {
            let flag = Arc::new(Flag {
                ready: AtomicBool::new(true),
                bell: bell.clone(),
            });
            Slot {
                future: Some(future),
                waker: Waker::from(flag.clone()),
                flag,
            }
        };
        Host {
            users: users.into_iter().map(slot).collect(),
            bell: bell.clone(),
            scheduler,
            rng,
            ready: Vec::new(),
        }
    }

    /// Polls those that are ready; whether there was one. The caller is woken when there is another one.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> bool {
        {
            let mut waker = self.bell.host.lock().expect("no user panics under it");
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
        }
        if !self.bell.rung.swap(false, Ordering::Relaxed) {
            return false;
        }
        let mut ready = std::mem::take(&mut self.ready);
        ready.extend((0..self.users.len()).filter(|at| self.users[*at].flag.ready.load(Ordering::Relaxed)));
        let is_random = self.scheduler == Scheduler::Random;
        if is_random {
            self.rng.shuffle(&mut ready);
        }
        let any = !ready.is_empty();
        for at in ready.drain(..) {
            if is_random && self.rng.permille(LATER) {
                self.bell.rung.store(true, Ordering::Relaxed);
                continue;
            }
            let user = &mut self.users[at];
            user.flag.ready.store(false, Ordering::Relaxed);
            let Some(future) = &mut user.future else {
                continue;
            };
            let mut cx = Context::from_waker(&user.waker);
            // What it panicked with is kept by the hook: see panics.rs.
            let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut cx)));
            if !matches!(polled, Ok(Poll::Pending)) {
                user.future = None;
            }
        }
        self.ready = ready;
        any
    }
}
