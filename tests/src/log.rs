//! What the library says by way of `tracing`.

use std::io::Write;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;

/// The log of a thread.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// How often this text stands in it.
    pub fn count(&self, text: &str) -> usize {
        String::from_utf8_lossy(&self.0.lock()).matches(text).count()
    }

    /// Begins to write down what this thread says, until the guard is dropped.
    #[must_use]
    pub fn listen(&self) -> tracing::subscriber::DefaultGuard {
        // As long as there is one dispatcher, `tracing` asks only that of the thread that is the first to reach an event whether
        // anybody wants it. Another test's thread has none, and would turn the event off for all.
        static SECOND: OnceLock<Dispatch> = OnceLock::new();
        SECOND.get_or_init(|| Dispatch::new(NoSubscriber::new()));
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || log.clone())
            .finish();
        tracing::subscriber::set_default(subscriber)
    }
}
