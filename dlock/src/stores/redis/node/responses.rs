//! The outcomes of steps: answered, failed, resent, or remembered because a copy may still take effect.

use std::collections::HashSet;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use super::actor::Actor;
use super::by_commands;
use super::failure::{broke, classify, is_broken, no_answer};
use super::in_flight::{Batch, CallForm, InFlight, Outcome as CallOutcome};
use super::replicas::ConnectionRole;
use super::undos::NO_CALL;
use super::{Done, Step};
use crate::base::clock;
use crate::base::observed::log;
use crate::base::waking::reply_to;
use crate::store::{GrantId, Outcome, Reason, StoreError};
use crate::stores::redis::script::{self, Answer, By, Call, PlainAcquire, Verb};

/// Why an acquire is not sent again.
const GIVEN_UP: &str = "its caller has given it up";

/// What to do after a call returned.
pub(super) enum After {
    Fine,
    /// The server does not have the script: send the same steps again, with its text.
    Again(Batch, ConnectionRole),
    Broken(String),
}

/// What is known about a call that was carried out.
struct Response {
    /// When, by the server's clock (µs).
    server_time: u64,
    /// See [`InFlight::overtook`].
    overtook: bool,
    /// See [`InFlight::round`].
    round: u64,
}

impl Actor {
    /// Fails timed-out steps, and queues due ones again.
    pub(super) fn look_at_the_clock(&mut self) {
        let now = clock::now();
        while self
            .later
            .first_key_value()
            .is_some_and(|((at, _), _)| *at <= now)
        {
            // At the back, where it is the last to time out.
            if let Some((_, step)) = self.later.pop_first() {
                self.send_queue.push(step);
            }
        }
        while let Some(mut step) = self.send_queue.pop_overdue(now) {
            let why = step.held_up.take().unwrap_or_else(|| self.waited_because());
            let error = match step.sent {
                0 => StoreError::not_done(Reason::Unreachable, why),
                _ => StoreError::unknown(why),
            };
            self.fail(&mut step, error);
        }
        while self.plain.front().is_some_and(|plain| plain.deadline <= now) {
            if let Some(plain) = self.plain.pop_front() {
                let error = StoreError::not_done(Reason::Unreachable, self.waited_because());
                reply_to(plain.reply, Err(error));
            }
        }
        let mut calls = std::mem::take(&mut self.calls);
        for call in calls.iter_mut().filter(|call| call.due <= now) {
            let mut due = call.until;
            if let Batch::Steps(steps) = &mut call.batch {
                for step in steps.iter_mut().filter(|step| step.reply.is_some()) {
                    if step.deadline <= now {
                        self.fail(step, no_answer());
                    } else {
                        due = due.min(step.deadline);
                    }
                }
            }
            call.due = due;
        }
        self.calls = calls;
    }

    fn waited_because(&self) -> String {
        match self.trouble.as_str() {
            "" => "it had to wait too long".to_owned(),
            trouble => trouble.to_owned(),
        }
    }

    /// Answers a step with a failure, and remembers copies that may still take effect.
    pub(super) fn fail(&mut self, step: &mut Step, mut error: StoreError) {
        step.admit(&mut error);
        if error.outcome == Outcome::Unknown {
            for id in step.call.takes() {
                self.late_copies.remember(&id, step.refuse_after);
            }
        }
        let Some(reply) = step.reply.take() else { return };
        if step.call.releases().is_some() && error.is_passing() && !reply.is_closed() {
            error.outcome = Outcome::Unknown;
            self.keep_release(step.call.clone());
        }
        let is_abandoned_undo = step.call.undoes_acquire() && reply.is_closed() && error.is_passing();
        if is_abandoned_undo && self.former_connections.may_have_acquires() {
            self.undos.remember(NO_CALL, step.call.clone());
        }
        if let Verb::GiveBack { token, .. } = &step.call.verb
            && reply.is_closed()
            && error.is_outlasted()
            && self.late_copies.get(token.as_str()).is_some()
        {
            self.release_again(step.call.clone(), self.connector.access.patience());
        }
        reply.answer(Err(error));
    }

