//! What a lock offers: its options, and the ways to take it.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::{AcquireReply, AcquireRequest, BackendError, Kind, Outcome, Reason, ReleaseRequest};
use crate::client::Handle;
use crate::grants::{Entry, Grant, Terms, margin, next_id};
use crate::guard::{Held, HoldState, LockGuard};
use crate::scope::{self, HoldRef, Scope};
use crate::{Error, LockKey, Loss, clock, telemetry};

/// The longest of all durations that an option takes: a year.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long a waiter sleeps at the most when the holder's lease has no end or is renewed all the time.
const LONGEST_SLEEP: Duration = Duration::from_secs(30);

/// A lock by name, with options: cheap to make, to clone and to keep.
///
/// Made by [`LockClient::lock`](crate::LockClient::lock). Options are set by methods that consume and
/// return the lock; they belong to this value and what is cloned from it, never to anybody else's
/// acquisition. A name or an option that makes no sense is reported by the acquire (or by
/// [`check`](Self::check)), before anything is sent.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let lock = client.lock("report:2026").wait(Duration::from_secs(3));
///
/// let guard = lock.acquire().await?;
/// println!("token {}", guard.fencing_token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Lock {
    handle: Arc<Handle>,
    key: LockKey,
    options: Options,
}

#[derive(Debug, Clone)]
struct Options {
    kind: Kind,
    lease: Option<Duration>,
    renewed_lease: Option<Duration>,
    wait: Option<Duration>,
    max_hold: Option<Duration>,
    min_hold: Option<Duration>,
    max_waiters: Option<usize>,
}

impl Lock {
    pub(crate) fn new(handle: Arc<Handle>, key: LockKey) -> Lock {
        let options = Options {
            kind: Kind::Lock,
            lease: None,
            renewed_lease: None,
            wait: None,
            max_hold: None,
            min_hold: None,
            max_waiters: None,
        };
        Lock { handle, key, options }
    }

    /// What to lock as; a plain [`Kind::Lock`] by default.
    pub fn kind(mut self, kind: Kind) -> Lock {
        self.options.kind = kind;
        self
    }

    /// Fixes the lease: the lock is not renewed and ends by itself after this long. By default a lock is
    /// renewed for as long as its guard lives.
    pub fn lease(mut self, lease: Duration) -> Lock {
        self.options.lease = Some(lease);
        self
    }

    /// The lease that the watchdog keeps renewing, every third of it; the client's
    /// ([`LockClientBuilder::lease`](crate::LockClientBuilder::lease), 30 s) by default. After a crash of
    /// the holder the lock comes free when it has run out.
    pub fn renewed_lease(mut self, lease: Duration) -> Lock {
        self.options.renewed_lease = Some(lease);
        self.options.lease = None;
        self
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) wait for the lock; without end by
    /// default.
    pub fn wait(mut self, wait: Duration) -> Lock {
        self.options.wait = Some(wait);
        self
    }

    /// The longest time that the lock is held: after it renewal has ended and the lock is lost, however
    /// alive the holder looks. No limit by default.
    pub fn max_hold(mut self, max_hold: Duration) -> Lock {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// Keeps the lock taken for at least this long from its acquisition on, even if it is released before:
    /// so that a scheduled job runs once on machines whose clocks differ. No minimum by default.
    pub fn min_hold(mut self, min_hold: Duration) -> Lock {
        self.options.min_hold = Some(min_hold);
        self
    }

    /// How many callers may wait for the lock in this process at a time; one more is refused at once with
    /// [`Error::TooManyWaiters`]. No limit by default; a queue without bound is an outage, so set one where
    /// requests come from outside.
    pub fn max_waiters(mut self, max_waiters: usize) -> Lock {
        self.options.max_waiters = Some(max_waiters);
        self
    }

    /// The name of the lock.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Whether name and options make sense, as each acquire checks it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::InvalidOption`].
    pub fn check(&self) -> Result<(), Error> {
        self.key.check()?;
        self.options.check()
    }

    /// Takes the lock if it is free, without waiting for anybody: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when somebody else has it, and everything that
    /// [`acquire`](Self::acquire) may answer.
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<LockGuard, Error>> + Send + use<> {
        Attempt::new(self, true, Location::caller()).run()
    }

    /// Takes the lock, and waits for it as long as [`wait`](Self::wait) allows.
    ///
    /// Inside a frame that holds the same lock it re-enters, without waiting and without asking the store.
    ///
    /// # Errors
    ///
    /// - [`Error::NotAcquired`] when somebody else has it until the wait is over.
    /// - [`Error::Lost`] when the enclosing frame has lost it.
    /// - [`Error::TooManyWaiters`], [`Error::InvalidKey`], [`Error::InvalidOption`], [`Error::KeyTaken`],
    ///   [`Error::ClientClosed`] as they say.
    /// - [`Error::Unreachable`], [`Error::OutcomeUnknown`] or [`Error::Refused`] when the store is at
    ///   fault. Failures that may pass are tried again until the wait is over, at most for
    ///   [`retry_for`](crate::LockClientBuilder::retry_for).
    ///
    /// Cancel safe: dropped at any point it leaves no lock, no place in a queue and no subscription, and a
    /// wake-up that it consumed goes to the next waiter. Whatever is under way is undone in the background.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<LockGuard, Error>> + Send + use<> {
        Attempt::new(self, false, Location::caller()).run()
    }

