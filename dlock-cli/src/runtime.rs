//! The runtime of a command.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Pipes have as many files as the runtime opens: two each.
#[cfg(unix)]
const PIPES: usize = 3;

/// Runs a command on one thread.
pub(crate) fn block_on<T>(command: impl Future<Output = T>) -> Result<T, String> {
    block_on_threads(1, command)
}

/// Runs a command on as many threads.
pub(crate) fn block_on_threads<T>(threads: usize, command: impl Future<Output = T>) -> Result<T, String> {
    let runtime = build(threads).map_err(|error| format!("the runtime does not start: {error}"))?;
    let outcome = runtime.block_on(command);
    // A name that is still being resolved is not waited for.
    runtime.shutdown_background();
    Ok(outcome)
}

fn build(threads: usize) -> io::Result<Runtime> {
    // tokio panics where it gets no file for its signals.
    #[cfg(unix)]
    let pipes: Vec<_> = (0..PIPES).map(|_| io::pipe()).collect::<io::Result<_>>()?;
    #[cfg(unix)]
    drop(pipes);
    let mut builder = match threads {
        1 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    builder.worker_threads(threads).enable_all().build()
}