    /// A claim is sent again, and its release may have overtaken it.
    fn remember_claim(&mut self, step: &Step) {
        if let Some(id) = step.call.claims() {
            self.late_copies.remember(id, step.refuse_after);
        }
    }

    /// Releases a claim after a while, without a waiting caller.
    fn release_again(&mut self, call: Call, wait: Duration) {
        let at = clock::now() + wait.min(self.connector.access.patience() * 2);
        let deadline = at + self.connector.access.patience();
        self.next += 1;
        self.later
            .insert((at, self.next), Step::unanswered(call, deadline));
    }

    /// Handles the outcome of the call at this index.
    pub(super) fn answered_call(&mut self, at: usize, outcome: CallOutcome) -> After {
        let Some(call) = self.calls.remove(at) else {
            return After::Fine;
        };
        let slot = call.slot;
        let after = self.settle(call, outcome);
        // A call that is sent again here is in flight as before.
        if let Some(slot) = slot
            && !matches!(after, After::Again(..))
        {
            self.give_slots(&[slot]);
        }
        after
    }

    fn settle(&mut self, call: InFlight, outcome: CallOutcome) -> After {
        let mut steps = match call.batch {
            Batch::Steps(steps) => steps,
            Batch::Wait => return self.acknowledged(call.round, outcome),
            Batch::Plain(plain) => {
                let result = match outcome {
                    Some(result) => result.map_err(|error| classify(&error)),
                    None => Err(no_answer()),
                };
                reply_to(plain.reply, result);
                return match self.former_connections.stay_open() {
                    true => After::Broken("it does not close the former connection".to_owned()),
                    false => After::Fine,
                };
            }
        };
        match outcome {
            None => {
                self.undo_later(call.number, &steps);
                self.all_failed(&mut steps, &no_answer());
                After::Fine
            }
            Some(Err(error)) if is_broken(&error) => {
                self.write_off(Batch::Steps(steps));
                After::Broken(error.to_string())
            }
            Some(Err(error)) => {
                let unknown_script = error.kind() == ErrorKind::Server(ServerErrorKind::NoScript);
                if !unknown_script || call.form != CallForm::Script(By::Hash) {
                    return self.refused_call(&error, steps);
                }
                let steps = self.not_carried_out(steps);
                match steps.is_empty() {
                    true => After::Fine,
                    false => After::Again(Batch::Steps(steps), call.role),
                }
            }
            Some(Ok(replies)) => {
                let read = match call.form {
                    CallForm::Commands { tokens } => {
                        let outcomes = by_commands::read(&replies, &steps, tokens, &mut self.token_draws);
                        outcomes.map(|outcomes| (None, self.requeue_undone(&mut steps, outcomes)))
                    }
                    CallForm::Script(_) => {
                        let reply = script::read(replies, steps.iter().map(|step| &step.call));
                        reply.map(|reply| {
                            self.token_draws.observe(&steps, &reply, call.sent_at);
                            (reply.server_time, reply.answers)
                        })
                    }
                };
                let Some((told, answers)) = read else {
                    // What follows may belong to other calls.
                    self.write_off(Batch::Steps(steps));
                    return After::Broken(script::strange().message);
                };
                if steps.is_empty() {
                    return After::Fine;
                }
                // What was sent before has been carried out.
                self.undos.answered(call.number);
                if let Some(told) = told {
                    self.late_copies.server_says(told, call.sent_at);
                }
                let answered_call = Response {
                    server_time: told.unwrap_or_else(|| self.late_copies.server_time(call.sent_at)),
                    overtook: call.overtook,
                    round: call.round,
                };
                self.all_answered(steps, answers, answered_call)
            }
        }
    }