    /// Takes the lock as [`acquire`](Self::acquire) does, runs the closure's future inside, and gives the
    /// lock back: when it is done, and also when it panics or is dropped. A nested acquire of the same lock
    /// re-enters. When the lock is lost the future is dropped.
    ///
    /// A release that fails after the work was done does not take the result away; it is logged, and the
    /// lease ends the lock.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let token = client.lock("report").run(|held| async move { held.fencing_token() }).await?;
    /// # assert!(token > 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the lock was lost before the future
    /// was done.
    ///
    /// Cancel safe as far as the lock goes; what becomes of the work is up to the closure's future.
    #[track_caller]
    pub fn run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        let acquire = self.acquire();
        async move {
            let guard = acquire.await?;
            let output = guard.run(work(guard.held())).await;
            crate::guard::finish(guard).await;
            output
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &self.key)
            .field("options", &self.options)
            .finish()
    }
}

/// A duration that a timer can take and a store can keep.
pub(crate) fn check_duration(option: &'static str, duration: Option<Duration>) -> Result<(), Error> {
    let reason = match duration {
        Some(Duration::ZERO) => "it is zero".to_owned(),
        Some(d) if d > LONGEST => format!("{d:?} is more than a year"),
        _ => return Ok(()),
    };
    Err(Error::InvalidOption { option, reason })
}

/// A lease that is worth having: longer than what is taken off it for the clocks.
pub(crate) fn check_lease(option: &'static str, lease: Option<Duration>) -> Result<(), Error> {
    check_duration(option, lease)?;
    match lease {
        Some(lease) if lease <= margin(lease) => Err(Error::InvalidOption {
            option,
            reason: format!(
                "a lease of {lease:?} leaves nothing after the safety margin of {:?}",
                margin(lease)
            ),
        }),
        _ => Ok(()),
    }
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        check_lease("lease", self.lease)?;
        check_lease("renewed_lease", self.renewed_lease)?;
        check_lease("max_hold", self.max_hold)?;
        check_duration("min_hold", self.min_hold)?;
        check_duration("wait", self.wait).map_err(|error| match self.wait {
            Some(Duration::ZERO) => Error::InvalidOption {
                option: "wait",
                reason: "it is zero: try_acquire asks once without waiting".to_owned(),
            },
            _ => error,
        })?;
        let ends = [("max_hold", self.max_hold), ("lease", self.lease)];
        for (option, end) in ends {
            if let (Some(min), Some(end)) = (self.min_hold, end)
                && min > end
            {
                return Err(Error::InvalidOption {
                    option: "min_hold",
                    reason: format!("{min:?} is longer than {option}, which is {end:?}"),
                });
            }
        }
        Ok(())
    }
}

/// One call of acquire.
struct Attempt {
    handle: Arc<Handle>,
    key: LockKey,
    options: Options,
    once: bool,
    by: &'static Location<'static>,
}

/// What one look at the store brought.
enum Look {
    Acquired(LockGuard),
    Busy(Option<Duration>),
}

impl Attempt {
    fn new(lock: &Lock, once: bool, by: &'static Location<'static>) -> Attempt {
        Attempt {
            handle: lock.handle.clone(),
            key: lock.key.clone(),
            options: lock.options.clone(),
            once,
            by,
        }
    }

