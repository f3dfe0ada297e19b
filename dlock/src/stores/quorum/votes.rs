//! The replies of a quorum's members to an acquire, and what follows from them.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use super::Member;
use crate::base::broken;
use crate::store::member;
use crate::store::{AcquireReply, Granted, Outcome, Reason, StoreError};

/// The time after which a failed member is expected back.
const FAILS_FOR: Duration = Duration::from_millis(50);

/// How many members are a majority.
pub(super) fn majority(members: usize) -> usize {
    if broken!(QuorumOfAMinority) {
        return members / 2;
    }
    members / 2 + 1
}

/// The reply of one member.
#[derive(Debug)]
pub(super) enum Vote {
    Granted {
        token: u64,
    },
    Busy {
        remaining: Option<Duration>,
    },
    Abstains {
        votes_in: Duration,
    },
    /// Too many of the others abstain.
    NotAsked,
    Failed(StoreError),
}

impl Vote {
    pub(super) fn of(answer: Result<member::Vote, StoreError>) -> Vote {
        match answer {
            Ok(member::Vote::Cast(AcquireReply::Acquired(Granted { lease: Some(_), .. }))) => Vote::Failed(
                StoreError::unknown("it gave another lease than was asked for, so it has no vote"),
            ),
            Ok(member::Vote::Cast(AcquireReply::Acquired(granted))) => Vote::Granted {
                token: granted.first_token,
            },
            Ok(member::Vote::Cast(in_the_way)) => Vote::Busy {
                remaining: in_the_way.busy_for(),
            },
            Ok(member::Vote::Abstained { votes_in }) => Vote::Abstains { votes_in },
            Err(error) => Vote::Failed(error),
        }
    }

    /// Whether the member said that it is not available.
    fn declines(&self) -> bool {
        matches!(self, Vote::Busy { .. } | Vote::Abstains { .. })
    }
}

/// The decision.
pub(super) enum Verdict {
    Granted {
        token: u64,
    },
    /// A majority may become available within this time.
    Busy {
        remaining: Option<Duration>,
    },
    Failed(StoreError),
}

/// The replies of all of them.
pub(super) struct Votes<'a> {
    members: &'a [Member],
    votes: Vec<Option<Vote>>,
}

