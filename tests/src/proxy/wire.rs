//! The connections: how bytes get from one side to the other.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::fault::{Deed, Tracker, Verdict, verdict};
use super::pairing::{Answer, Pairing, Pending};
use super::ports::told;
use super::shared::{Conn, Shared};
use crate::network::{Direction, Swallow};
use crate::resp::{Command, ReplyDecoder, RequestDecoder};

/// Accepts a connection of a client. With `mute` it leads to no server and gets no reply.
pub(super) fn take_in(shared: &Arc<Shared>, client: TcpStream, mute: bool) {
    let (conn, upstream) = {
        let mut state = shared.state.lock();
        state.connections_seen += 1;
        let conn = Arc::new(Conn::new(state.connections_seen));
        state.connections.insert(conn.id, conn.clone());
        (conn, (!mute).then_some(state.upstream))
    };
    tokio::spawn(serve(shared.clone(), conn, client, upstream));
}

/// One connection, from its acceptance until both its sides are closed.
async fn serve(shared: Arc<Shared>, conn: Arc<Conn>, client: TcpStream, upstream: Option<SocketAddr>) {
    match upstream {
        None => stay_mute(&conn, client).await,
        Some(upstream) => {
            if let Ok(server) = TcpStream::connect(upstream).await {
                forward(&shared, &conn, client, server).await;
            }
        }
    }
    conn.open.store(false, Ordering::SeqCst);
    shared.state.lock().connections.remove(&conn.id);
}

async fn stay_mute(conn: &Conn, mut client: TcpStream) {
    let mut waste = [0; 4096];
    let read = async { while matches!(client.read(&mut waste).await, Ok(1..)) {} };
    tokio::select! {
        () = conn.drop_client.cancelled() => {}
        () = read => {}
    }
    if conn.reset.load(Ordering::SeqCst) {
        let _ = client.set_zero_linger();
    }
}

async fn forward(shared: &Shared, conn: &Conn, client: TcpStream, server: TcpStream) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let (to_server, from_client) = mpsc::unbounded_channel();
    let (to_client, from_server) = mpsc::unbounded_channel();
    let pairing = Mutex::new(Pairing::default());
    tokio::join!(
        read_client(shared, conn, client_read, to_server),
        write_server(shared, conn, server_write, from_client, &pairing),
        read_server(shared, conn, server_read, to_client, &pairing),
        write_client(shared, conn, client_write, from_server),
    );
}

/// What is under way to the server.
enum ToServer {
    Command {
        raw: Bytes,
        command: Command,
        deeds: Vec<(Deed, Tracker)>,
        due: Instant,
    },
    /// Of what a replica and its master say to each other.
    Piece {
        raw: Bytes,
        due: Instant,
    },
    End {
        due: Instant,
    },
}

/// What is under way to the client.
enum ToClient {
    Reply { raw: Bytes, due: Instant },
    Hang,
    Cut,
    End { due: Instant },
}

