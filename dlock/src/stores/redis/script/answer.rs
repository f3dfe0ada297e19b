//! The answers of the script.

use std::time::Duration;

use redis::Value;

use super::call::{Call, Response, Verb};
use crate::store::counter::CounterReply;
use crate::store::records::{Fingerprint, ForgetReply, RecordLook, RecordState, RecordView};
use crate::store::slots::time_of;
use crate::store::{Holder, Kind, Reason, Renewal, StoreError};
use crate::stores::redis::kinds::KindStep;
use crate::stores::redis::node::refused;
use crate::stores::redis::permits;

/// The answer to a step.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Acquired {
        first: u64,
        last: u64,
    },
    /// Acquired, with the numbers of the next waiters in the queue that belong to this client.
    InLine {
        first: u64,
        last: u64,
        behind: Vec<u64>,
    },
    Busy {
        remaining: Option<Duration>,
        /// The time within which a waiter asks again.
        again: Option<Duration>,
        /// How many processes wait for a plain lock, if they are many.
        listeners: Option<u64>,
    },
    /// The total is smaller than the requested permits.
    TooFew,
    /// The first and the last token of each of several.
    All(Vec<(u64, u64)>),
    /// None of several, because of the answer for the one at this index.
    None {
        at: usize,
        answer: Box<Result<Answer, StoreError>>,
    },
    Released {
        /// How many clients were notified; `None` if the server forbids to tell.
        receivers: Option<u64>,
    },
    /// The grant does not exist.
    Gone,
    Renewed,
    /// For each of the renewals in a step.
    Renewals(Vec<Result<Renewal, StoreError>>),
    Holders(Vec<Holder>),
    Counted(CounterReply),
    /// An entry of a client, and when it expires.
    Entry(Vec<u8>, Duration),
    /// The messages of a mailbox.
    Mail(Vec<Vec<u8>>),
    Free,
    Abstains {
        votes_in: Duration,
    },
    /// Whether it existed, and was done.
    There(bool),
    Claimed {
        attempt: u32,
        fence: u64,
    },
    Completed(Response),
    Running {
        remaining: Duration,
        attempt: u32,
    },
    Mismatch,
    Orphan {
        attempt: u32,
    },
    /// For a claim of a slot, in µs since the epoch.
    Slot {
        now: u64,
        slot: u64,
        last: Option<u64>,
        answer: Box<Answer>,
    },
    Missed,
    ClockWentBack,
    TooFarAhead,
    Look(Box<RecordLook>),
    Forget(ForgetReply),
    /// The call had enough answers: send the same request again.
    Again,
    Done {
        told: bool,
    },
    NotOwner,
}

impl Answer {
    /// Whether it was blocked by another holder or waiter.
    pub(crate) fn is_busy(&self) -> bool {
        match self {
            Answer::Busy { .. } | Answer::TooFew | Answer::Running { .. } => true,
            Answer::None { answer, .. } => answer.as_ref().as_ref().is_ok_and(Answer::is_busy),
            Answer::Slot { answer, .. } => answer.is_busy(),
            _ => false,
        }
    }
}

/// The reply to a call.
pub(crate) struct Reply {
    /// When the server carried it out (µs of its clock), if it tells: always if a release found nothing.
    pub(crate) server_time: Option<u64>,
    /// To the steps in their order.
    pub(crate) answers: Vec<Result<Answer, StoreError>>,
}

/// Parses the reply to a call with these steps.
pub(crate) fn read<'a>(reply: Value, mut steps: impl ExactSizeIterator<Item = &'a Call>) -> Option<Reply> {
    let parts = match reply {
        Value::Array(parts) => parts,
        // To a short call.
        Value::Int(answer) if steps.len() == 1 => return read_alone(answer, steps.next()?),
        _ => return None,
    };
    let now = number(parts.first()?)?;
    let mut parts = parts[1..].iter();
    let mut answers = Vec::with_capacity(steps.len());
    for step in steps {
        let vote = match step.vote_after {
            Some(_) => Some(parts.next()?),
            None => None,
        };
        answers.push(match (parts.next()?, &step.verb) {
            (part, Verb::Renew { all, .. }) => read_renewals(part, all.len())
                .map(Answer::Renewals)
                .ok_or_else(strange),
            (Value::Int(first), Verb::Acquire { .. }) if *first >= 0 => {
                let first = u64::try_from(*first).ok()?;
                let tokens = number(parts.next()?)?.checked_sub(1)?;
                Ok(Answer::Acquired {
                    first,
                    last: first.checked_add(tokens)?,
                })
            }
            (Value::Int(number), _) => read_number(*number, step),
            (other, _) => read_answer(other),
        });
        match vote {
            None | Some(Value::Int(1)) => {}
            // Then it was not acquired.
            Some(other) => *answers.last_mut()? = read_answer(other),
        }
    }
    parts.next().is_none().then_some(Reply {
        server_time: Some(now).filter(|now| *now > 0),
        answers,
    })
}

