//! Why work was not done, or why its outcome is unknown.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use crate::Error;

/// The shortest and the longest pause before work is tried again: a lease that ends now is about to be renewed, or taken
/// over, and work elsewhere may end before its lease.
const SHORTEST: Duration = Duration::from_millis(100);
const SOON: Duration = Duration::from_secs(1);
/// When to try again what only time, a newer process or an operator mends.
const LATER: Duration = Duration::from_secs(10);

/// Why [`Once::run`](crate::Once::run) has no result.
///
/// | | a consumer of a queue | |
/// |---|---|---|
/// | `Store` of an invalid key or option, for example | puts the message aside: it would never run | [`is_permanent`](Self::is_permanent) |
/// | any other `Store`, `Lost` before the work, `ClockWentBack`, `SlotTooFarAhead` | requeues the message; this was no attempt | [`is_not_started`](Self::is_not_started), [`retry_after`](Self::retry_after) |
/// | `Work`, any other `Lost` | requeues the message; an attempt was made | |
/// | `ResultUnavailable`, `Unreadable` | acknowledges the message: it was done before | [`is_done`](Self::is_done) |
/// | `Failed`, `Orphaned` | puts the message aside: no attempt follows | [`is_given_up`](Self::is_given_up) |
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::{LockClient, OnceError};
///
/// let client = LockClient::memory();
/// let failed = client.once("import").run(async |_| Err::<u64, _>("no such file")).await;
/// match failed {
///     Err(OnceError::Work(error)) => assert_eq!(error, "no such file"), // the next call tries again
///     other => panic!("{other:?}"),
/// }
/// # }
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The work ran here and failed. [`OnFailure`](crate::OnFailure) says what later calls do. The causes of its error
    /// are not among the sources: take the error by [`work`](OnceError::work) or [`into_work`](OnceError::into_work).
    #[error("the work failed: {0}")]
    Work(E),

    /// The work failed in earlier attempts, and [`OnFailure`](crate::OnFailure) says that it is not tried again.
    #[error("the work has failed in {attempts} attempt{} and is not tried again", if *attempts == 1 { "" } else { "s" })]
    #[non_exhaustive]
    Failed {
        /// How many attempts there were.
        attempts: u32,
    },

    /// The process of an earlier attempt crashed, was cut off or dropped the work: whether the work was done is
    /// unknown, and by [`OnOrphan::Leave`](crate::record::OnOrphan::Leave) it is not done again.
    #[error("attempt {attempt} of the work ended without a result and is not repeated")]
    #[non_exhaustive]
    Orphaned {
        /// The number of that attempt.
        attempt: u32,
    },

    /// The claim was lost: its lease was over before the work began here, the work was dropped, or its result came too
    /// late. Another process may do it again.
    #[error("attempt {attempt} of the work lost its claim{}", if *started { "" } else { " before it began" })]
    #[non_exhaustive]
    Lost {
        /// The number of this attempt.
        attempt: u32,
        /// Whether the work began. If not, the store does not count the attempt.
        started: bool,
    },

    /// The work was done, but its result was too large to keep, or the store refused it.
    #[error("the work was done before, and its result was not kept")]
    ResultUnavailable,

    /// There is a result that cannot be read: of another type, or of a newer version. The work is not done again.
    #[error("the result of the work cannot be read: {why}")]
    #[non_exhaustive]
    Unreadable {
        /// Why.
        why: String,
    },

    /// The last slot of the work is more than one ahead of the store's clock: that clock was set back, or the work had
    /// a longer [period](crate::Once::every) before. Nothing runs until the clock has caught up, unless an operator
    /// [forgets](crate::record::Records::forget) the record.
    #[error(
        "the last slot of the work is {} ahead of the store's clock: the clock was set back, or the work had a longer period before",
        ahead(*.stored, *.now)
    )]
    #[non_exhaustive]
    ClockWentBack {
        /// The last slot.
        stored: SystemTime,
        /// The store's clock.
        now: SystemTime,
    },

    /// The slot that was [named](crate::Once::slot) is too far ahead: more than one period ahead of the slot nearest to the
    /// store's clock, or more than five minutes ahead of that clock if there is no period.
    #[error("the slot of the work is {} ahead of the store's clock", ahead(*.slot, *.now))]
    #[non_exhaustive]
    SlotTooFarAhead {
        /// The slot.
        slot: SystemTime,
        /// The store's clock.
        now: SystemTime,
    },

    /// An option is invalid, or the store failed before the work began.
    #[error(transparent)]
    Store(#[from] Error),
}

