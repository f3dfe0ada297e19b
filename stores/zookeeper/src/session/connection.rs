//! One connection to a server: incoming and outgoing frames.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use crate::wire::{self, Welcome};

/// The longest message that is read: longer than a server sends by default.
const LONGEST: usize = 64 << 20;

/// The id and the password of a session, with which another connection resumes it.
#[derive(Debug, Clone, Default)]
pub(super) struct Ticket {
    pub(super) id: i64,
    pub(super) password: Vec<u8>,
}

pub(super) struct Connection {
    stream: TcpStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    /// How many bytes of `outgoing` were written.
    written: usize,
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Says why a server may close a connection instead of giving it a session.
fn closed(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::new(
            error.kind(),
            format!(
                "{error}: the server closed the connection without an answer: it serves no clients now, or this is its \
                 port for TLS, which dlock-zookeeper does not speak; use its port without TLS"
            ),
        ),
        _ => error,
    }
}

impl Connection {
    /// Connects to one of the addresses of a host, and requests a session. An address that does not answer leaves time for the
    /// others.
    pub(super) async fn dial(
        host: &str,
        within: Duration,
        session: Duration,
        ticket: &Ticket,
    ) -> io::Result<(Connection, Welcome)> {
        let found = timeout(within, lookup_host(host)).await;
        let addresses: Vec<SocketAddr> = found.map_err(|_| io::ErrorKind::TimedOut)??.collect();
        let share = within / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
        let mut dialled = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for address in addresses {
            let greeted = timeout(share, Connection::greet(address, session, ticket));
            dialled = greeted
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            if dialled.is_ok() {
                break;
            }
        }
        dialled
    }

    async fn greet(
        address: SocketAddr,
        session: Duration,
        ticket: &Ticket,
    ) -> io::Result<(Connection, Welcome)> {
        let millis = i32::try_from(session.as_millis()).unwrap_or(i32::MAX);
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut connection = Connection {
            stream,
            incoming: Vec::with_capacity(4096),
            outgoing: Vec::new(),
            written: 0,
        };
        connection.queue(wire::hello(millis, ticket.id, &ticket.password));
        while connection.has_outgoing() {
            connection.write().await?;
        }
        loop {
            if let Some(frame) = connection.frame()? {
                let welcome = Welcome::decode(&frame).map_err(|_| broken("it is no ZooKeeper server"))?;
                return Ok((connection, welcome));
            }
            connection.read().await.map_err(closed)?;
        }
    }

    pub(super) fn queue(&mut self, message: Vec<u8>) {
        self.outgoing.extend(message);
    }

    pub(super) fn has_outgoing(&self) -> bool {
        self.written < self.outgoing.len()
    }

    /// Writes queued bytes or reads, whichever is possible first. Cancel safe.
    pub(super) async fn turn(&mut self) -> io::Result<()> {
        let has_outgoing = self.has_outgoing();
        let (mut reading, mut writing) = self.stream.split();
        tokio::select! {
            biased;
            written = writing.write(&self.outgoing[self.written..]), if has_outgoing => {
                Connection::wrote(&mut self.outgoing, &mut self.written, written?)
            }
            read = reading.read_buf(&mut self.incoming) => match read? {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                _ => Ok(()),
            }
        }
    }

    async fn write(&mut self) -> io::Result<()> {
        let written = self.stream.write(&self.outgoing[self.written..]).await?;
        Connection::wrote(&mut self.outgoing, &mut self.written, written)
    }

    fn wrote(outgoing: &mut Vec<u8>, before: &mut usize, written: usize) -> io::Result<()> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        *before += written;
        if *before == outgoing.len() {
            outgoing.clear();
            *before = 0;
        }
        Ok(())
    }

    async fn read(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.incoming).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Returns the next complete message.
    pub(super) fn frame(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some((length, rest)) = self.incoming.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > LONGEST {
            return Err(broken(
                "it sent a message that is too long, or is no ZooKeeper server",
            ));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let frame = rest[..length].to_vec();
        self.incoming.drain(..4 + length);
        Ok(Some(frame))
    }
}
