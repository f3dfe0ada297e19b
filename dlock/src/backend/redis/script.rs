//! The steps of `lua/steps.lua`: how they are asked and how their answers read.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::{Cmd, Script, Value};
use tokio::time::Instant;

use crate::backend::{BackendError, GrantId, Reason};
use crate::clock;

/// The script that all steps are in.
static STEPS: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/steps.lua")));

/// The last fencing token of a server; the one key that stays.
pub(super) const FENCE: &str = "dlock:fence";

/// One step on one key.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// The key as the server knows it.
    pub(super) key: Arc<str>,
    pub(super) verb: Verb,
}

#[derive(Debug, Clone)]
pub(super) enum Verb {
    Acquire {
        grant: GrantId,
        lease: Duration,
        tokens: u32,
    },
    Release {
        grant: GrantId,
        /// Until when the key stays taken.
        keep_until: Option<Instant>,
    },
    Renew {
        grant: GrantId,
        lease: Duration,
    },
    Inspect,
    Force,
}

/// What a step answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Acquired {
        first: u64,
        last: u64,
    },
    Busy {
        remaining: Option<Duration>,
    },
    Released {
        told: bool,
    },
    /// The grant is not there.
    Gone,
    Renewed,
    Holder {
        id: String,
        holds: u64,
        remaining: Option<Duration>,
    },
    Free,
}

impl Call {
    /// Whether sending it twice does no more than sending it once.
    pub(super) fn is_repeatable(&self) -> bool {
        !matches!(self.verb, Verb::Acquire { .. } | Verb::Force)
    }

    pub(super) fn is_release(&self) -> bool {
        matches!(self.verb, Verb::Release { .. })
    }

    fn write(&self, refuse_after: u64, cmd: &mut Cmd) {
        match &self.verb {
            Verb::Acquire { grant, lease, tokens } => {
                cmd.arg("acquire").arg(4).arg(grant.as_str()).arg(millis(*lease));
                cmd.arg(refuse_after).arg((*tokens).max(1));
            }
            Verb::Release { grant, keep_until } => {
                let keep = keep_until.map_or(Duration::ZERO, |t| t.saturating_duration_since(clock::now()));
                cmd.arg("release")
                    .arg(3)
                    .arg(grant.as_str())
                    .arg(millis(keep))
                    .arg(channel(&self.key));
            }
            Verb::Renew { grant, lease } => {
                cmd.arg("renew").arg(2).arg(grant.as_str()).arg(millis(*lease));
            }
            Verb::Inspect => {
                cmd.arg("inspect").arg(0);
            }
            Verb::Force => {
                cmd.arg("force").arg(2).arg(channel(&self.key)).arg(refuse_after);
            }
        }
    }
}

/// The channel on which Redisson and we tell of the release of a plain lock.
pub(super) fn channel(key: &str) -> String {
    const PREFIX: &str = "redisson_lock__channel";
    if key.contains('{') {
        format!("{PREFIX}:{key}")
    } else {
        format!("{PREFIX}:{{{key}}}")
    }
}

/// Whole milliseconds, never less than asked for.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// How the script is named to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Hash,
    Text,
}

/// The call that carries these steps, each with the server time (µs) after which an acquire or a forced
/// release refuses itself.
pub(super) fn call<'a>(by: By, steps: impl Iterator<Item = (&'a Call, u64)> + Clone) -> Cmd {
    let mut cmd = match by {
        By::Hash => redis::cmd("EVALSHA"),
        By::Text => redis::cmd("EVAL"),
    };
    match by {
        By::Hash => cmd.arg(STEPS.get_hash()),
        By::Text => cmd.arg(include_str!("lua/steps.lua")),
    };
    cmd.arg(1 + steps.clone().count()).arg(FENCE);
    for (step, _) in steps.clone() {
        cmd.arg(&*step.key);
    }
    for (step, refuse_after) in steps {
        step.write(refuse_after, &mut cmd);
    }
    cmd
}

/// Has the server keep the script, so that the first call is by hash.
pub(super) fn load() -> Cmd {
    let mut cmd = redis::cmd("SCRIPT");
    cmd.arg("LOAD").arg(include_str!("lua/steps.lua"));
    cmd
}

/// The server's time (µs) and the answers, as many as were asked.
pub(super) fn read(reply: Value, asked: usize) -> Option<(u64, Vec<Result<Answer, BackendError>>)> {
    let Value::Array(parts) = reply else { return None };
    let mut parts = parts.into_iter();
    let now = number(&parts.next()?)?;
    let answers: Vec<_> = parts.map(|part| read_answer(&part)).collect();
    (answers.len() == asked).then_some((now, answers))
}

fn read_answer(part: &Value) -> Result<Answer, BackendError> {
    let strange = || BackendError::unknown("the server gave an answer that makes no sense");
    let Value::Array(words) = part else {
        return Err(strange());
    };
    let name = words.first().and_then(text).ok_or_else(strange)?;
    let word = |at: usize| words.get(at).ok_or_else(strange);
    let num = |at: usize| number(word(at)?).ok_or_else(strange);
    let string = |at: usize| text(word(at)?).ok_or_else(strange);
    let ttl = |at: usize| match word(at)? {
        Value::Int(ms) => Ok(u64::try_from(*ms).ok().map(Duration::from_millis)),
        _ => Err(strange()),
    };
    match name.as_str() {
        "acquired" => Ok(Answer::Acquired {
            first: num(1)?,
            last: num(2)?,
        }),
        "busy" => Ok(Answer::Busy { remaining: ttl(1)? }),
        "late" => Err(BackendError::not_done(
            Reason::Unreachable,
            "the request reached the server too late and was refused there",
        )),
        "released" => Ok(Answer::Released {
            told: string(1)? == "1",
        }),
        "gone" => Ok(Answer::Gone),
        "renewed" => Ok(Answer::Renewed),
        "holder" => Ok(Answer::Holder {
            id: string(1)?,
            holds: num(2)?,
            remaining: ttl(3)?,
        }),
        "free" => Ok(Answer::Free),
        "taken" => {
            let found = string(1)?;
            let article = if found == "hash" {
                "other data (a hash)".to_owned()
            } else {
                format!("a {found}")
            };
            Err(BackendError::not_done(
                Reason::KeyTaken(article.clone()),
                format!("the key holds {article}"),
            ))
        }
        "failed" => Err(refused(&string(1)?)),
        _ => Err(strange()),
    }
}

/// A command inside the script failed before anything was changed.
fn refused(message: &str) -> BackendError {
    let hint = if message.contains("READONLY") || message.contains("read only replica") {
        " (this server is a read-only replica: give the master's address)"
    } else if message.contains("OOM") {
        " (its memory is used up)"
    } else {
        ""
    };
    BackendError::not_done(Reason::Refused, format!("{message}{hint}"))
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        other => text(other)?.parse().ok(),
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}
