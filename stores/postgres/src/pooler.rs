//! Detects a transaction pooler between the client and the server.

use dlock::store::StoreError;
use tokio::time::{Duration, Instant, timeout};
use tokio_postgres::Client;

use crate::connect::{Connector, Session};
use crate::failure;
use crate::greeting::is_greeted_by;

/// The most rounds of checks, and the divisor of the time limit after which no new round begins.
const ROUNDS: (usize, u32) = (16, 2);

/// Connects, and tells whether a transaction pooler is in between; if not, the session is set up.
pub(crate) async fn connect(connector: &Connector) -> Result<(Session, bool), StoreError> {
    let first = connector.connect_plain().await?;
    let pooled = {
        let second = connector.connect_plain().await?;
        let looked = timeout(connector.timeout, is_between(&first, &second, connector.timeout)).await;
        looked.map_err(|_| StoreError::unknown(format!("{} did not answer", connector.address)))??
    };
    if !pooled {
        connector.set_up(&first).await?;
    }
    Ok((first, pooled))
}

/// Whether two connections of this process share one backend, which happens only with a transaction pooler. While other
/// clients use the pooler, this is seen only by chance, so the check is repeated, unless the server itself is at the
/// other end.
async fn is_between(one: &Session, other: &Session, limit: Duration) -> Result<bool, StoreError> {
    let until = Instant::now() + limit / ROUNDS.1;
    for round in 0..ROUNDS.0 {
        let before = backend(&one.client).await?;
        let others = backend(&other.client).await?;
        if before == others || backend(&one.client).await? != before {
            return Ok(true);
        }
        if round == 0
            && is_greeted_by(&one.client, before).await
            && is_greeted_by(&other.client, others).await
        {
            return Ok(false);
        }
        // A pooler reuses the last backend first, so both connections get the same one, at least while no other client
        // is active.
        if round > 0 && Instant::now() > until {
            break;
        }
    }
    Ok(false)
}

async fn backend(client: &Client) -> Result<i32, StoreError> {
    let asked = client.query_typed("SELECT pg_backend_pid()", &[]).await;
    let rows = asked.map_err(|error| StoreError::from(failure::of_step(error)))?;
    let pid = rows.first().and_then(|row| row.try_get(0).ok());
    pid.ok_or_else(|| StoreError::unknown("the server did not say which process serves"))
}
