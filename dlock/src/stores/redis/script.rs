//! The steps of `lua/*.lua`: how they are asked and how their answers read.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::{Cmd, Script, Value};
use tokio::time::Instant;

use super::cluster::slot::Slot;
use super::command::{self, Command, Packed};
use super::fence::Fence;
use super::kinds::KindStep;
use super::node::refused;
use super::operations::OperationStep;
use super::permits;
use crate::base::clock;
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};
use crate::store::records::{
    ClaimRequest, ClaimToken, Fingerprint, ForgetReply, OnOrphan, RecordLook, RecordState, RecordView,
    SlotRequest,
};
use crate::store::slots::{micros_of, time_of};
use crate::store::{AcquireRequest, GrantId, Holder, Kind, Reason, Renewal, StoreError};

/// The script that all steps are in. What most calls do not need is made only where it is needed: as one function.
const TEXT: &str = concat!(
    include_str!("lua/always.lua"),
    include_str!("lua/run.lua"),
    "local function rare()\n",
    include_str!("lua/common.lua"),
    include_str!("lua/steps.lua"),
    include_str!("lua/records.lua"),
    include_str!("lua/quorum.lua"),
    include_str!("lua/read_write.lua"),
    include_str!("lua/several.lua"),
    include_str!("lua/fair.lua"),
    include_str!("lua/fenced.lua"),
    include_str!("lua/permits.lua"),
    include_str!("lua/counters.lua"),
    include_str!("lua/operations.lua"),
    include_str!("lua/rare.lua"),
    "end\n",
    include_str!("lua/rest.lua")
);
static STEPS: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));
/// How each call of the script begins.
static BY_HASH: LazyLock<Vec<u8>> = LazyLock::new(|| command::written(&["EVALSHA", STEPS.get_hash()]));

/// Since when a member of a quorum has its data.
const VOTER: &str = "dlock:voter";

/// How a script is told that a key which it uses is on another server of a Cluster.
pub(super) const NOT_LOCAL: &str = "non local key in a cluster node";
/// How a script is told that a Cluster does not serve.
pub(super) const DOWN: &str = "while the cluster is down";

/// One step on one key, or one that carries many.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// The key as the server knows it; of a step that carries many the first.
    pub(super) key: Arc<str>,
    /// Where that is in a Cluster: all steps of a call are in one slot.
    pub(super) slot: Option<Slot>,
    pub(super) verb: Verb,
    /// Of an acquire on a member of a quorum: how long that has to have been up with its data, or else it
    /// abstains.
    pub(super) vote_after: Option<Duration>,
}

/// One lock among several that are acquired at once.
#[derive(Debug, Clone)]
pub(crate) struct OneAcquire {
    /// The key as the server knows it.
    pub(crate) key: Arc<str>,
    tokens: u32,
    step: KindStep,
}

impl OneAcquire {
    pub(crate) fn new(key: Arc<str>, request: AcquireRequest) -> OneAcquire {
        OneAcquire {
            key,
            tokens: request.tokens.max(1),
            step: KindStep::Acquire(Box::new(request)),
        }
    }
}

/// One renewal among many.
#[derive(Debug, Clone)]
pub(crate) struct OneRenewal {
    /// The key as the server knows it.
    pub(crate) key: Arc<str>,
    pub(crate) grant: GrantId,
}

#[derive(Debug, Clone)]
pub(crate) enum Verb {
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
    /// All of these or none: never none of them are asked for.
    All(Vec<OneAcquire>),
    /// Renewals of plain locks, of which each has an answer of its own: never none.
    Renew {
        all: Arc<Vec<OneRenewal>>,
        lease: Duration,
    },
    /// What a kind beside the plain lock does its own way.
    As(KindStep),
    /// Fencing tokens are greater than this one from now on, if the grant with this field is still there.
    RaiseFence {
        field: String,
        at_least: u64,
    },
    Count(CounterRequest),
    /// On an entry of a client.
    Entry(Box<OperationStep>),
    Inspect,
    /// Ends whatever hold there is; only that of this holder, if one is named.
    Force(Option<String>),
    Claim(Box<ClaimRequest>),
    ClaimSlot(Box<ClaimRequest>, SlotRequest),
    /// Looks at a record, with its response or without.
    LookAtRecord {
        response: bool,
    },
    ForgetRecord,
    Extend {
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    },
    Complete {
        token: ClaimToken,
        response: Response,
        retention: Duration,
    },
    /// Releases a record, or leaves it as an orphan.
    GiveBack {
        token: ClaimToken,
        forget: bool,
    },
}

