//! Just enough of the Redis protocol to see where one command or one reply ends.
//!
//! The proxy must forward exactly the bytes that it got, so these decoders cut a stream into frames and leave the
//! bytes alone. They take input in pieces of any size, and remember how far
//! they got, so that a large value that arrives in small pieces is not read over and over.

use std::borrow::Cow;
use std::fmt;

use bytes::{Buf, Bytes, BytesMut};

/// The longest line that a decoder accepts (inline commands, lengths, simple replies), in bytes.
pub(crate) const MAX_LINE: usize = 64 * 1024;
/// The most arguments that a command may have.
pub(crate) const MAX_ARGS: usize = 1024 * 1024;
/// The largest command or reply, in bytes.
pub(crate) const MAX_FRAME: usize = 64 * 1024 * 1024;

/// A stream that is not the Redis protocol, or exceeds a limit of the decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a redis protocol stream: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

fn malformed<T>(why: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(why.into()))
}

/// One command with its arguments, as a client sent it or `MONITOR` showed it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Command {
    args: Vec<Bytes>,
}

impl Command {
    /// Puts a command together from its name and arguments.
    pub fn new<A: Into<Bytes>>(args: impl IntoIterator<Item = A>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
        }
    }

    /// The name in upper case: `EVALSHA`, `CLIENT`.
    pub fn name(&self) -> String {
        self.arg(0).to_ascii_uppercase()
    }

    /// Whether the name is `name`, in any case.
    pub fn is(&self, name: &str) -> bool {
        self.args
            .first()
            .is_some_and(|first| first.eq_ignore_ascii_case(name.as_bytes()))
    }

    /// Whether it runs a script or a function: `EVAL`, `EVALSHA`, `FCALL` and their read-only forms.
    pub fn is_script(&self) -> bool {
        ["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL", "FCALL_RO"]
            .iter()
            .any(|name| self.is(name))
    }

    /// The step on plain locks that commands do without a script: a release, or all acquires of a call.
    pub fn step_by_commands(&self) -> Option<&'static str> {
        let steps = [("HDEL", "release"), ("EXEC", "acquire")];
        steps
            .into_iter()
            .find_map(|(name, step)| self.is(name).then_some(step))
    }

    /// Whether it carries steps of a client.
    pub fn carries_steps(&self) -> bool {
        self.is_script() || self.step_by_commands().is_some()
    }

    /// The name and all arguments, as bytes.
    pub fn args(&self) -> &[Bytes] {
        &self.args
    }

    /// Argument `index` as text; 0 is the name. Empty when there are fewer.
    pub fn arg(&self, index: usize) -> Cow<'_, str> {
        self.args
            .get(index)
            .map_or(Cow::Borrowed(""), |arg| String::from_utf8_lossy(arg))
    }

    /// Whether any argument contains `text`.
    pub fn mentions(&self, text: &str) -> bool {
        let text = text.as_bytes();
        text.is_empty()
            || self
                .args
                .iter()
                .any(|arg| arg.windows(text.len()).any(|part| part == text))
    }

    /// The keys of a script call, as text; nothing for any other command.
    pub fn script_keys(&self) -> Vec<String> {
        if !self.is_script() {
            return Vec::new();
        }
        let count = self.arg(2).parse().unwrap_or(0);
        self.args
            .iter()
            .skip(3)
            .take(count)
            .map(|key| String::from_utf8_lossy(key).into_owned())
            .collect()
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, arg) in self.args.iter().enumerate() {
            if index > 0 {
                f.write_str(" ")?;
            }
            // whole scripts would hide the rest of a failed assertion
            let shown = arg.len().min(120);
            write!(f, "{}", arg[..shown].escape_ascii())?;
            if shown < arg.len() {
                write!(f, "…({} bytes)", arg.len())?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

/// One command and the bytes that carried it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// The bytes as they came.
    pub(crate) raw: Bytes,
    /// What they say.
    pub(crate) command: Command,
}

/// Cuts the client's stream into commands, inline commands included.
#[derive(Debug, Default)]
pub(crate) struct RequestDecoder {
    buf: BytesMut,
    pos: usize,
    missing: Option<usize>,
    spans: Vec<(usize, usize)>,
}

impl RequestDecoder {
    /// Adds bytes that arrived.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.buf.extend_from_slice(bytes);
    }

    /// The next complete command.
    ///
    /// # Errors
    /// When the stream is not the protocol or goes beyond a limit; the decoder is of no use after that.
    pub(crate) fn frame(&mut self) -> Result<Option<Request>, Malformed> {
        let missing = match self.missing {
            Some(missing) => missing,
            None => {
                let Some(line) = line(&self.buf, self.pos)? else {
                    return Ok(None);
                };
                if self.buf[self.pos] != b'*' {
                    let words = self.buf[..line.0]
                        .split(u8::is_ascii_whitespace)
                        .filter(|word| !word.is_empty())
                        .map(Bytes::copy_from_slice)
                        .collect();
                    return Ok(Some(self.cut(line.1, words)));
                }
                let count = match length(&self.buf[self.pos + 1..line.0])? {
                    Some(count) if count > MAX_ARGS => return malformed(format!("{count} arguments")),
                    count => count.unwrap_or(0),
                };
                self.pos = line.1;
                self.missing = Some(count);
                count
            }
        };
        for left in (0..missing).rev() {
            let Some(line) = line(&self.buf, self.pos)? else {
                return Ok(None);
            };
            if self.buf[self.pos] != b'$' {
                return malformed(format!(
                    "an argument begins with byte {:#04x}",
                    self.buf[self.pos]
                ));
            }
            let Some(len) = length(&self.buf[self.pos + 1..line.0])? else {
                return malformed("an argument without a value");
            };
            let end = bulk_end(line.1, len)?;
            if self.buf.len() < end {
                return Ok(None);
            }
            self.spans.push((line.1, line.1 + len));
            self.pos = end;
            self.missing = Some(left);
        }
        let words = self
            .spans
            .drain(..)
            .map(|(from, to)| Bytes::copy_from_slice(&self.buf[from..to]))
            .collect();
        Ok(Some(self.cut(self.pos, words)))
    }

    fn cut(&mut self, end: usize, args: Vec<Bytes>) -> Request {
        self.pos = 0;
        self.missing = None;
        Request {
            raw: self.buf.split_to(end).freeze(),
            command: Command { args },
        }
    }
}

