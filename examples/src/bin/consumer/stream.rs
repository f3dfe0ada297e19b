//! A Redis stream with a group of consumers: it delivers each message at least once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::OnceClaim;
use redis::RedisResult;
use tokio::sync::Mutex;

use crate::connection::Connection;

/// How long a read waits for a message, in ms.
const BLOCK: u64 = 200;
/// All consumers of a stream are in this group.
const GROUP: &str = "consumers";
/// Where a sweep through the pending messages begins, and where it ends.
const BEGIN: &str = "0-0";

type Fields = HashMap<String, String>;
type Entries = Vec<(String, Option<Fields>)>;

/// A payment, as it was delivered.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) id: String,
    pub(crate) amount: u64,
    /// Of the layer: which attempt it is, and its fencing token.
    pub(crate) claim: Option<OnceClaim>,
}

#[derive(Clone)]
pub(crate) struct Stream {
    /// Reads block, so acknowledgements use a separate connection.
    reads: Arc<Mutex<Reads>>,
    writes: Connection,
    name: String,
    consumer: String,
    idle: Duration,
}

struct Reads {
    connection: Connection,
    fetched: VecDeque<Message>,
    /// Where the sweep through the pending messages continues.
    cursor: String,
    /// When the last sweep ended; `None` during one.
    swept: Option<Instant>,
}

impl Stream {
    pub(crate) async fn open(
        url: &str,
        name: &str,
        consumer: &str,
        idle: Duration,
    ) -> Result<Stream, String> {
        let writes = Connection::open(url).await?;
        let mut create = redis::cmd("XGROUP");
        create.arg("CREATE").arg(name).arg(GROUP).arg("0").arg("MKSTREAM");
        let created = writes.step(async |mut connection| create.query_async::<()>(&mut connection).await);
        match created.await {
            Ok(()) => {}
            Err(error) if error.code() == Some("BUSYGROUP") => {}
            Err(error) => return Err(format!("cannot make a group of {name}: {error}")),
        }
        Ok(Stream {
            reads: Arc::new(Mutex::new(Reads {
                connection: Connection::open(url).await?,
                fetched: VecDeque::new(),
                cursor: BEGIN.to_owned(),
                swept: None,
            })),
            writes,
            name: name.to_owned(),
            consumer: consumer.to_owned(),
            idle,
        })
    }

    /// Adds payments of 1 to `count`.
    pub(crate) async fn produce(&self, count: u64) -> RedisResult<()> {
        let mut all = redis::pipe();
        for amount in 1..=count {
            all.cmd("XADD")
                .arg(&self.name)
                .arg("*")
                .arg("amount")
                .arg(amount)
                .ignore();
        }
        let step = async |mut connection| all.query_async(&mut connection).await;
        self.writes.step(step).await
    }

    /// The next message: a message that another consumer has left, or a new one. If this future is dropped, a message
    /// may be lost here; it was not acknowledged and is delivered again.
    pub(crate) async fn next(&self) -> RedisResult<Message> {
        let mut reads = self.reads.lock().await;
        loop {
            if let Some(message) = reads.fetched.pop_front() {
                return Ok(message);
            }
            let is_due = reads.swept.is_none_or(|last| last.elapsed() > self.idle / 4);
            let entries = match is_due {
                true => self.left_by_others(&mut reads).await?,
                false => self.new_ones(&reads.connection).await?,
            };
            let mut unreadable = Vec::new();
            for (id, fields) in entries {
                let amount = fields.and_then(|fields| fields.get("amount")?.parse().ok());
                match amount {
                    Some(amount) => reads.fetched.push_back(Message {
                        id,
                        amount,
                        claim: None,
                    }),
                    None => unreadable.push(id),
                }
            }
            for id in unreadable {
                // Left pending, it would be delivered again for ever, before the payments behind it.
                tracing::error!("{id} is put aside: it is no payment, or was deleted");
                self.put_aside(&id).await?;
            }
        }
    }

    async fn new_ones(&self, connection: &Connection) -> RedisResult<Entries> {
        let mut read = redis::cmd("XREADGROUP");
        read.arg("GROUP")
            .arg(GROUP)
            .arg(&self.consumer)
            .arg("COUNT")
            .arg(1);
        read.arg("BLOCK")
            .arg(BLOCK)
            .arg("STREAMS")
            .arg(&self.name)
            .arg(">");
        let step = async |mut connection| read.query_async(&mut connection).await;
        let streams: Option<Vec<(String, Entries)>> = connection.step(step).await?;
        Ok(streams
            .into_iter()
            .flatten()
            .flat_map(|(_, entries)| entries)
            .collect())
    }

    /// Messages of consumers that were killed, and those that were not done: some of them, from where the last call ended.
    async fn left_by_others(&self, reads: &mut Reads) -> RedisResult<Entries> {
        let mut claim = redis::cmd("XAUTOCLAIM");
        claim
            .arg(&self.name)
            .arg(GROUP)
            .arg(&self.consumer)
            .arg(self.idle.as_millis() as u64);
        claim.arg(&reads.cursor).arg("COUNT").arg(16);
        let step = async |mut connection| claim.query_async(&mut connection).await;
        let reply: Vec<redis::Value> = reads.connection.step(step).await?;
        let mut reply = reply.into_iter();
        let (Some(cursor), Some(entries)) = (reply.next(), reply.next()) else {
            return Ok(Vec::new());
        };
        reads.cursor = redis::from_redis_value(cursor)?;
        reads.swept = (reads.cursor == BEGIN).then(Instant::now);
        // In place of a message that was deleted, Redis 6.2 sends nil, without its id.
        let entries: Vec<Option<(String, Option<Fields>)>> = redis::from_redis_value(entries)?;
        Ok(entries.into_iter().flatten().collect())
    }

    /// Has a pending message delivered again after this time, if that is sooner than it would be otherwise.
    pub(crate) async fn deliver_after(&self, id: &str, pause: Duration) -> RedisResult<()> {
        let idle = self.idle.saturating_sub(pause).as_millis() as u64;
        let mut claim = redis::cmd("XCLAIM");
        claim
            .arg(&self.name)
            .arg(GROUP)
            .arg(&self.consumer)
            .arg(0)
            .arg(id);
        claim.arg("IDLE").arg(idle).arg("JUSTID");
        let step = async |mut connection| claim.query_async(&mut connection).await;
        self.writes.step(step).await
    }

    pub(crate) async fn acknowledge(&self, id: &str) -> RedisResult<()> {
        let mut acknowledge = redis::cmd("XACK");
        acknowledge.arg(&self.name).arg(GROUP).arg(id);
        let step = async |mut connection| acknowledge.query_async(&mut connection).await;
        self.writes.step(step).await
    }

    /// Acknowledges a message that is not tried again, and records it for an operator.
    pub(crate) async fn put_aside(&self, id: &str) -> RedisResult<()> {
        let mut both = redis::pipe();
        both.atomic();
        both.cmd("RPUSH")
            .arg(format!("aside:{}", self.name))
            .arg(id)
            .ignore();
        both.cmd("XACK").arg(&self.name).arg(GROUP).arg(id).ignore();
        let step = async |mut connection| both.query_async(&mut connection).await;
        self.writes.step(step).await
    }
}
