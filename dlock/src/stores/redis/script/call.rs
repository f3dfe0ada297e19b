//! The requests to the script, and their arguments.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{capped, channel_of, id, left, micros, millis};
use crate::store::counter::{CounterRequest, CounterStep};
use crate::store::records::{ClaimRequest, ClaimToken, OnOrphan, SlotRequest};
use crate::store::slots::micros_of;
use crate::store::{AcquireRequest, GrantId};
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::command::Command;
use crate::stores::redis::fence::Fence;
use crate::stores::redis::kinds::KindStep;
use crate::stores::redis::operations::OperationStep;
use crate::stores::redis::permits;

/// The time since which a member of a quorum has its data.
const VOTER: &str = "dlock:voter";

/// One step on one key, or one with many keys.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The key as the server knows it; for a step with many keys the first.
    pub(crate) key: Arc<str>,
    /// Its slot in a Cluster: all steps of a call are in one slot.
    pub(crate) slot: Option<Slot>,
    pub(crate) verb: Verb,
    /// For an acquire on a member of a quorum: how long the member must have been up with its data, or else it
    /// abstains.
    pub(crate) vote_after: Option<Duration>,
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

/// The acquire of a plain lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlainAcquire {
    pub(crate) grant: GrantId,
    /// In ms.
    pub(crate) lease: u64,
    /// How many fencing tokens it asks for, at least 1.
    pub(crate) tokens: u32,
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
        /// Until when the key stays held.
        keep_until: Option<Instant>,
        /// Whether it undoes an acquire that may have been refused.
        undoes_acquire: bool,
    },
    /// All of these or none; never empty.
    All(Vec<OneAcquire>),
    /// Renewals of plain locks, each with a separate answer; never empty.
    Renew {
        all: Arc<Vec<OneRenewal>>,
        lease: Duration,
    },
    /// A step of another kind with its own procedure.
    As(KindStep),
    /// Makes future fencing tokens greater than this one, if the grant with this field still exists.
    RaiseFence {
        field: String,
        at_least: u64,
    },
    Count(CounterRequest),
    /// On an entry of a client.
    Entry(Box<OperationStep>),
    Inspect,
    /// Ends any hold; only that of this holder, if one is named.
    Force(Option<String>),
    Claim(Box<ClaimRequest>),
    ClaimSlot(Box<ClaimRequest>, SlotRequest),
    /// Reads a record, with its response or without.
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

