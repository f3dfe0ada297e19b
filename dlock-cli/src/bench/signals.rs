//! The signals that end a measurement.

/// Completes at a signal that asks this process to end. One that it was started to ignore, as by nohup(1), stays ignored.
#[cfg(unix)]
pub(super) async fn asked_to_end() {
    use nix::sys::signal::Signal;
    use tokio::signal::unix::{SignalKind, signal};

    let ending = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
    let listeners = ending
        .into_iter()
        .filter(|ends| !crate::run::is_ignored(*ends))
        .filter_map(|ends| signal(SignalKind::from_raw(ends as i32)).ok());
    let arrivals: Vec<_> = listeners
        .map(|mut listener| Box::pin(async move { listener.recv().await }))
        .collect();
    match arrivals.is_empty() {
        true => std::future::pending().await,
        false => drop(futures_util::future::select_all(arrivals).await),
    }
}

#[cfg(not(unix))]
pub(super) async fn asked_to_end() {
    let _ = tokio::signal::ctrl_c().await;
}