/// What a record keeps for its user: opaque bytes, not to be shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Response(pub(crate) Vec<u8>);

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// What a step answered.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Acquired {
        first: u64,
        last: u64,
    },
    /// The same, and the numbers of the next waiters in the queue that belong to this client.
    InLine {
        first: u64,
        last: u64,
        behind: Vec<u64>,
    },
    Busy {
        remaining: Option<Duration>,
        /// Within which time a waiter asks again.
        again: Option<Duration>,
        /// How many processes wait for a plain lock, where they are many.
        listeners: Option<u64>,
    },
    /// There are fewer permits in all than are wanted.
    TooFew,
    /// The first and the last token of each of several.
    All(Vec<(u64, u64)>),
    /// None of several, because of what was answered to the one at this place.
    None {
        at: usize,
        answer: Box<Result<Answer, StoreError>>,
    },
    Released {
        /// How many clients were notified; `None` when the server forbids to tell.
        receivers: Option<u64>,
    },
    /// The grant is not there.
    Gone,
    Renewed,
    /// To each of the renewals that a step carries.
    Renewals(Vec<Result<Renewal, StoreError>>),
    Holders(Vec<Holder>),
    Counted(CounterReply),
    /// An entry of a client, and when it goes.
    Entry(Vec<u8>, Duration),
    /// The messages of a mailbox.
    Mail(Vec<Vec<u8>>),
    Free,
    Abstains {
        votes_in: Duration,
    },
    /// Whether it was there, and was done.
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
    /// To a claim for a slot, in µs since the epoch.
    Slot {
        now: u64,
        slot: u64,
        last: Option<u64>,
        answer: Box<Answer>,
    },
    Missed,
    ClockWentBack,
    TooFarAhead,
    Look(RecordLook),
    Forget(ForgetReply),
    /// The call had answers enough: the same request again, please.
    Again,
    Done {
        told: bool,
    },
    NotOwner,
}

impl Answer {
    /// Whether another holder or waiter was in the way.
    pub(super) fn is_busy(&self) -> bool {
        match self {
            Answer::Busy { .. } | Answer::TooFew | Answer::Running { .. } => true,
            Answer::None { answer, .. } => answer.as_ref().as_ref().is_ok_and(Answer::is_busy),
            Answer::Slot { answer, .. } => answer.is_busy(),
            _ => false,
        }
    }
}

impl Call {
    /// Whether sending it twice does no more than sending it once.
    pub(super) fn is_repeatable(&self) -> bool {
        !self.is_acquire() && !matches!(self.verb, Verb::Force(_) | Verb::ForgetRecord)
    }

    /// Whether it extends leases.
    pub(super) fn is_renewal(&self) -> bool {
        matches!(self.verb, Verb::Renew { .. } | Verb::As(KindStep::Renew(_)))
    }

    /// The grant that this releases.
    pub(super) fn releases(&self) -> Option<GrantId> {
        match &self.verb {
            Verb::Release { grant, .. } => Some(*grant),
            Verb::As(step) => step.releases(),
            _ => None,
        }
    }

    /// Whether it takes locks.
    pub(super) fn is_acquire(&self) -> bool {
        matches!(
            self.verb,
            Verb::Acquire { .. } | Verb::As(KindStep::Acquire(_)) | Verb::All(_)
        )
    }

