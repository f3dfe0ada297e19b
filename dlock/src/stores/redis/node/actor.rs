//! The task that owns the connection: what is sent, what is received, and what happens when nothing is.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use redis::{RedisError, Value};
use tokio::time::Instant;

use super::alarm::Alarm;
use super::contacts::SILENT;
use super::delivery::Answers;
use super::flow_control::{FlowControl, has_threads};
use super::former_connections::FormerConnections;
use super::in_flight::{Batch, CallForm, InFlight};
use super::inbox::Inbox;
use super::late_copies::LateCopies;
use super::replicas::Replicas;
use super::responses::After;
use super::send_queue::SendQueue;
use super::served::{End, Served};
use super::slot_migration::SlotMigrations;
use super::token_draws::TokenDraws;
use super::undos::Undos;
use super::{Part, Plain, Request, Standing, Step, Used};
use crate::base::clock;
use crate::store::StoreError;
use crate::store::url::Address;
use crate::stores::redis::cluster::Cluster;
use crate::stores::redis::connect::{Connected, Connector};
use crate::stores::redis::script::By;

/// How many requests are accepted before anything else is checked.
const MANY: usize = 1024;

enum Event {
    /// The answer to a call in flight.
    Response(usize, Result<Value, RedisError>),
    Disconnected(String),
    /// Another server has taken over from this one.
    Left,
    /// The outcome of connecting the spare.
    Spare(Result<Connected, StoreError>),
    /// Requests, or no handle is left that could send any.
    Asked(usize),
    Alarm,
    /// Several answers were delivered: lets their callers run.
    Delivered,
}

pub(super) struct Actor {
    pub(super) connector: Arc<Connector>,
    pub(super) part: Part,
    /// The server that was connected to last.
    pub(super) address: Option<Address>,
    pub(super) requests: Inbox<Request, Used>,
    /// Requests that are being accepted.
    taken: Vec<Request>,
    pub(super) send_queue: SendQueue,
    pub(super) moves: SlotMigrations,
    /// Whether it is to end.
    pub(super) retired: bool,
    pub(super) plain: VecDeque<Plain>,
    /// Releases to resend at their time.
    pub(super) later: BTreeMap<(Instant, u64), Step>,
    pub(super) next: u64,
    /// In the order in which they were sent, which is that of the answers.
    pub(super) calls: VecDeque<InFlight>,
    pub(super) late_copies: LateCopies,
    pub(super) flow_control: FlowControl,
    /// Whether steps wait for others that are sent along.
    pub(super) holds_back: bool,
    /// Whether the last call of commands left steps behind that need the script.
    pub(super) script_is_next: bool,
    /// Answers on their way to their callers.
    pub(super) answers: Answers,
    /// The state of acknowledgements by replicas, if configured.
    pub(super) replicas: Option<Replicas>,
    pub(super) standing: Arc<Standing>,
    /// The run id of the connected server process; empty if not permitted to ask.
    pub(super) run_id: String,
    /// That of the last one that was a master.
    pub(super) master_run_id: String,
    pub(super) token_draws: TokenDraws,
    pub(super) former_connections: FormerConnections,
    /// Of acquires by commands without an answer: for the next connection.
    pub(super) undos: Undos,
    /// Whether there are steps [in doubt](super::Queuing::in_doubt).
    pub(super) has_doubts: bool,
    /// A master was found at the address: a read-only replica there is a former master.
    pub(super) was_master: bool,
    /// Whether the last connected server is no longer a master, as far as it tells.
    pub(super) was_demoted: bool,
    /// Connections in a row that ended soon, and on which the server carried out nothing.
    pub(super) setbacks: u32,
    alarm: Alarm,
    /// The buffer for commands.
    pub(super) room: Vec<u8>,
    /// The trouble that ended the last connection, until there is another one.
    pub(super) trouble: String,
}

impl Actor {
    pub(super) fn new(
        connector: Connector,
        requests: Inbox<Request, Used>,
        part: Part,
        standing: Arc<Standing>,
    ) -> Actor {
        Actor {
            address: None,
            requests,
            taken: Vec::new(),
            send_queue: SendQueue::new(part.steps.clone()),
            part,
            moves: SlotMigrations::default(),
            retired: false,
            plain: VecDeque::new(),
            later: BTreeMap::new(),
            next: 0,
            calls: VecDeque::new(),
            late_copies: LateCopies::new(),
            flow_control: FlowControl::new(false, false),
            holds_back: false,
            script_is_next: false,
            answers: Answers::new(false),
            replicas: connector.access.replicas.map(Replicas::new),
            standing,
            run_id: String::new(),
            master_run_id: String::new(),
            token_draws: TokenDraws::default(),
            former_connections: FormerConnections::default(),
            undos: Undos::default(),
            has_doubts: false,
            was_master: !connector.endpoint.is_fixed(),
            was_demoted: false,
            setbacks: 0,
            alarm: Alarm::default(),
            room: Vec::new(),
            trouble: String::new(),
            connector: Arc::new(connector),
        }
    }

