//! The resource that the locks protect: a register for each key that takes no write with a token older than the last.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, BufStream};
use tokio::net::{TcpListener, TcpStream};

use super::event::{HoldId, Register as Event};
use super::log::Log;

/// What the register has, for everybody.
#[derive(Debug)]
struct Values {
    last: Mutex<HashMap<usize, u64>>,
    log: Log,
}

impl Values {
    /// The token that the register knows after this write. The log has the order in which writes took effect.
    fn write(&self, key: usize, token: u64, hold: HoldId) -> u64 {
        let mut all = self.last.lock();
        let last = all.entry(key).or_default();
        if token < *last {
            let last = *last;
            self.log.say(Event::Refused {
                key,
                token,
                hold,
                last,
            });
            return last;
        }
        *last = token;
        self.log.say(Event::Took { key, token, hold });
        token
    }
}

/// Serves registers until the process ends, in a thread of its own: a client that waits for the orchestrator's other
/// work would hold locks meanwhile.
///
/// # Errors
/// When the log cannot be made, or no port is free.
pub(crate) fn serve(log: &Path) -> io::Result<SocketAddr> {
    let values = Arc::new(Values {
        last: Mutex::default(),
        log: Log::open(log)?,
    });
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    thread::Builder::new().name("register".into()).spawn(move || {
        runtime.block_on(async move {
            let listener = TcpListener::from_std(listener).expect("the listener can be used");
            loop {
                // A client that cannot be accepted tries again.
                if let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(answer(values.clone(), stream));
                }
            }
        });
    })?;
    Ok(address)
}

/// One line `key token hold` for a write, one line with the last token for its answer.
async fn answer(values: Arc<Values>, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Some(line) = lines.next_line().await? {
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().ok_or(io::ErrorKind::InvalidData);
        let (key, token, hold) = (word()?.parse(), word()?.parse(), word()?.parse());
        let (Ok(key), Ok(token), Ok(hold)) = (key, token, hold) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let last = values.write(key, token, hold);
        write.write_all(format!("{last}\n").as_bytes()).await?;
    }
    Ok(())
}

/// A connection to the registers.
#[derive(Debug)]
pub(crate) struct Writer(BufStream<TcpStream>);

impl Writer {
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Writer> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Writer(BufStream::new(stream)))
    }

    /// Writes; the token that the register has then. It took the write when that is the writer's own.
    pub(crate) async fn write(&mut self, key: usize, token: u64, hold: HoldId) -> io::Result<u64> {
        let line = format!("{key} {token} {hold}\n");
        self.0.write_all(line.as_bytes()).await?;
        self.0.flush().await?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).await?;
        answer
            .trim()
            .parse()
            .map_err(|_| io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::event::Life;

    #[tokio::test]
    async fn a_write_with_an_older_token_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("register.log");
        let address = serve(&log).unwrap();
        let mut writer = Writer::connect(address).await.unwrap();
        let life = Life { slot: 0, life: 0 };
        let hold = |number| HoldId { life, number };
        assert_eq!(writer.write(1, 10, hold(1)).await.unwrap(), 10);
        assert_eq!(writer.write(1, 10, hold(1)).await.unwrap(), 10);
        assert_eq!(writer.write(1, 9, hold(2)).await.unwrap(), 10);
        assert_eq!(writer.write(2, 9, hold(2)).await.unwrap(), 9);
        let said = std::fs::read_to_string(&log).unwrap();
        let words: Vec<_> = said.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
        assert_eq!(words, ["took", "took", "refused", "took"]);
    }
}
