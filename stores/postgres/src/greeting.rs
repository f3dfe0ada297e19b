//! Who sent the client its cancel key: the server itself, or a pooler in between.

use std::future::{Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::join;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio_postgres::Client;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

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
