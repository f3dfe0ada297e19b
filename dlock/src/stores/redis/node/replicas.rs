//! Acknowledgements by replicas: with [`MinReplicas`], an acquire or a renewal counts only when enough replicas have
//! it.
//!
//! `WAIT` tells how many replicas have everything that its own connection wrote, and blocks later commands on that
//! connection until it is answered. So there is a second connection. As long as no `WAIT` is in flight there, all steps
//! use it, and one `WAIT` follows the steps that need acknowledgement. Until it is answered the other steps use the
//! usual connection, and those that need acknowledgement stay in the send queue.
//!
//! Steps of one key keep their order: a step uses neither connection while an earlier one is in the send queue, or in
//! flight on the other connection.

use std::collections::{HashSet, VecDeque};
use std::task::{Context, Poll};

use redis::{Cmd, RedisError, Value};
use tokio::time::Instant;

use super::actor::Actor;
use super::failure::{classify, is_broken, no_answer};
use super::in_flight::{Batch, CallForm, InFlight, Outcome as CallOutcome};
use super::responses::After;
use super::wire::{Replied, Wire};
use super::{Done, Step};
use crate::base::clock;
use crate::store::options::MinReplicas;
use crate::store::{Outcome, Reason, Renewal, StoreError};
use crate::stores::redis::command::Packed;
use crate::stores::redis::connect::Connected;
use crate::stores::redis::script::{Answer, By, Call};

/// The connections to a server.
pub(super) struct Wires {
    usual: Wire,
    acknowledged: Option<Wire>,
    /// Of the next call.
    number: u64,
}

/// Which connection a call uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionRole {
    Usual,
    Acknowledged,
}

impl Wires {
    pub(super) fn new(connected: Connected) -> Wires {
        Wires {
            usual: Wire::new(connected.link),
            acknowledged: connected.acknowledged.map(Wire::new),
            number: 0,
        }
    }

    fn wire(&mut self, role: ConnectionRole) -> &mut Wire {
        match (role, &mut self.acknowledged) {
            (ConnectionRole::Acknowledged, Some(wire)) => wire,
            _ => &mut self.usual,
        }
    }

    /// Sends a call, and numbers it. `asking` says that its slot is moving to this server.
    pub(super) fn send(&mut self, role: ConnectionRole, command: &Packed, asking: bool) -> u64 {
        let number = self.number;
        self.number += 1;
        match asking {
            true => self.wire(role).send_asking(command, number),
            false => self.wire(role).send(command, number),
        }
        number
    }

    /// As [`Wire::poll`] on each of them.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Replied, String>> {
        for wire in self.each() {
            if let Poll::Ready(found) = wire.poll(cx) {
                return Poll::Ready(found);
            }
        }
        Poll::Pending
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Wire> {
        self.acknowledged.iter_mut().chain([&mut self.usual])
    }
}

/// Steps that need acknowledgement, and those carried out but not yet acknowledged.
pub(super) struct Replicas {
    wanted: MinReplicas,
    /// The number of the next `WAIT`.
    round: u64,
    /// Whether a step was sent that needs it.
    owed: bool,
    /// Steps carried out by the server, with the number of the `WAIT` after each, in that order.
    done: VecDeque<(u64, Step, Answer)>,
}

impl Replicas {
    pub(super) fn new(wanted: MinReplicas) -> Replicas {
        Replicas {
            wanted,
            round: 0,
            owed: false,
            done: VecDeque::new(),
        }
    }

    /// The number of the `WAIT` after a call with these steps that is sent now.
    pub(super) fn send(&mut self, role: ConnectionRole, steps: &[Step]) -> u64 {
        self.owed |=
            role == ConnectionRole::Acknowledged && steps.iter().any(|step| step.call.is_acknowledged());
        self.round
    }

    /// Ends everything that was in flight on the connection.
    pub(super) fn drain(&mut self) -> Vec<Step> {
        self.owed = false;
        self.done.drain(..).map(|(_, step, _)| step).collect()
    }

    fn wait(&self) -> Cmd {
        let mut cmd = redis::cmd("WAIT");
        cmd.arg(self.wanted.count)
            .arg(self.wanted.within.as_millis() as u64);
        cmd
    }

    fn too_few(&self, acknowledged: i64) -> StoreError {
        let MinReplicas { count, within } = self.wanted;
        StoreError {
            // The server has it.
            outcome: Outcome::Unknown,
            reason: Reason::TooFewReplicas {
                acknowledged: u32::try_from(acknowledged).unwrap_or(0),
                wanted: count,
                within,
            },
            ..StoreError::unknown(format!(
                "{acknowledged} of the {count} replicas that min_replicas wants acknowledged it within {within:?}"
            ))
        }
    }
}

/// Which steps of the send queue may be sent now: all, if nothing needs acknowledgement.
#[derive(Default)]
pub(super) struct Gate {
    /// Steps that need acknowledgement may not.
    closed: bool,
    /// The keys of earlier steps.
    taken: HashSet<Box<str>>,
}

impl Gate {
    pub(super) fn lets(&mut self, step: &Step) -> bool {
        if !self.closed && self.taken.is_empty() {
            return true;
        }
        let is_behind = |taken: &HashSet<Box<str>>| step.call.keys().any(|key| taken.contains(key));
        let stays = (self.closed && step.call.is_acknowledged()) || is_behind(&self.taken);
        if stays {
            self.taken.extend(step.call.keys().map(Box::from));
        }
        !stays
    }
}

