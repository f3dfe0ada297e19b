//! One server: a queue of steps, and a supervised connection that carries them.
//!
//! Steps go out in the order in which they were queued. Those that wait when a call can be made travel
//! together in one script call; a step that is alone goes out at once. A step that is not answered within
//! its time fails, whatever the connection does. A connection that broke, or did not answer several times
//! in a row, is replaced, for ever and with growing pauses.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::Instant;

use super::connect::{Connected, Connector};
use super::script::{self, Answer, By, Call, Verb};
use crate::backend::{BackendError, Lane, Outcome, Reason};
use crate::clock;

/// Steps in one call.
const BATCH: usize = 256;
/// Bytes that the steps of one call may bring along, unless one alone has more: so that a large result
/// delays few others.
const HEAVY: usize = 1024 * 1024;
/// Calls under way at a time.
const CALLS: usize = 2;
/// Calls in a row without an answer after which the connection is given up.
const SILENT: u32 = 2;

/// What a step brought.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) answer: Answer,
    /// The step was sent more than once.
    pub(crate) repeated: bool,
}

type Reply = oneshot::Sender<Result<Done, BackendError>>;

struct Step {
    call: Call,
    deadline: Instant,
    /// How often it was sent.
    sent: u32,
    /// A call of its own, because in company it was refused.
    alone: bool,
    /// Until when the server may carry out an acquire or a forced release, by the server's clock in µs.
    refuse_after: u64,
    /// `None` once it was answered.
    reply: Option<Reply>,
}

impl Step {
    /// Of a step on a record that was sent before nobody can tell what became of the earlier copy.
    fn admit(&self, error: &mut BackendError) {
        if self.sent > 1 && self.call.is_on_record() {
            error.outcome = Outcome::Unknown;
        }
    }
}

/// A command that is not a step.
struct Plain {
    cmd: Cmd,
    deadline: Instant,
    reply: oneshot::Sender<Result<Value, BackendError>>,
}

enum Request {
    Step(Step),
    Plain(Plain),
}

/// A server, for those who have steps for it. The connection ends when the last of these is gone.
#[derive(Debug, Clone)]
pub(super) struct Node {
    queue: mpsc::UnboundedSender<Request>,
    timeout: Duration,
}

impl Node {
    /// Starts with a connection that stands. `doubts` is told whenever it had to be made anew.
    pub(super) fn start(
        connector: Connector,
        connected: Connected,
        doubts: broadcast::Sender<Lane>,
        runtime: &tokio::runtime::Handle,
    ) -> Node {
        let (queue, requests) = mpsc::unbounded_channel();
        let timeout = connector.timeout;
        let actor = Actor {
            connector: Arc::new(connector),
            requests,
            doubts,
            queue: VecDeque::new(),
            plain: VecDeque::new(),
            later: BTreeMap::new(),
            flights: HashMap::new(),
            next: 0,
            unsettled: HashMap::new(),
            anchor: (connected.server_time, connected.asked_at),
            trouble: String::new(),
        };
        runtime.spawn(actor.run(connected));
        Node { queue, timeout }
    }

    /// Queues a step now; the future is its answer, within the timeout.
    pub(super) fn step(&self, call: Call) -> impl Future<Output = Result<Done, BackendError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let deadline = clock::now() + self.timeout;
        let step = Step {
            call,
            deadline,
            sent: 0,
            alone: false,
            refuse_after: 0,
            reply: Some(reply),
        };
        let queued = self.queue.send(Request::Step(step)).is_ok();
        async move {
            match answer.await {
                Ok(answer) => answer,
                Err(_) => Err(closed(queued)),
            }
        }
    }

    /// Sends a command that is not a step, and does not keep the order of steps.
    pub(super) async fn plain(&self, cmd: Cmd) -> Result<Value, BackendError> {
        let (reply, answer) = oneshot::channel();
        let deadline = clock::now() + self.timeout;
        let queued = self
            .queue
            .send(Request::Plain(Plain { cmd, deadline, reply }))
            .is_ok();
        answer.await.unwrap_or_else(|_| Err(closed(queued)))
    }
}

/// Asks whether the server is there; nobody waits for the answer.
fn ping(timeout: Duration) -> Plain {
    Plain {
        cmd: redis::cmd("PING"),
        deadline: clock::now() + timeout,
        reply: oneshot::channel().0,
    }
}

/// The background work is gone, by shutdown or with its runtime.
fn closed(queued: bool) -> BackendError {
    BackendError {
        outcome: if queued {
            Outcome::Unknown
        } else {
            Outcome::NotDone
        },
        reason: Reason::Closed,
        message: "the lock client is shut down".to_owned(),
        source: None,
    }
}

