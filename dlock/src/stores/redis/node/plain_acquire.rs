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

use std::time::Duration;

use redis::{ServerError, ServerErrorKind, Value};
use tokio::time::Instant;

use super::Step;
use super::payload::{self, Payload};
use crate::store::StoreError;
use crate::stores::redis::command::Pipeline;
use crate::stores::redis::fence::Fence;
use crate::stores::redis::script::{self, Answer, PlainAcquire};

const MULTI: &[u8] = b"*1\r\n$5\r\nMULTI\r\n";
const RESTORE: &[u8] = b"*4\r\n$7\r\nRESTORE\r\n";
const INCRBY: &[u8] = b"*3\r\n$6\r\nINCRBY\r\n";
const EXEC: &[u8] = b"*1\r\n$4\r\nEXEC\r\n";
/// An upper bound of the bytes of an acquire without its key.
const LENGTH: usize = 64 + payload::LONGEST;
/// How long tokens are drawn after the script has set the last one to the server's clock: so they stay close to it.
const FRESH: Duration = Duration::from_millis(200);
/// From 2^53 on the script does not count any more.
const NO_TOKEN: u64 = 1 << 53;
/// An acquire that reserves more tokens follows handoffs: others wait for the lock, and it is often busy.
const MOST_TOKENS: u32 = 32;

/// The acquire that the commands can do of this step.
pub(super) fn of(step: &Step) -> Option<PlainAcquire> {
    if step.by_script || step.alone {
        return None;
    }
    let acquire = step.call.plain_acquire()?;
    (acquire.tokens <= MOST_TOKENS).then_some(acquire)
}

/// An upper bound of the bytes of the commands.
pub(super) fn size(steps: &[Step]) -> usize {
    let of_one = |step: &Step| LENGTH + step.call.key.len();
    steps.iter().map(of_one).sum::<usize>() + 3 * LENGTH
}

/// Writes the commands of these steps, all of them plain acquires.
pub(super) fn write(steps: &[Step], tokens: u64, fence: &Fence, pipeline: &mut Pipeline) {
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
                forbidden: executed.iter().any(is_forbidden),
            })
        }
        // Discarded as a whole; another error would not have ended it.
        (Value::Okay, Value::ServerError(error)) if is_end(error) => Some(Outcomes {
            of_steps: restores.iter().map(|_| Outcome::Refused).collect(),
            last_token: None,
            // If none of the commands was refused, their execution was.
            forbidden: queued.iter().any(is_forbidden) || !queued.iter().any(is_error),
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
                forbidden: true,
            })
        }
        _ => None,
    }
}

fn is_error(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(_))
}

fn is_end(error: &ServerError) -> bool {
    error.kind() != Some(ServerErrorKind::ResponseError)
}

/// Whether this refusal lasts: the user may not, or the server does not know how to.
fn is_forbidden(reply: &Value) -> bool {
    let lasts = |error: &ServerError| {
        matches!(
            error.kind(),
            Some(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError)
        )
    };
    matches!(reply, Value::ServerError(error) if lasts(error))
}

/// Whether acquires may draw their fencing tokens by `INCRBY` on a connection, and how many.
///
/// A token of the script is the server's time in µs, so that tokens grow although the last of them is lost. `INCRBY` only
/// counts on, so it follows the script: on each connection the script comes first, and again after [`FRESH`]. A last token
/// that is lost in between comes to light, because the next one is too small.
#[derive(Debug, Default)]
pub(super) struct TokenDraws {
    /// The id of the connection on the server; `None` where the server cannot close it.
    connection: Option<i64>,
    /// Whether acquires were sent on it by commands.
    used: bool,
    forbidden: bool,
    /// Whether the server has given replies to them that make no sense.
    distrusted: bool,
    /// The greatest token that is known to be taken.
    last: u64,
    /// When the script set it to the server's clock.
    set_at: Option<Instant>,
}

impl TokenDraws {
    /// Those on the next connection, with this id.
    pub(super) fn next(&self, connection: Option<i64>) -> TokenDraws {
        TokenDraws {
            connection: connection.filter(|_| !self.distrusted),
            distrusted: self.distrusted,
            ..TokenDraws::default()
        }
    }

    /// The id of the connection, if late acquires may arrive on it.
    pub(super) fn doubtful(&self) -> Option<i64> {
        self.connection.filter(|_| self.used)
    }

