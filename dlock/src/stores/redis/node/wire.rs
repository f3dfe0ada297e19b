//! A connection that makes progress when its user polls it: what is sent, and which reply belongs to which call.
//!
//! The library makes the connection and logs in; from then on the bytes are ours. So there is one task between a
//! caller's step and the socket, and only the channel to that task.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use redis::{Cmd, ErrorKind, RedisError, Value};
use tokio::io::ReadBuf;
use tokio::sync::oneshot;

use super::reply::{LookedAt, first_value};
use crate::base::waking::reply_to;
use crate::stores::redis::command::Packed;
use crate::stores::redis::connect::Link;

/// How many bytes to read at a time.
const READ: usize = 16 * 1024;
/// A larger buffer is not reused.
const LARGE: usize = 1024 * 1024;
/// The maximum number of reads in one poll. Otherwise a server that sends without end would keep the task from its
/// timers.
const READS: usize = 16;

/// A command outside the calls, and the receiver of its reply.
pub(in super::super) struct Aside {
    pub(in super::super) cmd: Cmd,
    pub(in super::super) reply: oneshot::Sender<Result<Value, RedisError>>,
}

/// The recipient of a reply.
enum Expected {
    Call(u64),
    /// A call of several commands, with the replies so far, errors among them.
    Commands {
        call: u64,
        replies: Vec<Value>,
        missing: usize,
    },
    Aside(oneshot::Sender<Result<Value, RedisError>>),
    Ignored,
}

/// The reply to a call, or the array of the replies to its commands.
#[derive(Debug, PartialEq)]
pub(super) struct Replied {
    /// The number of the call.
    pub(super) to: u64,
    pub(super) result: Result<Value, RedisError>,
}

/// The state of the connection.
enum State {
    Open,
    /// Nothing more is sent, for this reason; what the server sent before can still be read.
    Closing(String),
    /// The input was not a reply, or a reply to no command: nothing after it certainly belongs to a call.
    OutOfStep(String),
}

pub(super) struct Wire {
    link: Link,
    /// Bytes to write, and how many are written.
    output: Vec<u8>,
    written: usize,
    is_flushed: bool,
    /// Bytes read, and how many are consumed.
    input: Vec<u8>,
    taken: usize,
    /// The scan of the next value.
    looked_at: LookedAt,
    scratch: Box<[u8]>,
    /// In the order in which the commands were sent.
    expected: VecDeque<Expected>,
    state: State,
}

impl Wire {
    pub(super) fn new(link: Link) -> Wire {
        Wire {
            link,
            output: Vec::new(),
            written: 0,
            is_flushed: true,
            input: Vec::new(),
            taken: 0,
            looked_at: LookedAt::default(),
            scratch: vec![0; READ].into(),
            expected: VecDeque::new(),
            state: State::Open,
        }
    }

    /// Appends a call to the bytes to write.
    pub(super) fn send(&mut self, command: &Packed, number: u64) {
        let expected = match command.replies {
            1 => Expected::Call(number),
            missing => Expected::Commands {
                call: number,
                replies: Vec::with_capacity(missing),
                missing,
            },
        };
        self.put(command, expected);
    }

    /// Appends a call for a server to which its slot is moving.
    pub(super) fn send_asking(&mut self, command: &Packed, number: u64) {
        self.put(&Packed::from(&redis::cmd("ASKING")), Expected::Ignored);
        self.put(command, Expected::Call(number));
    }

    fn put(&mut self, command: &Packed, expected: Expected) {
        self.output.extend_from_slice(command.bytes());
        self.expected.push_back(expected);
    }

