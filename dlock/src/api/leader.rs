//! Leader election: of all candidate processes, one leads.
//!
//! The leader is the holder of the lock of that name, and a term is one hold of it. So every promise for a lock applies
//! to a leader, and nothing here depends on the kind of store.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::time::Duration;

use crate::api::guard::{LockGuard, Wraps, finish};
use crate::api::lock::guarded;
use crate::api::methods::hold_methods;
use crate::base::chance;
use crate::runtime::emit::Event;
use crate::store::{Holder, Kind};
use crate::{Error, Held, Lock, LockClient, LockKey};

/// About how long to pause before a failed store is asked again.
const PAUSE: Duration = Duration::from_secs(1);

/// A role that one process at a time has; created by [`LockClient::leader`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::LockClient::memory();
/// let schedule = client.leader("scheduler").lead(|term| async move {
///     loop {
///         println!("due jobs are run here and nowhere else, with token {}", term.fencing_token());
/// #       break;
/// #       #[allow(unreachable_code)]
///         tokio::time::sleep(std::time::Duration::from_secs(60)).await;
///     }
/// });
/// tokio::select! {
///     ended = schedule => ended?, // in a program that drains the client, `Error::Draining` is no failure
///     _ = tokio::signal::ctrl_c() => {} // drops the work and resigns: another process leads at once
/// }
/// client.shutdown(std::time::Duration::from_secs(5)).await;
/// # Ok(()) }
/// ```
///
/// All candidates ask for the lock of that name (so a lock for another purpose needs another name), and its holder
/// leads until it is released. A live leader renews the lock. When a leader crashes, or is cut off from the store,
/// another candidate leads as soon as the lease has expired, and **not before**; when a leader resigns or is dropped,
/// another candidate leads at once. The former leader is told before an expired lease lets the next one be elected, and
/// its work is dropped; the promises of a lock, and [their limits](crate#what-is-promised), apply here.
///
/// # The token
///
/// A leader that was stopped (a long pause, a suspended machine) learns of it only when it resumes, and may have a
/// write in flight. So each term has a fencing token, greater than those of all earlier terms. Send it along with every
/// write, and have the resource refuse older tokens:
///
/// ```sql
/// UPDATE jobs SET last_run = $1, fence = $2 WHERE name = $3 AND fence <= $2
/// ```
///
/// If no row was updated, another process leads. A token that the resource does not check protects nothing.
///
/// # Why it is not a fair lock
///
/// The longest wait does not make the best leader. In a queue, a candidate that has died keeps the others waiting until
/// it is passed over; without a queue, a live candidate leads at once.
#[derive(Clone)]
#[must_use = "it is no candidate until it campaigns"]
pub struct Leader {
    client: LockClient,
    lock: Lock,
}

impl LockClient {
    /// Returns the role of this name, which one process has at a time. Nothing is sent until a process campaigns for
    /// it.
    pub fn leader(&self, name: impl Into<LockKey>) -> Leader {
        Leader {
            client: self.clone(),
            // A term is long, and the other processes are there to take over.
            lock: self.lock(name).local_handoffs(0),
        }
    }
}

impl Leader {
    /// Sets how long other processes wait to lead after the leader crashed. The leader renews the lease every third of
    /// it. The client's by default ([`LockClientBuilder::lease`](crate::LockClientBuilder::lease), 30 s).
    pub fn lease(mut self, lease: Duration) -> Leader {
        self.lock = self.lock.lease(lease);
        self
    }

    /// Limits how long one term lasts, so that a stuck leader does not lead for ever. No limit by default.
    pub fn max_term(mut self, max_term: Duration) -> Leader {
        self.lock = self.lock.max_hold(max_term);
        self
    }

    /// Sets the group by which metrics distinguish leaders: the kind of work, never the name of a role that is made
    /// from data. None by default; see [`LockOptions::group`](crate::LockOptions::group). Candidates wait by design: leave the
    /// group out of alerts for callers that wait long, as those of `ops/alerts.yaml`.
    pub fn group(mut self, group: &'static str) -> Leader {
        self.lock = self.lock.group(group);
        self
    }

