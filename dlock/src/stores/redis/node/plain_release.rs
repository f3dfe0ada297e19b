//! Releases plain locks by two commands instead of the script: `HDEL`, and `PUBLISH` for waiters of other processes. They take
//! the server less time (docs/performance.md).
//!
//! `PUBLISH` is sent whether or not `HDEL` finds the grant: an earlier copy may have released the lock and lost its
//! notification. So a release that finds nothing, or is refused, wakes waiters for nothing; the script then repeats the step
//! and says why. The undo of an acquire often finds nothing, so it goes by the script from the start.

use redis::{ServerErrorKind, Value};

use super::Step;
use crate::stores::redis::command::Pipeline;
use crate::stores::redis::script;

const HDEL: &[u8] = b"*3\r\n$4\r\nHDEL\r\n";
const PUBLISH: &[u8] = b"*3\r\n$7\r\nPUBLISH\r\n";
/// The message, as Redisson sends it.
const UNLOCKED: &[u8] = b"0";
/// An upper bound of the bytes of both commands without the key, which they contain twice.
const LENGTH: usize = 192;

/// An upper bound of the bytes of the commands.
pub(super) fn size(steps: &[Step]) -> usize {
    steps.iter().map(|step| LENGTH + 2 * step.call.key.len()).sum()
}

/// Writes the commands of these steps, all of them plain releases.
pub(super) fn write(steps: &[Step], pipeline: &mut Pipeline) {
    for step in steps {
        let Some(grant) = step.call.plain_release() else {
            debug_assert!(false, "{:?}", step.call);
            continue;
        };
        let channel = script::channel_of(&step.call.key).map(str::as_bytes);
        let key = step.call.key.as_bytes();
        (pipeline.command(HDEL).arg(&[key])).arg(&[script::id(grant, &mut [0; 57])]);
        pipeline.command(PUBLISH).arg(&channel).arg(&[UNLOCKED]);
    }
}

/// How many replies so many releases have.
pub(super) fn replies(releases: usize) -> usize {
    2 * releases
}

/// What the server has done with a step.
#[derive(Debug, PartialEq)]
pub(super) enum Outcome {
    /// `receivers` is `None` where notifications are forbidden.
    Released { receivers: Option<u64> },
    /// Released, but the notification failed; another one may succeed.
    Untold,
    /// There was no such grant.
    NotHeld,
    /// `HDEL` failed and changed nothing.
    Refused,
}

