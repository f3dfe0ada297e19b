//! The task that owns the connection: what is sent, what is received, and what happens when nothing is.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use redis::{Cmd, RedisError, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::by_commands;
use super::contacts::{Contacts, SILENT};
use super::delivery::Answers;
use super::flow_control::{CALLS, FlowControl, NEAR, has_threads};
use super::former_connections::FormerConnections;
use super::in_flight::{Batch, CallForm, InFlight};
use super::inbox::Inbox;
use super::late_copies::{LateCopies, micros};
use super::replicas::{ConnectionRole, Replicas, Wires};
use super::responses::After;
use super::send_queue::SendQueue;
use super::slot_migration::SlotMigrations;
use super::token_draws::TokenDraws;
use super::undos::Undos;
use super::{Part, Plain, PlainReply, Request, Standing, Step, Used};
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::observed::log;
use crate::store::url::Address;
use crate::store::{Reason, StoreError};
use crate::stores::redis::cluster::Cluster;
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::command::Packed;
use crate::stores::redis::connect::{Connected, Connector};
use crate::stores::redis::script::{self, By};

/// The maximum number of calls in flight in a Cluster, where each carries steps of one slot only.
pub(in super::super) const CALLS_IN_ALL: usize = 128;
/// A connection that was silent for this long is doubted if the next call on it is not answered soon.
const IDLE: Duration = Duration::from_secs(1);
/// A connection that was silent for this long is tested.
const TEST: Duration = Duration::from_secs(10);
/// How many requests are accepted before anything else is checked.
const MANY: usize = 1024;
/// The first pause between two attempts to connect.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause, after many failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A spare connection, made because the one in use may be dead: the network or a middlebox forgets idle connections. A
/// server that is only slow does not answer on a new connection either, and that is then dropped.
type Spare = Pin<Box<dyn Future<Output = Result<Connected, StoreError>> + Send>>;

/// A connection that is served.
struct Served {
    wires: Wires,
    contacts: Contacts,
    /// Completes when another server has taken over; `None` for a fixed address.
    left: Option<Timer>,
    spare: Option<Spare>,
    /// A spare was tried since the last answer, and was useless.
    was_tried: bool,
}

impl Served {
    fn new(connector: &Connector, connected: Connected) -> Served {
        let (endpoint, address) = (connector.endpoint.clone(), connected.address.clone());
        Served {
            wires: Wires::new(connected),
            contacts: Contacts::new(),
            left: (!endpoint.is_fixed())
                .then(|| -> Timer { Box::pin(async move { endpoint.left(&address, 0).await }) }),
            spare: None,
            was_tried: false,
        }
    }
}

