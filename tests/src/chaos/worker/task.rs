//! One task of a worker: it locks, works, writes and releases, again and again.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::panic::panic_any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use dlock::{Error, Held, LockGuard};
use fastrand::Rng;

use super::hold::{Hold, OnPurpose};
use super::plan::{Ask, End, Plan, Terms};
use super::{Mode, Shared};
use crate::chaos::clock;
use crate::chaos::event::{HoldId, Said, Share};
use crate::chaos::register::Writer;
use crate::chaos::wanted::{Guard, Wanted};

/// The pause after a failed acquire, so that an unreachable server does not fill the logs.
const AFTER_FAILURE: Duration = Duration::from_millis(20);

/// How long a former writer reads on.
const READS_ON: Duration = Duration::from_millis(10);

pub(super) struct Task {
    shared: Arc<Shared>,
    register: SocketAddr,
    rng: Rng,
    often_long: bool,
}

impl Task {
    pub(super) fn new(shared: Arc<Shared>, register: SocketAddr, seed: u64, often_long: bool) -> Task {
        Task {
            shared,
            register,
            rng: Rng::with_seed(seed),
            often_long,
        }
    }

    /// Works until it is over. An error when the register is gone, and with it the orchestrator.
    pub(super) async fn run(mut self) -> std::io::Result<()> {
        let mut writer = Writer::connect(self.register).await?;
        let mut mode = self.shared.mode.subscribe();
        loop {
            self.shared.busy.fetch_add(1, Ordering::SeqCst);
            // Read while it counts as busy: it is not taken for resting now.
            let now = *mode.borrow_and_update();
            if now == Mode::Go {
                let store = self.shared.client.capabilities();
                let plan = Plan::draw(&mut self.rng, self.often_long, store);
                self.once(&plan, &mut writer).await?;
                tokio::time::sleep(plan.pause).await;
            }
            self.shared.busy.fetch_sub(1, Ordering::SeqCst);
            match now {
                Mode::Go => {}
                Mode::End => return Ok(()),
                Mode::Rest => drop(mode.changed().await),
            }
        }
    }

    async fn once(&self, plan: &Plan, writer: &mut Writer) -> std::io::Result<()> {
        let shared = &*self.shared;
        let number = shared.holds.fetch_add(1, Ordering::Relaxed);
        let wanted = self.wanted(plan);
        shared.asking.lock().insert(number, plan.key);
        let lease_ms = plan.lease().as_millis() as u64;
        let (key, share, how) = (plan.key, plan.share, plan.told());
        let mut hold = Hold::new(&shared.log, number);
        let work = Work {
            shared,
            plan,
            number,
            wanted: &wanted,
        };
        shared.log.say(Said::Ask {
            hold: number,
            key,
            share,
            lease_ms,
            how,
        });
        if plan.ask == Ask::Run {
            return work.run(&mut hold, writer).await;
        }
        let guard = match plan.ask {
            Ask::Try => wanted.try_acquire().await,
            Ask::Cancelled(after) => match tokio::time::timeout(after, wanted.acquire()).await {
                Ok(outcome) => outcome,
                Err(_) => {
                    work.asked_for(Said::Quit { hold: number });
                    return Ok(());
                }
            },
            _ => wanted.acquire().await,
        };
        match guard {
            Ok(guard) => {
                work.got(&guard.held());
                let written = work.inside(&guard.held(), guard.lock(), &mut hold, writer).await;
                work.release(guard, &mut hold).await;
                written
            }
            Err(error) => {
                work.not_had(&error).await;
                Ok(())
            }
        }
    }

    fn wanted(&self, plan: &Plan) -> Wanted {
        let wanted = Wanted::new(&self.shared.client, plan.key, plan.share);
        let wanted = match plan.ask {
            Ask::Within(limit) => wanted.wait(limit),
            _ => wanted,
        };
        match plan.terms {
            Terms::Plain => wanted,
            Terms::Renewed(lease) => wanted.lease(lease),
            Terms::Fixed(lease) => wanted.fixed_lease(lease),
            Terms::MaxHold(most) => wanted.max_hold(most),
            Terms::MinHold(least) => wanted.min_hold(least),
        }
    }
}

/// One acquire and what follows.
struct Work<'a> {
    shared: &'a Shared,
    plan: &'a Plan,
    number: u64,
    wanted: &'a Wanted,
}

