//! A command as bytes for the server.
//!
//! The library keeps a command as its arguments, and serialises them when it is sent. A call has some twenty arguments
//! for every few steps, so here they are serialised once.

use std::fmt;

use redis::{Cmd, RedisWrite, ToRedisArgs};

/// Space for the header: `*`, the number of arguments and the end of the line.
const HEAD: usize = 24;

/// A larger buffer is not reused.
const LARGE: usize = 64 * 1024;

/// A command that is being written: first its name, then its arguments, one `arg` each.
pub(super) struct Command {
    bytes: Vec<u8>,
    args: usize,
}

impl Command {
    /// Reserves this many bytes for arguments, in the buffer of an earlier command.
    pub(super) fn new(mut bytes: Vec<u8>, size: usize) -> Command {
        bytes.clear();
        bytes.reserve(HEAD + size);
        bytes.resize(HEAD, 0);
        Command { bytes, args: 0 }
    }

    pub(super) fn arg(&mut self, arg: impl ToRedisArgs) -> &mut Command {
        arg.write_redis_args(self);
        self
    }

    /// The same of one that is in pieces.
    pub(super) fn joined(&mut self, pieces: &[&str]) -> &mut Command {
        self.args += 1;
        append_arg(&mut self.bytes, pieces.iter().map(|piece| piece.as_bytes()));
        self
    }

    /// The same of one that is always the same: written before by [`written`].
    pub(super) fn written(&mut self, args: usize, bytes: &[u8]) -> &mut Command {
        self.args += args;
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(super) fn finish(mut self) -> Packed {
        let mut number = itoa::Buffer::new();
        let number = number.format(self.args).as_bytes();
        let at = HEAD - number.len() - 3;
        self.bytes[at] = b'*';
        self.bytes[at + 1..HEAD - 2].copy_from_slice(number);
        self.bytes[HEAD - 2..HEAD].copy_from_slice(b"\r\n");
        Packed {
            bytes: self.bytes,
            begin: at,
            replies: 1,
        }
    }
}

/// Appends an argument that is in pieces, in wire format.
fn append_arg<'a>(bytes: &mut Vec<u8>, pieces: impl Iterator<Item = &'a [u8]> + Clone) {
    let mut digits = itoa::Buffer::new();
    let length: usize = pieces.clone().map(<[u8]>::len).sum();
    bytes.push(b'$');
    bytes.extend_from_slice(digits.format(length).as_bytes());
    bytes.extend_from_slice(b"\r\n");
    pieces.for_each(|piece| bytes.extend_from_slice(piece));
    bytes.extend_from_slice(b"\r\n");
}

/// Commands that are sent together, each with a reply.
pub(super) struct Pipeline {
    bytes: Vec<u8>,
    commands: usize,
}

impl Pipeline {
    /// Reserves this many bytes, in the buffer of an earlier command.
    pub(super) fn new(mut bytes: Vec<u8>, size: usize) -> Pipeline {
        bytes.clear();
        bytes.reserve(size);
        Pipeline { bytes, commands: 0 }
    }

    /// Begins a command: in wire format the number of its arguments, its name included, and the name.
    pub(super) fn command(&mut self, head: &[u8]) -> &mut Pipeline {
        self.commands += 1;
        self.bytes.extend_from_slice(head);
        self
    }

    /// Adds an argument that is in pieces.
    pub(super) fn arg(&mut self, pieces: &[&[u8]]) -> &mut Pipeline {
        append_arg(&mut self.bytes, pieces.iter().copied());
        self
    }

    pub(super) fn finish(self) -> Packed {
        Packed {
            bytes: self.bytes,
            begin: 0,
            replies: self.commands,
        }
    }
}

/// Arguments in wire format.
pub(super) fn written(args: &[&str]) -> Vec<u8> {
    let mut command = Command::new(Vec::new(), 0);
    for arg in args {
        command.arg(*arg);
    }
    command.bytes.split_off(HEAD)
}

impl RedisWrite for Command {
    fn write_arg(&mut self, arg: &[u8]) {
        self.args += 1;
        append_arg(&mut self.bytes, std::iter::once(arg));
    }

