//! The connections of the proxy, message by message.

use std::collections::HashMap;

use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use crate::sql_proxy::{Deed, Request, Shared, Stage};
use crate::{Direction, Swallow};

/// A reply that is still to come, and what is to become of it.
type Pending = Option<(Swallow, watch::Sender<Stage>)>;

pub(crate) async fn forward(shared: &Shared, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let (asked, replies) = mpsc::unbounded_channel();
    let requests = requests(shared, client_read, server_write, asked);
    let replies = self::replies(shared, server_read, client_write, replies);
    // A client that closes takes nothing back that it has sent; a server that closes ends it all.
    let mut requests = std::pin::pin!(requests);
    let mut replies = std::pin::pin!(replies);
    tokio::select! {
        outcome = &mut requests => { outcome?; replies.await }
        outcome = &mut replies => outcome,
    }
}

async fn requests(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    asked: mpsc::UnboundedSender<Pending>,
) -> io::Result<()> {
    let mut startup = vec![0; 4];
    from.read_exact(&mut startup).await?;
    let length = u32::from_be_bytes([startup[0], startup[1], startup[2], startup[3]]) as usize;
    startup.resize(length, 0);
    from.read_exact(&mut startup[4..]).await?;
    shared.pass(Direction::ToServer).await;
    to.write_all(&startup).await?;
    let _ = asked.send(None);
    let mut prepared = HashMap::new();
    loop {
        let (mut bytes, mut lines, mut executes) = (Vec::new(), Vec::new(), false);
        loop {
            let Some(message) = message(&mut from).await? else {
                return to.shutdown().await;
            };
            let body = &message[5..];
            match message[0] {
                b'P' => {
                    let (name, sql) = (text(body, 0), text(body, 1));
                    lines.push(sql.clone());
                    prepared.insert(name, sql);
                }
                b'B' => lines.extend(prepared.get(&text(body, 1)).cloned()),
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
                    to.write_all(&std::mem::take(&mut bytes)).await?;
                }
                _ => {}
            }
        }
        lines.dedup();
        let request = Request {
            sql: lines.join("\n"),
            executes,
        };
        let mut pending = None;
        match shared.look(request) {
            Some((Deed::Lose, _)) => return Err(io::ErrorKind::ConnectionAborted.into()),
            Some((Deed::Swallow(then), stage)) => pending = Some((then, stage)),
            Some((Deed::Hold, stage)) => {
                let mut stages = stage.subscribe();
                let _ = stages.wait_for(|stage| *stage == Stage::Released).await;
            }
            None => {}
        }
        shared.pass(Direction::ToServer).await;
        let _ = asked.send(pending);
        to.write_all(&bytes).await?;
    }
}

async fn replies(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut asked: mpsc::UnboundedReceiver<Pending>,
) -> io::Result<()> {
    let mut current: Option<Pending> = None;
    let mut mute = false;
    let cut = shared.cut_clients();
    loop {
        let message = tokio::select! {
            message = message(&mut from) => message?,
            () = cut.cancelled() => {
                to.shutdown().await?;
                // What the server says from now on is for nobody.
                return io::copy(&mut from, &mut io::sink()).await.map(drop);
            }
        };
        let Some(message) = message else { return Ok(()) };
        if current.is_none() {
            current = asked.try_recv().ok();
        }
        shared.pass(Direction::ToClient).await;
        let swallowed = matches!(&current, Some(Some(_)));
        if !mute && !swallowed {
            // The client may be gone; what it sent still reaches the server.
            let _ = to.write_all(&message).await;
        }
        if message[0] == b'Z'
            && let Some(Some((then, stage))) = current.take()
        {
            stage.send_replace(Stage::Swallowed);
            match then {
                Swallow::Cut => return Err(io::ErrorKind::ConnectionAborted.into()),
                Swallow::Hang => mute = true,
            }
        }
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
