//! The protocol between ZooKeeper and its clients, and between its servers.

use std::time::Duration;

use tokio::io::{self, AsyncReadExt};
use tokio::net::tcp::OwnedReadHalf;

use crate::network::{Asks, Dialect, Unit};

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZkRequest {
    /// The number by which its reply is known.
    xid: i32,
    /// The number of the operation.
    pub operation: i32,
    /// The path of the node; empty where there is none.
    pub path: String,
}

impl ZkRequest {
    /// Whether it creates a node, and no container.
    pub fn creates(&self) -> bool {
        matches!(self.operation, 1 | 15)
    }

    /// Whether it deletes a node.
    pub fn deletes(&self) -> bool {
        self.operation == 2
    }

    /// Whether it is of several parts, as a renewal is.
    pub fn is_multi(&self) -> bool {
        self.operation == 14
    }

    /// Whether it sets the data of a node.
    pub fn sets_data(&self) -> bool {
        self.operation == 5
    }

    /// Whether it only shows that the client is there.
    pub fn is_ping(&self) -> bool {
        self.operation == 11
    }

    /// Whether it lists the nodes inside a node.
    pub fn lists(&self) -> bool {
        matches!(self.operation, 8 | 12)
    }

    fn parse(frame: &[u8]) -> Option<ZkRequest> {
        let int = |at: usize| Some(i32::from_be_bytes(frame.get(at..at + 4)?.try_into().ok()?));
        let (xid, operation) = (int(0)?, int(4)?);
        let path = int(8)
            .and_then(|length| frame.get(12..12 + usize::try_from(length).ok()?))
            .map(|path| String::from_utf8_lossy(path).into_owned());
        Some(ZkRequest {
            xid,
            operation,
            path: path.unwrap_or_default(),
        })
    }
}

/// ZooKeeper's protocol.
#[derive(Debug)]
pub struct Zk;

impl Dialect for Zk {
    type Request = ZkRequest;
    /// Whether it has told of its session.
    type Said = bool;
    type Reply = ();

    async fn unit(greeted: &mut bool, from: &mut OwnedReadHalf) -> io::Result<Option<Unit<ZkRequest>>> {
        let Some(bytes) = frame(from).await? else {
            return Ok(None);
        };
        let request = greeted.then(|| ZkRequest::parse(&bytes[4..])).flatten();
        *greeted = true;
        // What else has no number has its reply before those of earlier requests.
        let asks = match request.filter(|request| request.xid > 0 || request.is_ping()) {
            Some(request) => Asks::For(request),
            None => Asks::Nothing,
        };
        Ok(Some(Unit { bytes, asks }))
    }

    async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
        frame(from).await
    }

    fn ends((): &mut (), asked: &Asks<ZkRequest>, message: &[u8]) -> bool {
        matches!(asked, Asks::For(request) if message.get(4..8) == Some(&request.xid.to_be_bytes()))
    }

    fn is_step(request: &ZkRequest) -> bool {
        request.creates() || request.deletes() || request.is_multi()
    }
}

/// One message with its length; `None` at the end.
async fn frame(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
    let mut frame = vec![0; 4];
    if from.read(&mut frame[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut frame[1..]).await?;
    let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    frame.resize(4 + length, 0);
    from.read_exact(&mut frame[4..]).await?;
    Ok(Some(frame))
}

/// What is not looked into.
#[derive(Debug)]
pub(super) struct Bytes;

impl Dialect for Bytes {
    type Request = ();
    type Said = ();
    type Reply = ();

    // A server that is refused by its new leader tries again; one that is accepted for nothing begins an election.
    const IS_AWAITED: Duration = Duration::from_secs(5);

    async fn unit((): &mut (), from: &mut OwnedReadHalf) -> io::Result<Option<Unit<()>>> {
        let asks = Asks::Nothing;
        Ok(some(from).await?.map(|bytes| Unit { bytes, asks }))
    }

    async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
        some(from).await
    }

    fn ends((): &mut (), _: &Asks<()>, _: &[u8]) -> bool {
        false
    }

    fn is_step((): &()) -> bool {
        false
    }
}

async fn some(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
    let mut some = vec![0; 16_384];
    let length = from.read(&mut some).await?;
    some.truncate(length);
    Ok((length > 0).then_some(some))
}