/// The data that a record keeps for its user: opaque bytes, not to be shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Response(pub(crate) Vec<u8>);

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Call {
    /// Whether sending it twice has the same effect as sending it once.
    pub(crate) fn is_repeatable(&self) -> bool {
        match &self.verb {
            Verb::Force(_) | Verb::ForgetRecord => false,
            Verb::Entry(step) => step.is_repeatable(),
            _ => !self.is_acquire(),
        }
    }

    /// Whether it extends leases.
    pub(crate) fn is_renewal(&self) -> bool {
        matches!(self.verb, Verb::Renew { .. } | Verb::As(KindStep::Renew(_)))
    }

    /// The grant that this releases.
    pub(crate) fn releases(&self) -> Option<GrantId> {
        match &self.verb {
            Verb::Release { grant, .. } => Some(*grant),
            Verb::As(step) => step.releases(),
            _ => None,
        }
    }

    /// Whether it takes locks.
    pub(crate) fn is_acquire(&self) -> bool {
        matches!(
            self.verb,
            Verb::Acquire { .. } | Verb::As(KindStep::Acquire(_)) | Verb::All(_)
        )
    }

    /// The ids under which this takes something that may have to be released later.
    pub(crate) fn takes(&self) -> Vec<String> {
        let acquires = self.acquires().into_iter().map(|id| id.to_string());
        acquires.chain(self.claims().map(str::to_owned)).collect()
    }

    /// The ids under which it takes locks and queue positions.
    pub(crate) fn acquires(&self) -> Vec<GrantId> {
        match &self.verb {
            Verb::Acquire { grant, .. } => vec![*grant],
            Verb::As(step) => step.acquires().collect(),
            Verb::All(all) => all.iter().flat_map(|one| one.step.acquires()).collect(),
            _ => Vec::new(),
        }
    }

    /// The id of a claim: it may be resent, and none of its copies takes effect after its time.
    pub(crate) fn claims(&self) -> Option<&str> {
        match &self.verb {
            Verb::Claim(request) | Verb::ClaimSlot(request, _) => Some(request.token.as_str()),
            _ => None,
        }
    }

    /// The id of a claim that this ends.
    pub(crate) fn ends_claim(&self) -> Option<&str> {
        match &self.verb {
            Verb::Complete { token, .. } | Verb::GiveBack { token, .. } => Some(token.as_str()),
            _ => None,
        }
    }

    /// Whether an earlier copy of it may have done what this one could not.
    pub(crate) fn may_be_done_before(&self) -> bool {
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
    pub(crate) fn takes_token(&self) -> bool {
        self.is_acquire()
            || matches!(
                self.verb,
                Verb::Claim(_) | Verb::ClaimSlot(..) | Verb::RaiseFence { .. }
            )
    }

    /// Whether it begins something: then it can be refused if too many wait already.
    pub(crate) fn may_be_turned_away(&self) -> bool {
        match &self.verb {
            Verb::Claim(_) | Verb::ClaimSlot(..) | Verb::Inspect | Verb::Force(_) | Verb::Entry(_) => true,
            Verb::LookAtRecord { .. } | Verb::ForgetRecord => true,
            Verb::Count(request) => !matches!(request.step, CounterStep::Give { .. }),
            _ => self.is_acquire(),
        }
    }

    /// See [`KindStep::is_cheaper_in_company`].
    pub(crate) fn is_cheaper_in_company(&self) -> bool {
        matches!(&self.verb, Verb::As(step) if step.is_cheaper_in_company())
    }

    /// See [`KindStep::joins_queue`].
    pub(crate) fn joins_queue(&self) -> bool {
        matches!(&self.verb, Verb::As(step) if step.joins_queue())
    }

    /// How many locks it concerns.
    pub(crate) fn width(&self) -> usize {
        match &self.verb {
            Verb::Renew { all, .. } => all.len(),
            Verb::All(all) => all.len(),
            _ => 1 + usize::from(self.vote_after.is_some()),
        }
    }

    /// The keys that it concerns.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
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

    /// Whether it may find or create keys besides the named one. A server that receives a slot treats keys
    /// that have not arrived yet as missing.
    pub(crate) fn has_companions(&self) -> bool {
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

    /// The key whose companions it would create in a Cluster slot other than the key's own, so that it could never be
    /// carried out as a whole.
    pub(crate) fn is_parted(&self) -> Option<&str> {
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

    /// How many locks it acquires, and the total of fencing tokens that it needs.
    pub(super) fn wants(&self) -> (u32, u64) {
        match &self.verb {
            Verb::Acquire { tokens, .. } => (1, u64::from((*tokens).max(1))),
            Verb::As(KindStep::Acquire(request)) => (1, u64::from(request.tokens.max(1))),
            Verb::All(all) => all.iter().fold((0, 0), |(count, tokens), one| {
                (count + 1, tokens + u64::from(one.tokens))
            }),
            _ => (0, 0),
        }
    }

    /// Returns the grant, if this releases a plain or fenced lock at once, outside a Cluster.
    pub(crate) fn plain_release(&self) -> Option<GrantId> {
        match &self.verb {
            Verb::Release {
                grant, keep_until, ..
            } if self.slot.is_none() && left(*keep_until).is_zero() => Some(*grant),
            _ => None,
        }
    }

    /// Returns the acquire, if this is one of a plain lock alone, outside a Cluster and a quorum.
    pub(crate) fn plain_acquire(&self) -> Option<PlainAcquire> {
        match self.verb {
            Verb::Acquire { grant, lease, tokens } if self.slot.is_none() && self.vote_after.is_none() => {
                Some(PlainAcquire {
                    grant,
                    lease: millis(capped(lease)),
                    tokens: tokens.max(1),
                })
            }
            _ => None,
        }
    }

    /// Whether it undoes an acquire that may have been refused.
    pub(crate) fn undoes_acquire(&self) -> bool {
        matches!(
            self.verb,
            Verb::Release {
                undoes_acquire: true,
                ..
            }
        )
    }

    /// Writes it as a separate call, if one of the short forms fits.
    pub(super) fn write_alone(&self, refuse_after: u64, fence: &Fence, cmd: &mut Command) -> bool {
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
            (Verb::Release { .. }, None) => {
                let Some(grant) = self.plain_release() else {
                    return false;
                };
                cmd.arg(1).arg(&*self.key).arg("release");
                cmd.arg(id(grant, &mut [0; 57]));
                cmd.joined(&channel_of(&self.key));
            }
            _ => return false,
        }
        true
    }

    /// Its share of the server's time, in steps on one lock.
    pub(crate) fn work(&self) -> usize {
        match &self.verb {
            Verb::As(step) => step.work(),
            _ => self.width(),
        }
    }

    /// How many bytes it adds to a call, in addition to those of every step.
    pub(crate) fn weight(&self) -> usize {
        match &self.verb {
            Verb::Complete { response, .. } => response.0.len(),
            Verb::As(step) => step.weight(),
            Verb::Entry(step) => step.weight(),
            _ => 0,
        }
    }

    pub(super) fn write(&self, refuse_after: u64, run_id: &str, cmd: &mut Command) {
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
            Verb::Release {
                grant, keep_until, ..
            } => {
                match millis(left(*keep_until)) {
                    0 => cmd.arg("release").arg(id(*grant, &mut [0; 57])),
                    keep => {
                        cmd.arg("keep").arg(3);
                        cmd.arg(id(*grant, &mut [0; 57])).arg(keep)
                    }
                };
                cmd.joined(&channel_of(&self.key));
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
                cmd.joined(&channel_of(&self.key)).arg(refuse_after).arg(only);
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
