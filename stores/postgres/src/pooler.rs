//! Detects a transaction pooler between the client and the server.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use dlock::store::StoreError;
use futures_util::future::join;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio::time::{Duration, Instant, timeout};
use tokio_postgres::Client;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use crate::connect::{Connector, Session};
use crate::failure;

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

/// Whether this server process sent the client its cancel key. A pooler sends its own process number.
pub(crate) async fn is_greeted_by(client: &Client, pid: i32) -> bool {
    /// The start of a cancel request, before the process number: its length and its code.
    const HEAD: [u8; 8] = [0, 0, 0, 16, 4, 210, 22, 46];
    /// A request for TLS, which comes first with `sslmode=require`.
    const TLS: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    let (request, mut written) = duplex(64);
    let token = client.cancel_token();
    let read = async move {
        let mut head = [0; 8];
        written.read_exact(&mut head).await.ok()?;
        if head == TLS {
            written.write_all(b"S").await.ok()?;
            written.read_exact(&mut head).await.ok()?;
        }
        (head == HEAD).then_some(())?;
        written.read_i32().await.ok()
    };
    // Nothing is sent to a server.
    let (_, named) = join(token.cancel_query_raw(request, Clear), read).await;
    named == Some(pid)
}

/// TLS that encrypts nothing, so that what would be sent can be read.
struct Clear;

struct ClearStream(DuplexStream);

impl TlsConnect<DuplexStream> for Clear {
    type Stream = ClearStream;
    type Error = io::Error;
    type Future = Ready<io::Result<ClearStream>>;

    fn connect(self, stream: DuplexStream) -> Self::Future {
        ready(Ok(ClearStream(stream)))
    }
}

impl TlsStream for ClearStream {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for ClearStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClearStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
