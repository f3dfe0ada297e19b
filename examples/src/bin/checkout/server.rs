//! Serves until a signal comes, and shuts down gracefully.

use std::future::IntoFuture;
use std::io;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// How long requests in progress may take when the service must end.
const GRACE: Duration = Duration::from_secs(5);

/// Opens the port. The error is one for people.
pub(crate) async fn listen(address: &str) -> Result<TcpListener, String> {
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot listen on {address}: another program has that port; stop it, or choose another one as in --listen 127.0.0.1:3001"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("cannot listen on {address}: this user may not; ports above 1023 are free for all users")
        }
        _ => format!("cannot listen on {address}: {error}; it is host:port, as in --listen 127.0.0.1:3000"),
    })
}

/// What asks the service to end.
pub(crate) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    /// Handles signals from now on: a signal that comes before the wait for it is not lost.
    #[cfg(unix)]
    pub(crate) fn new() -> io::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    #[cfg(not(unix))]
    pub(crate) fn new() -> io::Result<Signals> {
        Ok(Signals {})
    }

    /// Waits for one, and gives its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "Ctrl-C",
        }
        #[cfg(not(unix))]
        {
            let _ = tokio::signal::ctrl_c().await;
            "Ctrl-C"
        }
    }
}

/// The end of the service, in its order.
pub(crate) struct Ends<L, E> {
    /// The service is no longer ready, but still serves requests.
    pub(crate) leaves: L,
    /// How long it continues to serve, so that load balancers notice.
    pub(crate) leave_after: Duration,
    /// It accepts no new connections.
    pub(crate) ending: E,
}

/// Serves until a signal comes, and ends as [`Ends`] says. Requests in progress then have [`GRACE`] to finish; a
/// second signal ends this time. Returns what is left of it, for work whose clients have gone.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    mut signals: Signals,
    ends: Ends<impl FnOnce(), impl FnOnce()>,
) -> io::Result<Duration> {
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async {
        // The sender is dropped to stop: that is the message.
        let _ = stopped.await;
    });
    let mut server = std::pin::pin!(server.into_future());
    let signal = tokio::select! {
        ended = &mut server => return ended.map(|()| GRACE),
        signal = signals.next() => signal,
    };
    (ends.leaves)();
    if !ends.leave_after.is_zero() {
        tracing::info!(
            "{signal}: not ready any more, and serving on for {:?}",
            ends.leave_after
        );
        tokio::select! {
            ended = &mut server => return ended.map(|()| GRACE),
            () = tokio::time::sleep(ends.leave_after) => {}
            _ = signals.next() => {}
        }
    }
    tracing::info!("{signal}: no new requests are taken, those under way have {GRACE:?}");
    drop(stop);
    (ends.ending)();
    let until = Instant::now() + GRACE;
    tokio::select! {
        ended = &mut server => ended.map(|()| until.saturating_duration_since(Instant::now())),
        () = tokio::time::sleep_until(until) => {
            // A client that keeps a connection open must not keep the service up.
            tracing::warn!("some connections are still open after {GRACE:?} and will be cut off");
            Ok(Duration::ZERO)
        }
        signal = signals.next() => {
            tracing::warn!("{signal} again: what is still under way will be cut off");
            Ok(Duration::ZERO)
        }
    }
}