impl Call {
    /// Whether replicas must acknowledge it, if there are any.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.is_acquire() || self.is_renewal()
    }
}

impl Answer {
    /// Whether the step wrote data that replicas must have.
    fn is_granted(&self) -> bool {
        match self {
            Answer::Acquired { .. } | Answer::InLine { .. } | Answer::All(_) | Answer::Renewed => true,
            Answer::Renewals(all) => all.iter().any(|one| matches!(one, Ok(Renewal::Renewed))),
            _ => false,
        }
    }
}

impl Actor {
    /// The connection that steps use now.
    pub(super) fn role(&self) -> ConnectionRole {
        let asking = |call: &InFlight| matches!(call.batch, Batch::Wait);
        match &self.replicas {
            Some(_) if !self.calls.iter().any(asking) => ConnectionRole::Acknowledged,
            _ => ConnectionRole::Usual,
        }
    }

    /// What prevents steps from using this connection.
    pub(super) fn gate(&self, role: ConnectionRole) -> Gate {
        if self.replicas.is_none() {
            return Gate::default();
        }
        let others = self.calls.iter().filter(|call| call.role != role);
        let under_way = others.flat_map(|call| match &call.batch {
            Batch::Steps(steps) => steps.as_slice(),
            _ => &[],
        });
        Gate {
            closed: role == ConnectionRole::Usual,
            taken: under_way
                .flat_map(|step| step.call.keys())
                .map(Box::from)
                .collect(),
        }
    }

    /// Sends a `WAIT` after steps that need one.
    pub(super) fn ask_replicas(&mut self, wires: &mut Wires) {
        let timeout = self.connector.access.timeout;
        let Some(replicas) = self.replicas.as_mut().filter(|replicas| replicas.owed) else {
            return;
        };
        replicas.owed = false;
        let (cmd, round) = (replicas.wait(), replicas.round);
        replicas.round += 1;
        let now = clock::now();
        let until: Instant = now + replicas.wanted.within + timeout;
        let number = wires.send(ConnectionRole::Acknowledged, &Packed::from(&cmd), false);
        self.calls.push_back(InFlight {
            number,
            batch: Batch::Wait,
            role: ConnectionRole::Acknowledged,
            round,
            slot: None,
            form: CallForm::Script(By::Hash),
            sent_at: now,
            due: until,
            until,
            overtook: false,
        });
    }

    /// Keeps an answer until replicas have acknowledged the step; returns it if they need not.
    pub(super) fn unless_acknowledged_later(
        &mut self,
        step: Step,
        answer: Answer,
        round: u64,
    ) -> Option<(Step, Answer)> {
        let is_behind = |call: &InFlight| matches!(call.batch, Batch::Wait) && call.round >= round;
        let is_asked = self.calls.iter().any(is_behind);
        match &mut self.replicas {
            Some(replicas) if step.call.is_acknowledged() && answer.is_granted() => {
                // The `WAIT` after it may have been given up.
                replicas.owed |= !is_asked;
                replicas.done.push_back((round, step, answer));
                None
            }
            _ => Some((step, answer)),
        }
    }

    /// Handles the replicas' acknowledgement of everything that was sent before.
    pub(super) fn acknowledged(&mut self, round: u64, outcome: CallOutcome) -> After {
        let Some(replicas) = &mut self.replicas else {
            return After::Fine;
        };
        let verdict = match outcome {
            None => Err(no_answer()),
            Some(Ok(Value::Int(count))) if count >= i64::from(replicas.wanted.count) => Ok(()),
            Some(Ok(Value::Int(count))) => Err(replicas.too_few(count)),
            Some(Ok(_)) => Err(StoreError::unknown(
                "the server gave an answer to WAIT that makes no sense",
            )),
            // With the connection, everything unacknowledged fails.
            Some(Err(error)) if is_broken(&error) => return After::Broken(error.to_string()),
            Some(Err(error)) => Err(not_asked(&error)),
        };
        let ripe = replicas.done.iter().take_while(|(of, ..)| *of <= round).count();
        let ripe: Vec<_> = replicas.done.drain(..ripe).collect();
        for (_, mut step, answer) in ripe {
            let error = match &verdict {
                Ok(()) => None,
                Err(error) => Some(error.clone()),
            };
            let answer = match (answer, error) {
                (answer, None) => answer,
                (Answer::Renewals(all), Some(error)) => {
                    let doubted = |one| match one {
                        Ok(Renewal::Renewed) => Err(error.clone()),
                        other => other,
                    };
                    Answer::Renewals(all.into_iter().map(doubted).collect())
                }
                (_, Some(error)) => {
                    self.fail(&mut step, error);
                    continue;
                }
            };
            let repeated = step.sent > 1;
            if let Some(reply) = step.reply.take() {
                self.answers.push(reply, Ok(Done { answer, repeated }));
            }
        }
        After::Fine
    }
}

/// The server does not tell: the steps before it were done all the same.
fn not_asked(error: &RedisError) -> StoreError {
    let error = classify(error);
    StoreError {
        outcome: Outcome::Unknown,
        message: format!("min_replicas needs WAIT: {}", error.message),
        ..error
    }
}
