//! The task that owns the connection.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{Reason, StoreError};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::beat::Beats;
use super::connection::{Connection, Ticket};
use super::{Answer, Config, Epoch, Event, NoReply, Op, Session};
use crate::jute::{Garbled, In};
use crate::wire::{self, Code, Head, Welcome};

/// The shortest and the longest pause between rounds of connection attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A connection that broke earlier was of no use: for example a server that is about to stop closes each one.
const BRIEF: Duration = Duration::from_secs(1);

/// Opens a session, and starts the task that serves it.
pub(crate) async fn open(
    mut config: Config,
    events: UnboundedSender<Event>,
) -> Result<Arc<Session>, StoreError> {
    // Spreads clients over the servers.
    fastrand::shuffle(&mut config.hosts);
    let session = Arc::new(Session::new(config));
    let mut owner = Owner::new(session.clone(), events);
    let mut failed = None;
    for _ in 0..session.config.hosts.len() {
        match owner.connect().await {
            Ok(link) => {
                tokio::spawn(owner.run(Some(link)));
                return Ok(session);
            }
            Err(error) => failed = Some(error),
        }
    }
    let reason = match failed.as_ref().map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput) => Reason::Refused,
        _ => Reason::Unreachable,
    };
    let why = failed.map_or_else(|| "no server is named".to_owned(), |error| error.to_string());
    Err(StoreError::not_done(reason, why))
}

/// Owns the connection.
struct Owner {
    session: Arc<Session>,
    events: UnboundedSender<Event>,
    ticket: Ticket,
    epoch: Epoch,
    /// The server to try next.
    host: usize,
    /// The next pause.
    pause: Duration,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.session.end();
    }
}

/// A connection in use.
struct Link {
    connection: Connection,
    in_flight: VecDeque<(Op, i32, Moment)>,
    next_xid: i32,
    beats: Beats,
    /// The session timeout that the server granted.
    lasts: Duration,
    last_sent: Instant,
    ping_sent: Option<(Instant, Moment)>,
    host: String,
}

/// Why a connection ended.
enum End {
    Closed,
    Broken(io::Error),
}

impl Owner {
    fn new(session: Arc<Session>, events: UnboundedSender<Event>) -> Owner {
        Owner {
            session,
            events,
            ticket: Ticket::default(),
            epoch: 0,
            host: 0,
            pause: PAUSE.0,
        }
    }

    async fn run(mut self, mut first: Option<Link>) {
        let mut is_brief = false;
        loop {
            let link = match first.take() {
                Some(link) => Some(link),
                None => self.reconnect(is_brief).await,
            };
            let Some(mut link) = link else { return };
            let begun = Instant::now();
            // Without a receiver the store was dropped.
            let _ = self.events.send(Event::Connected);
            match self.serve(&mut link).await {
                End::Closed => return,
                End::Broken(error) => {
                    let why = format!("the connection to {} broke: {error}", link.host);
                    tracing::debug!(server = %link.host, %error, "connection broke");
                    self.session.has_trouble(why.clone());
                    for (op, ..) in link.in_flight {
                        let lost = StoreError::unknown(why.clone());
                        let _ = op.reply.send(Err(NoReply::Lost(self.epoch, lost)));
                    }
                }
            }
            is_brief = begun.elapsed() < BRIEF;
        }
    }

    /// Tries the servers one after another, at once unless the last connection was brief; `None` if the store was dropped.
    async fn reconnect(&mut self, is_brief: bool) -> Option<Link> {
        let session = self.session.clone();
        let mut tried = 0;
        if !is_brief {
            self.pause = PAUSE.0;
        } else if !self.pauses().await {
            return None;
        }
        loop {
            let failed = tokio::select! {
                link = self.connect() => match link {
                    Ok(link) => return Some(link),
                    Err(error) => error,
                },
                () = fail_late(&session) => return None,
            };
            session.has_trouble(failed.to_string());
            tried += 1;
            if tried % session.config.hosts.len() == 0 && !self.pauses().await {
                return None;
            }
        }
    }

    /// Pauses, longer each time; `false` if the store was dropped.
    async fn pauses(&mut self) -> bool {
        let pausing = Instant::now() + self.pause.mul_f64(0.5 + fastrand::f64());
        self.pause = (self.pause * 2).min(PAUSE.1);
        tokio::select! {
            () = sleep_until(pausing) => true,
            () = fail_late(&self.session) => false,
        }
    }