    /// Whether tokens may be drawn now; not where the last one is ahead of the server's clock (µs).
    pub(super) fn are_possible(&self, now: Instant, server_time: u64) -> bool {
        let is_fresh = |at| now.saturating_duration_since(at) < FRESH;
        self.connection.is_some()
            && !self.forbidden
            && self.set_at.is_some_and(is_fresh)
            && self.last <= server_time
    }

    /// Chooses how many tokens to draw for these acquires: at least one for each, and more only as far as that leaves the last
    /// one behind the server's clock (µs).
    pub(super) fn draw(&mut self, acquires: &[Step], server_time: u64) -> u64 {
        self.used |= !acquires.is_empty();
        let wanted = acquires.iter().filter_map(|step| step.call.plain_acquire());
        let wanted: u64 = wanted.map(|acquire| u64::from(acquire.tokens)).sum();
        let fewest = acquires.len() as u64;
        // Other clients draw, too.
        let spare = server_time.saturating_sub(self.last) / 4;
        wanted.min(fewest + spare).max(fewest)
    }

    /// Takes note of the tokens that a call of the script, sent at this moment, gave to acquires.
    pub(super) fn see(&mut self, steps: &[Step], answers: &[Result<Answer, StoreError>], sent_at: Instant) {
        for (step, answer) in steps.iter().zip(answers) {
            if let Ok(Answer::Acquired { last, .. }) = answer
                && step.call.plain_acquire().is_some()
            {
                self.last = self.last.max(*last);
                self.set_at = Some(sent_at);
            }
        }
    }

    pub(super) fn forbid(&mut self) {
        self.forbidden = true;
    }

    /// Draws no more tokens, not on later connections either.
    pub(super) fn distrust(&mut self) {
        self.distrusted = true;
    }

    /// Returns the first of these drawn tokens; `None` if the last token before them was lost, or is one of no use.
    pub(super) fn drawn(&mut self, count: u64, last: u64) -> Option<u64> {
        let before = last.checked_sub(count).filter(|before| *before >= self.last);
        match before.filter(|_| last < NO_TOKEN) {
            Some(before) => {
                self.last = last;
                Some(before + 1)
            }
            None => {
                self.set_at = None;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Outcome::{Acquired, Busy, Refused, WithoutToken};
    use super::*;
    use crate::base::clock;

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
            // What the server stores is not what was sent.
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
            ("+OK, +QUEUED, +QUEUED, -EXECABORT_NOPERM", true),
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
        ] {
            assert_eq!(replies(strange), None, "{strange}");
        }
    }

    fn possible(draws: &TokenDraws) -> bool {
        draws.are_possible(clock::now(), 1000)
    }

    fn seen(draws: &mut TokenDraws, last: u64) {
        (draws.last, draws.set_at) = (last, Some(clock::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_drawn_for_a_while_after_the_script_set_the_last() {
        let mut draws = TokenDraws::default().next(Some(7));
        assert!(!possible(&draws));
        seen(&mut draws, 100);
        assert!(possible(&draws));
        tokio::time::advance(FRESH).await;
        assert!(!possible(&draws));
        seen(&mut draws, 200);
        assert!(possible(&draws));
        seen(&mut draws, 1001);
        assert!(!possible(&draws), "it is ahead of the clock");
        draws = TokenDraws::default().next(Some(7));
        draws.forbid();
        seen(&mut draws, 300);
        assert!(!possible(&draws));
        draws.distrust();
        draws = draws.next(Some(8));
        seen(&mut draws, 100);
        assert!(!possible(&draws));
        // Where the server cannot close the connection, never.
        let mut draws = TokenDraws::default().next(None);
        seen(&mut draws, 100);
        assert!(!possible(&draws));
    }

    #[tokio::test]
    async fn last_token_that_was_lost_comes_to_light() {
        let mut draws = TokenDraws::default().next(Some(7));
        seen(&mut draws, 100);
        assert_eq!(draws.drawn(3, 103), Some(101));
        // Another client has drawn 2.
        assert_eq!(draws.drawn(1, 106), Some(106));
        for lost in [106, 7, 1, 0, NO_TOKEN] {
            assert_eq!(draws.drawn(1, lost), None);
            assert!(!possible(&draws), "the script is needed");
            seen(&mut draws, 106);
        }
    }
}
