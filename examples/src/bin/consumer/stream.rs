//! A Redis stream with a group of consumers: it delivers each message at least once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult};
use tokio::sync::Mutex;

/// How long the server may take to reply; longer than a read blocks.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a read waits for a message, in ms.
const BLOCK: u64 = 200;
/// All consumers of a stream are in this group.
const GROUP: &str = "consumers";

type Fields = HashMap<String, String>;
type Entries = Vec<(String, Option<Fields>)>;

/// A payment, as it was delivered.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) id: String,
    pub(crate) amount: u64,
    /// Of the layer: which attempt it is, and its fencing token.
    pub(crate) attempt: u32,
    pub(crate) token: u64,
}

#[derive(Clone)]
pub(crate) struct Stream {
    /// Reads block, so acknowledgements use a separate connection.
    reads: Arc<Mutex<Reads>>,
    writes: MultiplexedConnection,
    name: String,
    consumer: String,
    idle: Duration,
}

struct Reads {
    connection: MultiplexedConnection,
    fetched: VecDeque<Message>,
    claimed: Option<Instant>,
}

pub(crate) async fn connect(url: &str) -> Result<MultiplexedConnection, String> {
    // The URL may hold a password, and is not repeated.
    let client = Client::open(url).map_err(|_| "--url is none of a Redis server".to_owned())?;
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    connection
        .await
        .map_err(|error| format!("cannot open --url: {error}"))
}

impl Stream {
    pub(crate) async fn open(
        url: &str,
        name: &str,
        consumer: &str,
        idle: Duration,
    ) -> Result<Stream, String> {
        let mut writes = connect(url).await?;
        let mut create = redis::cmd("XGROUP");
        create.arg("CREATE").arg(name).arg(GROUP).arg("0").arg("MKSTREAM");
        match create.query_async::<()>(&mut writes).await {
            Ok(()) => {}
            Err(error) if error.code() == Some("BUSYGROUP") => {}
            Err(error) => return Err(format!("cannot make a group of {name}: {error}")),
        }
        Ok(Stream {
            reads: Arc::new(Mutex::new(Reads {
                connection: connect(url).await?,
                fetched: VecDeque::new(),
                claimed: None,
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
        all.query_async(&mut self.writes.clone()).await
    }

    /// The next message: a message that another consumer has left, or a new one. If this future is dropped, a message
    /// may be lost here; it was not acknowledged and is delivered again.
    pub(crate) async fn next(&self) -> RedisResult<Message> {
        let mut reads = self.reads.lock().await;
        loop {
            if let Some(message) = reads.fetched.pop_front() {
                return Ok(message);
            }
            let is_due = reads.claimed.is_none_or(|last| last.elapsed() > self.idle / 4);
            let entries = match is_due {
                true => {
                    reads.claimed = Some(Instant::now());
                    self.left_by_others(&mut reads.connection).await?
                }
                false => self.new_ones(&mut reads.connection).await?,
            };
            reads
                .fetched
                .extend(entries.into_iter().filter_map(|(id, fields)| {
                    // Deleted meanwhile, or none of ours.
                    let amount = fields?.get("amount")?.parse().ok()?;
                    Some(Message {
                        id,
                        amount,
                        attempt: 0,
                        token: 0,
                    })
                }));
        }
    }

    async fn new_ones(&self, connection: &mut MultiplexedConnection) -> RedisResult<Entries> {
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
        let streams: Option<Vec<(String, Entries)>> = read.query_async(connection).await?;
        Ok(streams
            .into_iter()
            .flatten()
            .flat_map(|(_, entries)| entries)
            .collect())
    }

    /// Messages of consumers that were killed, and those that were not done.
    async fn left_by_others(&self, connection: &mut MultiplexedConnection) -> RedisResult<Entries> {
        let mut claim = redis::cmd("XAUTOCLAIM");
        claim
            .arg(&self.name)
            .arg(GROUP)
            .arg(&self.consumer)
            .arg(self.idle.as_millis() as u64);
        claim.arg("0").arg("COUNT").arg(16);
        let reply: Vec<redis::Value> = claim.query_async(connection).await?;
        match reply.into_iter().nth(1) {
            Some(entries) => Ok(redis::from_redis_value(entries)?),
            None => Ok(Vec::new()),
        }
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
        claim.query_async(&mut self.writes.clone()).await
    }

    pub(crate) async fn acknowledge(&self, id: &str) -> RedisResult<()> {
        let mut acknowledge = redis::cmd("XACK");
        acknowledge.arg(&self.name).arg(GROUP).arg(id);
        acknowledge.query_async(&mut self.writes.clone()).await
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
        both.query_async(&mut self.writes.clone()).await
    }
}