    /// The ids under which this takes something, which may have to be released then.
    pub(super) fn takes(&self) -> Vec<String> {
        match &self.verb {
            Verb::Acquire { grant, .. } => vec![grant.to_string()],
            Verb::As(step) => step.acquires().map(|id| id.to_string()).collect(),
            Verb::All(all) => {
                let ids = all.iter().flat_map(|one| one.step.acquires());
                ids.map(|id| id.to_string()).collect()
            }
            _ => self.claims().map(str::to_owned).into_iter().collect(),
        }
    }

    /// The id of a claim: it may be sent again, and none of its copies takes effect after its time.
    pub(super) fn claims(&self) -> Option<&str> {
        match &self.verb {
            Verb::Claim(request) | Verb::ClaimSlot(request, _) => Some(request.token.as_str()),
            _ => None,
        }
    }

    /// The id of a claim that this ends.
    pub(super) fn ends_claim(&self) -> Option<&str> {
        match &self.verb {
            Verb::Complete { token, .. } | Verb::GiveBack { token, .. } => Some(token.as_str()),
            _ => None,
        }
    }

    /// Whether a copy of it that was sent before may have done what this one could not.
    pub(super) fn may_be_done_before(&self) -> bool {
        matches!(
            self.verb,
            Verb::Claim(_)
                | Verb::ClaimSlot(..)
                | Verb::Extend { .. }
                | Verb::Complete { .. }
                | Verb::GiveBack { .. }
                | Verb::Count(_)
        )
    }

    /// Whether it needs the last fencing token.
    pub(super) fn takes_token(&self) -> bool {
        self.is_acquire()
            || matches!(
                self.verb,
                Verb::Claim(_) | Verb::ClaimSlot(..) | Verb::RaiseFence { .. }
            )
    }

    /// Whether it begins something: then it can be refused where too many wait already.
    pub(super) fn may_be_turned_away(&self) -> bool {
        match &self.verb {
            Verb::Claim(_) | Verb::ClaimSlot(..) | Verb::Inspect | Verb::Force(_) | Verb::Entry(_) => true,
            Verb::LookAtRecord { .. } | Verb::ForgetRecord => true,
            Verb::Count(request) => !matches!(request.step, CounterStep::Give { .. }),
            _ => self.is_acquire(),
        }
    }

    /// How many locks it is about.
    pub(super) fn width(&self) -> usize {
        match &self.verb {
            Verb::Renew { all, .. } => all.len(),
            Verb::All(all) => all.len(),
            _ => 1 + usize::from(self.vote_after.is_some()),
        }
    }