    fn write_arg_fmt(&mut self, arg: impl fmt::Display) {
        self.write_arg(arg.to_string().as_bytes());
    }

    fn writer_for_next_arg(&mut self) -> impl std::io::Write + '_ {
        NextArg {
            command: self,
            bytes: Vec::new(),
        }
    }
}

/// An argument that is written in pieces.
struct NextArg<'a> {
    command: &'a mut Command,
    bytes: Vec<u8>,
}

impl std::io::Write for NextArg<'_> {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        self.bytes.write(piece)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for NextArg<'_> {
    fn drop(&mut self) {
        self.command.write_arg(&self.bytes);
    }
}

/// One or several commands in wire format.
pub(super) struct Packed {
    bytes: Vec<u8>,
    begin: usize,
    /// How many replies the server sends.
    pub(super) replies: usize,
}

impl Packed {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.begin..]
    }

    /// Returns its buffer, for the next command.
    pub(super) fn into_room(mut self) -> Vec<u8> {
        self.bytes.clear();
        self.bytes.shrink_to(LARGE);
        self.bytes
    }
}

impl From<&Cmd> for Packed {
    fn from(cmd: &Cmd) -> Packed {
        Packed {
            bytes: cmd.get_packed_command(),
            begin: 0,
            replies: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library writes the same.
    fn assert_is(command: Command, cmd: &Cmd) {
        assert_eq!(command.finish().bytes(), cmd.get_packed_command());
    }

    #[test]
    fn command_is_what_the_library_writes() {
        let (text, bytes, nothing) = (
            "a long text of more than nine bytes",
            [0_u8, 255, 13, 10],
            None::<u64>,
        );
        let mut command = Command::new(vec![7; 100], 3);
        command.arg("SET").arg(text).arg(&bytes[..]).arg("");
        command.arg(u64::MAX).arg(-1).arg(nothing).arg(Some(10));
        let mut cmd = redis::cmd("SET");
        cmd.arg(text).arg(&bytes[..]).arg("");
        cmd.arg(u64::MAX).arg(-1).arg(nothing).arg(Some(10));
        assert_is(command, &cmd);
    }

    #[test]
    fn command_has_any_number_of_arguments_of_any_length() {
        for count in [1, 9, 10, 99, 100, 12_345] {
            let (mut command, mut cmd) = (Command::new(Vec::new(), 0), Cmd::new());
            for length in 0..count {
                let arg = "x".repeat(length % 200);
                command.arg(&arg);
                cmd.arg(&arg);
            }
            assert_is(command, &cmd);
        }
    }

    #[test]
    fn pipeline_is_one_command_after_the_other() {
        let mut pipeline = Pipeline::new(vec![7; 10], 3);
        pipeline
            .command(b"*2\r\n$3\r\nGET\r\n")
            .arg(&[b"a long", b"", b" name"]);
        pipeline
            .command(b"*3\r\n$3\r\nSET\r\n")
            .arg(&[b"b"])
            .arg(&[b"\r\n"]);
        let packed = pipeline.finish();
        let mut get = redis::cmd("GET").arg("a long name").get_packed_command();
        get.extend(redis::cmd("SET").arg("b").arg("\r\n").get_packed_command());
        assert_eq!((packed.bytes(), packed.replies), (&get[..], 2));
    }

    #[test]
    fn argument_in_pieces_is_one_argument() {
        let mut command = Command::new(Vec::new(), 0);
        command.joined(&["a", "", "long name"]).joined(&[]).arg("b");
        assert_is(command, redis::cmd("along name").arg("").arg("b"));
    }

    #[test]
    fn what_was_written_before_counts_as_its_arguments() {
        let mut command = Command::new(Vec::new(), 0);
        command.written(2, &written(&["EVALSHA", "abc"])).arg(1);
        assert_is(command, redis::cmd("EVALSHA").arg("abc").arg(1));
    }

    #[test]
    fn room_is_used_again_unless_it_is_large() {
        let packed = |size| {
            let mut command = Command::new(Vec::new(), 0);
            command.arg(vec![0; size]);
            command.finish().into_room()
        };
        assert!(packed(1000).capacity() >= 1000 && packed(1000).is_empty());
        assert!(packed(2 * LARGE).capacity() <= LARGE);
    }
}