    /// Tries to connect to the next server.
    async fn connect(&mut self) -> io::Result<Link> {
        let config = self.session.config.clone();
        let host = config.hosts[self.host % config.hosts.len()].clone();
        self.host += 1;
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{host}: {error}"));
        loop {
            let within = match self.ticket.id {
                0 => config.timeout,
                _ => self.session.dials_within(),
            };
            let (sent, until) = (Moment::now(), Instant::now() + within);
            let dialled = Connection::dial(&host, within, config.session, &self.ticket).await;
            let (connection, welcome) = dialled.map_err(named)?;
            if welcome.timeout_ms > 0 && welcome.id != 0 {
                return self
                    .welcome(connection, welcome, (sent, until), host.clone())
                    .await
                    .map_err(named);
            }
            if self.ticket.id == 0 {
                return Err(named(io::Error::other("it gives no session")));
            }
            // The session has expired; a new one begins.
            tracing::warn!("the session with ZooKeeper expired, and with it all locks of this client");
            self.ticket = Ticket::default();
            self.epoch = self.session.begins();
            let _ = self.events.send(Event::Expired);
        }
    }

    async fn welcome(
        &mut self,
        mut connection: Connection,
        welcome: Welcome,
        (sent, until): (Moment, Instant),
        host: String,
    ) -> io::Result<Link> {
        let config = &self.session.config;
        let lasts = Duration::from_millis(u64::from(welcome.timeout_ms.unsigned_abs()));
        let tick = config.tick.unwrap_or(lasts / 2);
        // No renewal would give a useful lease.
        if tick > lasts / 4 * 3 {
            let why = format!(
                "the servers keep this session for {lasts:?}, of which a tick of {tick:?} leaves too little for a lease"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        if let Some(credentials) = &config.credentials {
            connection.queue(wire::auth(credentials));
            authorize(&mut connection, until).await?;
        }
        self.ticket = Ticket {
            id: welcome.id,
            password: welcome.password,
        };
        // The server asked the leader before it began or resumed the session.
        self.session.is_kept(sent + lasts);
        self.session.connected(lasts);
        Ok(Link {
            connection,
            in_flight: VecDeque::new(),
            next_xid: 1,
            beats: Beats::new(lasts, tick),
            lasts,
            last_sent: Instant::now(),
            ping_sent: None,
            host,
        })
    }

    /// Sends and receives until the connection breaks, or the store is dropped and every request has its reply.
    async fn serve(&self, link: &mut Link) -> End {
        loop {
            let now = Instant::now();
            self.session.fail_late(now);
            let closing = self.send(link, now);
            if closing && link.in_flight.is_empty() {
                return link.close(self.session.config.timeout).await;
            }
            let due = link.due();
            let turned = tokio::select! {
                turned = link.connection.turn() => turned,
                () = self.session.wake.notified() => Ok(()),
                () = sleep_until(due) => link.overdue(Instant::now()),
            };
            let received = turned.and_then(|()| self.receive(link));
            if let Err(error) = received {
                return End::Broken(error);
            }
        }
    }

    /// Sends the queued requests. Returns whether the store was dropped.
    fn send(&self, link: &mut Link, now: Instant) -> bool {
        let mut state = self.session.state.lock();
        if !state.waiting.is_empty() {
            link.last_sent = now;
        }
        let sent = Moment::now();
        for op in state.waiting.drain(..) {
            let xid = link.next_xid;
            // Requests have no negative ids.
            link.next_xid = xid.checked_add(1).unwrap_or(1);
            link.connection
                .queue(op.request.encode(xid, self.session.config.acl));
            link.in_flight.push_back((op, xid, sent));
        }
        state.closed
    }

    fn receive(&self, link: &mut Link) -> io::Result<()> {
        while let Some(frame) = link.connection.frame()? {
            self.message(link, &frame).map_err(|Garbled| {
                io::Error::new(io::ErrorKind::InvalidData, "a reply that cannot be understood")
            })?;
        }
        Ok(())
    }

    fn message(&self, link: &mut Link, frame: &[u8]) -> Result<(), Garbled> {
        let mut body = In::new(frame);
        let head = Head::decode(&mut body)?;
        let now = Moment::now();
        match head.xid {
            wire::NOTIFICATION => {
                if let Some(changed) = wire::notified(&mut body)? {
                    let _ = self.events.send(Event::Changed(changed));
                }
            }
            wire::PING => {
                if let Some((_, sent)) = link.ping_sent.take() {
                    link.beats.answered(sent, now);
                }
            }
            wire::AUTH => {}
            xid => {
                let (op, expected, sent) = link.in_flight.pop_front().ok_or(Garbled)?;
                if xid != expected {
                    link.in_flight.push_front((op, expected, sent));
                    return Err(Garbled);
                }
                let reply = match head.code {
                    Code::OK => match op.request.reply(&mut body) {
                        Ok(reply) => Ok(reply),
                        Err(garbled) => {
                            link.in_flight.push_front((op, expected, sent));
                            return Err(garbled);
                        }
                    },
                    code => Err(code),
                };
                link.beats.answered(sent, now);
                let agreed = reply.is_ok() && op.request.is_write();
                if let Some(from) = link.beats.counts_from(sent).filter(|_| agreed) {
                    self.session.is_kept(from + link.lasts);
                }
                let epoch = self.epoch;
                let _ = op.reply.send(Ok(Answer { reply, epoch }));
            }
        }
        Ok(())
    }
}

impl Link {
    /// The interval between messages to the server.
    fn beat(&self) -> Duration {
        self.lasts / 20
    }

    /// When to act if nothing arrives.
    fn due(&self) -> Instant {
        let ping = match self.ping_sent {
            None => self.last_sent + self.beat(),
            Some((sent, _)) => sent + self.lasts / 3,
        };
        let answer = self.in_flight.front().map(|(op, ..)| op.deadline);
        answer.map_or(ping, |answer| answer.min(ping))
    }

    /// Sends a ping, or gives up the connection: a reply that is late could be matched to another request.
    fn overdue(&mut self, now: Instant) -> io::Result<()> {
        let late = self.in_flight.front().is_some_and(|(op, ..)| op.deadline <= now);
        let deaf = self
            .ping_sent
            .is_some_and(|(sent, _)| sent + self.lasts / 3 <= now);
        if late || deaf {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it did not answer in time",
            ));
        }
        if self.ping_sent.is_none() && self.last_sent + self.beat() <= now {
            self.connection.queue(wire::ping());
            self.ping_sent = Some((now, Moment::now()));
            self.last_sent = now;
        }
        Ok(())
    }