    /// The keys that it is about.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        let (renewals, acquires, one) = match &self.verb {
            Verb::Renew { all, .. } => (&all[..], &[][..], None),
            Verb::All(all) => (&[][..], &all[..], None),
            _ => (&[][..], &[][..], Some(&*self.key)),
        };
        let renewals = renewals.iter().map(|one| &*one.key);
        let acquires = acquires.iter().map(|one| &*one.key);
        let voter = self.vote_after.map(|_| VOTER);
        voter.into_iter().chain(one).chain(renewals).chain(acquires)
    }

    /// Whether it may find or make keys that it does not name, beside the one that it names. A server that a slot comes to
    /// takes one that has not come yet for one that is not there.
    pub(super) fn has_companions(&self) -> bool {
        match &self.verb {
            Verb::As(step) => step.has_companions(),
            Verb::All(all) => all.iter().any(|one| one.step.has_companions()),
            Verb::Count(_) | Verb::Force(_) => true,
            Verb::Acquire { .. } | Verb::Release { .. } | Verb::Renew { .. } | Verb::RaiseFence { .. } => {
                false
            }
            Verb::Claim(_) | Verb::Extend { .. } | Verb::Complete { .. } | Verb::GiveBack { .. } => false,
            Verb::ClaimSlot(..) | Verb::ForgetRecord => false,
            // They change nothing.
            Verb::Inspect | Verb::LookAtRecord { .. } => false,
            Verb::Entry(_) => false,
        }
    }

    /// The key whose companions it would make in another slot of a Cluster than the key's own, so that it could never be
    /// carried out as a whole.
    pub(super) fn is_parted(&self) -> Option<&str> {
        let (one, all) = match &self.verb {
            Verb::Count(_) => (Some(&*self.key), &[][..]),
            Verb::As(step @ KindStep::Acquire(_)) => (step.has_companions().then_some(&*self.key), &[][..]),
            Verb::All(all) => (None, &all[..]),
            _ => (None, &[][..]),
        };
        let all = all.iter().filter(|one| one.step.has_companions());
        let mut keys = one.into_iter().chain(all.map(|one| &*one.key));
        keys.find(|key| !Slot::has_companions_of(key))
    }

    /// How many locks it acquires, and the fencing tokens that it wants for them in all.
    fn wants(&self) -> (u32, u64) {
        match &self.verb {
            Verb::Acquire { tokens, .. } => (1, u64::from((*tokens).max(1))),
            Verb::As(KindStep::Acquire(request)) => (1, u64::from(request.tokens.max(1))),
            Verb::All(all) => all.iter().fold((0, 0), |(count, tokens), one| {
                (count + 1, tokens + u64::from(one.tokens))
            }),
            _ => (0, 0),
        }
    }

    /// Writes it as a call of its own, where one of the short forms fits.
    fn write_alone(&self, refuse_after: u64, fence: &Fence, cmd: &mut Command) -> bool {
        match (&self.verb, self.slot) {
            _ if self.vote_after.is_some() => return false,
            (Verb::Acquire { grant, lease, tokens }, slot) => {
                cmd.arg(2);
                match slot {
                    Some(slot) => cmd.arg(fence.in_slot(slot)),
                    None => cmd.arg(fence.name()),
                };
                cmd.arg(&*self.key).arg("acquire").arg(refuse_after);
                cmd.arg(id(*grant, &mut [0; 57])).arg(millis(*lease));
                cmd.arg((*tokens).max(1)).arg(slot.map(|_| 1));
            }
            (Verb::Release { grant, keep_until }, None) if left(*keep_until).is_zero() => {
                cmd.arg(1).arg(&*self.key).arg("release");
                cmd.arg(id(*grant, &mut [0; 57])).arg(channel(&self.key));
            }
            _ => return false,
        }
        true
    }

    /// How much of the server's time it takes, in steps on one lock.
    pub(super) fn work(&self) -> usize {
        match &self.verb {
            Verb::As(step) => step.work(),
            _ => self.width(),
        }
    }

    /// How many bytes it adds to a call, beside what every step has.
    pub(super) fn weight(&self) -> usize {
        match &self.verb {
            Verb::Complete { response, .. } => response.0.len(),
            Verb::As(step) => step.weight(),
            Verb::Entry(step) => step.weight(),
            _ => 0,
        }
    }

    fn write(&self, refuse_after: u64, run_id: &str, cmd: &mut Command) {
        if let Some(after) = self.vote_after {
            cmd.arg("vote").arg(2).arg(run_id).arg(millis(after));
        }
        match &self.verb {
            Verb::Acquire { grant, lease, tokens } => {
                cmd.arg("acquire")
                    .arg(id(*grant, &mut [0; 57]))
                    .arg(millis(*lease));
                cmd.arg((*tokens).max(1));
            }
            Verb::Release { grant, keep_until } => {
                match millis(left(*keep_until)) {
                    0 => cmd.arg("release").arg(id(*grant, &mut [0; 57])),
                    keep => {
                        cmd.arg("keep").arg(3);
                        cmd.arg(id(*grant, &mut [0; 57])).arg(keep)
                    }
                };
                cmd.arg(channel(&self.key));
            }
            Verb::All(all) => {
                cmd.arg("all").arg(all.len());
                for one in all {
                    one.step.write(&one.key, cmd);
                }
            }
            Verb::Renew { all, lease } => {
                cmd.arg("renew").arg(millis(*lease)).arg(all.len());
                for OneRenewal { grant, .. } in all.iter() {
                    cmd.arg(id(*grant, &mut [0; 57]));
                }
            }
            Verb::As(step) => step.write(&self.key, cmd),
            Verb::RaiseFence { field, at_least } => {
                cmd.arg("raise_fence").arg(2).arg(field).arg(at_least);
            }
            Verb::Count(request) => permits::count(request, refuse_after, cmd),
            Verb::Entry(step) => step.write(cmd),
            Verb::Inspect => {
                cmd.arg("inspect").arg(0);
            }
            Verb::Force(only) => {
                cmd.arg("force").arg(2 + only.iter().len());
                cmd.arg(channel(&self.key)).arg(refuse_after).arg(only);
            }
            Verb::Claim(request) => {
                cmd.arg("claim").arg(6).arg(request.token.as_str());
                cmd.arg(&request.fingerprint[..]).arg(micros(request.lease));
                cmd.arg(millis(capped(request.retention.max(request.lease))));
                cmd.arg(refuse_after).arg(for_orphans(request.on_orphan));
            }
            Verb::ClaimSlot(request, slot) => {
                cmd.arg("claim_slot").arg(8).arg(request.token.as_str());
                cmd.arg(micros(request.lease));
                cmd.arg(millis(capped(request.retention.max(request.lease))));
                cmd.arg(refuse_after).arg(for_orphans(request.on_orphan));
                cmd.arg(slot.period().map_or(0, micros));
                cmd.arg(slot.time().map_or(0, micros_of))
                    .arg(micros(slot.ahead()));
            }
            Verb::LookAtRecord { response } => {
                cmd.arg("look_at_record").arg(1).arg(u8::from(*response));
            }
            Verb::ForgetRecord => {
                cmd.arg("forget_record").arg(1).arg(refuse_after);
            }
            Verb::Extend {
                token,
                lease,
                retention,
            } => {
                cmd.arg("extend").arg(3).arg(token.as_str()).arg(micros(*lease));
                cmd.arg(millis(capped(*retention.max(lease))));
            }
            Verb::Complete {
                token,
                response,
                retention,
            } => {
                cmd.arg("complete").arg(3).arg(token.as_str());
                cmd.arg(millis(capped(*retention))).arg(&response.0);
            }
            Verb::GiveBack { token, forget } => {
                let step = if *forget { "forget" } else { "abandon" };
                cmd.arg(step).arg(1).arg(token.as_str());
            }
        }
    }
}

