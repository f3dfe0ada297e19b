//! A permanent connection, and its send queue.
//!
//! Operations are sent in call order, without waiting for each other's replies. When a connection breaks, operations in
//! flight are sent again on the next one, because every operation on records but [`Step::Forget`] may be repeated; an
//! operation without a reply at its deadline has an unknown outcome.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::step::{Answer, Prepared, Step};
use super::table::Table;
use crate::connect::{Connector, Session};
use crate::failure::Failure;
use dlock::store::queue::SendState;
use dlock::store::{Outcome, Reason, StoreError, timeout_anywhere};

/// The shortest and the longest pause between connection attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// The send queue of a connection. The connection closes when this is dropped and the queue is empty.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: mpsc::UnboundedSender<Job>,
    setup: Arc<Setup>,
}

/// The state that all lanes of a store share.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) connector: Connector,
    pub(super) table: Table,
    /// Whether notifications go through the server.
    pub(super) tell: bool,
    /// Why there is no connection, for messages.
    pub(super) trouble: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Job {
    step: Step,
    deadline: Instant,
    send_state: Arc<SendState>,
    /// The operation was sent on a connection that broke.
    repeated: bool,
    reply: Option<oneshot::Sender<Result<Answer, StoreError>>>,
}

impl Lane {
    pub(super) fn start(setup: Arc<Setup>, first: Option<Session>, runtime: &runtime::Handle) -> Lane {
        let (jobs, line) = mpsc::unbounded_channel();
        let worker = Worker {
            setup: setup.clone(),
            line,
            next: VecDeque::new(),
            told: false,
        };
        runtime.spawn(worker.run(first));
        Lane { jobs, setup }
    }

    /// Queues an operation at once. The future only returns the reply.
    pub(super) fn step(&self, step: Step) -> impl Future<Output = Result<Answer, StoreError>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let (send_state, setup) = (Arc::new(SendState::default()), self.setup.clone());
        let deadline = Instant::now() + setup.connector.timeout;
        let job = Job {
            step,
            deadline,
            send_state: send_state.clone(),
            repeated: false,
            reply: Some(reply),
        };
        let queued = self.jobs.send(job).is_ok();
        async move {
            let why = match timeout_anywhere(deadline, answer).await {
                Some(Ok(answer)) => return answer,
                // The task has ended, although the deadline is not over.
                Some(Err(_)) if Instant::now() < deadline => {
                    let ended = "the runtime that served the connections has ended";
                    return Err(match !queued || send_state.give_up() {
                        true => StoreError::not_done(Reason::Closed, ended),
                        false => StoreError::unknown(ended),
                    });
                }
                _ => setup.silence(),
            };
            match send_state.give_up() {
                true => Err(StoreError::not_done(Reason::Unreachable, why)),
                false => Err(StoreError::unknown(why)),
            }
        }
    }
}

impl Setup {
    /// Describes why no reply arrived in time.
    fn silence(&self) -> String {
        let Connector { address, timeout, .. } = &self.connector;
        let trouble = self.trouble.lock().clone();
        trouble.unwrap_or_else(|| format!("{address} did not answer within {timeout:?}"))
    }
}

impl Job {
    fn answer(&mut self, answer: Result<Answer, StoreError>) {
        let repeated = self.repeated;
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(answer.map_err(|mut error| {
                if repeated {
                    // The first copy may have been carried out.
                    error.outcome = Outcome::Unknown;
                }
                error
            }));
        }
    }

    /// Whether the caller may still wait for the operation.
    fn is_due(&self) -> bool {
        self.deadline > Instant::now() && self.reply.is_some()
    }
}

struct Worker {
    setup: Arc<Setup>,
    line: mpsc::UnboundedReceiver<Job>,
    /// Jobs that were taken from the queue and are sent before the rest of it.
    next: VecDeque<Job>,
    /// Whether the trouble was logged; it is logged once until a connection succeeds.
    told: bool,
}

/// How an operation ended.
enum Ended {
    Answered,
    /// The connection is unusable; the operation is sent again if its deadline allows.
    Broken(Box<Job>, StoreError),
    /// No reply arrived in time.
    Silent,
}

type Running = FuturesUnordered<Pin<Box<dyn Future<Output = Ended> + Send>>>;

impl Worker {
    async fn run(mut self, mut first: Option<Session>) {
        loop {
            let session = match first.take() {
                Some(session) => session,
                None => match self.connect().await {
                    Some(session) => session,
                    None => return,
                },
            };
            *self.setup.trouble.lock() = None;
            let Some(trouble) = self.serve(session).await else {
                return;
            };
            self.tell_trouble(&trouble);
        }
    }