/// What a reply is to a reader that has to tell answers from pushed messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    /// An error.
    Error,
    /// An array or push whose first element is this word (`message`, `subscribe`, …).
    Tagged {
        /// The first element.
        word: String,
        /// Whether it came as a RESP3 push, which never answers a command by position.
        push: bool,
    },
    /// Anything else.
    Other,
}

/// One reply and the bytes that carried it.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    /// The bytes as they came.
    pub(crate) raw: Bytes,
    /// What sort of reply it is.
    pub(crate) kind: ReplyKind,
}

/// Cuts the server's stream into replies, RESP2 and RESP3.
#[derive(Debug, Default)]
pub(crate) struct ReplyDecoder {
    buf: BytesMut,
    pos: usize,
    /// Elements still missing at each level of nesting.
    open: Vec<usize>,
    word: Option<(usize, usize)>,
    seen: usize,
}

impl ReplyDecoder {
    /// Adds bytes that arrived.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.buf.extend_from_slice(bytes);
    }

    /// The next complete reply.
    ///
    /// # Errors
    /// When the stream is not the protocol or goes beyond a limit; the decoder is of no use after that.
    pub(crate) fn frame(&mut self) -> Result<Option<Reply>, Malformed> {
        loop {
            let Some(line) = line(&self.buf, self.pos)? else {
                return Ok(None);
            };
            let body = &self.buf[self.pos + 1..line.0];
            let mut end = line.1;
            let mut children = 0;
            // an attribute stands before its element and is not one itself
            let mut counts = true;
            match self.buf[self.pos] {
                b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => {}
                b'$' | b'!' | b'=' => {
                    if let Some(len) = length(body)? {
                        end = bulk_end(line.1, len)?;
                        if self.buf.len() < end {
                            return Ok(None);
                        }
                        if self.seen == 1 {
                            self.word = Some((line.1, line.1 + len));
                        }
                    }
                }
                b'*' | b'~' | b'>' => children = length(body)?.unwrap_or(0),
                b'%' => children = 2 * length(body)?.unwrap_or(0),
                b'|' => {
                    children = 2 * length(body)?.unwrap_or(0);
                    counts = false;
                }
                other => return malformed(format!("a reply begins with byte {other:#04x}")),
            }
            if children > 2 * MAX_ARGS {
                return malformed(format!("{children} elements"));
            }
            self.pos = end;
            self.seen += 1;
            match self.open.last_mut() {
                Some(left) if counts => *left -= 1,
                None if !counts => self.open.push(1),
                _ => {}
            }
            if children > 0 {
                self.open.push(children);
            }
            while self.open.last() == Some(&0) {
                self.open.pop();
            }
            if self.open.is_empty() {
                return Ok(Some(self.cut()));
            }
        }
    }

    fn cut(&mut self) -> Reply {
        let kind = match (self.buf[0], self.word.take()) {
            (b'-' | b'!', _) => ReplyKind::Error,
            (first @ (b'*' | b'>'), Some((from, to))) => ReplyKind::Tagged {
                word: String::from_utf8_lossy(&self.buf[from..to]).into_owned(),
                push: first == b'>',
            },
            _ => ReplyKind::Other,
        };
        let raw = self.buf.split_to(self.pos).freeze();
        self.pos = 0;
        self.seen = 0;
        Reply { raw, kind }
    }
}

