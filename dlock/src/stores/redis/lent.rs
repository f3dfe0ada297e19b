//! A stream that is lent: its borrower reads and writes as on the stream itself, until the lender takes it back.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The transport of a connection: TCP, TLS or a Unix socket.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

pub(super) type BoxStream = Pin<Box<dyn Stream>>;

/// The borrower's side. Once the stream was taken back, nothing can be read or written.
#[derive(Clone)]
pub(super) struct Lent(Arc<Mutex<Loan>>);

struct Loan {
    /// `None` when it was taken back.
    stream: Option<BoxStream>,
    /// How many bytes may still be read.
    readable: usize,
}

impl Lent {
    /// For a borrower that may read at most this many bytes; more is an error.
    pub(super) fn new(stream: BoxStream, readable: usize) -> Lent {
        let stream = Some(stream);
        Lent(Arc::new(Mutex::new(Loan { stream, readable })))
    }

    /// `None` the second time.
    pub(super) fn take_back(&self) -> Option<BoxStream> {
        self.0.lock().stream.take()
    }
}

impl Loan {
    fn poll<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut dyn Stream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match self.stream.as_mut() {
            Some(stream) => poll(stream.as_mut()),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

impl AsyncRead for Lent {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut loan = self.0.lock();
        let before = buffer.filled().len();
        let polled = loan.poll(|stream| stream.poll_read(cx, buffer));
        match loan.readable.checked_sub(buffer.filled().len() - before) {
            Some(left) => {
                loan.readable = left;
                polled
            }
            None => {
                let why = "the server sends more than any reply has at this point";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, why)))
            }
        }
    }
}

impl AsyncWrite for Lent {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.lock().poll(|stream| stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.lock().poll(|stream| stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.lock().poll(|stream| stream.poll_shutdown(cx))
    }
}