    /// Knows the slots, in a Cluster.
    pub(super) fn cluster(&self) -> Option<Arc<Cluster>> {
        self.part.cluster.as_ref()?.upgrade()
    }

    /// The server, for messages.
    pub(super) fn whereabouts(&self) -> String {
        self.connector.endpoint.to_string()
    }

    pub(super) async fn serve(&mut self, connected: Connected) -> End {
        let has_threads = has_threads();
        // In a Cluster, and where replicas acknowledge, calls wait for each other anyway.
        let in_parts = self.part.cluster.is_none() && self.replicas.is_none();
        self.flow_control = FlowControl::new(has_threads, in_parts);
        self.answers = Answers::new(has_threads);
        let mut served = Served::new(&self.connector, connected);
        let end = loop {
            if let ControlFlow::Break(end) = self.exchange(&mut served).await {
                break end;
            }
        };
        self.answers.deliver(usize::MAX);
        // The connection is dropped first, so that no more replies to the failed calls arrive.
        drop(served);
        if let Some(replicas) = &mut self.replicas {
            let steps = replicas.drain();
            self.write_off(Batch::Steps(steps));
        }
        for call in std::mem::take(&mut self.calls) {
            self.write_off(call.batch);
        }
        self.give_all_slots();
        end
    }

    /// Sends what may be sent, and handles the next event.
    async fn exchange(&mut self, served: &mut Served) -> ControlFlow<End> {
        if self.retired {
            return ControlFlow::Break(End::Broken);
        }
        self.depart(&mut served.wires);
        self.ask_replicas(&mut served.wires);
        let attention = [self.due(), self.spare_at(served), self.test_at(&served.contacts)];
        self.alarm.set(attention.into_iter().flatten().min());
        match poll_fn(|cx| self.poll_event(cx, served)).await {
            Event::Response(at, result) => {
                let after = self.responded(at, result, served);
                self.goes_on(after, served)
            }
            Event::Disconnected(trouble) => self.breaks(trouble),
            Event::Left => self.breaks("another server is the master now".to_owned()),
            // The address leads to another server now; the server in use will tell what it is.
            Event::Spare(Ok(connected)) if connected.is_replica && self.was_master => {
                ControlFlow::Continue(())
            }
            Event::Spare(Ok(connected)) => {
                self.trouble = "a connection that was idle is dead".to_owned();
                ControlFlow::Break(End::Replaced(Box::new(connected)))
            }
            Event::Spare(Err(_)) => ControlFlow::Continue(()),
            // What was held back for more to come is sent now.
            Event::Asked(0) if std::mem::take(&mut self.holds_back) => ControlFlow::Continue(()),
            Event::Asked(0) => ControlFlow::Break(End::Closed),
            Event::Asked(count) => {
                self.asked(count).await;
                ControlFlow::Continue(())
            }
            Event::Delivered => {
                let count = self.let_others_come().await;
                self.flow_control.came(count);
                ControlFlow::Continue(())
            }
            Event::Alarm => match self.alarmed(served) {
                Some(after) => self.goes_on(after, served),
                None => ControlFlow::Continue(()),
            },
        }
    }

    fn responded(&mut self, at: usize, result: Result<Value, RedisError>, served: &mut Served) -> After {
        let _reading = clock::one_reading();
        let call = &self.calls[at];
        let round_trip = clock::now().saturating_duration_since(call.sent_at);
        served.contacts.answered(call.role);
        (served.spare, served.was_tried) = (None, false);
        self.flow_control.answered_call(round_trip);
        self.answered_call(at, Some(result))
    }

    /// Accepts the requests that were taken from the channel.
    async fn asked(&mut self, count: usize) {
        let mut taken = std::mem::take(&mut self.taken);
        taken.drain(..).for_each(|request| self.take_in(request));
        self.taken = taken;
        self.flow_control.came(count);
        if self.flow_control.expects_more() {
            let count = self.let_others_come().await;
            self.flow_control.came(count);
        }
    }

    /// Does what is due. Returns the outcome of a call that was not answered in time.
    fn alarmed(&mut self, served: &mut Served) -> Option<After> {
        let spare_at = self.spare_at(served);
        self.look_at_the_clock();
        let now = clock::now();
        if spare_at.is_some_and(|at| at <= now) {
            served.was_tried = true;
            let connector = self.connector.clone();
            served.spare = Some(Box::pin(async move { connector.connect().await }));
        }
        if self.test_at(&served.contacts).is_some_and(|at| at <= now) {
            self.test(&served.contacts, now);
        }
        let at = self.calls.iter().position(|call| call.until <= now)?;
        served.contacts.unanswered(self.calls[at].role);
        if let Some(cluster) = self.cluster() {
            cluster.look();
        }
        Some(self.answered_call(at, None))
    }