/// The end of the line that begins at `from`: without and with its line break.
fn line(buf: &[u8], from: usize) -> Result<Option<(usize, usize)>, Malformed> {
    let rest = &buf[from.min(buf.len())..];
    match rest.iter().take(MAX_LINE).position(|byte| *byte == b'\n') {
        Some(at) => {
            let end = from + at;
            let text = if at > 0 && buf[end - 1] == b'\r' {
                end - 1
            } else {
                end
            };
            Ok(Some((text, end + 1)))
        }
        None if rest.len() >= MAX_LINE => malformed("a line without end"),
        None => Ok(None),
    }
}

/// A length; `None` is the protocol's -1.
fn length(digits: &[u8]) -> Result<Option<usize>, Malformed> {
    if digits == b"-1" {
        return Ok(None);
    }
    match std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| digits.parse::<usize>().ok())
    {
        Some(length) => Ok(Some(length)),
        None => malformed(format!("`{}` is no length", digits.escape_ascii())),
    }
}

fn bulk_end(start: usize, len: usize) -> Result<usize, Malformed> {
    match start.checked_add(len).and_then(|end| end.checked_add(2)) {
        Some(end) if end <= MAX_FRAME => Ok(end),
        _ => malformed(format!("a value of {len} bytes")),
    }
}

