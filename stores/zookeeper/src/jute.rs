//! The encoding of ZooKeeper's messages: big-endian numbers, and length-prefixed strings and buffers.

/// The message is malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Garbled;

/// Writes a message with its length prefix.
pub(crate) struct Out(Vec<u8>);

impl Out {
    pub(crate) fn new() -> Out {
        Out(vec![0; 4])
    }

    pub(crate) fn int(&mut self, value: i32) -> &mut Out {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(crate) fn long(&mut self, value: i64) -> &mut Out {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(crate) fn bool(&mut self, value: bool) -> &mut Out {
        self.0.push(u8::from(value));
        self
    }

    pub(crate) fn buffer(&mut self, value: &[u8]) -> &mut Out {
        self.length(value.len());
        self.0.extend(value);
        self
    }

    pub(crate) fn string(&mut self, value: &str) -> &mut Out {
        self.buffer(value.as_bytes())
    }

    /// Writes the length of a list; its elements follow.
    pub(crate) fn length(&mut self, length: usize) -> &mut Out {
        // Names and data are far shorter, and the server would refuse longer ones.
        self.int(i32::try_from(length).unwrap_or(i32::MAX))
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - 4).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

/// Reads a message without its length prefix.
pub(crate) struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    pub(crate) fn new(message: &'a [u8]) -> In<'a> {
        In(message)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Garbled> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Garbled)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn int(&mut self) -> Result<i32, Garbled> {
        let bytes = self.take(4)?.try_into().map_err(|_| Garbled)?;
        Ok(i32::from_be_bytes(bytes))
    }

    pub(crate) fn long(&mut self) -> Result<i64, Garbled> {
        let bytes = self.take(8)?.try_into().map_err(|_| Garbled)?;
        Ok(i64::from_be_bytes(bytes))
    }

    pub(crate) fn bool(&mut self) -> Result<bool, Garbled> {
        Ok(self.take(1)?[0] != 0)
    }

    /// Reads a length. A null buffer has the length -1 and is read as empty.
    fn length(&mut self) -> Result<usize, Garbled> {
        match self.int()? {
            -1 => Ok(0),
            length => usize::try_from(length).map_err(|_| Garbled),
        }
    }

    pub(crate) fn buffer(&mut self) -> Result<Vec<u8>, Garbled> {
        let length = self.length()?;
        Ok(self.take(length)?.to_vec())
    }

    pub(crate) fn string(&mut self) -> Result<String, Garbled> {
        String::from_utf8(self.buffer()?).map_err(|_| Garbled)
    }

    pub(crate) fn strings(&mut self) -> Result<Vec<String>, Garbled> {
        let length = self.length()?;
        (0..length).map(|_| self.string()).collect()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let mut out = Out::new();
        out.int(-7)
            .long(1 << 40)
            .bool(true)
            .string("größe")
            .buffer(&[1, 2]);
        out.length(2).string("a").string("");
        let message = out.finish();
        assert_eq!(message[..4], 43_u32.to_be_bytes());
        let mut read = In::new(&message[4..]);
        assert_eq!(
            (read.int(), read.long(), read.bool()),
            (Ok(-7), Ok(1 << 40), Ok(true))
        );
        assert_eq!(
            (read.string(), read.buffer()),
            (Ok("größe".to_owned()), Ok(vec![1, 2]))
        );
        assert_eq!(read.strings(), Ok(vec!["a".to_owned(), String::new()]));
        assert!(read.is_empty());
        assert_eq!(read.int(), Err(Garbled));
    }

    #[test]
    fn lengths_beyond_the_message_are_garbled() {
        for length in [5, i32::MAX, -2] {
            let mut message = length.to_be_bytes().to_vec();
            message.extend([0; 4]);
            assert_eq!(In::new(&message).buffer(), Err(Garbled), "{length}");
            assert_eq!(In::new(&message).strings(), Err(Garbled), "{length}");
        }
        assert_eq!(In::new(&(-1_i32).to_be_bytes()).buffer(), Ok(vec![]));
    }
}
