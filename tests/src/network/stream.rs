//! The connections of proxies for protocols that are a row of messages in both directions.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{Deed, Direction, NetFault, Network, Protocol, Swallow, Undelivered};

/// What a client says at a time.
#[derive(Debug)]
pub struct Unit<R> {
    pub(crate) bytes: Vec<u8>,
    pub(crate) asks: Asks<R>,
}

/// What replies to it.
#[derive(Debug)]
pub enum Asks<R> {
    /// Nothing, or something that is not waited for.
    Nothing,
    /// The server, though it is no request.
    ToBeGreeted,
    /// The server, with the reply to this request.
    For(R),
}

/// How messages are told apart, and replies found.
pub trait Dialect: Send + Sync + 'static {
    /// What a client asks for.
    type Request: std::fmt::Debug + Clone + Send + Sync + 'static;
    /// What is known of what the client said before.
    type Said: Default + Send;
    /// Where in a reply the server is.
    type Reply: Default + Send;

    /// How long a server is waited for that does not listen yet.
    const IS_AWAITED: Duration = Duration::ZERO;

    /// Reads what a client says next; `None` at the end.
    fn unit(
        said: &mut Self::Said,
        from: &mut OwnedReadHalf,
    ) -> impl Future<Output = io::Result<Option<Unit<Self::Request>>>> + Send;

    /// Reads what the server says next; `None` at the end.
    fn message(from: &mut OwnedReadHalf) -> impl Future<Output = io::Result<Option<Vec<u8>>>> + Send;

    /// Whether the reply to this ends with this message.
    fn ends(reply: &mut Self::Reply, asked: &Asks<Self::Request>, message: &[u8]) -> bool;

    /// See [`Protocol::is_step`].
    fn is_step(request: &Self::Request) -> bool;
}

/// The protocol of messages in this dialect.
#[derive(Debug)]
pub struct Stream<D>(PhantomData<fn() -> D>);

/// Something that the server is to reply to.
struct Pending<R> {
    asks: Asks<R>,
    fault: Option<(Option<Swallow>, NetFault)>,
}

impl<R> Pending<R> {
    fn swallow(&self) -> Option<Swallow> {
        self.fault.as_ref().and_then(|(swallow, _)| *swallow)
    }
}

impl<D: Dialect> Protocol for Stream<D> {
    type Request = D::Request;

    async fn forward(network: Arc<Network<Self>>, client: TcpStream, cut: CancellationToken) {
        let begun = Instant::now();
        let server = loop {
            match TcpStream::connect(network.upstream).await {
                Ok(server) => break server,
                Err(_) if begun.elapsed() < D::IS_AWAITED => sleep(Duration::from_millis(20)).await,
                Err(_) => return,
            }
        };
        let _ = server.set_nodelay(true);
        let (client_read, client_write) = client.into_split();
        let (server_read, server_write) = server.into_split();
        let (asked, pending) = mpsc::unbounded_channel();
        let mut requests = std::pin::pin!(requests::<D>(&network, &cut, client_read, server_write, asked));
        let mut replies = std::pin::pin!(replies::<D>(&network, &cut, server_read, client_write, pending));
        // A client that closes takes nothing back that it has sent; a server that closes ends it all.
        tokio::select! {
            outcome = &mut requests => if outcome.is_ok() { _ = replies.await },
            _ = &mut replies => {}
        }
    }

    fn is_step(request: &D::Request) -> bool {
        D::is_step(request)
    }
}

async fn requests<D: Dialect>(
    network: &Network<Stream<D>>,
    cut: &CancellationToken,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    asked: mpsc::UnboundedSender<Pending<D::Request>>,
) -> io::Result<()> {
    let (arrive, mut arrived) = mpsc::unbounded_channel();
    let read = async move {
        let (mut said, mut last) = (D::Said::default(), Instant::now());
        loop {
            let unit = tokio::select! {
                () = cut.cancelled() => return,
                unit = D::unit(&mut said, &mut from) => unit,
            };
            let Ok(Some(unit)) = unit else { return };
            let struck = match &unit.asks {
                Asks::For(request) => network.strike(request.clone()),
                _ => None,
            };
            let held = match &struck {
                Some((Deed::Hold, fault)) => Some(Undelivered(fault.clone())),
                _ => None,
            };
            let due = network.weather.due(Direction::ToServer, &mut last);
            let _ = arrive.send((due, unit, struck, held));
        }
    };
    let write = async move {
        while let Some((due, Unit { bytes, asks }, struck, held)) = arrived.recv().await {
            if let Some((Deed::Hold, fault)) = &struck {
                // Whatever becomes of its client.
                fault.is_released().await;
            } else {
                tokio::select! {
                    // One behind it may be held.
                    () = cut.cancelled() => continue,
                    () = passes(network, Direction::ToServer, due) => {}
                }
            }
            let fault = match struck {
                Some((Deed::Lose, _)) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Some((Deed::Swallow(then), fault)) => Some((Some(then), fault)),
                Some((Deed::Hold, fault)) => Some((None, fault)),
                None => None,
            };
            if !matches!(asks, Asks::Nothing) {
                let _ = asked.send(Pending { asks, fault });
            }
            let written = to.write_all(&bytes).await;
            drop(held);
            written?;
        }
        to.shutdown().await
    };
    let ((), written) = tokio::join!(read, write);
    written
}

async fn replies<D: Dialect>(
    network: &Network<Stream<D>>,
    cut: &CancellationToken,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut asked: mpsc::UnboundedReceiver<Pending<D::Request>>,
) -> io::Result<()> {
    let (arrive, mut arrived) = mpsc::unbounded_channel();
    // After a cut the server's messages are dropped.
    let read = async move {
        let mut last = Instant::now();
        while let Ok(Some(message)) = D::message(&mut from).await {
            let _ = arrive.send((network.weather.due(Direction::ToClient, &mut last), message));
        }
        Ok(())
    };
    let write = async move {
        let mut current: Option<(Pending<D::Request>, D::Reply)> = None;
        let mut mute = false;
        let forward = async {
            while let Some((due, message)) = arrived.recv().await {
                passes(network, Direction::ToClient, due).await;
                if current.is_none() {
                    let next = asked.try_recv().ok();
                    current = next.map(|next| (next, D::Reply::default()));
                }
                let swallowed = current
                    .as_ref()
                    .is_some_and(|(asked, _)| asked.swallow().is_some());
                if !mute && !swallowed {
                    // The client may be gone; what it sent still reaches the server.
                    let _ = to.write_all(&message).await;
                }
                let over = current
                    .take_if(|(pending, reply)| D::ends(reply, &pending.asks, &message))
                    .and_then(|(pending, _)| pending.fault);
                if let Some((then, fault)) = over {
                    fault.is_swallowed();
                    match then {
                        Some(Swallow::Cut) => return Err(io::ErrorKind::ConnectionAborted.into()),
                        Some(Swallow::Hang) => mute = true,
                        None => {}
                    }
                }
            }
            io::Result::Ok(())
        };
        tokio::select! {
            () = cut.cancelled() => {}
            outcome = forward => outcome?,
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write).map(|((), ())| ())
}

async fn passes<D: Dialect>(network: &Network<Stream<D>>, direction: Direction, due: Instant) {
    sleep_until(due).await;
    network.weather.unblocked(direction).await;
}