    /// Keeps the steps that commands have done, and returns their answers; queues the others again.
    fn requeue_undone(
        &mut self,
        steps: &mut Vec<Step>,
        outcomes: Vec<by_commands::Outcome>,
    ) -> Vec<Result<Answer, StoreError>> {
        use by_commands::Outcome::{Again, Done, NotDone, Refused, WithoutToken};

        let mut answers = Vec::with_capacity(outcomes.len());
        // Nearly always: the steps stay where they are in memory.
        if outcomes.iter().all(|outcome| matches!(outcome, Done(_))) {
            answers.extend(outcomes.into_iter().filter_map(|outcome| match outcome {
                Done(answer) => Some(Ok(answer)),
                _ => None,
            }));
            return answers;
        }
        let (mut again, mut refused) = (Vec::new(), Vec::new());
        let mut released = None;
        let outcomes = std::mem::take(steps).into_iter().zip(outcomes);
        let done = outcomes.filter_map(|(mut step, outcome)| {
            step.by_script |= !matches!(outcome, Done(_) | Again);
            match outcome {
                Done(answer) => {
                    answers.push(Ok(answer));
                    return Some(step);
                }
                Again => again.push(step),
                _ if self.is_given_up(&step, &mut released) => {
                    let error = match outcome {
                        WithoutToken => StoreError::unknown(GIVEN_UP),
                        _ => StoreError::not_done(Reason::Unreachable, GIVEN_UP),
                    };
                    self.fail(&mut step, error);
                }
                NotDone => {
                    step.sent -= 1;
                    self.settle_undone(&step);
                    again.push(step);
                }
                Refused => refused.push(step),
                WithoutToken => {
                    (step.in_doubt, self.has_doubts) = (true, true);
                    // What they find busy may be free.
                    self.calls.iter_mut().for_each(|call| call.overtook = true);
                    undo_of(&step.call)
                        .into_iter()
                        .for_each(|undo| self.keep_release(undo));
                    again.push(step);
                }
            }
            None
        });
        *steps = done.collect();
        again.retain(|step| step.reply.is_some());
        if !refused.is_empty() {
            again.extend(self.not_carried_out(refused));
        }
        self.send_queue.put_back(again);
        answers
    }

    /// Whether this is an acquire of which a release waits or is in flight: sent again it would come behind that. `released` keeps
    /// the grants with a release, once they were looked for.
    fn is_given_up(&self, step: &Step, released: &mut Option<HashSet<GrantId>>) -> bool {
        let acquires = step.call.acquires();
        if acquires.is_empty() {
            return false;
        }
        let released = released.get_or_insert_with(|| {
            let in_flight = self.calls.iter().flat_map(|call| call.batch.all());
            let steps = in_flight.chain(self.send_queue.iter());
            steps.filter_map(|step| step.call.releases()).collect()
        });
        acquires.iter().any(|id| released.contains(id))
    }

    /// What an earlier copy of the acquire of this grant may have taken is released.
    fn resolve_doubt(&mut self, grant: GrantId) {
        self.has_doubts = false;
        let in_flight = self.calls.iter_mut().flat_map(|call| call.batch.all_mut());
        for step in in_flight.chain(self.send_queue.iter_mut()) {
            let is_its = step
                .call
                .plain_acquire()
                .is_some_and(|acquire| acquire.grant == grant);
            step.in_doubt &= !is_its;
            self.has_doubts |= step.in_doubt;
        }
    }

    /// Remembers to undo the acquires among the steps of this call, of which the outcome is unknown.
    fn undo_later(&mut self, call: u64, steps: &[Step]) {
        if self.former_connections.may_have_acquires() {
            let undos = steps.iter().filter_map(|step| undo_of(&step.call));
            undos.for_each(|undo| self.undos.remember(call, undo));
        }
    }

    /// Sends a release before everything else, for a while.
    pub(super) fn keep_release(&mut self, release: Call) {
        let deadline = clock::now() + self.connector.access.patience() * 4;
        self.send_queue.keep(Step::unanswered(release, deadline));
    }

