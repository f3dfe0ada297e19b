//! The connections of a proxy before MySQL, packet by packet.

use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use crate::sql_proxy::{Deed, Request, Shared, Stage};
use crate::{Direction, Swallow};

/// A command whose text is SQL.
const QUERY: u8 = 3;
/// In a status: another result follows.
const MORE_RESULTS: u16 = 8;

/// A reply that is still to come, and what is to become of it.
type Pending = Option<(Swallow, watch::Sender<Stage>)>;

pub(crate) async fn forward(shared: &Shared, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let (asked, replies) = mpsc::unbounded_channel();
    let requests = requests(shared, client_read, server_write, asked);
    let replies = self::replies(shared, server_read, client_write, replies);
    // A client that closes takes nothing back that it has sent; a server that closes ends it all.
    let mut requests = std::pin::pin!(requests);
    let mut replies = std::pin::pin!(replies);
    tokio::select! {
        outcome = &mut requests => { outcome?; replies.await }
        outcome = &mut replies => outcome,
    }
}

async fn requests(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    asked: mpsc::UnboundedSender<Pending>,
) -> io::Result<()> {
    while let Some(packet) = packet(&mut from).await? {
        // Commands begin a sequence of their own; everything else belongs to the greeting.
        if packet[3] != 0 {
            shared.pass(Direction::ToServer).await;
            to.write_all(&packet).await?;
            continue;
        }
        let executes = packet.get(4) == Some(&QUERY);
        let sql = match executes {
            true => String::from_utf8_lossy(&packet[5..]).into_owned(),
            false => String::new(),
        };
        let mut pending = None;
        match shared.look(Request { sql, executes }) {
            Some((Deed::Lose, _)) => return Err(io::ErrorKind::ConnectionAborted.into()),
            Some((Deed::Swallow(then), stage)) => pending = Some((then, stage)),
            Some((Deed::Hold, stage)) => {
                let mut stages = stage.subscribe();
                let _ = stages.wait_for(|stage| *stage == Stage::Released).await;
            }
            None => {}
        }
        shared.pass(Direction::ToServer).await;
        let _ = asked.send(pending);
        to.write_all(&packet).await?;
    }
    to.shutdown().await
}

async fn replies(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut asked: mpsc::UnboundedReceiver<Pending>,
) -> io::Result<()> {
    let mut current: Option<(Pending, Reply)> = None;
    let mut mute = false;
    let cut = shared.cut_clients();
    loop {
        let packet = tokio::select! {
            packet = packet(&mut from) => packet?,
            () = cut.cancelled() => {
                to.shutdown().await?;
                // What the server says from now on is for nobody.
                return io::copy(&mut from, &mut io::sink()).await.map(drop);
            }
        };
        let Some(packet) = packet else { return Ok(()) };
        if current.is_none() {
            current = asked.try_recv().ok().map(|pending| (pending, Reply::Head));
        }
        shared.pass(Direction::ToClient).await;
        if !mute && !matches!(&current, Some((Some(_), _))) {
            // The client may be gone; what it sent still reaches the server.
            let _ = to.write_all(&packet).await;
        }
        let Some((_, reply)) = &mut current else { continue };
        if !reply.ends_with(&packet[4..]) {
            continue;
        }
        if let Some((Some((then, stage)), _)) = current.take() {
            stage.send_replace(Stage::Swallowed);
            match then {
                Swallow::Cut => return Err(io::ErrorKind::ConnectionAborted.into()),
                Swallow::Hang => mute = true,
            }
        }
    }
}

/// Where in the reply to a command the server is.
#[derive(Debug)]
enum Reply {
    /// At the beginning of a result.
    Head,
    /// In the columns of one with rows: how many are left.
    Columns(u64),
    /// Whether there was a mark behind the columns, as servers make it that also end the rows by one.
    Rows(Option<bool>),
}

impl Reply {
    /// Takes the next packet; whether it is the last one.
    fn ends_with(&mut self, body: &[u8]) -> bool {
        match self {
            Reply::Head => match body.first() {
                Some(0x00) => self.ends_by(status(body)),
                Some(0xff) | None => true,
                Some(_) => {
                    *self = Reply::Columns(number(body).0);
                    false
                }
            },
            Reply::Columns(left) => {
                *left -= 1;
                if *left == 0 {
                    *self = Reply::Rows(None);
                }
                false
            }
            Reply::Rows(marked) => match (body.first(), *marked) {
                (Some(0xff), _) => true,
                (Some(0xfe), None) if body.len() == 5 => {
                    *marked = Some(true);
                    false
                }
                // Its warnings and its status.
                (Some(0xfe), Some(true)) if body.len() == 5 => {
                    self.ends_by(u16::from_le_bytes([body[3], body[4]]))
                }
                (Some(0xfe), _) if body.len() < 9 => self.ends_by(status(body)),
                _ => {
                    marked.get_or_insert(false);
                    false
                }
            },
        }
    }

    fn ends_by(&mut self, status: u16) -> bool {
        *self = Reply::Head;
        status & MORE_RESULTS == 0
    }
}

/// The status in a packet that says OK: behind two numbers.
fn status(body: &[u8]) -> u16 {
    let rest = &body[1..];
    let (_, first) = number(rest);
    let (_, second) = number(&rest[first..]);
    match rest[first + second..] {
        [low, high, ..] => u16::from_le_bytes([low, high]),
        _ => 0,
    }
}

/// A number of variable length, and how long it is.
fn number(body: &[u8]) -> (u64, usize) {
    let bytes = match body.first() {
        Some(0xfc) => 2,
        Some(0xfd) => 3,
        Some(0xfe) => 8,
        Some(small) => return (u64::from(*small), 1),
        None => return (0, 0),
    };
    let value = body[1..].iter().take(bytes).rev();
    (
        value.fold(0, |value, byte| value << 8 | u64::from(*byte)),
        bytes + 1,
    )
}

/// One packet with its head; `None` at the end.
async fn packet(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
    let mut packet = vec![0; 4];
    if from.read(&mut packet[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut packet[1..]).await?;
    let length = u32::from_le_bytes([packet[0], packet[1], packet[2], 0]) as usize;
    packet.resize(length + 4, 0);
    from.read_exact(&mut packet[4..]).await?;
    Ok(Some(packet))
}
