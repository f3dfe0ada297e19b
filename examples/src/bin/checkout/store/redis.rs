//! Records on a Redis or Valkey server.
//!
//! A step that fails or takes too long closes its connection, and the next step opens another one. So the service
//! recovers as soon as the server does: after a restart, which breaks the connection, and after a hang, which does
//! not.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ErrorKind, IntoConnectionInfo, RedisError, Script, ServerErrorKind,
};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::StoreError;

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);
/// How long it may take to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// How long a step may take in all, waiting for a connection included.
const STEP: Duration = Duration::from_secs(2);

/// Compares tokens as the decimal numbers they are: Lua's own numbers are exact up to 2^53 only.
const NEWER: &str = r#"
local function newer(last, ours)
  return #last > #ours or (#last == #ours and last > ours)
end
"#;

/// KEYS: the record. ARGV: our token, the record to begin with or nothing.
/// Answers the token that shuts us out, or nothing, and then the record, or nothing.
const CLAIM: &str = r#"
local record = redis.call('GET', KEYS[1])
if not record then
  if ARGV[2] == '' then return { false, false } end
  redis.call('SET', KEYS[1], ARGV[2])
  return { false, ARGV[2] }
end
local last = string.match(record, '"token":(%d+)')
if not last then return redis.error_reply('WRONGTYPE not a record of the checkout') end
if newer(last, ARGV[1]) then return { last, false } end
record = string.gsub(record, '"token":%d+', '"token":' .. ARGV[1], 1)
redis.call('SET', KEYS[1], record)
return { false, record }
"#;

/// KEYS: the record. ARGV: our token, the new record.
/// Answers the token that shuts us out, or nothing, and nothing more.
const WRITE: &str = r#"
local record = redis.call('GET', KEYS[1])
if record then
  local last = string.match(record, '"token":(%d+)')
  if not last then return redis.error_reply('WRONGTYPE not a record of the checkout') end
  if newer(last, ARGV[1]) then return { last, false } end
end
redis.call('SET', KEYS[1], ARGV[2])
return { false, false }
"#;

pub(crate) struct RedisStore {
    client: Client,
    connection: Mutex<Slot>,
    claim: Script,
    write: Script,
}

/// The current connection. Steps that fail together must not close a connection that was opened since.
#[derive(Default)]
struct Slot {
    open: Option<MultiplexedConnection>,
    number: u64,
}

/// What became of a step.
enum Failure {
    /// It was never sent, or the server said that it did not do it.
    NotDone(String),
    /// It was sent, and the outcome is unknown.
    Unknown(String),
    /// The key holds something else.
    Foreign,
}