    /// Says what each term and each candidacy is for, for the person on call, as [`Lock::note`] does. At most 200
    /// characters; none by default. It is written to the store as it is: leave secrets out.
    pub fn note(mut self, note: impl AsRef<str>) -> Leader {
        self.lock = self.lock.note(note);
        self
    }

    /// Returns the name of the role.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.lock.key()
    }

    /// Checks name and options, as each campaign does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::InvalidOption`]; [`Error::Unsupported`] for what the store does not have.
    pub fn check(&self) -> Result<(), Error> {
        self.lock.check().map_err(of_a_term)
    }

    /// Returns a view of the term in which this client leads, as of this call; `None` while it does not lead. Sends nothing.
    ///
    /// For code beside the work: a handler that only the leader answers, a health page, a metric. It follows the clock of
    /// this process and its renewals, as every guard does: it ends before an expired lease lets another candidate lead. After
    /// a forced release it ends with the next renewal, which may be a third of the lease later. What is written under it
    /// carries its fencing token.
    ///
    /// It is the hold of this client and its clones on the name, also one by [`LockClient::lock`], which should use other
    /// names. Terms of other clients of the process are not seen. The call looks through all holds of the client.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let leader = client.leader("scheduler");
    /// assert!(leader.term().is_none());
    ///
    /// let term = leader.campaign().await?;
    /// // Elsewhere in the program:
    /// match leader.term() {
    ///     Some(held) => println!("this process leads, with token {}", held.fencing_token()),
    ///     None => println!("another process leads, or none"),
    /// }
    /// # assert_eq!(leader.term().map(|held| held.fencing_token()), Some(term.fencing_token()));
    /// term.release().await?;
    /// assert!(leader.term().is_none());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn term(&self) -> Option<Held> {
        let watchdog = &self.client.shared().watchdog;
        watchdog.grant_of(Kind::Mutex, self.key()).map(Held::new)
    }

    /// Returns the current leader, as the store sees it; `None` when there is none. It is this client if the id begins
    /// with [`LockClient::id`]; [`term`](Self::term) says so without a request.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::KeyTaken`] or a failure of the store. Cancel safe.
    pub async fn current(&self) -> Result<Option<Holder>, Error> {
        self.client.inspect(self.key().clone()).await
    }

    /// Runs the closure's future while this process leads: waits until it is elected, runs the future, drops it when
    /// leadership is lost, and campaigns again, with a new future from the closure. When the future is done, its result
    /// is returned; drop this future to stop work that never ends. Either way this process resigns, and another one
    /// leads at once.
    ///
    /// A store failure does not end it: it retries for as long as it takes. When the client is [shut
    /// down](LockClient::shutdown), the work is dropped at once, since it would not end by itself.
    ///
    /// The closure gets a view of the term. The work runs in the term's frame, see [`scope`](crate::scope). Work that
    /// does not return to the runtime cannot be dropped: run slow work in another thread, which checks
    /// [`is_held`](Held::is_held).
    ///
    /// # Errors
    ///
    /// [`Error::ClientClosed`] when the client is shut down. [`Error::Draining`] when it [drains](LockClient::drain)
    /// while this process is a candidate: a leader leads on until the shutdown, but one that loses its term is a
    /// candidate again. And, from the first campaign on, every error that retrying does not fix: [`Error::InvalidKey`],
    /// [`Error::InvalidOption`], [`Error::KeyTaken`], [`Error::Unsupported`].
    ///
    /// Cancel safe for the leadership; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn lead<F, Fut>(&self, mut work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnMut(Held) -> Fut,
        Fut: Future,
    {
        let (this, by) = (self.clone(), Location::caller());
        async move {
            loop {
                // Larger than most work, and rare.
                let term = Box::pin(this.elected(by)).await?;
                let held = term.guard.held();
                let done = tokio::select! {
                    biased;
                    () = this.client.shared().closing.given() => Err(Error::ClientClosed),
                    // The closure too runs in the frame.
                    done = term.guard.run(async { work(held).await }) => done,
                };
                Box::pin(finish(term.guard)).await;
                match done {
                    Err(Error::Lost { key, loss, .. }) => {
                        Event::LeadLost { name: &key, loss }.emit();
                    }
                    done => return done,
                }
            }
        }
    }

    /// Waits until this process leads, for as long as it takes, through store failures too. For a single term, or for
    /// work that is not a future; otherwise [`lead`](Self::lead) is easier.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let term = client.leader("scheduler").campaign().await?;
    /// let token = term.fencing_token();
    /// term.run(async move { println!("leading with {token}") }).await?; // dropped when the lead is lost
    /// term.release().await?; // another process leads at once
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`lead`](Self::lead).
    ///
    /// Cancel safe: dropped at any point, this process is no longer a candidate.
    #[track_caller]
    pub fn campaign(&self) -> impl Future<Output = Result<Term, Error>> + Send + use<> {
        let (this, by) = (self.clone(), Location::caller());
        async move { this.elected(by).await }
    }

    /// Leads if no other process leads now: asks the store once.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when another process leads, the errors of [`lead`](Self::lead), and failures of the
    /// store.
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_campaign(&self) -> impl Future<Output = Result<Term, Error>> + Send + use<> {
        let call = self.lock.call(true, Location::caller());
        async move { guarded(call).await.map(Term::begins).map_err(of_a_term) }
    }

    async fn elected(&self, by: &'static Location<'static>) -> Result<Term, Error> {
        loop {
            match guarded(self.lock.call(false, by)).await {
                Ok(guard) => return Ok(Term::begins(guard)),
                Err(
                    error @ (Error::Unreachable { .. }
                    | Error::OutcomeUnknown { .. }
                    | Error::Refused { .. }
                    | Error::NotReplicated { .. }),
                ) => {
                    Event::StandingFailed {
                        name: self.key(),
                        error: &error,
                    }
                    .emit();
                }
                Err(error) => return Err(of_a_term(error)),
            }
            let pause = async { tokio::time::sleep(chance::jittered(PAUSE)).await };
            tokio::select! {
                biased;
                () = self.client.shared().closing.given() => {}
                () = self.client.handle().with_timers(pause) => {}
            }
        }
    }
}