impl<E> OnceError<E> {
    /// Returns the error of the work, if it ran here and failed: it keeps its own causes, which the chain of sources of
    /// an `OnceError` does not have.
    ///
    /// ```
    /// # use dlock::OnceError;
    /// let failed = OnceError::Work("no such file");
    /// assert_eq!(failed.work(), Some(&"no such file"));
    /// assert_eq!(OnceError::<&str>::ResultUnavailable.work(), None);
    /// ```
    #[must_use]
    pub fn work(&self) -> Option<&E> {
        match self {
            OnceError::Work(error) => Some(error),
            _ => None,
        }
    }

    /// Returns whether the work did not begin here: this was no attempt. Try again after
    /// [`retry_after`](Self::retry_after), unless the error [is permanent](Self::is_permanent). False for the error of
    /// work that stated [`not_started`](crate::OnceClaim::not_started): the work knows that itself.
    ///
    /// ```
    /// use dlock::{Error, OnceError};
    ///
    /// assert!(OnceError::<String>::Store(Error::Draining).is_not_started());
    /// assert!(!OnceError::Work("no such file").is_not_started());
    /// ```
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        use OnceError::{ClockWentBack, Lost, SlotTooFarAhead, Store};
        matches!(
            self,
            Store(_) | Lost { started: false, .. } | ClockWentBack { .. } | SlotTooFarAhead { .. }
        )
    }

    /// Returns whether the work did not begin here, and trying again cannot help: the key, an option or the URL is invalid,
    /// the store does not support an option, or there is no default client.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// let nameless = dlock::LockClient::memory().once("");
    /// let error = nameless.run(async |_| Ok::<_, String>(42)).await.unwrap_err();
    /// assert!(error.is_not_started() && error.is_permanent());
    /// # }
    /// ```
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, OnceError::Store(error) if is_permanent(error))
    }

    /// Returns whether the work was done before, and only its result is not available.
    ///
    /// ```
    /// # use dlock::OnceError;
    /// assert!(OnceError::<String>::ResultUnavailable.is_done());
    /// ```
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self, OnceError::ResultUnavailable | OnceError::Unreadable { .. })
    }

    /// Returns whether no attempt follows, by [`OnFailure`](crate::OnFailure) or
    /// [`OnOrphan`](crate::record::OnOrphan).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock::{LockClient, OnFailure};
    ///
    /// let import = LockClient::memory().once("import").on_failure(OnFailure::Keep);
    /// let failed = import.run(async |_| Err::<(), _>("no such file")).await.unwrap_err();
    /// assert!(!failed.is_given_up()); // its own error, and the first one
    /// let given_up = import.run(async |_| Ok::<(), &str>(())).await.unwrap_err();
    /// assert!(given_up.is_given_up());
    /// # }
    /// ```
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        matches!(self, OnceError::Failed { .. } | OnceError::Orphaned { .. })
    }

    /// Returns when to try again after an error [before the work](Self::is_not_started): after a second; after 10 s where
    /// the key holds other data ([`Error::KeyTaken`]) or the clocks have to come closer. `None` for all other errors, and
    /// where it [cannot help](Self::is_permanent).
    ///
    /// ```
    /// use dlock::{Error, OnceError};
    /// use std::time::Duration;
    ///
    /// let draining = OnceError::<String>::Store(Error::Draining);
    /// assert_eq!(draining.retry_after(), Some(Duration::from_secs(1)));
    /// assert_eq!(OnceError::Work("no such file").retry_after(), None);
    /// ```
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            OnceError::Store(Error::KeyTaken { .. })
            | OnceError::ClockWentBack { .. }
            | OnceError::SlotTooFarAhead { .. } => Some(LATER),
            OnceError::Lost { started: false, .. } => Some(SOON),
            OnceError::Store(error) if is_permanent(error) => None,
            OnceError::Store(_) => Some(SOON),
            _ => None,
        }
    }

    /// Returns the error of the work itself, if it ran here and failed; see [`work`](Self::work).
    ///
    /// ```
    /// # use dlock::OnceError;
    /// assert_eq!(OnceError::Work("no such file").into_work(), Some("no such file"));
    /// ```
    #[must_use]
    pub fn into_work(self) -> Option<E> {
        match self {
            OnceError::Work(error) => Some(error),
            _ => None,
        }
    }
}