impl Work<'_> {
    /// The acquire has ended.
    fn asked_for(&self, event: Said) {
        self.shared.log.say(event);
        self.shared.asking.lock().remove(&self.number);
    }

    fn got(&self, view: &Held) {
        let token = view.fencing_token();
        self.asked_for(Said::Got {
            hold: self.number,
            token,
        });
        self.shared.acquired.fetch_add(1, Ordering::Relaxed);
    }

    async fn not_had(&self, error: &Error) {
        let why = kind_of(error);
        self.asked_for(Said::No {
            hold: self.number,
            why,
        });
        if error.is_unavailable() {
            tokio::time::sleep(AFTER_FAILURE).await;
        }
    }

    /// The work as the closure of `Lock::run`.
    async fn run(&self, hold: &mut Hold<'_>, writer: &mut Writer) -> std::io::Result<()> {
        let mut entered = false;
        let outcome = {
            let (hold, entered) = (&mut *hold, &mut entered);
            let work = |view: Held| async move {
                self.got(&view);
                *entered = true;
                let written = self.inside(&view, None, hold, writer).await;
                if hold.last_check(&view) {
                    self.let_go("run");
                }
                written
            };
            self.wanted.run(work).await
        };
        match outcome {
            Ok(written) => {
                self.gone("ok".to_owned());
                written
            }
            Err(Error::Lost { loss, .. }) if entered => {
                hold.dropped(loss);
                Ok(())
            }
            Err(error) => {
                self.not_had(&error).await;
                Ok(())
            }
        }
    }

    /// What is done under the lock.
    async fn inside(
        &self,
        view: &Held,
        guard: Option<&LockGuard>,
        hold: &mut Hold<'_>,
        writer: &mut Writer,
    ) -> std::io::Result<()> {
        hold.check(view);
        self.write(view, writer).await?;
        if self.plan.again {
            self.enter_again(guard).await;
        }
        if self.plan.ensure {
            // Whatever it answers: the checks see whether it is true.
            let _ = view.ensure(self.plan.lease() / 2).await;
        }
        let held = hold.keep(view, self.plan.work, || self.shared.is_resting()).await;
        if held && self.plan.work > Duration::from_millis(20) {
            self.write(view, writer).await?;
        }
        Ok(())
    }

    /// What only one may do at a time.
    async fn write(&self, view: &Held, writer: &mut Writer) -> std::io::Result<()> {
        if self.plan.share != Share::All {
            return Ok(());
        }
        let (life, hold) = (self.shared.life, self.number);
        let sent = clock::now();
        let token = view.fencing_token();
        let id = HoldId { life, number: hold };
        let last = writer.write(self.plan.key, token, id).await?;
        let answer = if last == token { "took" } else { "refused" }.to_owned();
        self.shared.log.say(Said::Wrote {
            hold,
            sent,
            answer,
            last,
        });
        Ok(())
    }

    /// A nested acquire of a lock comes in at once and shares the token.
    async fn enter_again(&self, guard: Option<&LockGuard>) {
        let Wanted::Lock(lock) = self.wanted else { return };
        let again = match guard {
            Some(guard) if self.number.is_multiple_of(2) => guard.reenter(),
            Some(guard) => guard.scope(lock.acquire()).await,
            // The closure runs in the frame.
            None => lock.acquire().await,
        };
        if let Ok(again) = again {
            let (hold, token) = (self.number, again.fencing_token());
            self.shared.log.say(Said::Again { hold, token });
            let _ = again.release().await;
        }
    }

    fn let_go(&self, how: &str) {
        self.shared.log.say(Said::Let {
            hold: self.number,
            how: how.to_owned(),
        });
    }

    fn gone(&self, answer: String) {
        self.shared.log.say(Said::Gone {
            hold: self.number,
            answer,
        });
    }

    /// The hold of a writer ends, and one of a reader begins.
    async fn downgrade(&self, guard: LockGuard) {
        self.let_go("downgrade");
        let shared = self.shared;
        let number = shared.holds.fetch_add(1, Ordering::Relaxed);
        shared.log.say(Said::Ask {
            hold: number,
            key: self.plan.key,
            share: Share::Read,
            lease_ms: self.plan.lease().as_millis() as u64,
            how: "downgrade".to_owned(),
        });
        let reading = Work { number, ..*self };
        match guard.downgrade().await {
            Ok(guard) => {
                reading.got(&guard.held());
                let mut hold = Hold::new(&shared.log, number);
                let view = guard.held();
                hold.keep(&view, READS_ON, || shared.is_resting()).await;
                hold.last_check(&view);
                reading.let_go("release");
                reading.gone(outcome(guard.release().await));
            }
            Err(error) => reading.not_had(&error).await,
        }
    }

    async fn release(&self, guard: Guard, hold: &mut Hold<'_>) {
        hold.last_check(&guard.held());
        let guard = match guard {
            Guard::Lock(guard) if self.plan.end == End::Downgrade => return self.downgrade(guard).await,
            guard => guard,
        };
        match self.plan.end {
            End::Release | End::Downgrade => {
                self.let_go("release");
                self.gone(outcome(guard.release().await));
            }
            End::Begun => {
                self.let_go("begun");
                let mut release = Box::pin(guard.release());
                poll_fn(|cx| {
                    let _ = release.as_mut().poll(cx);
                    Poll::Ready(())
                })
                .await;
            }
            End::Drop => {
                self.let_go("drop");
                drop(guard);
            }
            End::Panic => {
                self.let_go("panic");
                let holder = tokio::spawn(async move {
                    let _guard = guard;
                    panic_any(OnPurpose);
                });
                let _ = holder.await;
            }
        }
    }
}

/// The answer of a release.
fn outcome(released: Result<(), Error>) -> String {
    match released {
        Ok(()) => "ok".to_owned(),
        Err(Error::Lost { loss, .. }) => format!("lost:{loss:?}"),
        Err(error) => kind_of(&error),
    }
}

/// The sort of an error.
fn kind_of(error: &Error) -> String {
    let told = format!("{error:?}");
    told.split(|c: char| !c.is_alphanumeric())
        .next()
        .unwrap_or_default()
        .to_owned()
}
