//! Calls of commands instead of the script: releases and acquires of plain locks, all of a call in one write.

use redis::Value;

use super::Step;
use super::token_draws::TokenDraws;
use super::{plain_acquire, plain_release};
use crate::stores::redis::command::{Packed, Pipeline};
use crate::stores::redis::fence::Fence;
use crate::stores::redis::script::Answer;

/// How many of the steps of a call are releases: they come before its acquires, as the send queue arranges them.
pub(super) fn releases(steps: &[Step]) -> usize {
    steps.partition_point(|step| step.call.plain_release().is_some())
}

/// Writes the commands of these steps into the buffer, with so many tokens for the acquires among them.
pub(super) fn write(steps: &[Step], tokens: u64, fence: &Fence, room: Vec<u8>) -> Packed {
    let (releases, acquires) = steps.split_at(releases(steps));
    let size = plain_release::size(releases) + plain_acquire::size(acquires);
    let mut pipeline = Pipeline::new(room, size);
    plain_release::write(releases, &mut pipeline);
    plain_acquire::write(acquires, tokens, fence, &mut pipeline);
    pipeline.finish()
}

/// What the server has done with a step.
#[derive(Debug)]
pub(super) enum Outcome {
    Done(Answer),
    /// Done in part: the same commands do the rest.
    Again,
    /// There was no such grant, or the lock is busy; the script says more.
    NotDone,
    /// The server refused it; the script says why. Calls in flight may be carried out before it, although they were sent later.
    Refused,
    /// The lock may be acquired, without a fencing token.
    WithoutToken,
}

/// Reads the replies to these steps, with so many tokens for the acquires among them. `None` for what is no reply to these
/// commands: then acquires do not go by them any more.
pub(super) fn read(
    replies: &Value,
    steps: &[Step],
    tokens: u64,
    draws: &mut TokenDraws,
) -> Option<Vec<Outcome>> {
    let outcomes = outcomes(replies, steps, tokens, draws);
    if outcomes.is_none() {
        draws.distrust();
    }
    outcomes
}