    /// The server has refused a call as a whole, and carried out none of its steps.
    fn refused_call(&mut self, error: &RedisError, steps: Vec<Step>) -> After {
        let mut steps = match self.redirected(error, steps) {
            Ok(()) => return After::Fine,
            Err(steps) => steps,
        };
        let mut error = self.is_of_a_cluster(error).unwrap_or_else(|| classify(error));
        if self.is_demoted(&error) {
            self.was_demoted = true;
            match self.was_master {
                true => {
                    let steps = self.not_carried_out(steps);
                    self.send_queue.put_back(steps);
                }
                false => self.all_failed(&mut steps, &error),
            }
            return After::Broken(error.message);
        }
        if self.part.cluster.is_some() {
            error.message = format!("{}: {}", self.whereabouts(), error.message);
        }
        // Perhaps because of one of them.
        if error.is_refused() && steps.len() > 1 {
            let mut steps = self.not_carried_out(steps);
            steps.iter_mut().for_each(|step| step.alone = true);
            self.send_queue.put_back(steps);
        } else {
            self.all_failed(&mut steps, &error);
        }
        After::Fine
    }

    fn all_failed(&mut self, steps: &mut [Step], error: &StoreError) {
        steps.iter_mut().for_each(|step| self.fail(step, error.clone()));
    }

    /// None of these steps was carried out: those with a caller are resent, as if for the first time. Calls in flight may be
    /// carried out before them.
    pub(super) fn not_carried_out(&mut self, steps: Vec<Step>) -> Vec<Step> {
        for call in &mut self.calls {
            call.overtook = true;
        }
        let mut again = Vec::with_capacity(steps.len());
        let mut released = None;
        for mut step in steps {
            step.sent -= 1;
            self.settle_undone(&step);
            if step.reply.is_none() {
                continue;
            }
            if self.is_given_up(&step, &mut released) {
                self.fail(&mut step, StoreError::not_done(Reason::Unreachable, GIVEN_UP));
                continue;
            }
            self.remember_claim(&step);
            again.push(step);
        }
        again
    }

    /// A copy of this step was not carried out: if that was the only one, and its caller is gone, none will be.
    fn settle_undone(&mut self, step: &Step) {
        if step.reply.is_none() && step.sent == 0 {
            for id in step.call.takes() {
                self.late_copies.settle(&id);
            }
        }
    }

    fn all_answered(
        &mut self,
        steps: Vec<Step>,
        answers: Vec<Result<Answer, StoreError>>,
        answered_call: Response,
    ) -> After {
        let demotion = answers.iter().find_map(|answer| self.demotion(answer));
        self.was_demoted |= demotion.is_some();
        if let Some(trouble) = &demotion
            && self.was_master
        {
            // None of them had any effect.
            let steps = self.not_carried_out(steps);
            self.send_queue.put_back(steps);
            return After::Broken(trouble.clone());
        }
        let mut again = Vec::new();
        let mut released = None;
        for (mut step, answer) in steps.into_iter().zip(answers) {
            if let Some(error) = answer_error(&answer).filter(|error| self.is_elsewhere(error))
                && step.reply.is_some()
            {
                self.try_again(step, error);
                continue;
            }
            let once_more = match &answer {
                Ok(Answer::Again) => true,
                // It may have arrived before a release of our own that was ahead of it in the send queue. Sent once more, it
                // would be in the queue twice.
                Ok(answer) if answer.is_busy() => answered_call.overtook && !step.call.joins_queue(),
                _ => false,
            };
            if once_more && step.reply.is_some() && !self.is_given_up(&step, &mut released) {
                step.sent -= 1;
                self.remember_claim(&step);
                again.push(step);
            } else {
                self.answered(step, answer, &answered_call);
            }
        }
        self.send_queue.put_back(again);
        match demotion {
            Some(trouble) => After::Broken(trouble),
            None => {
                self.setbacks = 0;
                After::Fine
            }
        }
    }

