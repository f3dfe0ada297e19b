//! A command that runs once in a fleet, or once in each slot of time: claimed, run, and settled by how it ended.

use std::time::{Duration, SystemTime};

use dlock::{Error, Lease, LockClient, Once, OnceClaim, OnceError, OnceReply, SlotReply};
use futures_util::TryFutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::args::{OnLost, Plan};
use super::command::Change;
use super::end::{End, GIVEN_UP, LOST, NOT_ACQUIRED};
use super::hold::{View, not_acquired};
use super::once_args::OncePlan;
use super::say::Say;
use super::signals::{A_MOMENT, Signals};
use super::terminal::Terminal;
use super::watch::{self, How};
use crate::look::clean;
use crate::look::told;

/// The longest wait that the library accepts.
const AS_LONG_AS_IT_TAKES: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Runs the command, unless it ran before.
pub(super) async fn run(
    client: &LockClient,
    plan: &Plan,
    asked: &OncePlan,
    terminal: Option<Terminal>,
    signals: &mut Signals,
    say: Say,
) -> End {
    let grace = match plan.grace(client.lease(), None) {
        Ok(grace) => grace,
        Err(why) => return End::Misused(why),
    };
    let calls = match Calls::new(client, plan, asked) {
        Ok(calls) => calls,
        Err(error) => return not_acquired(&error, plan, say),
    };
    let admitted = tokio::select! {
        biased;
        signal = signals.end() => return End::given_up(signal, terminal.as_ref()),
        admitted = say.while_waiting(client, plan, calls.admitted()) => admitted,
    };
    let (claim, settling) = match admitted {
        Admitted::Claimed(claim, settling) => (claim, settling),
        Admitted::Answered(answer) => return not_run(answer, plan, say),
    };
    let ended = watch::run(plan, View::Claim(claim.clone()), grace, terminal, signals, say).await;
    signals.command_has_ended();
    let is_success = match ended.how {
        How::Ended(Change::Exited(status)) => status == 0,
        How::NotStarted => {
            claim.not_started();
            false
        }
        // It ended in the middle: the claim is given up, as after a crash.
        How::Lost | How::Interrupted | How::Ended(_) => return ended.end,
    };
    let host = client.active().host.clone();
    let work = plan.locks();
    let settling = settling.settle(is_success.then(|| result(&host)));
    let Some(settled) = signals.let_finish(settling).await else {
        say.line(&format!(
            "{work}: it has ended, and the store did not confirm it within {A_MOMENT:?}"
        ));
        return ended.end;
    };
    match settled {
        Ok(Reply::Unrecorded(error)) => {
            say.line(&format!(
                "{work}: it succeeded, but may be run again: {}",
                told(&error)
            ));
            ended.end
        }
        Err(OnceError::Lost { .. }) if is_success => {
            say.line(&format!("{work}: lost before its success was recorded"));
            match plan.on_lost {
                OnLost::End => End::With(LOST),
                OnLost::Ignore => ended.end,
            }
        }
        _ => ended.end,
    }
}

/// The stored form of a success.
fn result(host: &str) -> Value {
    let ended = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    json!({ "host": host, "ended": ended })
}

/// The command failed.
#[derive(Debug)]
struct Failed;

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the command failed")
    }
}

/// The outcome of a call.
enum Reply {
    Ran,
    Unrecorded(Error),
    Earlier(Value),
    Elsewhere {
        attempt: u32,
        remaining: Duration,
        /// The requested slot, and the one whose command runs.
        slots: Option<[SystemTime; 2]>,
    },
    Missed {
        slot: SystemTime,
        /// The last slot that was begun, if known.
        last: Option<SystemTime>,
    },
    /// Of a newer version of the library.
    Other,
}

/// The answer to a call.
type Answer = Result<Reply, OnceError<Failed>>;

/// The call for this command.
struct Calls {
    once: Once,
    every: Option<Duration>,
    slot: Option<SystemTime>,
    wait: Option<Duration>,
}

enum Admitted {
    Claimed(OnceClaim, Settling),
    Answered(Answer),
}

/// A call with a claim that waits for how the command ends. Dropped, the claim is given up.
struct Settling {
    outcome: oneshot::Sender<Option<Value>>,
    call: LocalBoxFuture<'static, Answer>,
}

impl Settling {
    /// With the stored form of a success, or without it.
    async fn settle(self, success: Option<Value>) -> Answer {
        let _ = self.outcome.send(success);
        self.call.await
    }
}

impl Calls {
    fn new(client: &LockClient, plan: &Plan, asked: &OncePlan) -> Result<Calls, Error> {
        let mut once = (client.once(asked.key.clone()))
            .on_failure(asked.on_failure)
            .on_orphan(asked.on_orphan);
        if let Some(Lease::Renewed(lease)) = plan.options.lease {
            once = once.lease(lease);
        }
        if let Some(keep) = asked.keep {
            once = once.keep(keep);
        }
        match asked.every {
            Some(period) => once.clone().every(period).check()?,
            None => once.check()?,
        }
        Ok(Calls {
            once,
            every: asked.every,
            slot: asked.slot,
            wait: (!plan.tries).then(|| plan.options.wait.unwrap_or(AS_LONG_AS_IT_TAKES)),
        })
    }