/// A call under way.
struct Flight {
    load: Load,
    by: By,
    sent_at: Instant,
}

enum Load {
    Steps(Vec<Step>),
    Plain(Plain),
}

/// What came of it; `None` for no answer in time.
type Landed = (u64, Option<Result<Value, RedisError>>);

type Flying = FuturesUnordered<BoxFuture<'static, Landed>>;

/// Why a connection is not served any more.
enum End {
    Broken,
    Closed,
}

struct Actor {
    connector: Arc<Connector>,
    requests: mpsc::UnboundedReceiver<Request>,
    doubts: broadcast::Sender<Lane>,
    queue: VecDeque<Step>,
    plain: VecDeque<Plain>,
    /// Releases that are to be sent again at their time.
    later: BTreeMap<(Instant, u64), Step>,
    flights: HashMap<u64, Flight>,
    next: u64,
    /// Acquires and claims of which a copy may be on its way, with the server time after which it cannot take
    /// effect any more.
    unsettled: HashMap<Box<str>, u64>,
    /// The server's clock (µs) not after this moment of ours.
    anchor: (u64, Instant),
    /// What was wrong with the connection last.
    trouble: String,
}

impl Actor {
    async fn run(mut self, first: Connected) {
        let mut connected = first;
        loop {
            match self.serve(connected).await {
                End::Closed => return,
                End::Broken => {}
            }
            tracing::warn!(server = %self.connector.address, trouble = %self.trouble, "the connection to the lock store is lost");
            connected = match self.reconnect().await {
                Some(connected) => connected,
                None => return,
            };
            tracing::info!(server = %self.connector.address, "connected to the lock store again");
            self.anchor = (connected.server_time, connected.asked_at);
            // Releases first: what is free shall be seen as free.
            let (releases, others): (VecDeque<_>, VecDeque<_>) =
                self.queue.drain(..).partition(|step| step.call.is_release());
            self.queue = releases;
            self.queue.extend(others);
            let _ = self.doubts.send(Lane::default());
        }
    }

    /// Connects, for as long as it takes. `None` when nobody wants it any more.
    async fn reconnect(&mut self) -> Option<Connected> {
        let mut pause = Duration::from_millis(10);
        loop {
            let connector = self.connector.clone();
            let attempt = async move { connector.connect().await };
            tokio::pin!(attempt);
            let outcome = loop {
                let due = self.next_event();
                tokio::select! {
                    outcome = &mut attempt => break outcome,
                    request = self.requests.recv() => self.take(request?),
                    () = sleep_until(due) => self.look_at_the_clock(),
                }
            };
            match outcome {
                Ok(connected) => return Some(connected),
                Err(error) => self.trouble = error.message,
            }
            let again = clock::now() + pause.mul_f64(0.5 + fastrand::f64());
            pause = (pause * 2).min(Duration::from_secs(1));
            loop {
                let due = self.next_event().map_or(again, |due| due.min(again));
                tokio::select! {
                    request = self.requests.recv() => self.take(request?),
                    () = clock::sleep_until(due) => self.look_at_the_clock(),
                }
                if clock::now() >= again {
                    break;
                }
            }
        }
    }