    fn answered(&mut self, mut step: Step, answer: Result<Answer, StoreError>, answered_call: &Response) {
        let server_time = answered_call.server_time;
        if let Some(grant) = &step.call.releases() {
            // Nothing there: the acquire may still be in flight, and this release counts once it cannot be any more.
            if let Some(refuse_after) = self.late_copies.get(grant) {
                if matches!(answer, Ok(Answer::Gone)) && server_time <= refuse_after {
                    let wait = Duration::from_micros(refuse_after - server_time) + Duration::from_millis(1);
                    let at = clock::now() + wait.min(self.connector.access.patience() * 2);
                    step.deadline = at + self.connector.access.patience();
                    self.next += 1;
                    self.later.insert((at, self.next), step);
                    return;
                }
                // A refusal tells nothing about copies.
                if answer.is_ok() {
                    self.late_copies.settle(grant);
                }
            }
            if matches!(answer, Ok(Answer::Released { .. } | Answer::Gone)) {
                self.undos.released(*grant);
                if self.has_doubts {
                    self.resolve_doubt(*grant);
                }
            }
        }
        self.settle_claim(&step, &answer, server_time);
        if let Ok(Answer::Released { receivers: None }) = answer {
            log!(warn, key = %step.call.key, "a lock was released, but the server forbids to tell: waiters in other processes find out by looking");
        }
        if let Ok(Answer::Done { told: false }) = answer {
            log!(warn, key = %step.call.key, "a record was completed or released, but the server forbids notifications: its waiters find out by looking");
        }
        let answer = match answer {
            Ok(answer) => match self.unless_acknowledged_later(step, answer, answered_call.round) {
                Some((same, answer)) => {
                    step = same;
                    Ok(answer)
                }
                None => return,
            },
            Err(mut error) => {
                step.admit(&mut error);
                Err(error)
            }
        };
        let answer = match answer {
            // Perhaps by the earlier copy.
            Ok(answer) if step.in_doubt && !matches!(answer, Answer::Acquired { .. }) => {
                Err(StoreError::unknown("the last fencing token was lost"))
            }
            answer => answer,
        };
        let repeated = step.sent > 1;
        if let Some(reply) = step.reply.take() {
            self.answers
                .push(reply, answer.map(|answer| Done { answer, repeated }));
        }
        self.requests.reuse(step.end());
    }

    /// What an answer tells about copies of a claim that may be in flight.
    fn settle_claim(&mut self, step: &Step, answer: &Result<Answer, StoreError>, server_time: u64) {
        if let Some(id) = step.call.claims()
            && step.sent == 1
        {
            self.late_copies.settle(id);
        }
        let Some(id) = step.call.ends_claim() else { return };
        let Some(refuse_after) = self.late_copies.get(id) else {
            return;
        };
        match (&step.call.verb, answer) {
            // Released, but a copy of the claim may still arrive: release again when none can take effect any more.
            (Verb::GiveBack { .. }, _) if server_time <= refuse_after => {
                let wait = Duration::from_micros(refuse_after - server_time) + Duration::from_millis(1);
                self.release_again(step.call.clone(), wait);
            }
            // Every later copy finds the result.
            (Verb::GiveBack { .. }, _) | (_, Ok(Answer::Done { .. })) => self.late_copies.settle(id),
            _ => {}
        }
    }

    /// The connection broke under these: repeatable steps are resent, the others fail.
    pub(super) fn write_off(&mut self, batch: Batch) {
        let steps = match batch {
            Batch::Steps(steps) => steps,
            Batch::Plain(plain) => {
                reply_to(plain.reply, Err(broke()));
                return;
            }
            Batch::Wait => return,
        };
        self.undo_later(NO_CALL, &steps);
        let mut again = Vec::new();
        for mut step in steps {
            if step.call.is_repeatable() && step.reply.is_some() {
                self.remember_claim(&step);
                again.push(step);
            } else {
                self.fail(&mut step, broke());
            }
        }
        self.send_queue.put_back(again);
    }
}

/// Why a step was not done; for several locks, which lock was busy.
pub(super) fn answer_error(answer: &Result<Answer, StoreError>) -> Option<&StoreError> {
    match answer {
        Err(error) => Some(error),
        Ok(Answer::None { answer, .. }) => answer_error(answer),
        Ok(_) => None,
    }
}

/// The release that undoes this, if it is a plain acquire.
fn undo_of(acquire: &Call) -> Option<Call> {
    let PlainAcquire { grant, .. } = acquire.plain_acquire()?;
    let verb = Verb::Release {
        grant,
        keep_until: None,
        undoes_acquire: true,
    };
    Some(Call {
        verb,
        ..acquire.clone()
    })
}
