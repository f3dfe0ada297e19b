//! A connection to a Redis server that is opened again when it breaks.
//!
//! A step that fails or takes too long closes its connection, and the next step opens another one. A step is never sent
//! twice.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisResult};
use tokio::sync::Mutex;

/// How long the server may take to accept a connection, and to reply; longer than a read blocks.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(crate) struct Connection {
    client: Client,
    slot: Arc<Mutex<Slot>>,
}

/// The current connection. Steps that fail together must not close a connection that was opened since.
#[derive(Default)]
struct Slot {
    open: Option<MultiplexedConnection>,
    number: u64,
}

impl Connection {
    /// Connects, so that a wrong URL is an error at the start.
    pub(crate) async fn open(url: &str) -> Result<Connection, String> {
        // The URL may hold a password, and is not repeated.
        let client = Client::open(url).map_err(|_| "--url is none of a Redis server".to_owned())?;
        let slot = Arc::default();
        let connection = Connection { client, slot };
        match connection.connected().await {
            Ok(_) => Ok(connection),
            Err(error) => Err(format!("cannot open --url: {error}")),
        }
    }

    pub(crate) async fn step<T>(
        &self,
        send: impl AsyncFnOnce(MultiplexedConnection) -> RedisResult<T>,
    ) -> RedisResult<T> {
        let (connection, number) = self.connected().await?;
        let outcome = send(connection).await;
        if outcome.is_err() {
            let mut slot = self.slot.lock().await;
            if slot.number == number {
                slot.open = None;
            }
        }
        outcome
    }

    /// The first caller opens it, the others wait for it.
    async fn connected(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        let mut slot = self.slot.lock().await;
        if let Some(connection) = &slot.open {
            return Ok((connection.clone(), slot.number));
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config);
        let connection = connection.await?;
        slot.open = Some(connection.clone());
        slot.number += 1;
        Ok((connection, slot.number))
    }
}