/// Why a connection is not served any more.
enum End {
    Broken,
    /// Another one exists already.
    Replaced(Box<Connected>),
    Closed,
}

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
    flow_control: FlowControl,
    /// Whether steps wait for others that are sent along.
    holds_back: bool,
    /// Whether the last call of commands left steps behind that need the script.
    script_is_next: bool,
    /// Answers on their way to their callers.
    pub(super) answers: Answers,
    /// The state of acknowledgements by replicas, if configured.
    pub(super) replicas: Option<Replicas>,
    standing: Arc<Standing>,
    /// The run id of the connected server process; empty if not permitted to ask.
    pub(super) run_id: String,
    /// That of the last one that was a master.
    master_run_id: String,
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
    room: Vec<u8>,
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

    pub(super) async fn run(mut self, first: Option<Connected>) {
        let mut first = first;
        self.is_cut_off();
        loop {
            let connected = match first.take() {
                Some(connected) => connected,
                None => match self.reconnect().await {
                    Some(connected) => connected,
                    None => break,
                },
            };
            self.begin(&connected);
            let begun = clock::now();
            self.standing.cut_off_since.store(0, Ordering::Relaxed);
            let end = self.serve(connected).await;
            self.is_cut_off();
            if clock::now() >= begun + LONGEST_PAUSE {
                // It was not useless, though perhaps idle.
                self.setbacks = 0;
            }
            match end {
                End::Closed => break,
                End::Broken => {}
                End::Replaced(connected) => first = Some(*connected),
            }
            if self.retired {
                break;
            }
            log!(warn, server = %self.connector.endpoint, trouble = %self.trouble, "the connection to the lock store is lost");
            let elsewhere = self
                .address
                .as_ref()
                .is_some_and(|at| !self.connector.endpoint.is_at(at));
            if elsewhere {
                // Reported at once, and again when the other server can be asked.
                self.part.doubts.tell(self.part.lane);
            }
            if let Some(cluster) = self.cluster() {
                cluster.look();
            }
        }
        if self.retired {
            self.wind_up().await;
        }
    }

    /// From now on nothing is sent.
    fn is_cut_off(&self) {
        let now = Moment::now().as_nanos();
        self.standing.cut_off_since.store(now, Ordering::Relaxed);
    }

    /// Handles an established connection.
    fn begin(&mut self, connected: &Connected) {
        let address = self.address.replace(connected.address.clone());
        if address
            .as_ref()
            .is_some_and(|before| *before != connected.address)
        {
            self.late_copies.settle_all();
        }
        self.late_copies
            .server_says(connected.server_time, connected.asked_at);
        self.token_draws.begin();
        self.script_is_next = false;
        self.trouble.clear();
        let before = std::mem::replace(&mut self.run_id, connected.run_id.clone());
        // A server that was demoted may be its own successor: it had only to load its data.
        let is_known = !before.is_empty() && !self.run_id.is_empty();
        if !is_known || before != self.run_id {
            self.standing.processes.fetch_add(1, Ordering::Relaxed);
        }
        let is_another = match is_known {
            true => before != self.run_id,
            false => self.was_demoted,
        };
        if !connected.is_replica && !self.run_id.is_empty() {
            let master = std::mem::replace(&mut self.master_run_id, self.run_id.clone());
            if !master.is_empty() && master != self.run_id {
                self.late_copies.settle_all();
            }
        }
        for (cmd, reply) in self.former_connections.replace(&self.run_id, connected.id) {
            let close = self.plain(
                cmd,
                ConnectionRole::Usual,
                self.connector.access.patience() * 4,
                reply,
            );
            self.plain.push_front(close);
        }
        // They may have been carried out long after their callers gave up the undoing: a server can stand still for any time.
        for undo in self.undos.take() {
            self.keep_release(undo);
        }
        self.was_master |= !connected.is_replica;
        if address.is_some() {
            self.was_demoted = false;
            if is_another {
                self.connector.endpoint.changed();
            }
            log!(info, server = %self.connector.endpoint, "connected to the lock store again");
            self.send_queue.releases_first();
            self.part.doubts.tell(self.part.lane);
        }
    }

    /// Connects, for as long as it takes. `None` if it is not needed any more.
    async fn reconnect(&mut self) -> Option<Connected> {
        let mut pause = SHORTEST_PAUSE;
        // The last connection was useless: no hurry.
        let setbacks = self.setbacks;
        self.setbacks = setbacks.saturating_add(1);
        let mut at_once = setbacks == 0;
        for _ in 1..setbacks.min(10) {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        loop {
            if !std::mem::replace(&mut at_once, false) {
                self.wait_between(pause).await?;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            let (connector, was_master) = (self.connector.clone(), self.was_master);
            let attempt = async move {
                let connected = connector.connect().await?;
                match was_master {
                    true => is_ready(connected),
                    false => Ok(connected),
                }
            };
            tokio::pin!(attempt);
            let outcome = loop {
                let due = self.due();
                tokio::select! {
                    outcome = &mut attempt => break outcome,
                    request = self.requests.recv() => self.take_in(request?),
                    () = sleep_until(due) => self.look_at_the_clock(),
                }
                if self.retired {
                    return None;
                }
            };
            match outcome {
                Ok(connected) => return Some(connected),
                Err(error) => {
                    if self.address.is_none() && self.trouble.is_empty() {
                        log!(warn, trouble = %error.message, "a server of the lock store cannot be reached");
                    }
                    self.trouble = error.message;
                }
            }
            if let Some(cluster) = self.cluster() {
                cluster.look();
            }
        }
    }

    /// Waits for about this long before the next attempt to connect. `None` if it is not needed any more.
    async fn wait_between(&mut self, pause: Duration) -> Option<()> {
        let again = clock::now() + chance::jittered(pause);
        loop {
            let due = self.due().map_or(again, |due| due.min(again));
            tokio::select! {
                request = self.requests.recv() => self.take_in(request?),
                () = clock::sleep_until(due) => self.look_at_the_clock(),
            }
            if self.retired {
                return None;
            }
            if clock::now() >= again {
                return Some(());
            }
        }
    }

    async fn serve(&mut self, connected: Connected) -> End {
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

    /// Sends what may be sent now.
    fn depart(&mut self, wires: &mut Wires) {
        if self.has_nothing_to_send() {
            return;
        }
        let may_wait = self.waits_for_company() || self.waits_for_more();
        // No step comes any more once no handle is left.
        self.holds_back = may_wait && self.plain.is_empty() && !self.requests.is_over();
        if self.holds_back {
            return;
        }
        let _reading = clock::one_reading();
        while let Some((batch, form, role)) = self.next_batch() {
            self.send(batch, form, role, wires);
        }
    }

    fn has_nothing_to_send(&self) -> bool {
        self.send_queue.is_empty() && self.plain.is_empty()
    }

    /// Whether all that would be sent is cheaper together with what follows, and the last call in flight is about the same lock:
    /// the server would carry it out after that call anyway.
    fn waits_for_company(&self) -> bool {
        let Some(Batch::Steps(steps)) = self.calls.back().map(|call| &call.batch) else {
            return false;
        };
        let gathers = self.replicas.is_none() && self.flow_control.gathers();
        let last = steps.last().filter(|_| gathers);
        last.is_some_and(|last| self.send_queue.company_on() == Some(&*last.call.key))
    }

    /// Whether the queued steps are too few for a call of their own. They do not wait once the oldest call has been in flight
    /// for a millisecond.
    fn waits_for_more(&self) -> bool {
        let Some(oldest) = self.calls.front() else {
            return false;
        };
        (self.flow_control).waits_for_more(self.send_queue.len(), self.in_flight())
            && clock::now().saturating_duration_since(oldest.sent_at) < NEAR
    }

    /// How many steps are in flight.
    fn in_flight(&self) -> usize {
        self.calls.iter().map(|call| call.batch.all().len()).sum()
    }

    /// How many steps wait or are in flight.
    fn steps(&self) -> usize {
        self.in_flight() + self.send_queue.len()
    }

    /// How many calls may be in flight on a connection: in a Cluster there are many anyway, and with acknowledgements
    /// by replicas each call waits for those before it.
    fn calls(&self) -> usize {
        match (&self.part.cluster, &self.replicas) {
            (Some(_), _) => CALLS_IN_ALL,
            (None, Some(_)) => CALLS,
            (None, None) => self.flow_control.calls(),
        }
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

    /// When to connect a spare, unless a call is answered before.
    fn spare_at(&self, served: &Served) -> Option<Instant> {
        let may_help = served.spare.is_none() && !served.was_tried;
        may_help.then(|| self.doubtful_from(&served.contacts)).flatten()
    }

    /// When a connection that was idle before its oldest call is doubted, unless that is answered before.
    fn doubtful_from(&self, contacts: &Contacts) -> Option<Instant> {
        // One per connection suffices: answers come in the order of the calls.
        let oldest = |role| {
            let call = self.calls.iter().find(|call| call.role == role)?;
            let was_idle = call.sent_at >= contacts.on(role).at + IDLE;
            (was_idle && !matches!(call.batch, Batch::Wait)).then_some(call.sent_at)
        };
        let timeout = self.connector.access.timeout;
        let patience = (timeout / 4).max(self.flow_control.fastest().unwrap_or_default() * 3);
        let oldest = self.roles().iter().copied().filter_map(oldest).min();
        // Later than the timeout anyway.
        oldest
            .filter(|_| patience < timeout)
            .map(|sent_at| sent_at + patience)
    }

    /// The connection for acknowledgements exists only if there are replicas.
    fn roles(&self) -> &'static [ConnectionRole] {
        match self.replicas {
            Some(_) => &[ConnectionRole::Usual, ConnectionRole::Acknowledged],
            None => &[ConnectionRole::Usual],
        }
    }

    /// When the next test of an idle connection is due.
    fn test_at(&self, contacts: &Contacts) -> Option<Instant> {
        let idle = self.roles().iter().filter(|role| !self.is_busy(**role));
        idle.map(|role| contacts.on(*role).at + TEST).min()
    }

    /// Tests the idle connections: a dead one is found before it is needed.
    fn test(&mut self, contacts: &Contacts, now: Instant) {
        for role in self.roles() {
            if !self.is_busy(*role) && contacts.on(*role).at + TEST <= now {
                self.ping(*role);
            }
        }
    }

    /// Whether something is under way on a connection, or waits for it alone.
    fn is_busy(&self, role: ConnectionRole) -> bool {
        self.calls.iter().any(|call| call.role == role) || self.plain.iter().any(|plain| plain.role == role)
    }

    /// Asks whether the server is there, without waiting for the answer.
    fn ping(&mut self, role: ConnectionRole) {
        let ping = redis::cmd("PING");
        let ping = self.plain(ping, role, self.connector.access.timeout, oneshot::channel().0);
        self.plain.push_back(ping);
    }

    fn plain(&self, cmd: Cmd, role: ConnectionRole, within: Duration, reply: PlainReply) -> Plain {
        let deadline = clock::now() + within;
        Plain {
            cmd,
            role,
            deadline,
            reply,
        }
    }

    /// Chooses what to send next, how, which is nothing to a plain command, and on which connection.
    fn next_batch(&mut self) -> Option<(Batch, CallForm, ConnectionRole)> {
        if self.has_nothing_to_send() {
            return None;
        }
        let by_hash = CallForm::Script(By::Hash);
        let role = match self.plain.front() {
            Some(plain) => plain.role,
            None => self.role(),
        };
        let under_way = self.calls.iter().filter(|call| call.role == role);
        if under_way.count() >= self.calls() {
            return None;
        }
        if let Some(plain) = self.plain.pop_front() {
            return Some((Batch::Plain(plain), by_hash, role));
        }
        // Else steps that only the script can do might wait for ever.
        let script_is_next =
            std::mem::take(&mut self.script_is_next) && !self.send_queue.may_begin_with_untold_release();
        if !script_is_next && let Some((steps, form)) = self.next_by_commands() {
            return Some((Batch::Steps(steps), form, role));
        }
        if let Some(steps) = self.next_by_script(role) {
            return Some((Batch::Steps(steps), by_hash, role));
        }
        let (steps, form) = self.next_by_commands()?;
        Some((Batch::Steps(steps), form, role))
    }

    /// Chooses the next steps that commands can do.
    fn next_by_commands(&mut self) -> Option<(Vec<Step>, CallForm)> {
        if !self.connector.releases_by_commands() {
            return None;
        }
        let now = clock::now();
        let server_time = self.late_copies.server_time(now);
        let with_acquires =
            self.former_connections.may_have_acquires() && self.token_draws.are_possible(now, server_time);
        let (steps, needs_script) = self.send_queue.take_by_commands(now, with_acquires);
        if steps.is_empty() {
            return None;
        }
        self.script_is_next = needs_script;
        let acquires = &steps[by_commands::releases(&steps)..];
        if !acquires.is_empty() {
            self.former_connections.has_acquires();
        }
        let in_flight = self.calls.iter().map(|call| match call.form {
            CallForm::Commands { tokens } => tokens,
            CallForm::Script(_) => 0,
        });
        let tokens = self.token_draws.count_for(acquires, now, in_flight.sum());
        Some((steps, CallForm::Commands { tokens }))
    }

    /// Chooses the next steps for the script, whether or not commands can do them.
    fn next_by_script(&mut self, role: ConnectionRole) -> Option<Vec<Step>> {
        let gate = self.gate(role);
        let (calls, moves) = (&self.calls, &self.moves);
        let mut last = None;
        let may_send = |slot: Option<Slot>| {
            // Many waiters for the same acknowledgement are counted once.
            if let Some((same, may)) = last
                && same == slot
            {
                return may;
            }
            let is_there = |call: &&InFlight| call.role == role && call.slot == slot;
            let under_way = calls.iter().filter(is_there);
            // Without slots, that was counted already.
            let has_room = slot.is_none() || under_way.count() < CALLS;
            let may = has_room && moves.is_settled(slot);
            last = Some((slot, may));
            may
        };
        self.send_queue.take(clock::now(), gate, may_send)
    }

    fn send(&mut self, mut batch: Batch, form: CallForm, role: ConnectionRole, wires: &mut Wires) {
        let now = clock::now();
        let (command, due, until) = match &mut batch {
            // Handled separately.
            Batch::Wait => return,
            Batch::Plain(plain) => (Packed::from(&plain.cmd), plain.deadline, plain.deadline),
            Batch::Steps(steps) => {
                let server_now = self.late_copies.server_time(now);
                let due = steps.iter().map(|step| step.deadline).min().unwrap_or(now);
                let until = steps.iter().map(|step| step.deadline).max().unwrap_or(now);
                let refuse = |deadline: Instant| {
                    server_now.saturating_add(micros(deadline.saturating_duration_since(now)))
                };
                for step in steps.iter_mut() {
                    step.permit = None;
                    step.sent += 1;
                    // Acquires share one deadline.
                    step.refuse_after = refuse(match step.call.is_acquire() {
                        true => until,
                        false => step.deadline,
                    });
                }
                let room = std::mem::take(&mut self.room);
                let command = match form {
                    CallForm::Commands { tokens } => {
                        by_commands::write(steps, tokens, &self.part.fence, room)
                    }
                    CallForm::Script(by) => script::call(
                        by,
                        &self.run_id,
                        &self.part.fence,
                        steps.iter().map(|step| (&step.call, step.refuse_after)),
                        room,
                    ),
                };
                (command, due, until)
            }
        };
        let round = match (&mut self.replicas, &batch) {
            (Some(replicas), Batch::Steps(steps)) => replicas.send(role, steps),
            _ => 0,
        };
        let (slot, asking) = match &batch {
            Batch::Steps(steps) => steps
                .first()
                .map_or((None, false), |step| (step.call.slot, step.asking)),
            Batch::Plain(_) | Batch::Wait => (None, false),
        };
        self.calls.push_back(InFlight {
            number: wires.send(role, &command, asking),
            batch,
            role,
            round,
            slot,
            form,
            sent_at: now,
            due,
            until,
            overtook: false,
        });
        self.room = command.into_room();
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

/// A server where there was a master, unless it is none, or none yet.
fn is_ready(connected: Connected) -> Result<Connected, StoreError> {
    let trouble = match (connected.is_replica, connected.is_loading) {
        (true, _) => "is a read-only replica now: its master is looked for at the same address",
        (false, true) => "is still loading its data",
        (false, false) => return Ok(connected),
    };
    let message = format!("{} {trouble}", connected.address);
    Err(StoreError::not_done(Reason::Unreachable, message))
}

/// A timer that is reset only to ring earlier: it may ring for nothing, which is cheaper than resetting it for each
/// call. It is not polled again before it has rung, since each poll takes locks.
#[derive(Default)]
struct Alarm {
    timer: Option<(Instant, Timer)>,
    bell: Arc<Bell>,
}

type Timer = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Wakes the task of the connection when its timer rings.
#[derive(Default)]
struct Bell {
    /// Whether the timer has to be polled.
    rings: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rings.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl Alarm {
    fn set(&mut self, due: Option<Instant>) {
        let Some(due) = due else { return };
        if self.timer.as_ref().is_none_or(|(at, _)| due < *at) {
            self.timer = Some((due, Box::pin(clock::sleep_until(due))));
            self.bell.rings.store(true, Ordering::Relaxed);
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some((_, timer)) = &mut self.timer else {
            return Poll::Pending;
        };
        if !self.bell.rings.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.bell.rings.store(false, Ordering::Relaxed);
        self.bell.task.register(cx.waker());
        let bell = Waker::from(self.bell.clone());
        let poll = timer.as_mut().poll(&mut Context::from_waker(&bell));
        if poll.is_ready() {
            self.timer = None;
        }
        poll
    }
}

pub(super) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => clock::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
