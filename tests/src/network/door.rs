//! The port of a proxy: which connections are accepted there, and what the network behind it is like.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::sync::{Arc, mpsc as sync_mpsc};
use std::thread::{self, JoinHandle};

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

use super::Weather;
use crate::port::Port;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Refuse,
    Mute,
}

type Order = (State, sync_mpsc::Sender<io::Result<()>>);

/// A port, and the thread in which its connections are served. They all end when it is dropped.
#[derive(Debug)]
pub struct Door {
    weather: Arc<Weather>,
    port: Port,
    orders: Option<mpsc::UnboundedSender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Opens it. `serve` is called for each connection, inside the runtime of that thread, and told whether the client is never
    /// to be answered.
    ///
    /// # Panics
    /// When it cannot listen.
    pub(crate) fn open(
        name: &str,
        weather: Arc<Weather>,
        serve: impl Fn(TcpStream, bool) + Send + 'static,
    ) -> Door {
        let (orders, inbox) = mpsc::unbounded_channel();
        let (ready, started) = sync_mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime can be built");
                runtime.block_on(async {
                    let (port, listener) = loop {
                        let port = Port::reserve();
                        // another process may have been quicker
                        if let Ok(listener) = listen(port.number()) {
                            break (port, listener);
                        }
                    };
                    let number = port.number();
                    let _ = ready.send(port);
                    keep(number, listener, inbox, serve).await;
                });
            })
            .expect("a thread can be started");
        Door {
            weather,
            port: started.recv().expect("the proxy listens"),
            orders: Some(orders),
            thread: Some(thread),
        }
    }

    /// The port to connect to. It stays the same, also while new connections are refused.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    /// Refuses new connections, as a server that is not there does, until [`accept`](Self::accept).
    ///
    /// # Panics
    /// When the proxy has ended.
    pub fn refuse(&self) {
        self.set(State::Refuse);
    }

    /// Accepts new connections and never answers them, as a host behind a dead network seems to do, until
    /// [`accept`](Self::accept). Those accepted meanwhile stay mute.
    ///
    /// For open connections see [`block`](Weather::block).
    ///
    /// # Panics
    /// When the proxy has ended.
    pub fn mute_new(&self) {
        self.set(State::Mute);
    }

    /// Accepts new connections again.
    ///
    /// # Panics
    /// When its port was taken in between.
    pub fn accept(&self) {
        self.set(State::Open);
    }

    /// Accepts connections, and ends what is wrong with the network as a whole.
    pub(crate) fn heal(&self) {
        self.weather.clear();
        self.accept();
    }

    fn set(&self, state: State) {
        let (ack, done) = sync_mpsc::channel();
        let orders = self.orders.as_ref().expect("the door is there until drop");
        orders.send((state, ack)).expect("the proxy runs");
        done.recv()
            .expect("the proxy runs")
            .expect("the proxy's port is free");
    }
}

impl Deref for Door {
    type Target = Weather;

    fn deref(&self) -> &Weather {
        &self.weather
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.orders.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    // connections of the time before a refusal may still linger on the port
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::LOCALHOST, port).into())?;
    socket.listen(1024)
}

/// Lets connections in until the proxy is dropped.
async fn keep(
    port: u16,
    listener: TcpListener,
    mut orders: mpsc::UnboundedReceiver<Order>,
    serve: impl Fn(TcpStream, bool),
) {
    let mut listener = Some(listener);
    let mut mute = false;
    loop {
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            order = orders.recv() => {
                let Some((state, ack)) = order else { return };
                mute = state == State::Mute;
                let mut done = Ok(());
                if state == State::Refuse {
                    listener = None;
                } else if listener.is_none() {
                    match listen(port) {
                        Ok(again) => listener = Some(again),
                        Err(error) => done = Err(error),
                    }
                }
                let _ = ack.send(done);
            }
            accepted = accepted => {
                if let Ok((client, _)) = accepted {
                    serve(client, mute);
                }
            }
        }
    }
}