/// Reads the replies, two for each step; `None` for what is no reply to these commands.
pub(super) fn read(replies: &[Value]) -> impl Iterator<Item = Option<Outcome>> {
    let of_step = |replies: &[Value]| match replies {
        [Value::Int(1), Value::Int(receivers)] => Some(Outcome::Released {
            receivers: Some(u64::try_from(*receivers).ok()?),
        }),
        [Value::Int(1), Value::ServerError(error)] => Some(match error.kind() {
            // Or the server has no such command.
            Some(ServerErrorKind::NoPerm | ServerErrorKind::ResponseError) => {
                Outcome::Released { receivers: None }
            }
            _ => Outcome::Untold,
        }),
        [Value::Int(0), _] => Some(Outcome::NotHeld),
        [Value::ServerError(_), _] => Some(Outcome::Refused),
        _ => None,
    };
    replies.chunks(2).map(of_step)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::super::Queuing;
    use super::super::send_queue::SendQueue;
    use super::*;
    use crate::base::clock;
    use crate::store::GrantId;
    use crate::stores::redis::script::{Call, Verb};

    fn release(key: &str, number: u64) -> Step {
        let verb = Verb::Release {
            grant: GrantId::from_parts(7, number),
            keep_until: None,
            undoes_acquire: false,
        };
        let call = Call {
            key: Arc::from(key),
            slot: None,
            verb,
            vote_after: None,
        };
        let deadline = clock::now() + Duration::from_secs(1);
        Queuing::new(call, deadline, oneshot::channel().0, None)
    }

    #[tokio::test]
    async fn release_is_two_commands_on_the_key_and_its_channel() {
        let mut pipeline = Pipeline::new(vec![1, 2, 3], 0);
        write(&[release("a", 1), release("{b}", 2)], &mut pipeline);
        let packed = pipeline.finish();
        let id = |number| GrantId::from_parts(7, number).to_string();
        let mut expected = Vec::new();
        for (key, channel, number) in [("a", "{a}", 1), ("{b}", "{b}", 2)] {
            let channel = format!("redisson_lock__channel:{channel}");
            expected.extend(redis::cmd("HDEL").arg(key).arg(id(number)).get_packed_command());
            expected.extend(redis::cmd("PUBLISH").arg(channel).arg("0").get_packed_command());
        }
        assert_eq!((packed.bytes(), packed.replies), (&expected[..], 4));
    }

    fn replies(text: &str) -> Option<Vec<Outcome>> {
        let values = text.split(' ').map(|reply| match reply {
            "no" => "-NOPERM this user has no permissions\r\n".to_owned(),
            "busy" => "-BUSY a script runs\r\n".to_owned(),
            "unknown" => "-ERR unknown command\r\n".to_owned(),
            other => format!("{other}\r\n"),
        });
        let values = values.map(|reply| redis::parse_redis_value(reply.as_bytes()).unwrap());
        read(&values.collect::<Vec<_>>()).collect()
    }

    #[test]
    fn replies_say_what_was_released_and_who_was_told() {
        let released = |receivers| Outcome::Released { receivers };
        let expected = [
            released(Some(2)),
            released(None),
            released(None),
            Outcome::Untold,
            Outcome::NotHeld,
            Outcome::Refused,
        ];
        let found = replies(":1 :2 :1 no :1 unknown :1 busy :0 :2 busy :0").unwrap();
        assert_eq!(found, expected);
        for strange in [":2 :0", ":1 :-1", "+OK :1", ":1 +OK", ":1", "$-1 :1"] {
            assert_eq!(replies(strange), None, "{strange}");
        }
    }

    fn queue(steps: impl IntoIterator<Item = Step>) -> SendQueue {
        let mut queue = SendQueue::new(Arc::default());
        steps.into_iter().for_each(|step| queue.push(step));
        queue
    }

    fn taken(queue: &mut SendQueue) -> Vec<String> {
        let (steps, _) = queue.take_by_commands(clock::now(), false);
        steps.iter().map(|step| step.call.key.to_string()).collect()
    }

    fn step(key: &str, verb: Verb) -> Step {
        let mut step = release(key, 0);
        step.call.verb = verb;
        step
    }

    fn acquire(key: &str, number: u64) -> Step {
        let grant = GrantId::from_parts(7, number);
        let lease = Duration::from_secs(1);
        step(
            key,
            Verb::Acquire {
                grant,
                lease,
                tokens: 1,
            },
        )
    }

    #[tokio::test]
    async fn releases_go_before_acquires_but_not_before_that_of_the_same_grant() {
        let mut queue = queue([
            acquire("a", 1),
            release("b", 2),
            release("a", 1),
            acquire("c", 3),
            release("d", 4),
        ]);
        assert_eq!(taken(&mut queue), ["b", "d"]);
        assert_eq!((queue.len(), taken(&mut queue).len()), (3, 0));
    }

    #[tokio::test]
    async fn releases_stay_in_their_order_with_all_that_is_no_acquire() {
        let mut queue = queue([release("a", 1), step("b", Verb::Inspect), release("b", 2)]);
        assert_eq!(taken(&mut queue), ["a"]);
        assert_eq!(taken(&mut queue).len(), 0);
    }

    #[tokio::test]
    async fn what_the_script_has_to_release_is_not_taken() {
        let (mut undo, mut refused) = (release("a", 1), release("b", 2));
        undo.call.verb = Verb::Release {
            grant: GrantId::from_parts(7, 1),
            keep_until: None,
            undoes_acquire: true,
        };
        undo = Queuing::new(undo.call, undo.deadline, oneshot::channel().0, None);
        refused.by_script = true;
        let mut queue = queue([undo, refused, release("c", 3)]);
        assert_eq!(taken(&mut queue), ["c"]);
    }

    #[tokio::test]
    async fn acquires_follow_releases_and_wait_for_those_that_stay() {
        let keys =
            |steps: &[Step]| -> Vec<String> { steps.iter().map(|step| step.call.key.to_string()).collect() };
        let mut by_script = release("c", 3);
        by_script.by_script = true;
        let mut queue = queue([
            acquire("a", 1),
            release("b", 2),
            acquire("b", 4),
            by_script,
            acquire("c", 5),
            release("d", 6),
        ]);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert_eq!(
            (keys(&taken), needs_script),
            (["b", "d", "a", "b"].map(str::to_owned).to_vec(), true)
        );
        // The script takes the others, in their order.
        assert_eq!(queue.len(), 2);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert_eq!((keys(&taken), needs_script), (vec![], true));
    }

    #[tokio::test]
    async fn acquires_stay_behind_what_only_the_script_can_do() {
        let mut busy = acquire("a", 1);
        busy.by_script = true;
        let mut queue = queue([busy, acquire("b", 2), step("c", Verb::Inspect), acquire("d", 3)]);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert!(needs_script && taken.len() == 1 && &*taken[0].call.key == "b");
    }

    #[tokio::test]
    async fn failed_releases_go_first() {
        let mut queue = queue([release("a", 1)]);
        queue.keep(release("b", 2));
        assert_eq!(taken(&mut queue), ["b", "a"]);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn failed_release_that_is_put_back_keeps_no_step_from_timing_out() {
        let mut queue = queue([acquire("a", 1)]);
        let mut kept = release("b", 2);
        kept.deadline += Duration::from_secs(3600);
        queue.put_back([kept]);
        let overdue = clock::now() + Duration::from_secs(60);
        assert_eq!(
            queue.pop_overdue(overdue).map(|step| step.call.key.to_string()),
            Some("a".to_owned())
        );
        assert_eq!(taken(&mut queue), ["b"]);
    }

    #[tokio::test]
    async fn one_call_has_no_more_steps_than_any_other() {
        let mut queue = queue((0..300).map(|number| release("a", number)));
        (300..500).for_each(|number| queue.keep(release("a", number)));
        assert_eq!((taken(&mut queue).len(), taken(&mut queue).len()), (256, 244));
    }
}
