//! Redirections and temporary refusals. The steps of such a call were not carried out, and go on to the named server,
//! or are held back for a moment; their timeout continues.

use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::time::Instant;

use super::actor::Actor;
use super::failure::{is_read_only, serves_nothing};
use super::responses::answer_error;
use super::{Queuing, Step};
use crate::base::chance;
use crate::base::clock;
use crate::store::{Outcome, Reason, StoreError};
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::connect::{has_shards, is_of_a_cluster};
use crate::stores::redis::script::{Answer, DOWN, NOT_LOCAL};

/// The shortest and the longest time for which a step is held back.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));
/// A step that is redirected more often than this is held back each time: its servers do not agree yet.
const HOPS: u32 = 2;

impl Queuing {
    /// Not now: the more often, the longer the pause.
    pub(super) fn hold_back(&mut self, now: Instant) {
        let pause = (PAUSES.0 * (1 << self.hops.min(8))).min(PAUSES.1);
        self.not_before = Some(now + chance::shortened(pause));
        self.hops = self.hops.saturating_add(1);
    }

    /// Elsewhere.
    fn send_on(&mut self, now: Instant) {
        match self.hops {
            ..HOPS => self.hops += 1,
            _ => self.hold_back(now),
        }
    }
}

impl Actor {
    /// Redirects the steps, or holds them back, if the error says so; otherwise returns them.
    pub(super) fn redirected(&mut self, error: &RedisError, steps: Vec<Step>) -> Result<(), Vec<Step>> {
        use ServerErrorKind as S;
        let (Some(cluster), ErrorKind::Server(kind)) = (self.cluster(), error.kind()) else {
            return Err(steps);
        };
        let now = clock::now();
        let alone = steps.len() == 1;
        match kind {
            S::Moved => {
                let Some((to, slot)) = Slot::redirected(error) else {
                    return Err(steps);
                };
                let mut steps = self.not_carried_out(steps);
                for step in &mut steps {
                    step.send_on(now);
                    step.asking = false;
                }
                cluster.moved(self.part.lane, slot, to, steps);
            }
            S::Ask => {
                let Some((to, _)) = Slot::redirected(error) else {
                    return Err(steps);
                };
                let steps = self.not_carried_out(steps).into_iter();
                let (mut staying, mut visiting): (Vec<_>, Vec<_>) =
                    steps.partition(|step| step.call.has_companions());
                staying.iter_mut().for_each(|step| step.alone = true);
                // They find all their keys on one server only once the migration of the slot has ended.
                self.later(
                    staying,
                    &format!("the slot is on its way to another server: {error}"),
                );
                for step in &mut visiting {
                    step.send_on(now);
                    (step.asking, step.alone) = (true, true);
                }
                if !visiting.is_empty() {
                    cluster.ask_at(self.part.lane, to, visiting);
                }
            }
            // Its keys are on two servers at the moment. A step with a single key finds it.
            S::TryAgain if !alone => {
                let mut steps = self.not_carried_out(steps);
                steps.iter_mut().for_each(|step| step.alone = true);
                self.send_queue.put_back(steps);
            }
            S::TryAgain | S::ClusterDown | S::MasterDown | S::BusyLoading => {
                if kind != S::TryAgain {
                    cluster.look();
                }
                let steps = self.not_carried_out(steps);
                self.later(steps, &format!("{error}{}", hint(kind)));
            }
            _ => return Err(steps),
        }
        Ok(())
    }

    /// Resends steps of which nothing was carried out, a little later.
    fn later(&mut self, mut steps: Vec<Step>, why: &str) {
        let (now, why) = (clock::now(), format!("{}: {why}", self.whereabouts()));
        for step in &mut steps {
            step.hold_back(now);
            step.held_up = Some(why.clone());
        }
        self.once_more(steps);
    }

    /// Queues it for resending: from here, or, for steps of other servers, from where they belong.
    fn once_more(&mut self, steps: Vec<Step>) {
        let (mut visiting, own): (Vec<_>, Vec<_>) = steps.into_iter().partition(|step| step.asking);
        self.send_queue.put_back(own);
        if !visiting.is_empty()
            && let Some(cluster) = self.cluster()
        {
            visiting.iter_mut().for_each(|step| step.asking = false);
            cluster.reroute(visiting);
        }
    }

    /// A step that found another key than its own on another server did nothing, and is tried again.
    pub(super) fn is_elsewhere(&self, error: &StoreError) -> bool {
        self.part.cluster.is_some()
            && error.outcome == Outcome::NotDone
            && error.reason == Reason::Unreachable
            && (error.message.contains(NOT_LOCAL) || error.message.contains(DOWN))
    }

    /// Puts a step that did nothing back into the send queue, for a little later.
    pub(super) fn try_again(&mut self, mut step: Step, why: &StoreError) {
        step.sent -= 1;
        step.alone = true;
        self.later(vec![step], &why.message);
    }

    /// The error of a step on a server that should be the master and no longer is.
    pub(super) fn demotion(&self, answer: &Result<Answer, StoreError>) -> Option<String> {
        let demoted = |error: &&StoreError| self.is_demoted(error);
        let error = match answer {
            Ok(Answer::Renewals(all)) => all.iter().filter_map(|one| one.as_ref().err()).find(demoted),
            other => answer_error(other).filter(demoted),
        };
        error.map(|error| error.message.clone())
    }

    /// Whether the server, which should be the master, no longer is. A server of a Cluster redirects instead.
    ///
    /// A former master may serve nothing at all, for as long as it copies the data of the new one. A master that loads its
    /// own data says the same: then the next connection leads to it again.
    pub(super) fn is_demoted(&self, error: &StoreError) -> bool {
        self.part.cluster.is_none()
            && error.outcome == Outcome::NotDone
            && (is_read_only(error) || self.was_master && serves_nothing(error))
    }

    /// The error for a reply that only a Cluster server gives, when the URL names a single server.
    pub(super) fn is_of_a_cluster(&self, error: &RedisError) -> Option<StoreError> {
        use ServerErrorKind as S;
        let says_so = matches!(
            error.kind(),
            ErrorKind::Server(S::CrossSlot | S::Moved | S::Ask | S::ClusterDown)
        );
        let address = self
            .address
            .as_ref()
            .filter(|_| says_so && self.part.cluster.is_none())?;
        // A server that says what it is would have been refused as a node of a Cluster.
        let is_known = !self.run_id.is_empty();
        Some(match error.kind() {
            ErrorKind::Server(S::CrossSlot) if is_known => has_shards(address),
            _ => is_of_a_cluster(&self.connector.access, address),
        })
    }
}

fn hint(kind: ServerErrorKind) -> &'static str {
    match kind {
        ServerErrorKind::ClusterDown => {
            " (a shard is down or has no server; with cluster-require-full-coverage no, the others would go on)"
        }
        _ => "",
    }
}