fn outcomes(replies: &Value, steps: &[Step], tokens: u64, draws: &mut TokenDraws) -> Option<Vec<Outcome>> {
    let Value::Array(replies) = replies else {
        return None;
    };
    let (releases, acquires) = steps.split_at(releases(steps));
    let (of_releases, of_acquires) = replies.split_at_checked(plain_release::replies(releases.len()))?;
    if of_acquires.len() != plain_acquire::replies(acquires.len()) {
        return None;
    }
    let mut outcomes = Vec::with_capacity(steps.len());
    for outcome in plain_release::read(of_releases) {
        outcomes.push(match outcome? {
            plain_release::Outcome::Released { receivers } => Outcome::Done(Answer::Released { receivers }),
            // The next copy notifies the waiters; the script then reports that this one released the lock.
            plain_release::Outcome::Untold => Outcome::Again,
            plain_release::Outcome::NotHeld => Outcome::NotDone,
            plain_release::Outcome::Refused => Outcome::Refused,
        });
    }
    if !acquires.is_empty() {
        let done = plain_acquire::read(of_acquires)?;
        if done.forbidden {
            draws.forbid();
        }
        let mut drawn = done.last_token.and_then(|last| draws.accept(tokens, last));
        let acquired = |outcome: &&plain_acquire::Outcome| **outcome == plain_acquire::Outcome::Acquired;
        let acquired = done.of_steps.iter().filter(acquired).count() as u64;
        let share = tokens / acquired.max(1);
        for (step, outcome) in acquires.iter().zip(done.of_steps) {
            outcomes.push(match (outcome, &mut drawn) {
                (plain_acquire::Outcome::Acquired, Some(next)) => {
                    let asked = step.call.plain_acquire().map_or(1, |acquire| acquire.tokens);
                    let first = *next;
                    *next += share.min(u64::from(asked));
                    Outcome::Done(Answer::Acquired {
                        first,
                        last: *next - 1,
                    })
                }
                (plain_acquire::Outcome::Acquired, None) | (plain_acquire::Outcome::WithoutToken, _) => {
                    Outcome::WithoutToken
                }
                (plain_acquire::Outcome::Busy, _) => Outcome::NotDone,
                (plain_acquire::Outcome::Refused, _) => Outcome::Refused,
            });
        }
    }
    Some(outcomes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::test_steps::{acquire, release};
    use super::*;
    use crate::base::clock;
    use crate::stores::redis::script::Reply;

    /// Draws that have seen this token.
    fn draws(last: u64) -> TokenDraws {
        let mut draws = TokenDraws::default();
        let reply = Reply {
            server_time: Some(last),
            answers: vec![Ok(Answer::Acquired { first: last, last })],
        };
        draws.observe(&[acquire("k", 1, 1)], &reply, clock::now());
        draws
    }

    fn array(text: &str) -> Value {
        redis::parse_redis_value(format!("{text} ").replace(' ', "\r\n").as_bytes()).unwrap()
    }

    #[tokio::test]
    async fn releases_are_followed_by_one_transaction_for_all_acquires() {
        let steps = [release("a", 1), acquire("b", 2, 1), acquire("c", 3, 1)];
        let packed = write(&steps, 2, &Fence::of("p:"), Vec::new());
        let text = String::from_utf8_lossy(packed.bytes()).into_owned();
        let names: Vec<_> = text
            .split("\r\n")
            .filter(|line| line.len() > 3 && line.bytes().all(|byte| byte.is_ascii_uppercase()))
            .collect();
        let expected = ["HDEL", "PUBLISH", "MULTI", "RESTORE", "RESTORE", "INCRBY", "EXEC"];
        assert_eq!(names, expected);
        assert!(text.contains("\r\np:dlock:fence\r\n$1\r\n2\r\n"), "{text}");
        assert_eq!(packed.replies, expected.len());
    }

    #[tokio::test]
    async fn tokens_are_divided_among_those_that_acquired() {
        let steps = [
            release("a", 1),
            acquire("b", 2, 1),
            acquire("c", 3, 17),
            acquire("d", 4, 17),
        ];
        let replies = array("*8 :1 :2 +OK +QUEUED +QUEUED +QUEUED +QUEUED *4 +OK -BUSYKEY +OK :110");
        let outcomes = read(&replies, &steps, 10, &mut draws(100)).unwrap();
        let shown: Vec<_> = outcomes.iter().map(|outcome| format!("{outcome:?}")).collect();
        assert_eq!(
            shown,
            [
                "Done(Released { receivers: Some(2) })",
                "Done(Acquired { first: 101, last: 101 })",
                "NotDone",
                "Done(Acquired { first: 102, last: 106 })",
            ]
        );
    }

    #[tokio::test]
    async fn nothing_is_acquired_without_a_token_that_is_new() {
        let steps = [acquire("b", 2, 1), acquire("c", 3, 1)];
        for lost in [
            "*5 +OK +QUEUED +QUEUED +QUEUED *3 +OK -BUSYKEY :2",
            "*5 +OK +QUEUED +QUEUED +QUEUED *3 +OK -BUSYKEY -WRONGTYPE",
        ] {
            let outcomes = read(&array(lost), &steps, 2, &mut draws(100)).unwrap();
            assert!(
                matches!(outcomes[..], [Outcome::WithoutToken, Outcome::NotDone]),
                "{outcomes:?}"
            );
        }
    }

    #[tokio::test]
    async fn replies_to_other_commands_are_none() {
        let steps = [release("a", 1), acquire("b", 2, 1)];
        for strange in [
            ":1",
            "*2 :1 :0",
            "*5 :1 :0 +OK +QUEUED +QUEUED",
            "*7 :1 :0 +OK +QUEUED +QUEUED *2 +OK :101 :1",
            "*6 +OK :0 +OK +QUEUED +QUEUED *2 +OK :101",
        ] {
            assert!(
                read(&array(strange), &steps, 1, &mut draws(100)).is_none(),
                "{strange}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn more_tokens_are_drawn_only_as_far_as_the_clock_allows() {
        let acquires = [acquire("b", 2, 17), acquire("c", 3, 1)];
        for (elapsed, in_flight, drawn) in [
            (0, 0, 2),
            (7, 0, 3),
            (40, 0, 12),
            (40, 36, 3),
            (40, 100, 2),
            (1_000_000, 0, 18),
        ] {
            let draws = draws(100);
            tokio::time::advance(Duration::from_micros(elapsed)).await;
            assert_eq!(
                draws.count_for(&acquires, clock::now(), in_flight),
                drawn,
                "{elapsed} {in_flight}"
            );
        }
        let many: Vec<_> = (0..256).map(|number| acquire("k", number, 17)).collect();
        let draws = draws(100);
        tokio::time::advance(Duration::from_millis(15)).await;
        assert_eq!(draws.count_for(&many, clock::now(), 0), 256 + 32);
    }
}
