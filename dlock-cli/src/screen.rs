//! Text that is rewritten again and again, at a terminal that may not take it: after Ctrl-S, or with a slow reader.

use std::io::Write;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long the end of a line may take: a terminal that takes output needs a moment only.
const TAKEN_WITHIN: Duration = Duration::from_millis(200);

/// Writes in a thread of its own: only that thread waits for the terminal.
#[derive(Debug)]
pub(crate) struct Painter {
    texts: Sender<String>,
    taken: Receiver<()>,
    /// How many texts the terminal has still to take.
    pending: usize,
}

impl Painter {
    pub(crate) fn new(mut to: impl Write + Send + 'static) -> Painter {
        let (texts, queue) = channel::<String>();
        let (sender, taken) = channel();
        let write = move || {
            for text in queue {
                // A terminal that is gone shows nothing.
                let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
                let _ = sender.send(());
            }
        };
        // Without the thread nothing is shown.
        let _ = std::thread::Builder::new().name("screen".to_owned()).spawn(write);
        Painter {
            texts,
            taken,
            pending: 0,
        }
    }

    /// Shows a text. The text is dropped while the terminal has still to take the text before.
    pub(crate) fn show(&mut self, text: String) {
        if self.is_free(Duration::ZERO) {
            self.send(text);
        }
    }

    /// Shows a text that others rely on, as the last one: waits so long for the terminal, which may take it later, too.
    pub(crate) fn show_now(&mut self, text: &str, within: Duration) {
        self.send(text.to_owned());
        self.is_free(within);
    }

    fn send(&mut self, text: String) {
        self.pending += usize::from(self.texts.send(text).is_ok());
    }

    fn is_free(&mut self, within: Duration) -> bool {
        let until = Instant::now() + within;
        let left = || until.saturating_duration_since(Instant::now());
        while self.pending > 0 && self.taken.recv_timeout(left()).is_ok() {
            self.pending -= 1;
        }
        self.pending == 0
    }
}

/// A line on standard error, which is removed when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct StatusLine(Option<Painter>);

impl StatusLine {
    /// Replaces the line.
    pub(crate) fn show(&mut self, text: &str) {
        let (columns, _) = terminal_size(std::io::stderr());
        // A text that needs two lines would leave the first behind. Without the wrap, also one of wide characters is cut.
        let text: String = text.chars().take(columns - 1).collect();
        let painter = self.0.get_or_insert_with(|| Painter::new(std::io::stderr()));
        painter.show(format!("\r\x1b[K\x1b[?7l{text}\x1b[?7h"));
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if let Some(painter) = &mut self.0 {
            painter.show_now("\r\x1b[K", TAKEN_WITHIN);
        }
    }
}

/// Columns and rows of the terminal that this stream is.
#[cfg(unix)]
pub(crate) fn terminal_size(stream: impl std::os::fd::AsFd) -> (usize, usize) {
    match rustix::termios::tcgetwinsize(stream) {
        Ok(size) if size.ws_col > 0 => (usize::from(size.ws_col), usize::from(size.ws_row)),
        _ => (80, 24),
    }
}

#[cfg(not(unix))]
pub(crate) fn terminal_size<T>(_stream: T) -> (usize, usize) {
    (80, 24)
}