    /// Goes on after a call, unless the connection is broken.
    fn goes_on(&mut self, after: After, served: &mut Served) -> ControlFlow<End> {
        match after {
            After::Fine if served.contacts.is_silent() => {
                return self.breaks(format!("{SILENT} requests in a row were not answered"));
            }
            After::Fine => {
                // A second request decides it, without waiting for a caller's request. With two connections, the
                // send queue may use the other one.
                let settles_itself = !self.send_queue.is_empty() && self.replicas.is_none();
                if let Some(role) = served.contacts.silent_role()
                    && !settles_itself
                {
                    self.ping(role);
                }
            }
            After::Again(batch, role) => {
                self.send(batch, CallForm::Script(By::Text), role, &mut served.wires)
            }
            After::Broken(trouble) => return self.breaks(trouble),
        }
        ControlFlow::Continue(())
    }

    fn breaks(&mut self, trouble: String) -> ControlFlow<End> {
        self.trouble = trouble;
        ControlFlow::Break(End::Broken)
    }

    /// Lets the ready tasks run, and accepts their requests. Returns how many.
    async fn let_others_come(&mut self) -> usize {
        tokio::task::yield_now().await;
        let mut count = 0;
        while let Some(request) = self.requests.try_recv() {
            self.take_in(request);
            count += 1;
        }
        count
    }

    /// How many steps are in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.calls.iter().map(|call| call.batch.all().len()).sum()
    }

    /// How many steps wait or are in flight.
    pub(super) fn steps(&self) -> usize {
        self.in_flight() + self.send_queue.len()
    }

    fn poll_event(&mut self, cx: &mut Context<'_>, served: &mut Served) -> Poll<Event> {
        let Served {
            wires, left, spare, ..
        } = served;
        // Writes first, so that the server works while the available replies are handled.
        while let Poll::Ready(replied) = wires.poll(cx) {
            let replied = match replied {
                Ok(replied) => replied,
                Err(trouble) => return Poll::Ready(Event::Disconnected(trouble)),
            };
            // A call that was given up is gone.
            if let Some(at) = self.calls.iter().position(|call| call.number == replied.to) {
                return Poll::Ready(Event::Response(at, replied.result));
            }
        }
        let delivered = self.deliver();
        if left
            .as_mut()
            .is_some_and(|left| left.as_mut().poll(cx).is_ready())
        {
            *left = None;
            return Poll::Ready(Event::Left);
        }
        if let Some(Poll::Ready(outcome)) = spare.as_mut().map(|spare| spare.as_mut().poll(cx)) {
            *spare = None;
            return Poll::Ready(Event::Spare(outcome));
        }
        // Before the requests, which may keep coming.
        if self.alarm.poll(cx).is_ready() {
            return Poll::Ready(Event::Alarm);
        }
        if delivered > 1 && self.flow_control.lets_callers_run() {
            return Poll::Ready(Event::Delivered);
        }
        if !self.answers.is_empty() {
            // The next answer follows when the caller has asked again, or else when this thread has nothing else to do.
            let _ = pin!(tokio::task::yield_now()).poll(cx);
        }
        let taken = self.requests.poll_many(cx, &mut self.taken, MANY);
        taken.map(Event::Asked)
    }

    /// Delivers the next part of the answers; returns how many.
    fn deliver(&mut self) -> usize {
        if self.answers.is_empty() {
            return 0;
        }
        if self.answers.take_late() {
            self.flow_control.callers_ran_for_long();
        }
        let most = self.flow_control.part(self.answers.len(), self.steps());
        // The callers ask again before this task looks for requests.
        self.requests.return_spares();
        let delivered = self.answers.deliver(most);
        self.flow_control.delivered(delivered);
        delivered
    }

    pub(super) fn take_in(&mut self, request: Request) {
        match request {
            Request::Step(step) => self.send_queue.push(step),
            Request::Plain(plain) => self.plain.push_back(*plain),
            Request::Move(order) => self.take_order(*order),
        }
    }

    /// When something here needs attention without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        let under_way = self.calls.iter().map(|call| call.due);
        let plain = self.plain.front().map(|plain| plain.deadline);
        let later = self.later.keys().next().map(|(at, _)| *at);
        let queued = self.send_queue.due().into_iter().chain(self.send_queue.wakes_at);
        under_way.chain(queued).chain(plain).chain(later).min()
    }
}