fn is_permanent(error: &Error) -> bool {
    matches!(
        error,
        Error::InvalidKey { .. }
            | Error::InvalidOption { .. }
            | Error::InvalidUrl { .. }
            | Error::Unsupported { .. }
            | Error::NoDefaultClient
    )
}

fn ahead(time: SystemTime, now: SystemTime) -> String {
    format!("{:.1?}", time.duration_since(now).unwrap_or_default())
}

/// Why a function under `#[once]` has no result, of its own or of an earlier call.
///
/// ```
/// use dlock::NotRun;
///
/// #[derive(Debug)]
/// enum Failure {
///     Later,
///     Once(NotRun),
/// }
///
/// impl From<NotRun> for Failure {
///     fn from(why: NotRun) -> Failure {
///         match why {
///             NotRun::Elsewhere { .. } => Failure::Later,
///             why => Failure::Once(why),
///         }
///     }
/// }
/// # let _ = (Failure::Later, Failure::Once(NotRun::from(dlock::Error::ClientClosed)));
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum NotRun {
    /// Another process does the work now, or another task of this one.
    #[error(
        "the work is being done by another process, in attempt {attempt}; its lease ends in {remaining:.1?}"
    )]
    #[non_exhaustive]
    Elsewhere {
        /// The number of that attempt.
        attempt: u32,
        /// The rest of its lease, unless it is renewed.
        remaining: Duration,
    },
    /// Every other case: see [`OnceError`].
    #[error(transparent)]
    Failed(OnceError<Infallible>),
}

impl NotRun {
    /// Returns whether the body did not begin here, see [`OnceError::is_not_started`]; true for work that is done
    /// elsewhere. If the body itself turns errors of this library into `NotRun`, they are not told apart: use an error type of
    /// your own then.
    ///
    /// ```
    /// use dlock::{Error, NotRun};
    ///
    /// let draining = NotRun::from(Error::Draining);
    /// assert!(draining.is_not_started() && !draining.is_permanent());
    /// ```
    #[must_use]
    pub fn is_not_started(&self) -> bool {
        match self {
            NotRun::Elsewhere { .. } => true,
            NotRun::Failed(error) => error.is_not_started(),
        }
    }

    /// Returns whether the body did not begin here, and trying again cannot help, see [`OnceError::is_permanent`].
    ///
    /// ```
    /// let invalid = dlock::NotRun::from(dlock::Error::invalid_option("keep", "it is zero"));
    /// assert!(invalid.is_permanent());
    /// ```
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        self.is_not_started() && self.retry_after().is_none()
    }

    /// Returns whether the work was done before, and only its result is not available.
    ///
    /// ```
    /// use dlock::{NotRun, OnceError};
    ///
    /// assert!(NotRun::Failed(OnceError::ResultUnavailable).is_done());
    /// ```
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self, NotRun::Failed(error) if error.is_done())
    }

    /// Returns whether no attempt follows, by the option `attempts`.
    ///
    /// ```
    /// # #[cfg(feature = "macros")] mod example {
    /// use dlock::{LockClient, NotRun, once};
    ///
    /// #[once(key = "import", attempts = 1, client = client)]
    /// async fn import(client: &LockClient) -> Result<(), Failure> {
    ///     Err(Failure::NoSuchFile)
    /// }
    ///
    /// #[derive(Debug)]
    /// enum Failure {
    ///     NoSuchFile,
    ///     NotRun(NotRun),
    /// }
    ///
    /// impl From<NotRun> for Failure {
    ///     fn from(why: NotRun) -> Failure {
    ///         Failure::NotRun(why)
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] pub async fn main() {
    /// let client = LockClient::memory();
    /// assert!(matches!(import(&client).await, Err(Failure::NoSuchFile)));
    /// assert!(matches!(import(&client).await, Err(Failure::NotRun(why)) if why.is_given_up()));
    /// # } }
    /// # #[cfg(feature = "macros")] example::main();
    /// ```
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        matches!(self, NotRun::Failed(error) if error.is_given_up())
    }

    /// Returns when to call again after an error [before the body](Self::is_not_started): when the lease of the attempt
    /// elsewhere ends, but after a second at the latest and 100 ms at the soonest; otherwise as
    /// [`OnceError::retry_after`].
    ///
    /// ```
    /// use dlock::{Error, NotRun};
    /// use std::time::Duration;
    ///
    /// let draining = NotRun::from(Error::Draining);
    /// assert_eq!(draining.retry_after(), Some(Duration::from_secs(1)));
    /// ```
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            NotRun::Elsewhere { remaining, .. } => Some((*remaining).clamp(SHORTEST, SOON)),
            NotRun::Failed(error) => error.retry_after(),
        }
    }

    /// Converts the error of a call that did not run the work here, or has no result of it.
    pub(crate) fn of<E>(error: OnceError<E>) -> NotRun {
        NotRun::Failed(match error {
            OnceError::Work(_) => OnceError::Store(Error::invalid_option("work", "it failed by itself")),
            OnceError::Failed { attempts } => OnceError::Failed { attempts },
            OnceError::Orphaned { attempt } => OnceError::Orphaned { attempt },
            OnceError::Lost { attempt, started } => OnceError::Lost { attempt, started },
            OnceError::ResultUnavailable => OnceError::ResultUnavailable,
            OnceError::Unreadable { why } => OnceError::Unreadable { why },
            OnceError::ClockWentBack { stored, now } => OnceError::ClockWentBack { stored, now },
            OnceError::SlotTooFarAhead { slot, now } => OnceError::SlotTooFarAhead { slot, now },
            OnceError::Store(error) => OnceError::Store(error),
        })
    }
}

