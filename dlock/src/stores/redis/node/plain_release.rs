//! Releases of plain locks by commands instead of the script: `HDEL`, and `PUBLISH` for those who wait elsewhere. They
//! take the server less time than a step of the script (docs/performance.md).
//!
//! The notification is sent whatever was released: a release that is repeated because its connection broke may have
//! lost it. Where the lock was not held, or a command failed, the script repeats the step, and says why.

use redis::Value;

use super::Step;
use crate::stores::redis::command::{Packed, Pipeline};
use crate::stores::redis::script::{self, Answer};

const HDEL: &[u8] = b"*3\r\n$4\r\nHDEL\r\n";
const PUBLISH: &[u8] = b"*3\r\n$7\r\nPUBLISH\r\n";
/// The message, as Redisson sends it.
const UNLOCKED: &[u8] = b"0";
/// More than the commands have besides twice the key.
const LENGTH: usize = 192;

/// Writes the commands of these steps, all of them plain releases, into the buffer.
pub(super) fn write(steps: &[Step], room: Vec<u8>) -> Packed {
    let size = steps.iter().map(|step| LENGTH + 2 * step.call.key.len()).sum();
    let mut pipeline = Pipeline::new(room, size);
    for step in steps {
        let Some(grant) = step.call.is_plain_release() else { continue };
        let channel = script::channel_of(&step.call.key).map(str::as_bytes);
        let key = step.call.key.as_bytes();
        (pipeline.command(HDEL).arg(&[key])).arg(&[script::id(grant, &mut [0; 57])]);
        pipeline.command(PUBLISH).arg(&channel).arg(&[UNLOCKED]);
    }
    pipeline.finish()
}

/// Reads the replies: for each step its answer, or `None` where the script must repeat it.
pub(super) fn read(replies: &Value) -> impl Iterator<Item = Option<Answer>> {
    let replies = match replies {
        Value::Array(replies) => &replies[..],
        _ => &[],
    };
    replies.chunks(2).map(|of_step| match of_step {
        [Value::Int(1), published] => Some(Answer::Released {
            receivers: match published {
                Value::Int(receivers) => u64::try_from(*receivers).ok(),
                _ => None,
            },
        }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::super::Queuing;
    use super::*;
    use crate::base::clock;
    use crate::store::GrantId;
    use crate::stores::redis::script::{Call, Verb};

    fn release(key: &str, number: u64) -> Step {
        let verb = Verb::Release {
            grant: GrantId::from_parts(7, number),
            keep_until: None,
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
        let packed = write(&[release("a", 1), release("{b}", 2)], vec![1, 2, 3]);
        let id = |number| GrantId::from_parts(7, number).to_string();
        let mut expected = Vec::new();
        for (key, channel, number) in [("a", "{a}", 1), ("{b}", "{b}", 2)] {
            let channel = format!("redisson_lock__channel:{channel}");
            expected.extend(redis::cmd("HDEL").arg(key).arg(id(number)).get_packed_command());
            expected.extend(redis::cmd("PUBLISH").arg(channel).arg("0").get_packed_command());
        }
        assert_eq!((packed.bytes(), packed.replies), (&expected[..], 4));
    }

    #[test]
    fn all_but_a_release_that_was_carried_out_is_left_to_the_script() {
        let error = || redis::parse_redis_value(b"-NOPERM no\r\n").unwrap();
        let replies = [Value::Int(1), Value::Int(2), Value::Int(1), error()];
        let unclear = [Value::Int(0), Value::Int(2), error(), Value::Int(2), Value::Nil, Value::Int(2)];
        let all = Value::Array(replies.into_iter().chain(unclear).collect());
        let answers = read(&all).map(|answer| match answer {
            Some(Answer::Released { receivers }) => Some(receivers),
            _ => None,
        });
        let answers: Vec<_> = answers.collect();
        assert_eq!(answers, [Some(Some(2)), Some(None), None, None, None]);
    }
}