    /// Asks until the command may run, or certainly does not.
    async fn admitted(&self) -> Admitted {
        if self.every.is_none() && self.slot.is_none() {
            return self.call(self.wait, None).await;
        }
        // It does not wait behind an earlier slot: then this one is skipped.
        let admitted = self.call(None, self.slot).await;
        match (&admitted, self.wait) {
            (
                Admitted::Answered(Ok(Reply::Elsewhere {
                    slots: Some([slot, running]),
                    ..
                })),
                Some(wait),
            ) if slot == running => self.call(Some(wait), Some(*slot)).await,
            _ => admitted,
        }
    }

    async fn call(&self, wait: Option<Duration>, slot: Option<SystemTime>) -> Admitted {
        let (claimed, has_claimed) = oneshot::channel();
        let (outcome, ended) = oneshot::channel();
        let work = async move |claim: OnceClaim| {
            let _ = claimed.send(claim);
            match ended.await {
                Ok(Some(result)) => Ok::<Value, _>(result),
                _ => Err(Failed),
            }
        };
        let once = match wait {
            Some(wait) => self.once.clone().wait(wait),
            None => self.once.clone(),
        };
        let mut call: LocalBoxFuture<'static, Answer> = match (self.every, slot) {
            (None, None) => Box::pin(once.run(work).map_ok(Reply::from)),
            (Some(period), None) => Box::pin(once.every(period).run(work).map_ok(Reply::from)),
            (Some(period), Some(slot)) => {
                Box::pin(once.every(period).slot(slot).run(work).map_ok(Reply::from))
            }
            (None, Some(slot)) => Box::pin(once.slot(slot).run(work).map_ok(Reply::from)),
        };
        tokio::select! {
            biased;
            answer = &mut call => Admitted::Answered(answer),
            Ok(claim) = has_claimed => Admitted::Claimed(claim, Settling { outcome, call }),
        }
    }
}

impl From<OnceReply<Value>> for Reply {
    fn from(reply: OnceReply<Value>) -> Reply {
        match reply {
            OnceReply::Ran(_) => Reply::Ran,
            OnceReply::Unrecorded(_, error) => Reply::Unrecorded(error),
            OnceReply::Earlier(value) => Reply::Earlier(value),
            OnceReply::Elsewhere {
                attempt, remaining, ..
            } => Reply::Elsewhere {
                attempt,
                remaining,
                slots: None,
            },
            _ => Reply::Other,
        }
    }
}

impl From<SlotReply<Value>> for Reply {
    fn from(reply: SlotReply<Value>) -> Reply {
        match reply {
            SlotReply::Ran(_) => Reply::Ran,
            SlotReply::Unrecorded(_, error) => Reply::Unrecorded(error),
            SlotReply::Earlier(value) => Reply::Earlier(value),
            SlotReply::Elsewhere {
                slot,
                running,
                attempt,
                remaining,
                ..
            } => Reply::Elsewhere {
                attempt,
                remaining,
                slots: Some([slot, running]),
            },
            SlotReply::Missed { slot, last, .. } => Reply::Missed { slot, last },
            _ => Reply::Other,
        }
    }
}

/// The end of a command that does not run.
fn not_run(answer: Answer, plan: &Plan, say: Say) -> End {
    let work = plan.locks();
    let (status, why) = match answer {
        Ok(Reply::Earlier(result)) => (
            plan.conflict.unwrap_or(0),
            format!("was run before{}", by(&result)),
        ),
        Ok(Reply::Missed { slot, last }) => {
            let why = match last.filter(|last| *last > slot) {
                Some(last) => format!("a later one was begun, {}", rfc3339(last)),
                None => "it is older than --keep".to_owned(),
            };
            let why = format!("slot {} is over: {why}", rfc3339(slot));
            (plan.conflict.unwrap_or(0), why)
        }
        Ok(Reply::Elsewhere {
            attempt,
            remaining,
            slots,
        }) => {
            let remaining = humantime::format_duration(Duration::from_secs(remaining.as_secs()));
            let which = match slots {
                Some([slot, running]) if slot != running => {
                    format!(
                        "slot {} is skipped: that of {} runs",
                        rfc3339(slot),
                        rfc3339(running)
                    )
                }
                _ => "runs".to_owned(),
            };
            (
                plan.conflict.unwrap_or(NOT_ACQUIRED),
                format!("{which} on another machine, in attempt {attempt}; its lease ends in {remaining}"),
            )
        }
        Err(OnceError::Store(error)) => return not_acquired(&error, plan, say),
        Err(error @ (OnceError::ResultUnavailable | OnceError::Unreadable { .. })) => (
            plan.conflict.unwrap_or(0),
            format!("was run before: {}", clean(&error.to_string())),
        ),
        Err(error @ (OnceError::Failed { .. } | OnceError::Orphaned { .. })) => (GIVEN_UP, error.to_string()),
        Err(error @ OnceError::Lost { started: true, .. }) => (LOST, error.to_string()),
        Err(error) => (NOT_ACQUIRED, error.to_string()),
        Ok(Reply::Ran | Reply::Unrecorded(_) | Reply::Other) => (
            NOT_ACQUIRED,
            "the library returned an unexpected answer".to_owned(),
        ),
    };
    say.line(&format!("{work}: {why}"));
    End::With(status)
}

fn rfc3339(time: SystemTime) -> impl std::fmt::Display {
    humantime::format_rfc3339(time)
}

/// On which machine and when, if `dlock run` stored that.
fn by(result: &Value) -> String {
    match (result["host"].as_str(), result["ended"].as_str()) {
        (Some(host), Some(ended)) => format!(", on {} until {}", clean(host), clean(ended)),
        _ => String::new(),
    }
}