    async fn run(self) -> Result<LockGuard, Error> {
        let started = clock::now();
        // The asking frame is the one at the first poll.
        let scope = scope::current();
        // On memory nothing else here ever yields.
        tokio::task::consume_budget().await;
        let outcome = self.go(started, &scope).await;
        match &outcome {
            Ok(_) => telemetry::acquired(clock::now().saturating_duration_since(started)),
            Err(error) => {
                telemetry::not_acquired(error);
                tracing::debug!(key = %self.key, %error, "a lock was not acquired");
            }
        }
        outcome
    }

    async fn go(&self, started: Instant, scope: &Scope) -> Result<LockGuard, Error> {
        self.key.check()?;
        self.options.check()?;
        let until = if self.once {
            Some(started)
        } else {
            self.options.wait.map(|wait| started + wait)
        };
        let wait = Wait {
            attempt: self,
            started,
            until,
        };
        if let Some(guard) = wait.reenter(scope).await? {
            return Ok(guard);
        }
        if self.handle.shared().closing.is_cancelled() {
            return Err(Error::ClientClosed);
        }
        if self.once {
            return match self.look().await.map_err(|error| self.failed(error))? {
                Look::Acquired(guard) => Ok(guard),
                Look::Busy(remaining) => Err(wait.not_acquired(remaining)),
            };
        }
        wait.in_turn().await
    }

    /// Asks the store once. The step is finished even if this is dropped, and then undone.
    fn look(&self) -> impl Future<Output = Result<Look, BackendError>> + Send + use<> {
        let handle = self.handle.clone();
        let shared = handle.shared().clone();
        let Options {
            kind,
            lease,
            renewed_lease,
            max_hold,
            min_hold,
            ..
        } = self.options;
        let sent = clock::now();
        let terms = Terms {
            lease: lease.or(renewed_lease).unwrap_or(shared.settings.lease),
            renewed: lease.is_none(),
            max_end: max_hold.map(|d| sent + d),
            min_until: min_hold.map(|d| sent + d),
        };
        // `max_hold` caps every lease and `min_hold` stretches the first one; options where the two
        // contradict each other are refused.
        let first_lease = terms
            .lease
            .max(min_hold.unwrap_or_default())
            .min(max_hold.unwrap_or(Duration::MAX));
        let (key, by, id) = (self.key.clone(), self.by, shared.next_grant());
        let request = AcquireRequest {
            kind,
            key: key.clone(),
            grant: id.clone(),
            lease: first_lease,
            tokens: 1,
        };
        let step = shared.backend.clone().acquire(request);
        let carrier = handle.clone();
        carrier.carry(async move {
            match step.await {
                Ok(AcquireReply::Acquired { first_token, .. }) => {
                    let hold = next_id();
                    let grant = Arc::new(Grant::new(
                        kind,
                        key,
                        id,
                        &shared,
                        terms,
                        sent,
                        first_lease,
                        hold,
                        by,
                    ));
                    shared.registry.add(&grant, sent);
                    let in_time = !matches!(grant.status(), HoldState::Lost(Loss::Expired));
                    let guard = LockGuard::new(
                        HoldRef {
                            id: hold,
                            token: first_token,
                            grant,
                        },
                        handle,
                    );
                    // Dropped otherwise, which gives it back.
                    in_time.then_some(Look::Acquired(guard)).ok_or_else(|| {
                        BackendError::not_done(
                            Reason::Unreachable,
                            "the answer came only after the lease had run out",
                        )
                    })
                }
                Ok(AcquireReply::Busy { remaining }) => Ok(Look::Busy(remaining)),
                Err(error) => {
                    if error.outcome == Outcome::Unknown {
                        let keep_for = Duration::ZERO;
                        handle.undo(
                            ReleaseRequest {
                                kind,
                                key,
                                grant: id,
                                keep_for,
                            },
                            first_lease,
                        );
                    }
                    Err(error)
                }
            }
        })
    }

    fn failed(&self, error: BackendError) -> Error {
        error.into_error("the acquire of lock", &self.key)
    }
}

/// A call that may wait.
struct Wait<'a> {
    attempt: &'a Attempt,
    started: Instant,
    until: Option<Instant>,
}

