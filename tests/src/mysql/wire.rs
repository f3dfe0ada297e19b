//! The protocol of MySQL, packet by packet.

use tokio::io::{self, AsyncReadExt};
use tokio::net::tcp::OwnedReadHalf;

use crate::network::{Asks, Dialect, Unit};
use crate::sql::Request;

/// A command whose text is SQL.
const QUERY: u8 = 3;
/// In a status: another result follows.
const MORE_RESULTS: u16 = 8;

/// MySQL's protocol.
#[derive(Debug)]
pub struct Mysql;

impl Dialect for Mysql {
    type Request = Request;
    type Said = ();
    type Reply = Reply;

    async fn unit((): &mut (), from: &mut OwnedReadHalf) -> io::Result<Option<Unit<Request>>> {
        let Some(bytes) = packet(from).await? else {
            return Ok(None);
        };
        // Commands begin a sequence of their own; everything else belongs to the greeting.
        if bytes[3] != 0 {
            let asks = Asks::Nothing;
            return Ok(Some(Unit { bytes, asks }));
        }
        let executes = bytes.get(4) == Some(&QUERY);
        let sql = match executes {
            true => String::from_utf8_lossy(&bytes[5..]).into_owned(),
            false => String::new(),
        };
        let asks = Asks::For(Request { sql, executes });
        Ok(Some(Unit { bytes, asks }))
    }

    async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
        packet(from).await
    }

    fn ends(reply: &mut Reply, _: &Asks<Request>, message: &[u8]) -> bool {
        reply.ends_with(&message[4..])
    }

    fn is_step(request: &Request) -> bool {
        request.executes
    }
}

/// Where in the reply to a command the server is.
#[derive(Debug, Default)]
pub enum Reply {
    /// At the beginning of a result.
    #[default]
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