    async fn serve(&mut self, connected: Connected) -> End {
        let Connected {
            connection,
            mut disconnected,
            ..
        } = connected;
        let mut flying = Flying::new();
        let mut silent = 0;
        let end = loop {
            while flying.len() < CALLS {
                match self.load() {
                    Some(load) => self.take_off(load, By::Hash, &connection, &mut flying),
                    None => break,
                }
            }
            let due = self.next_event();
            tokio::select! {
                biased;
                Some((number, outcome)) = flying.next(), if !flying.is_empty() => {
                    let Some(flight) = self.flights.remove(&number) else { continue };
                    silent = if outcome.is_some() { 0 } else { silent + 1 };
                    match self.landed(flight, outcome) {
                        After::Fine if silent >= SILENT => {
                            self.trouble = format!("{silent} requests in a row were not answered");
                            break End::Broken;
                        }
                        // A second question settles it, without waiting for somebody to ask one.
                        After::Fine if silent > 0 && self.queue.is_empty() => self.plain.push_back(ping(self.connector.timeout)),
                        After::Fine => {}
                        After::Again(load) => self.take_off(load, By::Text, &connection, &mut flying),
                        After::Broken(trouble) => {
                            self.trouble = trouble;
                            break End::Broken;
                        }
                    }
                }
                () = disconnected.wait() => {
                    self.trouble = "the server closed the connection".to_owned();
                    break End::Broken;
                }
                request = self.requests.recv() => match request {
                    Some(request) => {
                        self.take(request);
                        while let Ok(request) = self.requests.try_recv() {
                            self.take(request);
                        }
                    }
                    None => break End::Closed,
                },
                () = sleep_until(due) => self.look_at_the_clock(),
            }
        };
        // The connection goes first, so that nothing more arrives of what is written off here.
        drop(flying);
        drop(connection);
        let mut flights: Vec<_> = self.flights.drain().collect();
        flights.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        for (_, flight) in flights {
            self.write_off(flight.load);
        }
        end
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Step(step) => self.queue.push_back(step),
            Request::Plain(plain) => self.plain.push_back(plain),
        }
    }

    /// What goes out next.
    fn load(&mut self) -> Option<Load> {
        if let Some(plain) = self.plain.pop_front() {
            return Some(Load::Plain(plain));
        }
        let first = self.queue.front()?;
        let mut weight = 0;
        let count = if first.alone {
            1
        } else {
            let company = self.queue.iter().take(BATCH).take_while(|step| {
                weight += step.call.weight();
                !step.alone && weight <= HEAVY
            });
            company.count().max(1)
        };
        Some(Load::Steps(self.queue.drain(..count).collect()))
    }

    fn take_off(&mut self, mut load: Load, by: By, connection: &MultiplexedConnection, flying: &mut Flying) {
        let now = clock::now();
        let number = self.next;
        self.next += 1;
        let (cmd, until) = match &mut load {
            Load::Plain(plain) => (plain.cmd.clone(), plain.deadline),
            Load::Steps(steps) => {
                let (server, at) = self.anchor;
                let server_now = server + micros(now.saturating_duration_since(at));
                for step in steps.iter_mut() {
                    step.sent += 1;
                    step.refuse_after = server_now + micros(step.deadline.saturating_duration_since(now));
                }
                let until = steps.iter().map(|step| step.deadline).max().unwrap_or(now);
                (
                    script::call(by, steps.iter().map(|step| (&step.call, step.refuse_after))),
                    until,
                )
            }
        };
        self.flights.insert(
            number,
            Flight {
                load,
                by,
                sent_at: now,
            },
        );
        let mut connection = connection.clone();
        flying.push(Box::pin(async move {
            let outcome = tokio::select! {
                biased;
                // An error of the server comes as a value here.
                outcome = connection.send_packed_command(&cmd) => Some(outcome.and_then(Value::extract_error)),
                () = clock::sleep_until(until) => None,
            };
            (number, outcome)
        }));
    }

    /// When something here needs attention without anybody saying so.
    fn next_event(&self) -> Option<Instant> {
        let open = |steps: &[Step]| {
            steps
                .iter()
                .filter(|step| step.reply.is_some())
                .map(|step| step.deadline)
                .min()
        };
        let flying = self.flights.values().filter_map(|flight| match &flight.load {
            Load::Steps(steps) => open(steps),
            Load::Plain(_) => None,
        });
        let queued = self.queue.front().map(|step| step.deadline);
        let plain = self.plain.front().map(|plain| plain.deadline);
        let later = self.later.keys().next().map(|(at, _)| *at);
        flying.chain(queued).chain(plain).chain(later).min()
    }

    /// Fails what is over its time, and queues what is due again.
    fn look_at_the_clock(&mut self) {
        let now = clock::now();
        while self
            .later
            .first_key_value()
            .is_some_and(|((at, _), _)| *at <= now)
        {
            // At the back, where it is the last to run out of time.
            if let Some((_, step)) = self.later.pop_first() {
                self.queue.push_back(step);
            }
        }
        let trouble = self.trouble.clone();
        let why = move || {
            if trouble.is_empty() {
                "it had to wait too long".to_owned()
            } else {
                trouble.clone()
            }
        };
        while self.queue.front().is_some_and(|step| step.deadline <= now) {
            let Some(mut step) = self.queue.pop_front() else {
                break;
            };
            let error = match step.sent {
                0 => BackendError::not_done(Reason::Unreachable, why()),
                _ => BackendError::unknown(why()),
            };
            self.fail(&mut step, error);
        }
        while self.plain.front().is_some_and(|plain| plain.deadline <= now) {
            if let Some(plain) = self.plain.pop_front() {
                let _ = plain
                    .reply
                    .send(Err(BackendError::not_done(Reason::Unreachable, why())));
            }
        }
        let mut flights = std::mem::take(&mut self.flights);
        for flight in flights.values_mut() {
            let Load::Steps(steps) = &mut flight.load else {
                continue;
            };
            for step in steps
                .iter_mut()
                .filter(|step| step.deadline <= now && step.reply.is_some())
            {
                self.fail(step, no_answer());
            }
        }
        self.flights = flights;
    }

    /// Answers a step with a failure, and remembers what may yet take effect.
    fn fail(&mut self, step: &mut Step, mut error: BackendError) {
        step.admit(&mut error);
        if error.outcome == Outcome::Unknown
            && let Some(id) = step.call.takes()
        {
            self.remember(id, step.refuse_after);
        }
        let Some(reply) = step.reply.take() else { return };
        if let Verb::Forget { token } = &step.call.verb
            && reply.is_closed()
            && error.is_passing()
            && self.unsettled.contains_key(token.as_str())
        {
            self.release_again(step.call.clone(), self.connector.timeout);
        }
        let _ = reply.send(Err(error));
    }

    /// A copy of this acquire or claim may be on its way.
    fn remember(&mut self, id: &str, refuse_after: u64) {
        let (server, at) = self.anchor;
        let server_now = server + micros(clock::now().saturating_duration_since(at));
        // What nobody came to settle in all that time needs no settling.
        self.unsettled.retain(|_, until| *until + 60_000_000 > server_now);
        let until = self.unsettled.entry(id.into()).or_default();
        *until = refuse_after.max(*until);
    }

    /// A claim goes out anew, and its release may have overtaken it.
    fn remember_claim(&mut self, step: &Step) {
        if let Some(id) = step.call.claims() {
            self.remember(id, step.refuse_after);
        }
    }

    /// Releases a claim after a while; nobody waits for the answer.
    fn release_again(&mut self, call: Call, wait: Duration) {
        let at = clock::now() + wait.min(self.connector.timeout * 2);
        let step = Step {
            call,
            deadline: at + self.connector.timeout,
            sent: 0,
            alone: false,
            refuse_after: 0,
            reply: Some(oneshot::channel().0),
        };
        self.next += 1;
        self.later.insert((at, self.next), step);
    }

    fn landed(&mut self, flight: Flight, outcome: Option<Result<Value, RedisError>>) -> After {
        let Flight { load, by, sent_at } = flight;
        let mut steps = match load {
            Load::Steps(steps) => steps,
            Load::Plain(plain) => {
                let result = match outcome {
                    Some(result) => result.map_err(|error| classify(&error)),
                    None => Err(no_answer()),
                };
                let _ = plain.reply.send(result);
                return After::Fine;
            }
        };
        let error = match outcome {
            None => {
                for step in &mut steps {
                    self.fail(step, no_answer());
                }
                return After::Fine;
            }
            Some(Ok(value)) => match script::read(value, steps.len()) {
                Some((server_time, answers)) => {
                    self.anchor = (server_time, sent_at);
                    let mut again = Vec::new();
                    for (mut step, answer) in steps.into_iter().zip(answers) {
                        if matches!(answer, Ok(Answer::Again)) {
                            step.sent -= 1;
                            self.remember_claim(&step);
                            again.push(step);
                        } else {
                            self.answered(step, answer, server_time);
                        }
                    }
                    again
                        .into_iter()
                        .rev()
                        .for_each(|step| self.queue.push_front(step));
                    return After::Fine;
                }
                None => BackendError::unknown("the server gave an answer that makes no sense"),
            },
            Some(Err(error)) => {
                if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) && by == By::Hash {
                    // Not carried out, so the copy that follows is the first.
                    for step in &mut steps {
                        step.sent -= 1;
                        self.remember_claim(step);
                    }
                    return After::Again(Load::Steps(steps));
                }
                if is_broken(&error) {
                    self.write_off(Load::Steps(steps));
                    return After::Broken(error.to_string());
                }
                let error = classify(&error);
                // Refused as a whole, perhaps because of one of them.
                if error.reason == Reason::Refused && steps.len() > 1 {
                    for mut step in steps.into_iter().rev() {
                        step.alone = true;
                        step.sent -= 1;
                        self.remember_claim(&step);
                        self.queue.push_front(step);
                    }
                    return After::Fine;
                }
                error
            }
        };
        for step in &mut steps {
            self.fail(step, error.clone());
        }
        After::Fine
    }

    fn answered(&mut self, mut step: Step, answer: Result<Answer, BackendError>, server_time: u64) {
        if let Verb::Release { grant, .. } = &step.call.verb {
            // Nothing there: the acquire may still be on its way, and this release counts once it cannot be
            // any more.
            if let Some(refuse_after) = self.unsettled.get(grant.as_str()).copied() {
                if matches!(answer, Ok(Answer::Gone)) && server_time <= refuse_after {
                    let wait = Duration::from_micros(refuse_after - server_time) + Duration::from_millis(1);
                    let at = clock::now() + wait.min(self.connector.timeout * 2);
                    step.deadline = at + self.connector.timeout;
                    self.next += 1;
                    self.later.insert((at, self.next), step);
                    return;
                }
                self.unsettled.remove(grant.as_str());
            }
        }
        self.settle_claim(&step, &answer, server_time);
        if let Ok(Answer::Released { heard: None }) = answer {
            tracing::warn!(key = %step.call.key, "a lock was released, but the server forbids to tell: waiters in other processes find out by looking");
        }
        if let Ok(Answer::Done { told: false }) = answer {
            tracing::warn!(key = %step.call.key, "a record was completed or released, but the server forbids to tell: who waits for it finds out by looking");
        }
        let Some(reply) = step.reply.take() else { return };
        let repeated = step.sent > 1;
        let _ = reply.send(match answer {
            Ok(answer) => Ok(Done { answer, repeated }),
            Err(mut error) => {
                step.admit(&mut error);
                Err(error)
            }
        });
    }

    /// What an answer says of the copies of a claim that may be on their way.
    fn settle_claim(&mut self, step: &Step, answer: &Result<Answer, BackendError>, server_time: u64) {
        if let Some(id) = step.call.claims()
            && step.sent == 1
        {
            self.unsettled.remove(id);
        }
        let Some(id) = step.call.ends_claim() else { return };
        let Some(refuse_after) = self.unsettled.get(id).copied() else {
            return;
        };
        match (&step.call.verb, answer) {
            // Released, and a copy of the claim may yet arrive: once more when none can take effect any more.
            (Verb::Forget { .. }, _) if server_time <= refuse_after => {
                let wait = Duration::from_micros(refuse_after - server_time) + Duration::from_millis(1);
                self.release_again(step.call.clone(), wait);
            }
            // Whatever comes finds the result.
            (Verb::Forget { .. }, _) | (_, Ok(Answer::Done { .. })) => drop(self.unsettled.remove(id)),
            _ => {}
        }
    }

    /// The connection broke under these: what may be repeated is sent again, the rest has failed.
    fn write_off(&mut self, load: Load) {
        match load {
            Load::Plain(plain) => {
                let _ = plain.reply.send(Err(BackendError::unknown(broke())));
            }
            Load::Steps(steps) => {
                for mut step in steps.into_iter().rev() {
                    if step.call.is_repeatable() && step.reply.is_some() {
                        self.remember_claim(&step);
                        self.queue.push_front(step);
                    } else {
                        self.fail(&mut step, BackendError::unknown(broke()));
                    }
                }
            }
        }
    }
}

