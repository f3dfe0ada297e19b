//! Whether a transaction pooler is in between.

use dlock::store::StoreError;
use futures_util::future::join;
use tokio::io::{AsyncReadExt, duplex};
use tokio::time::{Duration, Instant};
use tokio_postgres::{Client, NoTls};

use crate::connect::Session;
use crate::failure;

/// How often both connections are looked at: at most, and for at least this part of the time that there is.
const ROUNDS: (usize, u32) = (16, 2);

/// Whether two connections of a process have one backend, which only a pooler brings about that gives a backend for a
/// transaction. Where others use the pooler at the same time that is seen by chance only, so it is looked at many times;
/// but not where the server itself is at the other end.
pub(crate) async fn is_between(one: &Session, other: &Session, limit: Duration) -> Result<bool, StoreError> {
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
        // Such a pooler takes what was used last: so each connection has it in turn, at least where nobody else is.
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

/// Whether it was this process of the server that greeted the client. A pooler greets it with a number of its own.
async fn is_greeted_by(client: &Client, pid: i32) -> bool {
    /// What begins a request to cancel, which has the number: its length, and its code.
    const HEAD: [u8; 8] = [0, 0, 0, 16, 4, 210, 22, 46];
    let (request, mut written) = duplex(64);
    let token = client.cancel_token();
    let read = async move {
        let mut head = [0; 8];
        // With `sslmode=require` it asks for encryption first, and goes no further.
        written.read_exact(&mut head).await.ok()?;
        (head == HEAD).then_some(())?;
        written.read_i32().await.ok()
    };
    // Nothing of it is sent anywhere.
    let (_, named) = join(token.cancel_query_raw(request, NoTls), read).await;
    named == Some(pid)
}
