//! The spans of waits and holds, and what is recorded on the caller's span.
//!
//! A span is created in the caller's own poll, so that it is a child of the caller's span. Without a subscriber for
//! these spans, all of this costs one check of a static.

use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

pub(crate) use tracing::Span;
use tracing::field::Empty;
use tracing::level_filters::LevelFilter;

use crate::base::observed::{log, observed};
use crate::runtime::emit::label::label;
use crate::runtime::emit::meter::{Ended, Outcome};
use crate::runtime::grants::Grant;
use crate::runtime::group::Group;
use crate::runtime::waits::WaitingCall;

label! {
    /// How an acquire obtained its lock.
    Path {
        /// Without waiting.
        Free = "free",
        /// From another caller of this process.
        Handoff = "handoff",
        /// After a notification of the store.
        Notified = "notified",
        /// By asking again after a pause.
        Polled = "polled",
        /// As the next waiter in this process's queue.
        Queue = "queue",
    }
}

/// The result of an acquire.
pub(crate) trait Acquired {
    /// Calls `with` for each of its grants.
    fn each_grant(&self, with: &mut dyn FnMut(&Grant));
}

/// The trace of one acquire.
#[derive(Debug)]
pub(crate) struct AcquireTrace {
    path: AtomicU8,
    /// The span of its wait.
    wait: OnceLock<Box<ObservedSpan>>,
}

/// A span at whose end a subscriber may panic, whoever drops it.
#[derive(Debug, Clone)]
pub(crate) struct ObservedSpan(Span);

impl Deref for ObservedSpan {
    type Target = Span;

    fn deref(&self) -> &Span {
        &self.0
    }
}

impl Drop for ObservedSpan {
    fn drop(&mut self) {
        let span = std::mem::replace(&mut self.0, Span::none());
        observed(|| drop(span));
    }
}

impl Default for AcquireTrace {
    fn default() -> AcquireTrace {
        AcquireTrace {
            path: AtomicU8::new(Path::Free as u8),
            wait: OnceLock::new(),
        }
    }
}

impl AcquireTrace {
    fn path(&self) -> Path {
        let path = self.path.load(Ordering::Relaxed);
        Path::ALL
            .into_iter()
            .find(|one| *one as u8 == path)
            .unwrap_or(Path::Free)
    }

    /// Records how it obtains its lock, as far as known.
    pub(crate) fn comes_by(&self, path: Path) {
        self.path.store(path as u8, Ordering::Relaxed);
    }

    /// Records that the call begins to wait, in the poll of its caller.
    pub(crate) fn begins_to_wait(&self, call: &WaitingCall, group: Group) {
        if self.path() == Path::Free {
            self.comes_by(Path::Queue);
        }
        observed(|| {
            let span = tracing::info_span!(
                target: "dlock::wait",
                "dlock.wait",
                dlock.key = %call.key,
                dlock.kind = %call.kind,
                dlock.group = group.name(),
                dlock.outcome = Empty,
                dlock.path = Empty,
                dlock.token = Empty,
                dlock.wait_ms = Empty,
            );
            if !span.is_disabled() {
                let _ = self.wait.set(Box::new(ObservedSpan(span)));
            }
        });
    }

    /// Records success, in the poll of its caller.
    pub(super) fn acquired(&self, waited: Duration, got: &dyn Acquired) {
        if LevelFilter::current() != LevelFilter::OFF {
            observed(|| self.record_success(waited, got));
        }
    }

    fn record_success(&self, waited: Duration, got: &dyn Acquired) {
        let wait = self.wait.get();
        let (mut tokens, mut token) = (0, 0);
        got.each_grant(&mut |grant| {
            (tokens, token) = (tokens + 1, grant.token);
            grant.begins_span(|before| {
                if let (Some(wait), Some(before)) = (wait, before) {
                    wait.follows_from(before);
                }
            });
        });
        for span in [Some(&Span::current()), wait.map(|wait| &***wait)]
            .into_iter()
            .flatten()
        {
            span.record("dlock.wait_ms", millis(waited))
                .record("dlock.path", self.path().name());
            // For several locks, the tokens are on the spans of their holds.
            if tokens == 1 {
                span.record("dlock.token", token);
            }
        }
        self.ended(Outcome::Acquired);
    }

    /// Records failure.
    pub(super) fn not_acquired(&self, waited: Duration, outcome: Outcome) {
        if LevelFilter::current() == LevelFilter::OFF {
            return;
        }
        observed(|| {
            Span::current().record("dlock.wait_ms", millis(waited));
            if let Some(wait) = self.wait.get() {
                wait.record("dlock.wait_ms", millis(waited));
            }
            self.ended(outcome);
        });
    }

    fn ended(&self, outcome: Outcome) {
        if let Some(wait) = self.wait.get() {
            wait.record("dlock.outcome", outcome.name());
        }
    }
}

/// Creates the span of a hold, in the poll of its caller.
pub(crate) fn hold(grant: &Grant) -> ObservedSpan {
    ObservedSpan(tracing::debug_span!(
        target: "dlock::hold",
        "dlock.hold",
        dlock.key = %grant.key,
        dlock.kind = %grant.kind,
        dlock.group = grant.group.name(),
        dlock.grant = %grant.id(),
        dlock.token = grant.token,
        dlock.ended = Empty,
        dlock.held_ms = Empty,
    ))
}

/// Whether a subscriber wants the spans of holds.
pub(crate) fn holds_are_traced() -> bool {
    let mut are_traced = false;
    observed(|| are_traced = tracing::span_enabled!(target: "dlock::hold", tracing::Level::DEBUG));
    are_traced
}

/// Records the end of the hold.
pub(crate) fn hold_ended(span: &Span, ended: Ended, held: Duration) {
    observed(|| {
        span.record("dlock.ended", ended.name())
            .record("dlock.held_ms", millis(held));
    });
}

/// Records a confirmed renewal of the hold, with this much of the lease left.
pub(crate) fn renewed(left: Duration) {
    log!(debug, target: "dlock::hold", left_ms = millis(left), "a lock was renewed");
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