impl Wait<'_> {
    fn not_acquired(&self, remaining: Option<Duration>) -> Error {
        let waited = match self.attempt.once {
            true => Duration::ZERO,
            false => clock::now().saturating_duration_since(self.started),
        };
        Error::NotAcquired {
            key: self.attempt.key.clone(),
            waited,
            remaining,
        }
    }

    /// The end of the wait.
    async fn over(&self) {
        match self.until {
            Some(until) => clock::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    /// Enters the hold that encloses the asker, if there is one. When somebody else is inside whom the
    /// asker's frames do not contain (another branch of a `join!`), it waits until a hold leaves and looks
    /// again; it never queues up for the lock behind them.
    async fn reenter(&self, scope: &Scope) -> Result<Option<LockGuard>, Error> {
        let Attempt {
            handle,
            key,
            options,
            once,
            by,
        } = self.attempt;
        let mut warn_at = Some(clock::now() + Duration::from_secs(1));
        loop {
            let Some(hold) = scope.nearest(handle.shared().id, options.kind, key) else {
                return Ok(None);
            };
            let grant = &hold.grant;
            let gate = grant.gate.notified();
            tokio::pin!(gate);
            gate.as_mut().enable();
            let line = match grant.enter(|id| scope.contains(id), by) {
                Entry::Entered(id) => {
                    let hold = HoldRef {
                        id,
                        token: hold.token,
                        grant: grant.clone(),
                    };
                    return Ok(Some(LockGuard::new(hold, handle.clone())));
                }
                Entry::Lost(loss) => {
                    return Err(Error::Lost {
                        key: key.clone(),
                        loss,
                    });
                }
                Entry::Sibling(line) => line,
            };
            if *once {
                return Err(self.not_acquired(Some(grant.remaining())));
            }
            tokio::select! {
                biased;
                () = gate => {}
                () = self.over() => return Err(self.not_acquired(Some(grant.remaining()))),
                () = handle.shared().closing.cancelled() => return Err(Error::ClientClosed),
                () = sleep_until(warn_at) => {
                    warn_at = None;
                    tracing::warn!(
                        %key, waiting = %by, inside = %line,
                        "a lock is waited for from inside its own frame, while another guard of it is \
                         inside: if that one waits for this call, this never ends (pass the guard on, use \
                         guard.reenter(), or set a wait)"
                    );
                }
            }
        }
    }

    /// Waits for the turn in this process, then at the store.
    async fn in_turn(&self) -> Result<LockGuard, Error> {
        let Attempt {
            handle, key, options, ..
        } = self.attempt;
        let shared = handle.shared();
        let ticket = shared.waiters.join(options.kind, key, options.max_waiters)?;
        let turn = tokio::select! {
            biased;
            () = shared.closing.cancelled() => return Err(Error::ClientClosed),
            turn = ticket.turn() => turn?,
            () = self.over() => return Err(self.not_acquired(None)),
        };
        let mut turn = turn;
        let mut failing = None;
        let mut remaining = None;
        loop {
            let look = tokio::select! {
                biased;
                look = self.attempt.look() => look,
                () = self.over() => return Err(failing.map_or_else(
                    || self.not_acquired(remaining),
                    |(_, error)| self.attempt.failed(error),
                )),
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
            };
            let sleep = match look {
                Ok(Look::Acquired(guard)) => return Ok(guard),
                Ok(Look::Busy(left)) => {
                    failing = None;
                    remaining = left;
                    turn.waits(options.max_waiters)?;
                    turn.watch
                        .get_or_insert_with(|| shared.backend.clone().watch(options.kind, key));
                    // A lease that is about to end is over a moment after its whole milliseconds.
                    left.map_or(LONGEST_SLEEP, |left| left + Duration::from_millis(1))
                        .min(LONGEST_SLEEP)
                }
                Err(error) => {
                    let (since, _) = *failing.get_or_insert_with(|| (clock::now(), error.clone()));
                    let failing_for = clock::now().saturating_duration_since(since);
                    if !error.is_passing() || failing_for >= shared.settings.retry_for {
                        return Err(self.attempt.failed(error));
                    }
                    failing = Some((since, error));
                    jittered(Duration::from_millis(50) + failing_for / 4)
                }
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                () = changed(&mut turn.watch) => {}
                () = tokio::time::sleep(sleep) => {}
                () = self.over() => return Err(failing.map_or_else(
                    || self.not_acquired(remaining),
                    |(_, error)| self.attempt.failed(error),
                )),
            }
        }
    }
}

async fn changed(watch: &mut Option<crate::backend::Watch>) {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => clock::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64())
}
