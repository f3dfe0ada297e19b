//! The protocol of PostgreSQL, message by message.

use std::collections::HashMap;

use tokio::io::{self, AsyncReadExt};
use tokio::net::tcp::OwnedReadHalf;

use crate::network::{Asks, Dialect, Unit};
use crate::sql::Request;

/// PostgreSQL's protocol. The SQL of prepared statements is known too, so that a test can lose the reply to the second
/// `COMMIT`.
#[derive(Debug)]
pub struct Pg;

/// What a client has said so far.
#[derive(Debug, Default)]
pub struct Said {
    /// The client has sent its start-up message.
    begun: bool,
    prepared: HashMap<String, String>,
}

impl Dialect for Pg {
    type Request = Request;
    type Said = Said;
    type Reply = ();

    async fn unit(said: &mut Said, from: &mut OwnedReadHalf) -> io::Result<Option<Unit<Request>>> {
        if !said.begun {
            said.begun = true;
            let mut bytes = vec![0; 4];
            from.read_exact(&mut bytes).await?;
            let length = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
            bytes.resize(length, 0);
            from.read_exact(&mut bytes[4..]).await?;
            let asks = Asks::ToBeGreeted;
            return Ok(Some(Unit { bytes, asks }));
        }
        let (mut bytes, mut lines, mut executes) = (Vec::new(), Vec::new(), false);
        loop {
            let Some(message) = message(from).await? else {
                return Ok(None);
            };
            let body = &message[5..];
            match message[0] {
                b'P' => {
                    let (name, sql) = (text(body, 0), text(body, 1));
                    lines.push(sql.clone());
                    said.prepared.insert(name, sql);
                }
                b'B' => lines.extend(said.prepared.get(&text(body, 1)).cloned()),
                b'E' => executes = true,
                b'Q' => {
                    lines.push(text(body, 0));
                    executes = true;
                }
                _ => {}
            }
            bytes.extend_from_slice(&message);
            match message[0] {
                b'S' | b'Q' => break,
                // Passwords and the end have no reply of their own.
                b'p' | b'X' => {
                    let asks = Asks::Nothing;
                    return Ok(Some(Unit { bytes, asks }));
                }
                _ => {}
            }
        }
        lines.dedup();
        let asks = Asks::For(Request {
            sql: lines.join("\n"),
            executes,
        });
        Ok(Some(Unit { bytes, asks }))
    }

    async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
        message(from).await
    }

    fn ends((): &mut (), _: &Asks<Request>, message: &[u8]) -> bool {
        message[0] == b'Z'
    }

    fn is_step(request: &Request) -> bool {
        request.executes
    }
}

/// One message with its head; `None` at the end.
async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
    let mut message = vec![0; 5];
    if from.read(&mut message[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut message[1..]).await?;
    let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]) as usize;
    message.resize(length + 1, 0);
    from.read_exact(&mut message[5..]).await?;
    Ok(Some(message))
}

/// The `n`-th text in a row of those that end with a zero.
fn text(body: &[u8], n: usize) -> String {
    let part = body.split(|byte| *byte == 0).nth(n).unwrap_or_default();
    String::from_utf8_lossy(part).into_owned()
}
