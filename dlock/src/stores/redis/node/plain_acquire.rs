//! Acquires plain locks by commands instead of the script: `RESTORE` creates the hash of a hold, with its lease, if there is
//! no such key, and `INCRBY` draws the fencing tokens of all acquires of a call. They take the server less time than the
//! script (docs/performance.md).
//!
//! `MULTI` makes them one step, as in the script: a token is drawn while the lock is held, and a call of which a part is lost
//! has no effect. What the commands cannot do is left to the script: it says who holds a lock that is busy, and why a step is
//! refused.
//!
//! Nothing refuses a call that arrives late, after its callers gave up. On the same connection the undos follow it; for
//! another one see [`former_connections`](super::former_connections).

use redis::{ServerError, ServerErrorKind, Value};

use super::Step;
use super::failure;
use super::payload::{self, Payload};
use crate::stores::redis::command::Pipeline;
use crate::stores::redis::fence::Fence;
use crate::stores::redis::script;

const MULTI: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
const RESTORE: &[u8] = b"*4\r\n$7\r\nRESTORE\r\n";
const INCRBY: &[u8] = b"*3\r\n$6\r\nINCRBY\r\n";
const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";
/// An upper bound of the bytes of an acquire without its key.
const LENGTH: usize = 64 + payload::LONGEST;
/// An acquire that reserves more tokens follows handoffs: others wait for the lock, and it is often busy.
const MOST_TOKENS: u32 = 32;

/// Whether the commands can do this step.
pub(super) fn can_do(step: &Step) -> bool {
    let acquire = step.call.plain_acquire().filter(|_| !step.alone);
    acquire.is_some_and(|acquire| acquire.tokens <= MOST_TOKENS)
}

/// An upper bound of the bytes of the commands.
pub(super) fn size(steps: &[Step]) -> usize {
    let of_one = |step: &Step| LENGTH + step.call.key.len();
    steps.iter().map(of_one).sum::<usize>() + 3 * LENGTH
}

/// Writes the commands of these steps, all of them plain acquires, if there are any.
pub(super) fn write(steps: &[Step], tokens: u64, fence: &Fence, pipeline: &mut Pipeline) {
    if steps.is_empty() {
        return;
    }
    pipeline.command(MULTI);
    for step in steps {
        let Some(acquire) = step.call.plain_acquire() else {
            debug_assert!(false, "{:?}", step.call);
            continue;
        };
        let (mut id, mut payload) = ([0; 57], Payload::new());
        let payload = payload.of_hold(script::id(acquire.grant, &mut id));
        let mut lease = itoa::Buffer::new();
        pipeline.command(RESTORE).arg(&[step.call.key.as_bytes()]);
        pipeline
            .arg(&[lease.format(acquire.lease).as_bytes()])
            .arg(&[payload]);
    }
    let mut digits = itoa::Buffer::new();
    pipeline.command(INCRBY).arg(&[fence.name().as_bytes()]);
    pipeline.arg(&[digits.format(tokens).as_bytes()]);
    pipeline.command(EXEC);
}

/// How many replies so many acquires have.
pub(super) fn replies(acquires: usize) -> usize {
    match acquires {
        0 => 0,
        _ => acquires + 3,
    }
}

/// What the server has done with a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Acquired,
    /// The key exists.
    Busy,
    /// Nothing was done.
    Refused,
    /// It may be held, and no token was drawn for it.
    WithoutToken,
}

/// What the server has done with a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcomes {
    pub(super) of_steps: Vec<Outcome>,
    /// The last of the drawn tokens, if they were drawn.
    pub(super) last_token: Option<u64>,
    /// Whether the server will not accept these commands from this user.
    pub(super) forbidden: bool,
}

/// Reads the replies to so many acquires; `None` for what is no reply to these commands.
pub(super) fn read(replies: &[Value]) -> Option<Outcomes> {
    let [begun, queued @ .., executed] = replies else {
        return None;
    };
    let (_, restores) = queued.split_last()?;
    match (begun, executed) {
        (Value::Okay, Value::Array(executed)) if executed.len() == queued.len() => {
            let of_steps = executed[..restores.len()].iter().map(|reply| match reply {
                Value::Okay => Some(Outcome::Acquired),
                Value::ServerError(error) if error.code() == "BUSYKEY" => Some(Outcome::Busy),
                Value::ServerError(_) => Some(Outcome::Refused),
                _ => None,
            });
            let last_token = match executed.last()? {
                Value::Int(token) => u64::try_from(*token).ok(),
                Value::ServerError(_) => None,
                _ => return None,
            };
            Some(Outcomes {
                of_steps: of_steps.collect::<Option<_>>()?,
                last_token,
                forbidden: executed[..restores.len()].iter().any(is_forbidden),
            })
        }
        // Discarded as a whole.
        (Value::Okay, Value::ServerError(error)) if is_discarded(error) => Some(Outcomes {
            of_steps: restores.iter().map(|_| Outcome::Refused).collect(),
            last_token: None,
            forbidden: queued.iter().any(is_forbidden) || says_forbidden(error),
        }),
        // Each was carried out for itself.
        (Value::ServerError(_), Value::ServerError(_)) => {
            let of_step = |reply: &Value| match reply {
                reply if is_error(reply) => Outcome::Refused,
                _ => Outcome::WithoutToken,
            };
            Some(Outcomes {
                of_steps: restores.iter().map(of_step).collect(),
                last_token: None,
                forbidden: is_forbidden(begun),
            })
        }
        _ => None,
    }
}