/// What to do after a call came back.
enum After {
    Fine,
    /// The server does not know the script: the same steps again, with its text.
    Again(Load),
    Broken(String),
}

fn broke() -> String {
    "the connection broke before the answer came".to_owned()
}

fn no_answer() -> BackendError {
    BackendError::unknown("the server did not answer in time")
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX / 4)
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => clock::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Whether the connection is of no use any more.
fn is_broken(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse) || error.code() == Some("NOAUTH")
}

/// What an error says that came as the answer to a whole call: of most of them the call was not executed.
pub(super) fn classify(error: &RedisError) -> BackendError {
    use ServerErrorKind as S;
    let refused = |error: &RedisError, hint: &str| {
        BackendError::not_done(Reason::Refused, format!("{error}{hint}")).caused_by(error.clone())
    };
    match error.kind() {
        ErrorKind::Server(S::ReadOnly) => refused(
            error,
            " (this server is a read-only replica: give the master's address)",
        ),
        ErrorKind::Server(S::NoPerm) | ErrorKind::AuthenticationFailed => refused(error, ""),
        ErrorKind::Server(
            S::BusyLoading | S::NoScript | S::Moved | S::Ask | S::TryAgain | S::ClusterDown | S::MasterDown,
        ) => BackendError::not_done(Reason::Unreachable, error.to_string()).caused_by(error.clone()),
        _ => match error.code() {
            Some("WRONGPASS" | "NOAUTH" | "OOM" | "MISCONF" | "NOREPLICAS") => refused(error, ""),
            Some("BUSY") => {
                BackendError::not_done(Reason::Unreachable, error.to_string()).caused_by(error.clone())
            }
            _ => BackendError::unknown(error.to_string()).caused_by(error.clone()),
        },
    }
}