/// Renames the option in an error to its name here.
fn of_a_term(error: Error) -> Error {
    match error {
        Error::InvalidOption {
            option: "max_hold",
            reason,
        } => Error::InvalidOption {
            option: "max_term",
            reason,
        },
        error => error,
    }
}

impl fmt::Debug for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leader").field("lock", &self.lock).finish()
    }
}

/// A term as leader, until it is released or dropped, or lost. Dropping it resigns in the background.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let term = client.leader("billing").campaign().await?;
///
/// # let close_the_month = async |_token: u64| {};
/// close_the_month(term.fencing_token()).await;
/// term.check()?; // still the leader
/// term.release().await?; // resigns
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "dropping the term resigns"]
pub struct Term {
    guard: LockGuard,
}

impl Term {
    fn begins(guard: LockGuard) -> Term {
        Event::Leads {
            name: guard.key(),
            token: guard.fencing_token(),
        }
        .emit();
        Term { guard }
    }

    hold_methods! {
        /// That is of the role.
        key,
        /// That of [`Leader::current`].
        id,
        fencing_token,
        is_held,
        state,
        remaining,
        is_renewed,
        check,
        lost,
        ensure,
        note,
        revoked,
        why_lost,
        held,
        scope,
        frame,
        run,
        /// Another process leads at once.
        release,
    }
}

impl Wraps for Term {
    fn guard(&self) -> &LockGuard {
        &self.guard
    }

    fn into_guard(self) -> LockGuard {
        self.guard
    }
}