impl RedisStore {
    /// Connects, so that a wrong URL is an error at the start and not for the first buyer.
    pub(super) async fn open(url: &str) -> Result<RedisStore, String> {
        // The error of the URL's parser may repeat parts of it, and a password may be among them.
        let info = url
            .into_connection_info()
            .map_err(|_| match url.split_once("://") {
                Some(("rediss" | "valkeys", _)) => {
                    "the URL is wrong, or it asks for TLS and this was built without --features tls"
                        .to_owned()
                }
                _ => "the URL is not one of a Redis server, as in redis://user:password@localhost:6379/0"
                    .to_owned(),
            })?;
        // Small requests that wait for each other's acknowledgements would cost 40 ms a step.
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true));
        let client = Client::open(info).map_err(|error| reason(&error))?;
        let script = |body: &str| Script::new(&format!("{NEWER}{body}"));
        let connection = Mutex::default();
        let store = RedisStore {
            claim: script(CLAIM),
            write: script(WRITE),
            client,
            connection,
        };
        let at = store.address();
        match timeout(STEP, store.connected()).await {
            Ok(Ok(_)) => Ok(store),
            Ok(Err(error)) => Err(format!("{at}: {}", reason(&error))),
            Err(_) => Err(format!("{at}: it does not answer")),
        }
    }

    pub(crate) fn address(&self) -> String {
        self.client.get_connection_info().addr().to_string()
    }

    pub(super) async fn read(&self, key: &str) -> Result<Option<String>, StoreError> {
        let step =
            self.step(async |mut connection| redis::cmd("GET").arg(key).query_async(&mut connection).await);
        step.await.map_err(|failure| match failure {
            Failure::NotDone(why) | Failure::Unknown(why) => StoreError::Unavailable(why),
            Failure::Foreign => StoreError::Foreign(key.to_owned()),
        })
    }

    pub(super) async fn claim(
        &self,
        key: &str,
        token: u64,
        initial: &str,
    ) -> Result<Option<String>, StoreError> {
        // The claim makes no difference when nothing follows.
        self.guarded(&self.claim, key, token, initial)
            .await
            .map_err(|error| match error {
                StoreError::Unknown(why) => StoreError::Unavailable(why),
                other => other,
            })
    }

    pub(super) async fn write(&self, key: &str, record: &str, token: Option<u64>) -> Result<(), StoreError> {
        let Some(token) = token else {
            let step = self.step(async |mut connection| {
                redis::cmd("SET")
                    .arg(key)
                    .arg(record)
                    .query_async::<()>(&mut connection)
                    .await
            });
            return step.await.map_err(|failure| failure.of_write(key));
        };
        self.guarded(&self.write, key, token, record).await.map(|_| ())
    }

    pub(super) async fn add(&self, key: &str, more: u64) -> Result<u64, StoreError> {
        let step = self.step(async |mut connection| {
            redis::cmd("INCRBY")
                .arg(key)
                .arg(more)
                .query_async(&mut connection)
                .await
        });
        step.await.map_err(|failure| failure.of_write(key))
    }

    async fn guarded(
        &self,
        script: &Script,
        key: &str,
        token: u64,
        record: &str,
    ) -> Result<Option<String>, StoreError> {
        let step = self.step(async |mut connection| {
            let mut call = script.key(key);
            call.arg(token).arg(record);
            call.invoke_async::<(Option<u64>, Option<String>)>(&mut connection)
                .await
        });
        match step.await.map_err(|failure| failure.of_write(key))? {
            (Some(last), _) => Err(StoreError::Fenced { ours: token, last }),
            (None, record) => Ok(record),
        }
    }

    /// One step: at most [`STEP`] long, and never sent twice.
    async fn step<T>(
        &self,
        send: impl AsyncFnOnce(MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, Failure> {
        let mut used = None;
        let step = async {
            let (connection, number) = self
                .connected()
                .await
                .map_err(|error| Failure::NotDone(reason(&error)))?;
            used = Some(number);
            send(connection).await.map_err(|error| Failure::of(&error))
        };
        let outcome = match timeout(STEP, step).await {
            Ok(outcome) => outcome,
            Err(_) if used.is_none() => Err(Failure::NotDone("it does not answer".to_owned())),
            Err(_) => Err(Failure::Unknown("it does not answer".to_owned())),
        };
        if let (Err(Failure::Unknown(_) | Failure::NotDone(_)), Some(number)) = (&outcome, used) {
            self.give_up(number).await;
        }
        outcome
    }

    /// The connection, opened if there is none. The first caller opens it, the others wait for it.
    async fn connected(&self) -> Result<(MultiplexedConnection, u64), RedisError> {
        let mut slot = self.connection.lock().await;
        if let Some(connection) = &slot.open {
            return Ok((connection.clone(), slot.number));
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(ANSWER));
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        slot.open = Some(connection.clone());
        slot.number += 1;
        Ok((connection, slot.number))
    }

    async fn give_up(&self, number: u64) {
        let mut slot = self.connection.lock().await;
        if slot.number == number {
            slot.open = None;
        }
    }
}

impl Failure {
    fn of(error: &RedisError) -> Failure {
        let why = reason(error);
        match error.kind() {
            ErrorKind::UnexpectedReturnType => Failure::Foreign,
            ErrorKind::Server(kind) => match kind {
                // This error may hide an error that a script raised half way.
                ServerErrorKind::ResponseError => Failure::Unknown(why),
                _ => Failure::NotDone(why),
            },
            ErrorKind::Extension if error.code() == Some("WRONGTYPE") => Failure::Foreign,
            ErrorKind::Extension => Failure::NotDone(why),
            _ => Failure::Unknown(why),
        }
    }

    fn of_write(self, key: &str) -> StoreError {
        match self {
            Failure::NotDone(why) => StoreError::Unavailable(why),
            Failure::Unknown(why) => StoreError::Unknown(why),
            Failure::Foreign => StoreError::Foreign(key.to_owned()),
        }
    }
}

/// The error on one line.
fn reason(error: &RedisError) -> String {
    error.to_string().replace(['\r', '\n'], " ")
}