    fn tell_trouble(&mut self, trouble: &str) {
        let address = &self.setup.connector.address;
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(server = %address, %trouble, "no connection to the record store, trying again");
        }
        *self.setup.trouble.lock() = Some(trouble.to_owned());
    }

    /// Tries to connect until it succeeds; `None` when the connection is no longer needed.
    async fn connect(&mut self) -> Option<Session> {
        let mut pause = PAUSE.0;
        loop {
            match self.setup.connector.connect().await {
                Ok(session) => {
                    if std::mem::take(&mut self.told) {
                        let address = &self.setup.connector.address;
                        tracing::info!(server = %address, "connected to the record store again");
                    }
                    return Some(session);
                }
                Err(error) => {
                    self.tell_trouble(&error.message);
                    while let Ok(job) = self.line.try_recv() {
                        self.next.push_back(job);
                    }
                    self.next.retain(Job::is_due);
                    if error.reason == Reason::Refused {
                        for mut job in self.next.drain(..) {
                            job.answer(Err(error.clone()));
                        }
                    }
                }
            }
            if self.line.is_closed() && self.next.is_empty() {
                return None;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Serves until the connection is unusable, and returns the reason; `None` when it is no longer needed.
    async fn serve(&mut self, session: Session) -> Option<String> {
        let Session {
            client,
            mut notifications,
            driver,
        } = session;
        let client = Arc::new(client);
        let mut prepared = None;
        let mut running = Running::new();
        let given_up = CancellationToken::new();
        let trouble = loop {
            if let Some(job) = self.next.pop_front() {
                match self.begin(job, &client, &mut prepared, &given_up).await {
                    Ok(Some(work)) => running.push(work),
                    Ok(None) => {}
                    Err(trouble) => break Some(trouble),
                }
                continue;
            }
            tokio::select! {
                biased;
                Some(ended) = running.next(), if !running.is_empty() => match ended {
                    Ended::Answered => {}
                    Ended::Broken(job, error) => {
                        let trouble = error.message.clone();
                        self.again(*job, error);
                        break Some(trouble);
                    }
                    Ended::Silent => break Some("a step got no answer in time".to_owned()),
                },
                job = self.line.recv() => match job {
                    Some(job) => self.next.push_back(job),
                    // The last replies are still in flight.
                    None if running.is_empty() => break None,
                    None => if let Some(Ended::Broken(mut job, error)) = running.next().await {
                        job.answer(Err(error));
                    },
                },
                notification = notifications.recv() => if notification.is_none() {
                    break Some("the server closed the connection".to_owned());
                },
            }
        };
        // No request is in flight: the connection closes properly.
        trouble.as_ref()?;
        // Operations in flight learn now that no reply will arrive. The driver still cancels them.
        given_up.cancel();
        drop(driver);
        while let Some(ended) = running.next().await {
            if let Ended::Broken(job, error) = ended {
                self.again(*job, error);
            }
        }
        trouble
    }

    /// Returns the future that executes an operation; `None` if the operation is no longer due.
    async fn begin(
        &mut self,
        mut job: Job,
        client: &Arc<tokio_postgres::Client>,
        prepared: &mut Option<Arc<Prepared>>,
        given_up: &CancellationToken,
    ) -> Result<Option<Pin<Box<dyn Future<Output = Ended> + Send>>>, String> {
        if !job.is_due() {
            return Ok(None);
        }
        let on = match prepared {
            Some(on) => on.clone(),
            None => {
                let preparing = Prepared::new(client.clone(), &self.setup.table);
                match timeout_at(job.deadline, preparing).await {
                    Ok(Ok(on)) => prepared.insert(Arc::new(on)).clone(),
                    Ok(Err(Failure::Answered(error))) => {
                        job.answer(Err(error));
                        return Ok(None);
                    }
                    Ok(Err(Failure::Broken(error))) => {
                        self.next.push_front(job);
                        return Err(error.message);
                    }
                    Err(_) => return Err("the statements could not be prepared in time".to_owned()),
                }
            }
        };
        let doing = carry_out(job, on, self.setup.clone(), given_up.clone());
        Ok(Some(Box::pin(doing)))
    }

    fn again(&mut self, mut job: Job, error: StoreError) {
        if job.is_due() && !(error.outcome == Outcome::Unknown && matches!(job.step, Step::Forget(_))) {
            match error.outcome {
                Outcome::Unknown => job.repeated = true,
                Outcome::NotDone if !job.repeated => job.send_state.take_back(),
                Outcome::NotDone => {}
            }
            self.next.push_back(job);
        } else {
            job.answer(Err(error));
        }
    }
}

/// Sends the operation when first polled. No reply is waited for once the connection is given up.
async fn carry_out(mut job: Job, on: Arc<Prepared>, setup: Arc<Setup>, given_up: CancellationToken) -> Ended {
    if !job.send_state.send() {
        return Ended::Answered;
    }
    let answered = tokio::select! {
        biased;
        answered = timeout_at(job.deadline, job.step.run(&on, job.deadline)) => answered,
        () = given_up.cancelled() => {
            let error = StoreError::unknown("the connection was given up");
            return Ended::Broken(Box::new(job), error);
        }
    };
    let answer = match answered {
        Ok(Ok(answer)) => answer,
        Ok(Err(Failure::Answered(error))) => {
            job.answer(Err(error));
            return Ended::Answered;
        }
        Ok(Err(Failure::Broken(error))) => return Ended::Broken(Box::new(job), error),
        Err(_) => {
            job.answer(Err(StoreError::unknown(setup.silence())));
            return Ended::Silent;
        }
    };
    let notifications = job.step.notifications(&answer).filter(|_| setup.tell).cloned();
    job.answer(Ok(answer));
    if let Some(key) = notifications {
        let until = Instant::now() + setup.connector.timeout;
        let told = tokio::select! {
            told = timeout_at(until, on.tell(&setup.table.name, &key)) => matches!(told, Ok(Ok(()))),
            () = given_up.cancelled() => false,
        };
        if !told {
            tracing::debug!(key = key.as_str(), "the waiters of this record were not notified");
        }
    }
    Ended::Answered
}