    /// Ends the session; the servers remove its nodes at once.
    async fn close(&mut self, within: Duration) -> End {
        let until = Instant::now() + within;
        self.connection.queue(wire::close(self.next_xid));
        let closing = async {
            // The server closes the connection after it has ended the session.
            while self.connection.turn().await.is_ok() {
                if self.connection.frame().is_ok_and(|frame| frame.is_some())
                    && !self.connection.has_outgoing()
                {
                    break;
                }
            }
        };
        let _ = timeout_at(until, closing).await;
        End::Closed
    }
}

/// Waits for the reply to the credentials.
async fn authorize(connection: &mut Connection, until: Instant) -> io::Result<()> {
    let replied = timeout_at(until, async {
        loop {
            while let Some(frame) = connection.frame()? {
                let head =
                    Head::decode(&mut In::new(&frame)).map_err(|Garbled| io::Error::other("no reply"))?;
                if head.xid == wire::AUTH {
                    return match head.code {
                        Code::OK => Ok(()),
                        code => Err(io::Error::new(io::ErrorKind::PermissionDenied, code.to_string())),
                    };
                }
            }
            connection.turn().await?;
        }
    });
    replied
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Fails the requests whose deadline is over; returns when the store was dropped and no request waits.
async fn fail_late(session: &Session) {
    loop {
        let next = session.fail_late(Instant::now());
        if next.is_none() && session.state.lock().closed {
            return;
        }
        let woken = session.wake.notified();
        match next {
            Some(next) => tokio::select! {
                () = woken => {}
                () = sleep_until(next) => {}
            },
            None => woken.await,
        }
    }
}