    /// Makes progress, and returns the next reply to a call. Fails when the connection has ended and all replies were
    /// returned.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Replied, String>> {
        while let Some(Poll::Ready(Some(aside))) =
            self.link.asides.as_mut().map(|asides| asides.poll_recv(cx))
        {
            self.put(&Packed::from(&aside.cmd), Expected::Aside(aside.reply));
        }
        self.write(cx);
        for _ in 0..READS {
            match self.next_reply() {
                Ok(Some(replied)) => return Poll::Ready(Ok(replied)),
                Ok(None) => {}
                Err(error) => self.is_out_of_step(&error),
            }
            let may_read_more = match self.state {
                State::OutOfStep(_) => false,
                State::Open | State::Closing(_) => match self.read(cx) {
                    Poll::Ready(anything) => anything,
                    Poll::Pending if matches!(self.state, State::Open) => return Poll::Pending,
                    Poll::Pending => false,
                },
            };
            if let State::Closing(why) | State::OutOfStep(why) = &self.state
                && !may_read_more
            {
                return Poll::Ready(Err(why.clone()));
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes as much as the connection accepts now.
    fn write(&mut self, cx: &mut Context<'_>) {
        if !matches!(self.state, State::Open) {
            return self.output.clear();
        }
        while self.written < self.output.len() {
            match self
                .link
                .stream
                .as_mut()
                .poll_write(cx, &self.output[self.written..])
            {
                Poll::Ready(Ok(0)) => return self.give_up("the connection takes nothing more"),
                Poll::Ready(Ok(count)) => self.written += count,
                Poll::Ready(Err(error)) => return self.give_up(error),
                Poll::Pending => return,
            }
            self.is_flushed = false;
        }
        if self.written > 0 {
            self.written = 0;
            empty(&mut self.output);
        }
        if !self.is_flushed {
            match self.link.stream.as_mut().poll_flush(cx) {
                Poll::Ready(Ok(())) => self.is_flushed = true,
                Poll::Ready(Err(error)) => self.give_up(error),
                Poll::Pending => {}
            }
        }
    }

    /// Reads once. Returns whether there was anything.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let mut buffer = ReadBuf::new(&mut self.scratch);
        match self.link.stream.as_mut().poll_read(cx, &mut buffer) {
            Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                self.input.extend_from_slice(buffer.filled());
                return Poll::Ready(true);
            }
            Poll::Ready(Ok(())) => self.give_up("the server closed the connection"),
            Poll::Ready(Err(error)) => self.give_up(error),
            Poll::Pending => return Poll::Pending,
        }
        Poll::Ready(false)
    }

    /// Returns the next reply to a call from the bytes read.
    fn next_reply(&mut self) -> Result<Option<Replied>, RedisError> {
        if matches!(self.state, State::OutOfStep(_)) {
            return Ok(None);
        }
        while let Some((value, length)) = first_value(&self.input[self.taken..], &mut self.looked_at)? {
            self.taken += length;
            // Sent unasked.
            if matches!(value, Value::Push { .. }) {
                continue;
            }
            if let Some(Expected::Commands { replies, missing, .. }) = self.expected.front_mut()
                && *missing > 1
            {
                replies.push(value);
                *missing -= 1;
                continue;
            }
            match self.expected.pop_front() {
                // An error reply of the server is a value.
                Some(Expected::Call(to)) => {
                    let result = value.extract_error();
                    return Ok(Some(Replied { to, result }));
                }
                Some(Expected::Commands {
                    call, mut replies, ..
                }) => {
                    replies.push(value);
                    let result = Ok(Value::Array(replies));
                    return Ok(Some(Replied { to: call, result }));
                }
                Some(Expected::Aside(reply)) => {
                    reply_to(reply, value.extract_error());
                }
                Some(Expected::Ignored) => {}
                // The next one would be taken for the reply to another call.
                None => return Err(unasked(value)),
            }
        }
        match self.taken == self.input.len() {
            true => empty(&mut self.input),
            false => drop(self.input.drain(..self.taken)),
        }
        self.taken = 0;
        Ok(None)
    }

    /// Nothing more can be sent.
    fn give_up(&mut self, why: impl ToString) {
        self.output.clear();
        (self.written, self.is_flushed) = (0, true);
        if matches!(self.state, State::Open) {
            self.state = State::Closing(why.to_string());
        }
    }