impl From<Error> for NotRun {
    fn from(error: Error) -> NotRun {
        NotRun::Failed(OnceError::Store(error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::store::Kind;
    use crate::{LockKey, Loss};

    /// Each error once: what it says of itself, in the order not started, permanent, done, given up, and when to try again.
    #[test]
    fn each_error_says_what_to_do() {
        const NO: bool = false;
        let key = LockKey::from("k");
        let taken = Error::KeyTaken {
            key,
            found: "a string".to_owned(),
        };
        // A hold around the call was lost.
        let held_around = Error::Lost {
            kind: Kind::Mutex,
            key: "k".into(),
            loss: Loss::Expired,
        };
        let lost = |started| OnceError::Lost { attempt: 1, started };
        let (stored, now, slot) = (UNIX_EPOCH, UNIX_EPOCH, UNIX_EPOCH);
        let why = || "it is a number".to_owned();
        let not_started = [true, NO, NO, NO];
        let permanent = [true, true, NO, NO];
        let (done, given_up, attempted) = ([NO, NO, true, NO], [NO, NO, NO, true], [NO; 4]);
        for (error, says, after) in [
            (OnceError::Work("no such file"), attempted, None),
            (lost(true), attempted, None),
            (lost(false), not_started, Some(SOON)),
            (OnceError::Store(held_around), not_started, Some(SOON)),
            (OnceError::Failed { attempts: 1 }, given_up, None),
            (OnceError::Orphaned { attempt: 1 }, given_up, None),
            (OnceError::ResultUnavailable, done, None),
            (OnceError::Unreadable { why: why() }, done, None),
            (OnceError::ClockWentBack { stored, now }, not_started, Some(LATER)),
            (OnceError::SlotTooFarAhead { slot, now }, not_started, Some(LATER)),
            (OnceError::Store(Error::Draining), not_started, Some(SOON)),
            (OnceError::Store(taken), not_started, Some(LATER)),
            (
                OnceError::Store(Error::invalid_option("keep", "it is zero")),
                permanent,
                None,
            ),
        ] {
            let said = [
                error.is_not_started(),
                error.is_permanent(),
                error.is_done(),
                error.is_given_up(),
            ];
            assert_eq!((said, error.retry_after()), (says, after), "{error:?}");
            if error.work().is_some() {
                continue;
            }
            let not_run = NotRun::of(error.clone());
            let said = [
                not_run.is_not_started(),
                not_run.is_permanent(),
                not_run.is_done(),
                not_run.is_given_up(),
            ];
            assert_eq!((said, not_run.retry_after()), (says, after), "{error:?}");
        }
        for (remaining, after) in [(0, 100), (300, 300), (25_000, 1000)] {
            let elsewhere = NotRun::Elsewhere {
                attempt: 1,
                remaining: Duration::from_millis(remaining),
            };
            assert_eq!(elsewhere.retry_after(), Some(Duration::from_millis(after)));
            assert!(elsewhere.is_not_started() && !elsewhere.is_permanent());
        }
    }
}
