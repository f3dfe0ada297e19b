//! What is wrong with a network as a whole.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: commands.
    ToServer,
    /// From the server to the client: replies and messages.
    ToClient,
    /// Both ways.
    Both,
}

impl Direction {
    pub(crate) fn covers(self, one: Self) -> bool {
        self == Self::Both || self == one
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lane {
    pub(crate) delay: Duration,
    pub(crate) jitter: Duration,
    pub(crate) trickle: Option<Duration>,
    pub(crate) blocked: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Conditions {
    to_server: Lane,
    to_client: Lane,
    pub(crate) lose_messages: bool,
}

impl Conditions {
    pub(crate) fn lane(&self, direction: Direction) -> &Lane {
        match direction {
            Direction::ToClient => &self.to_client,
            Direction::ToServer | Direction::Both => &self.to_server,
        }
    }
}

/// Delays and blocks, for open connections and new ones, until they are taken back.
#[derive(Debug, Default)]
pub struct Weather(watch::Sender<Conditions>);

impl Weather {
    pub(crate) fn now(&self) -> Conditions {
        *self.0.borrow()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Conditions> {
        self.0.subscribe()
    }

    fn change(&self, direction: Direction, change: impl Fn(&mut Lane)) {
        self.0.send_modify(|now| {
            for (lane, way) in [
                (&mut now.to_server, Direction::ToServer),
                (&mut now.to_client, Direction::ToClient),
            ] {
                if direction.covers(way) {
                    change(lane);
                }
            }
        });
    }

    /// Delays what arrives from now on by `delay` plus up to `jitter`, in order. Zero and zero ends it.
    pub fn delay(&self, direction: Direction, delay: Duration, jitter: Duration) {
        self.change(direction, |lane| (lane.delay, lane.jitter) = (delay, jitter));
    }

    /// Forwards byte by byte, each in a packet of its own, with `gap` between two; `None` ends it. Only the proxy before
    /// Redis can.
    pub fn trickle(&self, direction: Direction, gap: Option<Duration>) {
        self.change(direction, |lane| lane.trickle = gap);
    }

    /// Forwards nothing in this direction, and closes nothing, until [`unblock`](Self::unblock). What arrives is kept.
    pub fn block(&self, direction: Direction) {
        self.change(direction, |lane| lane.blocked = true);
    }

    /// Lets everything go on that [`block`](Self::block) kept.
    pub fn unblock(&self, direction: Direction) {
        self.change(direction, |lane| lane.blocked = false);
    }

    /// Whether messages that no command asked for are lost on their way. Only the proxy before Redis can.
    pub fn lose_messages(&self, on: bool) {
        self.0.send_modify(|now| now.lose_messages = on);
    }

    /// Ends all of it.
    pub(crate) fn clear(&self) {
        self.0.send_replace(Conditions::default());
    }

    /// When bytes that arrive now are to go on; never before those that came earlier.
    pub(crate) fn due(&self, direction: Direction, last: &mut Instant) -> Instant {
        *last = (*last).max(Instant::now() + self.late_by(direction));
        *last
    }

    /// By how much what arrives now is late.
    pub(crate) fn late_by(&self, direction: Direction) -> Duration {
        let lane = *self.0.borrow().lane(direction);
        lane.delay + lane.jitter.mul_f64(fastrand::f64())
    }

    pub(crate) async fn unblocked(&self, direction: Direction) {
        let _ = self
            .subscribe()
            .wait_for(|now| !now.lane(direction).blocked)
            .await;
    }
}