fn for_orphans(on_orphan: OnOrphan) -> &'static str {
    match on_orphan {
        OnOrphan::TakeOver => "over",
        OnOrphan::Leave => "leave",
    }
}

/// A grant's id, written into a buffer.
pub(super) fn id(grant: GrantId, buffer: &mut [u8; 57]) -> &[u8] {
    let begin = grant.write(buffer);
    &buffer[begin..]
}

/// The channel on which Redisson and we tell of the release of a plain lock.
pub(super) fn channel(key: &str) -> String {
    prefixed(CHANNEL, key)
}

const CHANNEL: &str = "redisson_lock__channel";

/// Whether a message tells that another process has taken the plain lock that was available.
pub(super) fn says_taken(channel: &str, message: Option<&Value>) -> bool {
    matches!(message, Some(Value::BulkString(text)) if text == b"2") && channel.starts_with(CHANNEL)
}

/// What is called like a key with something before it, as Redisson writes that.
pub(super) fn prefixed(prefix: &str, key: &str) -> String {
    match key.contains('{') {
        true => [prefix, ":", key].concat(),
        false => [prefix, ":{", key, "}"].concat(),
    }
}

/// How long it is until then.
pub(super) fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::ZERO, |t| t.saturating_duration_since(clock::now()))
}

/// Whole milliseconds, never less than asked for.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(capped(duration).as_micros()).unwrap_or(u64::MAX)
}

