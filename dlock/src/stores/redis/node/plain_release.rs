//! Releases plain locks by two commands instead of the script: `HDEL`, and `PUBLISH` for waiters of other processes. They take
//! the server less time (docs/performance.md).
//!
//! `PUBLISH` is sent whether or not `HDEL` finds the grant: an earlier copy may have released the lock and lost its
//! notification. So a release that finds nothing, or is refused, wakes waiters for nothing; the script then repeats the step
//! and says why. The undo of an acquire often finds nothing, so it goes by the script from the start.

use redis::Value;

use super::Step;
use super::failure;
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
        [Value::Int(1), Value::ServerError(error)] => Some(match failure::lasts(error) {
            true => Outcome::Released { receivers: None },
            false => Outcome::Untold,
        }),
        [Value::Int(0), _] => Some(Outcome::NotHeld),
        [Value::ServerError(_), _] => Some(Outcome::Refused),
        _ => None,
    };
    replies.chunks(2).map(of_step)
}

#[cfg(test)]
mod tests {
    use super::super::test_steps::{grant, release};
    use super::*;

    #[tokio::test]
    async fn release_is_two_commands_on_the_key_and_its_channel() {
        let mut pipeline = Pipeline::new(vec![1, 2, 3], 0);
        write(&[release("a", 1), release("{b}", 2)], &mut pipeline);
        let packed = pipeline.finish();
        let id = |number| grant(number).to_string();
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
}