/// Parses the short reply to a call with this single step.
fn read_alone(number: i64, step: &Call) -> Option<Reply> {
    let Verb::Acquire { tokens, .. } = &step.verb else {
        return Some(Reply {
            server_time: None,
            answers: vec![read_number(number, step)],
        });
    };
    let now = u64::try_from(number).ok()?;
    let acquired = Answer::Acquired {
        first: now.checked_sub(u64::from(*tokens).saturating_sub(1))?,
        last: now,
    };
    Some(Reply {
        server_time: Some(now),
        answers: vec![Ok(acquired)],
    })
}

/// The error for a reply outside this protocol.
pub(crate) fn strange() -> StoreError {
    StoreError::unknown("the server gave an answer that makes no sense")
}

/// The outcome of each of these renewals.
fn read_renewals(part: &Value, count: usize) -> Option<Vec<Result<Renewal, StoreError>>> {
    let mut all = vec![Ok(Renewal::Renewed); count];
    match part {
        Value::Int(1) => {}
        Value::Array(words) if words.first().and_then(text)? == "others" => {
            for pair in words[1..].chunks(2) {
                let place = usize::try_from(number(&pair[0])?).ok()?.checked_sub(1)?;
                *all.get_mut(place)? = match pair.get(1)? {
                    Value::Int(0) => Ok(Renewal::Gone),
                    message => Err(refused(&text(message)?)),
                };
            }
        }
        _ => return None,
    }
    Some(all)
}

/// The common answers are single numbers.
fn read_number(number: i64, step: &Call) -> Result<Answer, StoreError> {
    let positive = u64::try_from(number).ok();
    match (&step.verb, positive) {
        (Verb::Acquire { .. } | Verb::As(KindStep::Acquire(_)), None) => Ok(Answer::Busy {
            remaining: u64::try_from(-2 - number).ok().map(Duration::from_millis),
            again: None,
            listeners: None,
        }),
        (Verb::Release { .. } | Verb::As(KindStep::Release { .. } | KindStep::Renew(_)), Some(0)) => {
            Ok(Answer::Gone)
        }
        (Verb::As(KindStep::Renew(_)), Some(_)) => Ok(Answer::Renewed),
        (Verb::RaiseFence { .. }, Some(there)) => Ok(Answer::There(there == 1)),
        (Verb::Release { .. } | Verb::As(KindStep::Release { .. }), positive) => Ok(Answer::Released {
            receivers: positive.map(|one_more| one_more - 1),
        }),
        _ => Err(strange()),
    }
}

fn read_answer(part: &Value) -> Result<Answer, StoreError> {
    let Value::Array(words) = part else {
        return Err(strange());
    };
    let words = Words(words);
    match words.string(0)?.as_str() {
        "acquired" => {
            let (first, last) = words.tokens(1)?;
            if words.len() == 3 {
                return Ok(Answer::Acquired { first, last });
            }
            let behind: Result<_, _> = (3..words.len()).map(|at| words.number(at)).collect();
            behind.map(|behind| Answer::InLine { first, last, behind })
        }
        "busy" => Ok(Answer::Busy {
            remaining: words.ttl(1)?,
            again: match words.len() {
                2 => None,
                _ => words.ttl(2)?,
            },
            listeners: match words.len() {
                2 | 3 => None,
                _ => Some(words.number(3)?),
            },
        }),
        "beyond" => Ok(Answer::TooFew),
        "abstains" => Ok(Answer::Abstains {
            votes_in: words.millis(1)?,
        }),
        "all" => {
            let each = (1..words.len()).step_by(2);
            each.map(|at| words.tokens(at))
                .collect::<Result<_, _>>()
                .map(Answer::All)
        }
        "none" => Ok(Answer::None {
            at: usize::try_from(words.number(1)?).map_err(|_| strange())?,
            answer: Box::new(read_answer(words.at(2)?)),
        }),
        "late" => Err(StoreError::not_done(
            Reason::Unreachable,
            "the request reached the server too late and was refused there",
        )),
        "released" => Ok(Answer::Released {
            receivers: words.optional(1)?,
        }),
        "gone" => Ok(Answer::Gone),
        "holders" => {
            let holder = |at: usize| {
                let kind = Kind::of_name(&words.string(at)?).ok_or_else(strange)?;
                let (id, holds) = (words.string(at + 1)?, words.number(at + 2)?);
                Ok(Holder::new(kind, id, holds, words.ttl(at + 3)?))
            };
            let all: Result<_, _> = (1..words.len()).step_by(4).map(holder).collect();
            all.map(Answer::Holders)
        }
        "free" => Ok(Answer::Free),
        "entry" => Ok(Answer::Entry(words.bytes(1)?, words.ttl(2)?.unwrap_or_default())),
        "mail" => (1..words.len())
            .map(|at| words.bytes(at))
            .collect::<Result<_, _>>()
            .map(Answer::Mail),
        "again" => Ok(Answer::Again),
        "done" => Ok(Answer::Done {
            told: words.optional(1)?.is_some(),
        }),
        "taken" => Err(taken(&words.string(1)?)),
        "failed" => Err(refused(&words.string(1)?)),
        name => match read_record(name, &words)? {
            Some(answer) => Ok(answer),
            None => permits::read(name, |at| signed(words.0.get(at)?)).ok_or_else(strange),
        },
    }
}

