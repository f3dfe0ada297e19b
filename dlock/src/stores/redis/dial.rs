//! Opens the socket to a server, over the first address of its name that answers.
//!
//! A name may have several addresses, including those of dead hosts. An address that swallows every packet delays the
//! others only for a moment: they are tried in parallel, one after the other (RFC 8305). An address whose connection
//! turned out to be useless is tried last the next time.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::net::TcpStream;

/// How long an address is tried before the next one is tried in parallel.
const HEAD_START: Duration = Duration::from_millis(100);
/// How many useless addresses are remembered; the oldest is forgotten first.
const MANY: usize = 64;

/// Opens sockets, and remembers which addresses were useless.
#[derive(Debug, Clone, Default)]
pub(super) struct Dialer(Arc<Mutex<VecDeque<SocketAddr>>>);

/// A connection to an address that must still prove useful: unless [`passed`](Self::passed) is called, the address is
/// tried last from now on.
#[derive(Debug)]
pub(super) struct Trial(Option<(Dialer, SocketAddr)>);

impl Trial {
    /// For a server with a single address.
    #[cfg(unix)]
    pub(super) fn none() -> Trial {
        Trial(None)
    }

    pub(super) fn passed(&mut self) {
        if let Some((dialer, address)) = self.0.take() {
            dialer.forget(address);
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Some((dialer, address)) = self.0.take() {
            dialer.forget(address);
            let mut useless = dialer.0.lock();
            useless.push_back(address);
            if useless.len() > MANY {
                useless.pop_front();
            }
        }
    }
}

impl Dialer {
    pub(super) async fn dial(&self, host: &str, port: u16) -> io::Result<(TcpStream, Trial)> {
        let addresses = tokio::net::lookup_host((host, port)).await?.collect();
        let stream = race(self.sorted(addresses), TcpStream::connect).await?;
        stream.set_nodelay(true)?;
        let address = stream.peer_addr()?;
        Ok((stream, Trial(Some((self.clone(), address)))))
    }

    fn forget(&self, address: SocketAddr) {
        self.0.lock().retain(|other| *other != address);
    }

    /// Sorts the useless ones to the end, the latest of them last.
    fn sorted(&self, mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
        let useless = self.0.lock();
        let rank = |address: &SocketAddr| useless.iter().position(|other| other == address);
        addresses.sort_by_key(rank);
        addresses
    }
}

/// Connects to the first address that answers. Each has a head start on the next.
async fn race<T, F>(
    addresses: impl IntoIterator<Item = SocketAddr>,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<T>
where
    F: Future<Output = io::Result<T>>,
{
    let mut addresses = addresses.into_iter().peekable();
    let mut attempts = FuturesUnordered::new();
    let mut failure = None;
    loop {
        attempts.extend(addresses.next().map(&connect));
        if attempts.is_empty() {
            let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            return Err(failure.unwrap_or_else(none));
        }
        let turn_of_the_next = async {
            match addresses.peek() {
                Some(_) => tokio::time::sleep(HEAD_START).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(outcome) = attempts.next() => match outcome {
                Ok(stream) => return Ok(stream),
                Err(error) => failure = Some(error),
            },
            () = turn_of_the_next => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn at(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    /// Addresses below 10 swallow everything, those below 20 refuse, the others answer after 30 ms.
    async fn connect(address: SocketAddr) -> io::Result<SocketAddr> {
        match address.port() {
            ..10 => std::future::pending().await,
            10..20 => Err(io::ErrorKind::ConnectionRefused.into()),
            _ => {
                tokio::time::sleep(Duration::from_millis(30)).await;
                Ok(address)
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn swallowing_address_hides_no_other() {
        let begun = Instant::now();
        let found = race([1, 2, 20, 21].map(at), connect).await.unwrap();
        assert_eq!((found, begun.elapsed().as_millis()), (at(20), 230));
    }

    #[tokio::test(start_paused = true)]
    async fn refusing_address_costs_no_time() {
        let begun = Instant::now();
        assert_eq!(race([10, 11, 20].map(at), connect).await.unwrap(), at(20));
        assert_eq!(begun.elapsed().as_millis(), 30);
        let error = race([10, 11].map(at), connect).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(race([], connect).await.is_err());
    }

    #[test]
    fn useless_address_is_tried_last_until_it_proves_itself() {
        let dialer = Dialer::default();
        let trial = |port| Trial(Some((dialer.clone(), at(port))));
        let order = || dialer.sorted([1, 2, 3].map(at).to_vec());
        drop(trial(2));
        drop(trial(1));
        assert_eq!(order(), [3, 2, 1].map(at));
        drop(trial(2));
        assert_eq!(order(), [3, 1, 2].map(at));
        trial(1).passed();
        assert_eq!(order(), [1, 3, 2].map(at));
    }
}
