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

/// How much of the first line is kept.
const LONGEST_LINE: usize = 256;

pub(super) type BoxStream = Pin<Box<dyn Stream>>;

/// The borrower's side. Once the stream was taken back, nothing can be read or written.
#[derive(Clone)]
pub(super) struct Lent(Arc<Mutex<Loan>>);

struct Loan {
    /// `None` when it was taken back.
    stream: Option<BoxStream>,
    /// How many bytes may still be read.
    readable: usize,
    /// The first line that was read, or its beginning.
    first_line: Vec<u8>,
}

impl Lent {
    /// For a borrower that may read at most this many bytes; more is an error.
    pub(super) fn new(stream: BoxStream, readable: usize) -> Lent {
        Lent(Arc::new(Mutex::new(Loan {
            stream: Some(stream),
            readable,
            first_line: Vec::new(),
        })))
    }

    /// The error with which the server began, if it did.
    pub(super) fn refusal(&self) -> Option<String> {
        let loan = self.0.lock();
        let line = String::from_utf8_lossy(loan.first_line.strip_prefix(b"-")?).into_owned();
        let end = match loan.keeps_more() {
            true => "",
            false if line.ends_with('\n') => "",
            false => "…",
        };
        Some(format!("{}{end}", line.trim_end()))
    }

    /// `None` the second time.
    pub(super) fn take_back(&self) -> Option<BoxStream> {
        self.0.lock().stream.take()
    }
}

impl Loan {
    /// Whether the first line is not complete, and there is room for more of it.
    fn keeps_more(&self) -> bool {
        self.first_line.len() < LONGEST_LINE && self.first_line.last() != Some(&b'\n')
    }

    fn keep(&mut self, read: &[u8]) {
        if self.keeps_more() {
            let room = LONGEST_LINE - self.first_line.len();
            let line = read.split_inclusive(|byte| *byte == b'\n').next();
            let line = line.unwrap_or_default();
            self.first_line.extend(&line[..line.len().min(room)]);
        }
    }

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
        loan.keep(&buffer.filled()[before..]);
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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn error_with_which_the_server_begins_is_kept() {
        let long = format!("-DENIED {}", "no ".repeat(100));
        for (parts, refusal) in [
            (
                ["-ERR max ", "number\r\n+OK\r\n"],
                Some("ERR max number".to_owned()),
            ),
            (["-ERR", " cut"], Some("ERR cut".to_owned())),
            (
                [long.as_str(), "\r\n"],
                Some(format!("{}…", &long[1..LONGEST_LINE])),
            ),
            (["+OK\r\n", "-ERR later\r\n"], None),
            (["", ""], None),
        ] {
            let (ours, mut theirs) = tokio::io::duplex(1024);
            let mut lent = Lent::new(Box::pin(ours), usize::MAX);
            for part in parts {
                theirs.write_all(part.as_bytes()).await.unwrap();
                lent.read_exact(&mut vec![0; part.len()]).await.unwrap();
            }
            assert_eq!(lent.refusal(), refusal);
        }
    }
}