/// A time that a server takes: not nothing, and no more than a century.
fn capped(duration: Duration) -> Duration {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    duration.clamp(Duration::from_millis(1), CENTURY)
}

/// How the script is named to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Hash,
    Text,
}

/// The call that carries these steps, each with the server time (µs) after which it refuses itself where it
/// takes something. Acquires share the latest one. `run_id` is that of the server process, empty where it is not
/// known. It is written into the buffer.
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
            // Where the fence is not needed, a call with one step has one key, which a server that is giving the slot
            // away still lets pass.
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

/// Has the server keep the script, so that the first call is by hash.
pub(super) fn load() -> Cmd {
    let mut cmd = redis::cmd("SCRIPT");
    cmd.arg("LOAD").arg(TEXT);
    cmd
}

/// The reply to a call.
pub(super) struct Reply {
    /// When the server carried it out (µs of its clock), where it says so: always where a release found nothing.
    pub(super) server_time: Option<u64>,
    /// To the steps in their order.
    pub(super) answers: Vec<Result<Answer, StoreError>>,
}

/// The reply to a call with these steps.
pub(super) fn read<'a>(reply: Value, mut steps: impl ExactSizeIterator<Item = &'a Call>) -> Option<Reply> {
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

/// The short reply to a call with this step alone.
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

/// The error for what no server of this protocol says.
pub(super) fn strange() -> StoreError {
    StoreError::unknown("the server gave an answer that makes no sense")
}

/// The last of so many fencing tokens.
fn last_of(first: u64, count: u64) -> Result<u64, StoreError> {
    let behind_first = count.checked_sub(1).ok_or_else(strange)?;
    first.checked_add(behind_first).ok_or_else(strange)
}

/// What became of each of these renewals.
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
    let name = words.first().and_then(text).ok_or_else(strange)?;
    let word = |at: usize| words.get(at).ok_or_else(strange);
    let num = |at: usize| number(word(at)?).ok_or_else(strange);
    let string = |at: usize| text(word(at)?).ok_or_else(strange);
    let ttl = |at: usize| match word(at)? {
        Value::Int(ms) => Ok(u64::try_from(*ms).ok().map(Duration::from_millis)),
        _ => Err(strange()),
    };
    let receivers = |at: usize| match word(at)? {
        Value::Int(n) => Ok(u64::try_from(*n).ok()),
        _ => Err(strange()),
    };
    let attempt = |at: usize| u32::try_from(num(at)?).map_err(|_| strange());
    match name.as_str() {
        "acquired" => {
            let first = num(1)?;
            let last = last_of(first, num(2)?)?;
            if words.len() == 3 {
                return Ok(Answer::Acquired { first, last });
            }
            let behind: Result<_, _> = (3..words.len()).map(num).collect();
            behind.map(|behind| Answer::InLine { first, last, behind })
        }
        "busy" => Ok(Answer::Busy {
            remaining: ttl(1)?,
            again: match words.len() {
                2 => None,
                _ => ttl(2)?,
            },
            listeners: match words.len() {
                2 | 3 => None,
                _ => Some(num(3)?),
            },
        }),
        "beyond" => Ok(Answer::TooFew),
        "abstains" => Ok(Answer::Abstains {
            votes_in: Duration::from_millis(num(1)?),
        }),
        "all" => {
            let mut tokens = Vec::with_capacity(words.len() / 2);
            for at in (1..words.len()).step_by(2) {
                let first = num(at)?;
                let last = last_of(first, num(at + 1)?)?;
                tokens.push((first, last));
            }
            Ok(Answer::All(tokens))
        }
        "none" => Ok(Answer::None {
            at: usize::try_from(num(1)?).map_err(|_| strange())?,
            answer: Box::new(read_answer(word(2)?)),
        }),
        "late" => Err(StoreError::not_done(
            Reason::Unreachable,
            "the request reached the server too late and was refused there",
        )),
        "released" => Ok(Answer::Released {
            receivers: receivers(1)?,
        }),
        "gone" => Ok(Answer::Gone),
        "holders" => {
            let holder = |at: usize| {
                let kind = Kind::of_name(&string(at)?).ok_or_else(strange)?;
                Ok(Holder::new(kind, string(at + 1)?, num(at + 2)?, ttl(at + 3)?))
            };
            let all: Result<_, _> = (1..words.len()).step_by(4).map(holder).collect();
            all.map(Answer::Holders)
        }
        "free" => Ok(Answer::Free),
        "entry" => Ok(Answer::Entry(bytes(word(1)?)?, ttl(2)?.unwrap_or_default())),
        "mail" => words[1..]
            .iter()
            .map(bytes)
            .collect::<Result<_, _>>()
            .map(Answer::Mail),
        "claimed" => Ok(Answer::Claimed {
            attempt: attempt(1)?,
            fence: num(2)?,
        }),
        "completed" => match word(1)? {
            Value::BulkString(response) => Ok(Answer::Completed(Response(response.clone()))),
            _ => Err(strange()),
        },
        "running" => Ok(Answer::Running {
            remaining: Duration::from_micros(num(1)?),
            attempt: attempt(2)?,
        }),
        "mismatch" => Ok(Answer::Mismatch),
        "slot" => Ok(Answer::Slot {
            now: num(1)?,
            slot: num(2)?,
            last: Some(num(3)?).filter(|last| *last > 0),
            answer: Box::new(read_answer(word(4)?)?),
        }),
        "missed" => Ok(Answer::Missed),
        "clock-back" => Ok(Answer::ClockWentBack),
        "ahead" => Ok(Answer::TooFarAhead),
        "no-record" => Ok(Answer::Look(RecordLook::new(time_of(num(1)?), None))),
        "record" => {
            let bytes = |at: usize| match word(at)? {
                Value::BulkString(bytes) => Ok(bytes.clone()),
                _ => Err(strange()),
            };
            let state = match string(2)?.as_str() {
                "c" => RecordState::claimed(Duration::from_micros(num(3)?)),
                "o" => RecordState::Orphaned,
                "f" => RecordState::Released,
                "d" if words.len() > 9 => RecordState::completed(num(8)?, Some(bytes(9)?)),
                "d" => RecordState::completed(num(8)?, None),
                _ => return Err(strange()),
            };
            let print = Fingerprint::try_from(bytes(6)?).map_err(|_| strange())?;
            let expires_in = Duration::from_millis(num(7)?);
            let record = RecordView::new(state, attempt(4)?, num(5)?, expires_in, print);
            Ok(Answer::Look(RecordLook::new(time_of(num(1)?), Some(record))))
        }
        "forgotten" => Ok(Answer::Forget(ForgetReply::Forgotten)),
        "missing" => Ok(Answer::Forget(ForgetReply::Missing)),
        "live" => Ok(Answer::Forget(ForgetReply::Claimed {
            remaining: Duration::from_micros(num(1)?),
            attempt: attempt(2)?,
            fence: num(3)?,
        })),
        "orphan" => Ok(Answer::Orphan { attempt: attempt(1)? }),
        "again" => Ok(Answer::Again),
        "done" => Ok(Answer::Done {
            told: receivers(1)?.is_some(),
        }),
        "not-owner" => Ok(Answer::NotOwner),
        "taken" => {
            let found = string(1)?;
            let article = match found.as_str() {
                "hash" => "other data (a hash)".to_owned(),
                // This user may not ask.
                "unknown" => "other data".to_owned(),
                found => format!("a {found}"),
            };
            Err(StoreError::not_done(
                Reason::KeyTaken(article.clone()),
                format!("the key holds {article}"),
            ))
        }
        "failed" => Err(refused(&string(1)?)),
        name => permits::read(name, |at| signed(words.get(at)?)).ok_or_else(strange),
    }
}

fn bytes(value: &Value) -> Result<Vec<u8>, StoreError> {
    match value {
        Value::BulkString(bytes) => Ok(bytes.clone()),
        _ => Err(strange()),
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