/// Parses the answers about records; `None` for other answers.
fn read_record(name: &str, words: &Words<'_>) -> Result<Option<Answer>, StoreError> {
    Ok(Some(match name {
        "claimed" => Answer::Claimed {
            attempt: words.attempt(1)?,
            fence: words.number(2)?,
        },
        "completed" => Answer::Completed(Response(words.bytes(1)?)),
        "running" => Answer::Running {
            remaining: words.micros(1)?,
            attempt: words.attempt(2)?,
        },
        "mismatch" => Answer::Mismatch,
        "orphan" => Answer::Orphan {
            attempt: words.attempt(1)?,
        },
        "not-owner" => Answer::NotOwner,
        "slot" => Answer::Slot {
            now: words.number(1)?,
            slot: words.number(2)?,
            last: Some(words.number(3)?).filter(|last| *last > 0),
            answer: Box::new(read_answer(words.at(4)?)?),
        },
        "missed" => Answer::Missed,
        "clock-back" => Answer::ClockWentBack,
        "ahead" => Answer::TooFarAhead,
        "no-record" => Answer::Look(Box::new(RecordLook::new(time_of(words.number(1)?), None))),
        "record" => {
            let state = match words.string(2)?.as_str() {
                "c" => RecordState::claimed(words.micros(3)?),
                "o" => RecordState::Orphaned,
                "f" => RecordState::Released,
                "d" if words.len() > 9 => RecordState::completed(words.number(8)?, Some(words.bytes(9)?)),
                "d" => RecordState::completed(words.number(8)?, None),
                _ => return Err(strange()),
            };
            let print = Fingerprint::try_from(words.bytes(6)?).map_err(|_| strange())?;
            let (attempt, fence) = (words.attempt(4)?, words.number(5)?);
            let record = RecordView::new(state, attempt, fence, words.millis(7)?, print);
            Answer::Look(Box::new(RecordLook::new(time_of(words.number(1)?), Some(record))))
        }
        "forgotten" => Answer::Forget(ForgetReply::Forgotten),
        "missing" => Answer::Forget(ForgetReply::Missing),
        "live" => Answer::Forget(ForgetReply::Claimed {
            remaining: words.micros(1)?,
            attempt: words.attempt(2)?,
            fence: words.number(3)?,
        }),
        _ => return Ok(None),
    }))
}

/// The key holds something other than a lock of this kind; or another key of the lock does, which is named.
fn taken(found: &str) -> StoreError {
    let (kind, at) = found.split_at(found.find(" at ").unwrap_or(found.len()));
    let article = match kind {
        "hash" => format!("other data (a hash{at})"),
        // This user may not ask.
        "unknown" => format!("other data{at}"),
        kind => format!("a {kind}{at}"),
    };
    let message = format!("the key holds {article}");
    StoreError::not_done(Reason::KeyTaken(article), message)
}

/// The words of an answer: its name, and its values.
struct Words<'a>(&'a [Value]);

impl Words<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, at: usize) -> Result<&Value, StoreError> {
        self.0.get(at).ok_or_else(strange)
    }

    fn number(&self, at: usize) -> Result<u64, StoreError> {
        number(self.at(at)?).ok_or_else(strange)
    }

    fn string(&self, at: usize) -> Result<String, StoreError> {
        text(self.at(at)?).ok_or_else(strange)
    }

    fn bytes(&self, at: usize) -> Result<Vec<u8>, StoreError> {
        match self.at(at)? {
            Value::BulkString(bytes) => Ok(bytes.clone()),
            _ => Err(strange()),
        }
    }

    fn attempt(&self, at: usize) -> Result<u32, StoreError> {
        u32::try_from(self.number(at)?).map_err(|_| strange())
    }

    fn millis(&self, at: usize) -> Result<Duration, StoreError> {
        self.number(at).map(Duration::from_millis)
    }

    fn micros(&self, at: usize) -> Result<Duration, StoreError> {
        self.number(at).map(Duration::from_micros)
    }

    /// An optional number: negative if missing, as when the server forbids to tell.
    fn optional(&self, at: usize) -> Result<Option<u64>, StoreError> {
        match self.at(at)? {
            Value::Int(number) => Ok(u64::try_from(*number).ok()),
            _ => Err(strange()),
        }
    }

    /// In milliseconds; negative if there is no end.
    fn ttl(&self, at: usize) -> Result<Option<Duration>, StoreError> {
        let millis = self.optional(at)?;
        Ok(millis.map(Duration::from_millis))
    }

    /// The first and the last of the tokens, given as a number of tokens.
    fn tokens(&self, at: usize) -> Result<(u64, u64), StoreError> {
        let first = self.number(at)?;
        let behind_first = self.number(at + 1)?.checked_sub(1).ok_or_else(strange)?;
        Ok((first, first.checked_add(behind_first).ok_or_else(strange)?))
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        other => text(other)?.parse().ok(),
    }
}

fn signed(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
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