    fn is_out_of_step(&mut self, why: &RedisError) {
        self.give_up(why);
        self.state = State::OutOfStep(why.to_string());
    }
}

fn unasked(value: Value) -> RedisError {
    let why = "the server sent a reply without a request";
    match value.extract_error() {
        Ok(_) => RedisError::from((ErrorKind::UnexpectedReturnType, why)),
        Err(error) => RedisError::from((ErrorKind::UnexpectedReturnType, why, error.to_string())),
    }
}

fn empty(buffer: &mut Vec<u8>) {
    buffer.clear();
    buffer.shrink_to(LARGE);
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io;
    use std::pin::Pin;

    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};

    use super::*;
    use crate::stores::redis::command::Pipeline;

    /// A wire that takes so many bytes at a time, and the server.
    fn pair(bytes: usize) -> (Wire, DuplexStream) {
        let (client, server) = tokio::io::duplex(bytes);
        (Wire::new(Link::plain(Box::pin(client))), server)
    }

    async fn next(wire: &mut Wire) -> Result<(u64, Result<Value, RedisError>), String> {
        let replied = poll_fn(|cx| wire.poll(cx)).await?;
        Ok((replied.to, replied.result))
    }

    fn get(key: &str) -> Packed {
        Packed::from(&*redis::cmd("GET").arg(key))
    }

    #[tokio::test]
    async fn replies_belong_to_the_calls_in_their_order() {
        let (mut wire, mut server) = pair(1024);
        let (sender, asides) = tokio::sync::mpsc::unbounded_channel();
        wire.link.asides = Some(asides);
        wire.send(&get("a"), 1);
        wire.send_asking(&get("b"), 2);
        let replies = b"$1\r\nA\r\n>2\r\n+invalidate\r\n_\r\n-ERR no ASKING here\r\n-ERR no b\r\n";
        server.write_all(replies).await.unwrap();
        assert_eq!(next(&mut wire).await.unwrap().0, 1);
        let (number, refused) = next(&mut wire).await.unwrap();
        assert_eq!((number, refused.unwrap_err().code()), (2, Some("ERR")));
        // Outside the calls, and between two of them.
        let (reply, replied) = oneshot::channel();
        let cmd = redis::cmd("GET").arg("c").to_owned();
        assert!(sender.send(Aside { cmd, reply }).is_ok());
        assert!(poll_fn(|cx| Poll::Ready(wire.poll(cx).is_pending())).await);
        wire.send(&get("d"), 3);
        server.write_all(b"+C\r\n:4\r\n").await.unwrap();
        assert_eq!(next(&mut wire).await.unwrap(), (3, Ok(Value::Int(4))));
        assert_eq!(replied.await.unwrap(), Ok(Value::SimpleString("C".to_owned())));
    }

    #[tokio::test]
    async fn call_of_several_commands_has_all_their_replies() {
        let (mut wire, mut server) = pair(1024);
        let mut pipeline = Pipeline::new(Vec::new(), 0);
        for key in ["a", "b", "c"] {
            pipeline.command(b"*2\r\n$3\r\nGET\r\n").arg(&[key.as_bytes()]);
        }
        wire.send(&pipeline.finish(), 1);
        wire.send(&get("d"), 2);
        server
            .write_all(b":1\r\n>1\r\n+push\r\n-ERR no b\r\n")
            .await
            .unwrap();
        assert!(poll_fn(|cx| Poll::Ready(wire.poll(cx).is_pending())).await);
        server.write_all(b":3\r\n:4\r\n").await.unwrap();
        let (call, replies) = next(&mut wire).await.unwrap();
        let Ok(Value::Array(replies)) = replies else {
            panic!("{replies:?}")
        };
        assert_eq!((call, replies.len()), (1, 3));
        assert_eq!((&replies[0], &replies[2]), (&Value::Int(1), &Value::Int(3)));
        assert!(matches!(replies[1], Value::ServerError(_)));
        assert_eq!(next(&mut wire).await.unwrap(), (2, Ok(Value::Int(4))));
    }

    #[tokio::test]
    async fn more_than_the_connection_takes_at_a_time_is_written_and_read_in_parts() {
        let (mut wire, server) = pair(7);
        let (mut reads, mut writes) = tokio::io::split(server);
        let long = "k".repeat(100);
        let mut expected: Vec<u8> = Vec::new();
        for number in 0..20 {
            wire.send(&get(&long), number);
            expected.extend(get(&long).bytes());
        }
        let mut seen = vec![0; expected.len()];
        let replies = ":1790000000000000\r\n".repeat(20);
        let serving = async {
            reads.read_exact(&mut seen).await.unwrap();
            writes.write_all(replies.as_bytes()).await.unwrap();
        };
        let asking = async {
            for number in 0..20 {
                let (of, reply) = next(&mut wire).await.unwrap();
                assert_eq!((of, reply), (number, Ok(Value::Int(1_790_000_000_000_000))));
            }
        };
        tokio::join!(serving, asking);
        assert_eq!(seen, expected);
    }

    #[tokio::test]
    async fn last_replies_are_read_before_the_end_of_the_connection_is_told() {
        let (mut wire, mut server) = pair(1024);
        server.write_all(b":1\r\n:2").await.unwrap();
        drop(server);
        for number in [1, 2] {
            wire.send(&get("a"), number);
        }
        assert_eq!(next(&mut wire).await.unwrap(), (1, Ok(Value::Int(1))));
        // Writing fails too, whichever is noticed first.
        assert!(next(&mut wire).await.is_err() && next(&mut wire).await.is_err());
    }

    #[tokio::test]
    async fn reply_that_nobody_asked_for_is_not_taken_for_that_of_the_next_call() {
        let (mut wire, mut server) = pair(1024);
        wire.send(&get("a"), 1);
        server.write_all(b":1\r\n-ERR too much\r\n").await.unwrap();
        assert_eq!(next(&mut wire).await.unwrap(), (1, Ok(Value::Int(1))));
        assert!(poll_fn(|cx| Poll::Ready(wire.poll(cx).is_ready())).await);
        wire.send(&get("b"), 2);
        server.write_all(b":2\r\n").await.unwrap();
        let why = next(&mut wire).await.unwrap_err();
        assert!(
            why.contains("without a request") && why.contains("too much"),
            "{why}"
        );
    }

    /// Sends messages for as long as it is read from.
    struct Flood(usize);

    impl AsyncRead for Flood {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.0 += 1;
            assert!(self.0 < 1000, "one poll reads without end");
            buffer.put_slice(b">2\r\n+invalidate\r\n_\r\n");
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Flood {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn one_poll_ends_although_the_server_sends_without_end() {
        let mut wire = Wire::new(Link::plain(Box::pin(Flood(0))));
        wire.send(&get("a"), 1);
        assert!(poll_fn(|cx| Poll::Ready(wire.poll(cx).is_pending())).await);
    }

    #[tokio::test]
    async fn line_without_end_ends_the_connection() {
        let (mut wire, mut server) = pair(1 << 20);
        wire.send(&get("a"), 1);
        let endless = async {
            loop {
                if server.write_all(&[b'+'; 8192]).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::select! {
            outcome = next(&mut wire) => assert!(outcome.unwrap_err().contains("no reply")),
            () = endless => {}
        }
    }

    #[tokio::test]
    async fn what_is_no_reply_ends_the_connection() {
        let (mut wire, mut server) = pair(1024);
        wire.send(&get("a"), 1);
        server.write_all(b"HTTP/1.1 400 Bad Request\r\n").await.unwrap();
        assert!(next(&mut wire).await.is_err());
    }
}
