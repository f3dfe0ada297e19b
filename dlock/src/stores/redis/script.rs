//! The script of `lua/*.lua` and its calls.

mod answer;
mod call;
mod queue;

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::Duration;

use redis::{Cmd, Script, Value};
use tokio::time::Instant;

pub(crate) use self::answer::Answer;
pub(super) use self::answer::Reply;
pub(super) use self::answer::{read, strange};
pub(crate) use self::call::{Call, OneAcquire, OneRenewal, PlainAcquire, Response, Verb};
use super::command::{self, Command, Packed};
use super::fence::Fence;
use crate::base::clock;
use crate::store::GrantId;

/// The script with all steps. What few calls need is created on demand: in one function, and the families that no call needs
/// alone in another one inside it.
const TEXT: &str = concat!(
    include_str!("lua/always.lua"),
    include_str!("lua/alone.lua"),
    include_str!("lua/queue.lua"),
    include_str!("lua/run.lua"),
    "local function rare()\n",
    include_str!("lua/common.lua"),
    include_str!("lua/steps.lua"),
    include_str!("lua/records.lua"),
    include_str!("lua/fair.lua"),
    include_str!("lua/fenced.lua"),
    include_str!("lua/crowded.lua"),
    "local function add_rarer_steps()\n",
    include_str!("lua/quorum.lua"),
    include_str!("lua/read_write.lua"),
    include_str!("lua/several.lua"),
    include_str!("lua/permits.lua"),
    include_str!("lua/counters.lua"),
    include_str!("lua/operations.lua"),
    include_str!("lua/rarer.lua"),
    "end\n",
    include_str!("lua/rare.lua"),
    "end\n",
    include_str!("lua/rest.lua")
);
static STEPS: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));
/// The prefix of each call of the script.
static BY_HASH: LazyLock<Vec<u8>> = LazyLock::new(|| command::written(&["EVALSHA", STEPS.get_hash()]));

/// The error of a script when a key that it uses is on another server of a Cluster.
pub(super) const NOT_LOCAL: &str = "non local key in a cluster node";
/// The error of a script when a Cluster is down.
pub(super) const DOWN: &str = "while the cluster is down";

/// Writes a grant's id into a buffer.
pub(super) fn id(grant: GrantId, buffer: &mut [u8; 57]) -> &[u8] {
    let begin = grant.write(buffer);
    &buffer[begin..]
}

/// The channel on which Redisson and dlock announce the release of a plain lock.
pub(super) fn channel(key: &str) -> String {
    prefixed(CHANNEL, key)
}

/// Its name in pieces.
pub(super) fn channel_of(key: &str) -> [&str; 4] {
    prefixed_of(CHANNEL, key)
}

const CHANNEL: &str = "redisson_lock__channel";

/// Whether a message says that another process has taken the available plain lock.
pub(super) fn says_taken(channel: &str, message: Option<&Value>) -> bool {
    matches!(message, Some(Value::BulkString(text)) if text == b"2") && channel.starts_with(CHANNEL)
}

/// The name of a companion of a key with this prefix, as Redisson writes it.
pub(super) fn prefixed(prefix: &str, key: &str) -> String {
    prefixed_of(prefix, key).concat()
}

/// The same in pieces.
fn prefixed_of<'a>(prefix: &'a str, key: &'a str) -> [&'a str; 4] {
    match key.contains('{') {
        true => [prefix, ":", key, ""],
        false => [prefix, ":{", key, "}"],
    }
}

/// The time until then.
pub(super) fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::ZERO, |t| t.saturating_duration_since(clock::now()))
}

/// Whole milliseconds, rounded up.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(capped(duration).as_micros()).unwrap_or(u64::MAX)
}

/// A time that a server accepts: not zero, and at most a century.
fn capped(duration: Duration) -> Duration {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    duration.clamp(Duration::from_millis(1), CENTURY)
}

/// How a call names the script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Hash,
    Text,
}

/// Writes the call that carries these steps into the buffer, each with the server time (µs) after which it refuses
/// itself if it takes something. Acquires share the latest one. `run_id` is that of the server process, empty if
/// unknown.
pub(super) fn call<'a>(
    by: By,
    run_id: &str,
    fences: &Fence,
    steps: impl Iterator<Item = (&'a Call, u64)> + Clone,
    buffer: Vec<u8>,
) -> Packed {
    let (mut count, mut acquires, mut tokens, mut late) = (0_usize, 0_u32, 0_u64, 0_u64);
    let (mut size, mut fence, mut in_cluster) = (0, Cow::Borrowed(fences.name()), false);
    for (step, refuse_after) in steps.clone() {
        if let Some(slot) = step.slot {
            // Without the fence, a call with one step has one key, which a server that migrates the slot still accepts.
            in_cluster = true;
            if step.takes_token() {
                fence = fences.in_slot(slot).into();
            } else if count == 0 {
                fence = step.key.as_ref().into();
            }
        }
        count += step.width();
        size += step.weight() + step.keys().map(str::len).sum::<usize>();
        let (locks, wanted) = step.wants();
        if locks > 0 {
            acquires += locks;
            tokens += wanted;
            late = late.max(refuse_after);
        }
    }
    let room = 128 * (1 + count) + size;
    let mut cmd = match by {
        By::Hash => {
            let mut cmd = Command::new(buffer, BY_HASH.len() + room);
            cmd.written(2, &BY_HASH);
            cmd
        }
        By::Text => {
            let mut cmd = Command::new(buffer, TEXT.len() + room);
            cmd.arg("EVAL").arg(TEXT);
            cmd
        }
    };
    let mut all = steps.clone();
    if let (Some((step, refuse_after)), None) = (all.next(), all.next())
        && step.write_alone(refuse_after, fences, &mut cmd)
    {
        return cmd.finish();
    }
    if queue::write(steps.clone().map(|(step, _)| step), late, fences, &mut cmd) {
        return cmd.finish();
    }
    cmd.arg(1 + count).arg(&*fence);
    for (step, _) in steps.clone() {
        for key in step.keys() {
            cmd.arg(key);
        }
    }
    cmd.arg(late).arg(acquires).arg(tokens).arg(u8::from(in_cluster));
    for (step, refuse_after) in steps {
        step.write(refuse_after, run_id, &mut cmd);
    }
    cmd.finish()
}

/// Loads the script into the server, so that the first call can use the hash.
pub(super) fn load() -> Cmd {
    let mut cmd = redis::cmd("SCRIPT");
    cmd.arg("LOAD").arg(TEXT);
    cmd
}
