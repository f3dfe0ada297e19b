//! Writing of logs that survive their writers.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use super::clock::{self, Nanos};
use super::event::Line;

/// A log that is only appended to. Each line is one `write(2)`: what was written is in the file, also when the process is
/// killed right after.
#[derive(Debug)]
pub(crate) struct Log(File);

impl Log {
    pub(crate) fn open(path: &Path) -> io::Result<Log> {
        File::options().create(true).append(true).open(path).map(Log)
    }

    /// Writes what happens now.
    ///
    /// # Panics
    /// When it cannot be written: a history with holes proves nothing.
    pub(crate) fn say(&self, event: impl fmt::Display) {
        self.say_at(clock::now(), event);
    }

    /// Writes what happened at this time.
    pub(crate) fn say_at(&self, at: Nanos, event: impl fmt::Display) {
        let line = Line { at, event }.to_string();
        (&self.0)
            .write_all(line.as_bytes())
            .expect("the log can be written");
    }
}