async fn read_client(
    shared: &Shared,
    conn: &Conn,
    mut client: OwnedReadHalf,
    queue: mpsc::UnboundedSender<ToServer>,
) {
    let mut last = Instant::now();
    let read = async {
        let mut decoder = RequestDecoder::default();
        let mut buf = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = client.read(&mut buf).await {
            if conn.is_of_replica.load(Ordering::SeqCst) {
                let due = shared.weather.due(Direction::ToServer, &mut last);
                let raw = Bytes::copy_from_slice(&buf[..len]);
                let _ = queue.send(ToServer::Piece { raw, due });
                continue;
            }
            decoder.feed(&buf[..len]);
            loop {
                match decoder.frame() {
                    Ok(Some(request)) => {
                        let deeds = shared.register(conn, &request.command);
                        if ["PSYNC", "SYNC"].iter().any(|name| request.command.is(name)) {
                            // It sends nothing more before it has the answer.
                            conn.is_of_replica.store(true, Ordering::SeqCst);
                        }
                        let due = shared.weather.due(Direction::ToServer, &mut last);
                        let (raw, command) = (request.raw, request.command);
                        let _ = queue.send(ToServer::Command {
                            raw,
                            command,
                            deeds,
                            due,
                        });
                    }
                    Ok(None) => break,
                    Err(error) => {
                        shared
                            .state
                            .lock()
                            .malformed
                            .push(format!("from a client: {error}"));
                        conn.destroy();
                        return;
                    }
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = conn.drop_client.cancelled() => {}
        () = read => {}
    }
    if conn.reset.load(Ordering::SeqCst) {
        let _ = client.as_ref().set_zero_linger();
    }
    conn.open.store(false, Ordering::SeqCst);
    conn.client_done.cancel();
    let due = shared.weather.due(Direction::ToServer, &mut last);
    let _ = queue.send(ToServer::End { due });
}

async fn write_server(
    shared: &Shared,
    conn: &Conn,
    mut server: OwnedWriteHalf,
    mut queue: mpsc::UnboundedReceiver<ToServer>,
    pairing: &Mutex<Pairing>,
) {
    let write = async {
        while let Some(item) = queue.recv().await {
            let (ToServer::Command { due, .. } | ToServer::Piece { due, .. } | ToServer::End { due }) = &item;
            sleep_until(*due).await;
            shared.unblocked(conn, Direction::ToServer).await;
            let (raw, command, deeds) = match item {
                ToServer::Command {
                    raw, command, deeds, ..
                } => (raw, command, deeds),
                ToServer::Piece { raw, .. } => {
                    let gap = shared.weather.now().lane(Direction::ToServer).trickle;
                    if write(&mut server, &raw, gap).await.is_err() {
                        return;
                    }
                    continue;
                }
                ToServer::End { .. } => break,
            };
            let mut pending = Pending::default();
            for (deed, tracker) in deeds {
                match deed {
                    Deed::Lose => return conn.destroy(),
                    Deed::Hold => {
                        let verdict = verdict(&tracker).await;
                        conn.holding.fetch_sub(1, Ordering::SeqCst);
                        if verdict == Verdict::Discard {
                            return conn.destroy();
                        }
                        pending.trackers.push(tracker);
                    }
                    Deed::Swallow(then) => {
                        pending.trackers.push(tracker);
                        pending.swallow = match pending.swallow {
                            Some(Swallow::Cut) => Some(Swallow::Cut),
                            _ => Some(then),
                        };
                    }
                }
            }
            // it may have become blocked while it was held
            shared.unblocked(conn, Direction::ToServer).await;
            pairing.lock().sent(&command, pending);
            let gap = shared.weather.now().lane(Direction::ToServer).trickle;
            if write(&mut server, &raw, gap).await.is_err() {
                return;
            }
        }
        let _ = server.shutdown().await;
    };
    tokio::select! {
        biased;
        () = conn.drop_server.cancelled() => {}
        () = write => {}
    }
}

async fn read_server(
    shared: &Shared,
    conn: &Conn,
    mut server: OwnedReadHalf,
    queue: mpsc::UnboundedSender<ToClient>,
    pairing: &Mutex<Pairing>,
) {
    let mut last = Instant::now();
    let read = async {
        let mut decoder = ReplyDecoder::default();
        let mut buf = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = server.read(&mut buf).await {
            if conn.is_of_replica.load(Ordering::SeqCst) {
                let due = shared.weather.due(Direction::ToClient, &mut last);
                let raw = Bytes::copy_from_slice(&buf[..len]);
                let _ = queue.send(ToClient::Reply { raw, due });
                continue;
            }
            decoder.feed(&buf[..len]);
            loop {
                match decoder.frame() {
                    Ok(Some(reply)) => {
                        let due = shared.weather.due(Direction::ToClient, &mut last);
                        let lose_messages = shared.weather.now().lose_messages;
                        let _ = match pairing.lock().answered(&reply) {
                            Answer::Message if lose_messages => Ok(()),
                            Answer::To(Some(Swallow::Hang)) => queue.send(ToClient::Hang),
                            Answer::To(Some(Swallow::Cut)) => queue.send(ToClient::Cut),
                            Answer::To(None) | Answer::Message => {
                                let ports = shared.state.lock().ports.clone();
                                let raw = told(reply.raw, &ports);
                                queue.send(ToClient::Reply { raw, due })
                            }
                        };
                    }
                    Ok(None) => break,
                    Err(error) => {
                        shared
                            .state
                            .lock()
                            .malformed
                            .push(format!("from the server: {error}"));
                        conn.destroy();
                        return;
                    }
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = conn.drop_server.cancelled() => {}
        () = read => {}
    }
    let due = shared.weather.due(Direction::ToClient, &mut last);
    let _ = queue.send(ToClient::End { due });
}

async fn write_client(
    shared: &Shared,
    conn: &Conn,
    mut client: OwnedWriteHalf,
    mut queue: mpsc::UnboundedReceiver<ToClient>,
) {
    let write = async {
        while let Some(item) = queue.recv().await {
            match item {
                ToClient::Reply { raw, due } => {
                    sleep_until(due).await;
                    shared.unblocked(conn, Direction::ToClient).await;
                    let gap = shared.weather.now().lane(Direction::ToClient).trickle;
                    if write(&mut client, &raw, gap).await.is_err() {
                        break;
                    }
                }
                ToClient::Hang => return conn.client_done.cancelled().await,
                ToClient::Cut => return conn.cut(),
                ToClient::End { due } => {
                    sleep_until(due).await;
                    shared.unblocked(conn, Direction::ToClient).await;
                    break;
                }
            }
        }
        let _ = client.shutdown().await;
        conn.open.store(false, Ordering::SeqCst);
        conn.drop_client.cancel();
    };
    tokio::select! {
        biased;
        () = conn.drop_client.cancelled() => {}
        () = write => {}
    }
    if conn.reset.load(Ordering::SeqCst) {
        // a dropped half says a polite good-bye, which would come before the reset
        client.forget();
    }
}

async fn write(stream: &mut OwnedWriteHalf, raw: &[u8], gap: Option<Duration>) -> io::Result<()> {
    let Some(gap) = gap else {
        return stream.write_all(raw).await;
    };
    for byte in raw {
        stream.write_all(std::slice::from_ref(byte)).await?;
        sleep(gap).await;
    }
    Ok(())
}
