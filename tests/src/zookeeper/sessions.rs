//! The sessions of a server, as an operator sees and ends them.

use std::collections::BTreeSet;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Zookeeper;
use crate::process::PATIENCE;

impl Zookeeper {
    /// The sessions that have a connection here.
    pub async fn connected_sessions(&self) -> BTreeSet<i64> {
        let said = self.said("cons").await.unwrap_or_default();
        let ids = said.split("sid=0x").skip(1).filter_map(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_hexdigit).collect();
            u64::from_str_radix(&digits, 16).ok()
        });
        ids.map(u64::cast_signed).filter(|id| *id != 0).collect()
    }

    /// How many sessions there are, with a connection or without one.
    ///
    /// # Panics
    /// When it does not count them.
    pub async fn sessions(&self) -> u64 {
        self.counted("zk_global_sessions").await
    }

    /// What it counts under this name.
    ///
    /// # Panics
    /// When it does not count that.
    pub async fn counted(&self, name: &str) -> u64 {
        let said = self.said("mntr").await.unwrap_or_default();
        let mut lines = said.lines().filter_map(|line| line.split_once('\t'));
        let line = lines.find(|(of, _)| *of == name);
        let (_, number) = line.unwrap_or_else(|| panic!("it counts no {name}:\n{said}"));
        number.parse().expect("a number")
    }

    /// Ends a session of a client that knows nothing of it.
    ///
    /// # Panics
    /// When the server does not do it.
    pub async fn end_session(&self, id: i64) {
        let deadline = Instant::now() + PATIENCE;
        // The client is back at once, and may be quicker.
        while self.closes(id).await.is_none_or(|kept| kept) {
            assert!(Instant::now() < deadline, "session {id:x} does not end");
        }
    }

    /// Takes a session over and closes it. Returns whether there was one, if the server says so.
    async fn closes(&self, id: i64) -> Option<bool> {
        let mut stream = TcpStream::connect(self.addr()).await.ok()?;
        // The time for which it is kept, and its password.
        let (time, size) = (10_000_i32.to_be_bytes(), 16_i32.to_be_bytes());
        let hello = [&[0; 12], &time[..], &id.to_be_bytes(), &size, &password(id), &[0]].concat();
        // A number, and the operation.
        let close = [1_i32.to_be_bytes(), (-11_i32).to_be_bytes()].concat();
        let message = [&[0, 0, 0, 45], &hello[..], &[0, 0, 0, 8], &close];
        stream.write_all(&message.concat()).await.ok()?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await.ok()?;
        said.get(8..12).map(|time| time != [0; 4])
    }
}

/// What servers make of the number of a session, by Java's generator of random numbers.
fn password(id: i64) -> Vec<u8> {
    const FACTOR: u64 = 0x5_DEEC_E66D;
    const MASK: u64 = (1 << 48) - 1;
    let mut seed = ((id ^ 0xB341_5C00).cast_unsigned() ^ FACTOR) & MASK;
    let mut word = || {
        seed = (seed.wrapping_mul(FACTOR).wrapping_add(0xB)) & MASK;
        ((seed >> 16) as u32).to_le_bytes()
    };
    [word(), word(), word(), word()].concat()
}