impl<'a> Votes<'a> {
    pub(super) fn new(members: &'a [Member]) -> Votes<'a> {
        Votes {
            members,
            votes: members.iter().map(|_| None).collect(),
        }
    }

    pub(super) fn put(&mut self, at: usize, vote: Vote) {
        self.votes[at] = Some(vote);
    }

    fn majority(&self) -> usize {
        majority(self.members.len())
    }

    /// Returns the members that granted it.
    pub(super) fn granted(&self) -> impl Iterator<Item = usize> {
        let granted = |vote: &Option<Vote>| matches!(vote, Some(Vote::Granted { .. }));
        (0..self.votes.len()).filter(move |at| granted(&self.votes[*at]))
    }

    /// Returns the members that have another holder.
    pub(super) fn busy(&self) -> impl Iterator<Item = usize> {
        let busy = |vote: &Option<Vote>| matches!(vote, Some(Vote::Busy { .. }));
        (0..self.votes.len()).filter(move |at| busy(&self.votes[*at]))
    }

    /// Returns the members that may have granted it, or may still do so.
    pub(super) fn in_doubt(&self) -> impl Iterator<Item = usize> {
        let in_doubt = |vote: &Option<Vote>| match vote {
            Some(Vote::Failed(error)) => error.outcome == Outcome::Unknown,
            vote => vote.is_none(),
        };
        (0..self.votes.len()).filter(move |at| in_doubt(&self.votes[*at]))
    }

    /// Whether a majority has granted it.
    pub(super) fn are_for_it(&self) -> bool {
        self.granted().count() >= self.majority()
    }

    /// Whether the missing replies can change nothing.
    pub(super) fn is_decided(&self) -> bool {
        let open = self.votes.iter().filter(|vote| vote.is_none()).count();
        self.are_for_it() || self.granted().count() + open < self.majority()
    }

    /// Whether the members that have answered are a majority, and one of them may not grant it.
    pub(super) fn are_contested(&self) -> bool {
        let mut answered = self.votes.iter().flatten();
        answered.clone().count() >= self.majority() && answered.any(Vote::declines)
    }

    pub(super) fn verdict(&self) -> Verdict {
        let majority = self.majority();
        let tokens = self.votes.iter().flatten().filter_map(|vote| match vote {
            Vote::Granted { token } => Some(*token),
            _ => None,
        });
        let granted = tokens.clone().count();
        if granted >= majority {
            let token = tokens.max().unwrap_or_default();
            return Verdict::Granted { token };
        }
        // When each of the others may grant it.
        let mut times: Vec<_> = self
            .votes
            .iter()
            .filter_map(|vote| match vote {
                Some(Vote::Busy { remaining }) => Some(*remaining),
                Some(Vote::Abstains { votes_in }) => Some(Some(*votes_in)),
                // It may be as good as the best of them.
                None | Some(Vote::NotAsked) => Some(Some(Duration::ZERO)),
                _ => None,
            })
            .map(|time| time.unwrap_or(Duration::MAX))
            .collect();
        // It is "busy" because a member said so, not because some were not asked.
        let is_said = self.votes.iter().flatten().any(Vote::declines);
        let last = majority - granted - 1;
        if !is_said || times.len() <= last {
            return Verdict::Failed(self.failure());
        }
        // Members that fail do not make it busy, but may be among the first that grant it.
        let fails = |vote: &&Vote| matches!(vote, Vote::Failed(_));
        times.extend(self.votes.iter().flatten().filter(fails).map(|_| FAILS_FOR));
        times.sort();
        Verdict::Busy {
            remaining: Some(times[last]).filter(|time| *time < Duration::MAX),
        }
    }

    /// Returns the members that abstain or fail, and for how long they are too many for a majority, if they are.
    pub(super) fn abstention(&self) -> Option<(Duration, Arc<[usize]>)> {
        let abstains = |(at, vote): (usize, &Option<Vote>)| match vote {
            Some(Vote::Abstains { votes_in }) => Some((*votes_in, at)),
            Some(Vote::Failed(_)) => Some((FAILS_FOR, at)),
            _ => None,
        };
        let mut all: Vec<_> = self.votes.iter().enumerate().filter_map(abstains).collect();
        all.sort_unstable();
        let others = self.votes.len() - all.len();
        let last = self.majority().checked_sub(others + 1)?;
        let (left, _) = *all.get(last)?;
        Some((left, all.into_iter().map(|(_, at)| at).collect()))
    }

    fn failure(&self) -> StoreError {
        let errors = self.votes.iter().flatten().filter_map(|vote| match vote {
            Vote::Failed(error) => Some(error),
            _ => None,
        });
        // Every grant, certain or possible, must be released.
        let unknown = self.granted().chain(self.in_doubt()).next().is_some();
        let lasting = errors.clone().find(|error| !error.is_passing());
        let first = errors.clone().next();
        StoreError {
            outcome: if unknown {
                Outcome::Unknown
            } else {
                Outcome::NotDone
            },
            reason: lasting
                .or(first)
                .map_or(Reason::Unreachable, |error| error.reason.clone()),
            message: self.told(),
            source: first.and_then(|error| error.source.clone()),
        }
    }

    /// The replies, by member.
    pub(super) fn told(&self) -> String {
        let (granted, all) = (self.granted().count(), self.members.len());
        let mut told = format!("{granted} of {all} servers granted it");
        for (member, vote) in self.members.iter().zip(&self.votes) {
            let _ = write!(told, "; {}: ", member.name);
            let _ = match vote {
                Some(Vote::Granted { .. }) => write!(told, "granted"),
                Some(Vote::Busy { remaining: None }) => write!(told, "busy"),
                Some(Vote::Busy {
                    remaining: Some(left),
                }) => write!(told, "busy for {left:.1?} at most unless renewed"),
                Some(Vote::Abstains { votes_in }) => write!(
                    told,
                    "votes in {votes_in:.1?}, since it may have lost locks before it started"
                ),
                Some(Vote::Failed(error)) => write!(told, "{error}"),
                Some(Vote::NotAsked) => write!(told, "not asked, since too few of the others vote"),
                None => write!(told, "not heard of yet"),
            };
        }
        told
    }
}
