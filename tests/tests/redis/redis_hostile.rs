//! What stands where the server should be sends without end: no call takes longer than its time, and when the server is
//! back the client goes on.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock_tests::faults::{SOON, hasty, is_back, within};
use dlock_tests::{Flavor, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What is sent again and again; the first is nothing.
const FLOODS: [&str; 6] = [
    "",
    ">2\r\n+invalidate\r\n_\r\n",
    "+endless",
    "|1\r\n+key\r\n+value\r\n",
    "*1\r\n",
    "$-1\r\n",
];

/// Passes on what goes to a server, and answers with a flood on all connections while one is chosen.
async fn relay(to: SocketAddr, flood: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let flood = flood.clone();
            tokio::spawn(async move {
                let Ok(server) = TcpStream::connect(to).await else {
                    return;
                };
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let there = async {
                    let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
                };
                let back = async {
                    let mut buffer = vec![0; 4096];
                    loop {
                        let chosen = FLOODS[flood.load(Ordering::Relaxed)];
                        let sent = match chosen {
                            "" => match tokio::time::timeout(
                                Duration::from_millis(5),
                                from_server.read(&mut buffer),
                            )
                            .await
                            {
                                Ok(Ok(count @ 1..)) => to_client.write_all(&buffer[..count]).await,
                                Ok(_) => return,
                                Err(_) => continue,
                            },
                            text => to_client.write_all(text.repeat(10_000).as_bytes()).await,
                        };
                        if sent.is_err() {
                            return;
                        }
                    }
                };
                tokio::select! {
                    () = there => {},
                    () = back => {},
                }
            });
        }
    });
    address
}

async fn flooded() {
    let server = Server::start(Flavor::from_env()).await;
    let flood = Arc::new(AtomicUsize::new(0));
    let address = relay(server.addr(), flood.clone()).await;
    let client = hasty(&format!("redis://{address}")).await;
    for (chosen, text) in FLOODS.iter().enumerate().skip(1) {
        let name = format!("k{chosen}");
        flood.store(chosen, Ordering::Relaxed);
        // The relay may wait for the server yet.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let asked = within(SOON, text, client.lock(&name).try_acquire()).await;
        assert!(asked.is_err(), "{text:?} granted a lock");
        flood.store(0, Ordering::Relaxed);
        is_back(&client).await;
    }
}

#[tokio::test]
async fn flood_lets_no_call_take_longer_than_its_time_on_one_thread() {
    flooded().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_lets_no_call_take_longer_than_its_time_on_two_threads() {
    flooded().await;
}