/// Whether `EXEC` itself is not permitted.
fn says_forbidden(error: &ServerError) -> bool {
    error.details().is_some_and(|details| details.contains("NOPERM"))
}

fn is_error(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(_))
}

/// Whether this reply to `EXEC` says that nothing was done. A server that does not know the command leaves the transaction
/// open, and what a proxy says of itself tells nothing: then the connection is of no use any more.
fn is_discarded(error: &ServerError) -> bool {
    error.kind() == Some(ServerErrorKind::ExecAbort)
}

fn is_forbidden(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if failure::lasts(error))
}

#[cfg(test)]
mod tests {
    use super::Outcome::{Acquired, Busy, Refused, WithoutToken};
    use super::*;

    fn replies(text: &str) -> Option<Outcomes> {
        let values = text.split(", ").map(|reply| format!("{reply}\r\n"));
        let values = values.map(|reply| {
            let reply = reply.replace(' ', "\r\n").replace('_', " ");
            redis::parse_redis_value(reply.as_bytes()).unwrap()
        });
        read(&values.collect::<Vec<_>>())
    }

    fn outcomes(of_steps: &[Outcome], last_token: Option<u64>, forbidden: bool) -> Option<Outcomes> {
        Some(Outcomes {
            of_steps: of_steps.to_vec(),
            last_token,
            forbidden,
        })
    }

    #[test]
    fn each_acquire_has_its_outcome_and_all_have_the_last_token() {
        for (text, expected) in [
            (
                "+OK, +QUEUED, +QUEUED, +QUEUED, *3 +OK -BUSYKEY_it_exists :9",
                outcomes(&[Acquired, Busy], Some(9), false),
            ),
            (
                "+OK, +QUEUED, +QUEUED, *2 -OOM_no_memory :9",
                outcomes(&[Refused], Some(9), false),
            ),
            // It does not know the format.
            (
                "+OK, +QUEUED, +QUEUED, *2 -ERR_Bad_data_format :9",
                outcomes(&[Refused], Some(9), true),
            ),
            (
                "+OK, +QUEUED, +QUEUED, *2 +OK -WRONGTYPE_no_number",
                outcomes(&[Acquired], None, false),
            ),
            (
                "+OK, +QUEUED, +QUEUED, *2 +OK :-3",
                outcomes(&[Acquired], None, false),
            ),
        ] {
            assert_eq!(replies(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_discarded_did_nothing() {
        for (text, forbidden) in [
            ("+OK, -OOM_no_memory, +QUEUED, -EXECABORT_discarded", false),
            ("+OK, -NOPERM_no, +QUEUED, -EXECABORT_discarded", true),
            ("+OK, +QUEUED, -ERR_unknown_command, -EXECABORT_discarded", true),
            ("+OK, +QUEUED, +QUEUED, -EXECABORT_because_of:_NOPERM_no", true),
            (
                "+OK, +QUEUED, +QUEUED, -EXECABORT_because_of:_BUSY_a_script_runs",
                false,
            ),
        ] {
            assert_eq!(replies(text), outcomes(&[Refused], None, forbidden), "{text}");
        }
    }

    #[test]
    fn without_a_transaction_an_acquire_may_have_succeeded() {
        let text = "-NOPERM_no, +OK, -BUSYKEY_it_exists, :9, -ERR_EXEC_without_MULTI";
        let expected = outcomes(&[WithoutToken, Refused], None, true);
        assert_eq!(replies(text), expected);
    }

    #[test]
    fn other_replies_are_none() {
        for strange in [
            "+OK",
            "+OK, +QUEUED",
            "+OK, +QUEUED, +QUEUED, *-1",
            "+OK, +QUEUED, +QUEUED, *1 +OK",
            "+OK, +QUEUED, +QUEUED, *2 :1 :9",
            "+OK, +QUEUED, +QUEUED, *2 +OK +OK",
            ":1, +QUEUED, +QUEUED, *2 +OK :9",
            "-NOPERM_no, +OK, :9, *2 +OK :9",
            "+OK, +QUEUED, +QUEUED, -ERR_unknown_command",
            "+OK, +QUEUED, +QUEUED, -UPSTREAM_failure",
        ] {
            assert_eq!(replies(strange), None, "{strange}");
        }
    }
}