/// The arguments of one line of `MONITOR` (`"SET" "a\x00" "b"`), escapes undone.
pub(crate) fn unquote(mut text: &[u8]) -> Vec<Bytes> {
    let mut args = Vec::new();
    while let Some(start) = text.iter().position(|byte| *byte == b'"') {
        text.advance(start + 1);
        let mut arg = Vec::new();
        while let Some(&byte) = text.first() {
            text.advance(1);
            match byte {
                b'"' => break,
                b'\\' => {
                    let Some(&escape) = text.first() else { break };
                    text.advance(1);
                    arg.push(match escape {
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'a' => 0x07,
                        b'b' => 0x08,
                        b'x' if text.len() >= 2 => {
                            let code = std::str::from_utf8(&text[..2]).unwrap_or("00");
                            let code = u8::from_str_radix(code, 16).unwrap_or(0);
                            text.advance(2);
                            code
                        }
                        other => other,
                    });
                }
                other => arg.push(other),
            }
        }
        args.push(arg.into());
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(stream: &[u8], piece: usize) -> Result<Vec<Request>, Malformed> {
        let mut decoder = RequestDecoder::default();
        let mut all = Vec::new();
        for piece in stream.chunks(piece) {
            decoder.feed(piece);
            while let Some(request) = decoder.frame()? {
                all.push(request);
            }
        }
        Ok(all)
    }

    fn replies(stream: &[u8], piece: usize) -> Result<Vec<Reply>, Malformed> {
        let mut decoder = ReplyDecoder::default();
        let mut all = Vec::new();
        for piece in stream.chunks(piece) {
            decoder.feed(piece);
            while let Some(reply) = decoder.frame()? {
                all.push(reply);
            }
        }
        Ok(all)
    }

    #[test]
    fn commands_are_cut_the_same_in_pieces_of_any_size() {
        let stream = b"*1\r\n$4\r\nPING\r\n*3\r\n$3\r\nset\r\n$3\r\na\r\n\r\n$0\r\n\r\nPING  x\r\n*0\r\n*-1\r\n\r\n*1\r\n$1\r\nx\r\n";
        for piece in 1..=stream.len() {
            let all = requests(stream, piece).unwrap();
            let shown: Vec<_> = all
                .iter()
                .map(|request| request.command.args().to_vec())
                .collect();
            let expected: [&[&str]; 7] = [
                &["PING"],
                &["set", "a\r\n", ""],
                &["PING", "x"],
                &[],
                &[],
                &[],
                &["x"],
            ];
            let expected: Vec<Vec<Bytes>> = expected
                .iter()
                .map(|args| {
                    args.iter()
                        .map(|arg| Bytes::copy_from_slice(arg.as_bytes()))
                        .collect()
                })
                .collect();
            assert_eq!(shown, expected, "in pieces of {piece}");
            let raw: Vec<u8> = all.iter().flat_map(|request| request.raw.to_vec()).collect();
            assert_eq!(raw, stream, "the bytes come out as they went in");
        }
    }

    #[test]
    fn replies_are_cut_the_same_in_pieces_of_any_size() {
        let stream: &[&[u8]] = &[
            b"+OK\r\n",
            b"-ERR no\r\n",
            b":1\r\n",
            b"$-1\r\n",
            b"$2\r\n\r\n\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*2\r\n*2\r\n:1\r\n$1\r\na\r\n*1\r\n*0\r\n",
            b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n",
            b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n",
            b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
            b"|1\r\n+ttl\r\n:9\r\n$1\r\nx\r\n",
            b"*2\r\n|1\r\n+ttl\r\n:9\r\n$1\r\nx\r\n:2\r\n",
            b"#t\r\n",
            b"_\r\n",
            b",1.5\r\n",
            b"=5\r\ntxt:x\r\n",
        ];
        let joined = stream.concat();
        for piece in 1..=joined.len() {
            let all = replies(&joined, piece).unwrap();
            let raw: Vec<&[u8]> = all.iter().map(|reply| &reply.raw[..]).collect();
            assert_eq!(raw, stream, "in pieces of {piece}");
            assert_eq!(all[1].kind, ReplyKind::Error);
            assert_eq!(
                all[8].kind,
                ReplyKind::Tagged {
                    word: "message".into(),
                    push: false
                }
            );
            assert_eq!(
                all[9].kind,
                ReplyKind::Tagged {
                    word: "subscribe".into(),
                    push: true
                }
            );
        }
    }

    #[test]
    fn streams_beyond_the_limits_are_refused() {
        for stream in [
            &b"*99999999\r\n"[..],
            b"*1\r\n$99999999999\r\n",
            b"*1\r\n$18446744073709551615\r\n",
            b"*x\r\n",
            b"*1\r\nPING\r\n",
            &[b'a'; MAX_LINE + 1],
        ] {
            assert!(
                requests(stream, stream.len()).is_err(),
                "{}",
                stream[..10].escape_ascii()
            );
        }
        assert!(replies(b"HTTP/1.1 200 OK\r\n", 3).is_err());
    }

    #[test]
    fn monitor_lines_are_unquoted() {
        let args = unquote(br#""SET" "a b" "\x00\xff\"\\\n" """#);
        assert_eq!(args, [&b"SET"[..], b"a b", b"\x00\xff\"\\\n", b""]);
    }

    #[test]
    fn a_command_tells_the_keys_of_its_script() {
        let command = Command::new(["evalsha", "abc", "2", "k1", "k2", "arg"]);
        assert!(command.is_script());
        assert_eq!(command.script_keys(), ["k1", "k2"]);
        assert!(command.mentions("k2") && !command.mentions("k3"));
    }
}
