//! Printing, for readers that may close early, such as `head`. A failed `println!` or `eprintln!` would panic.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Exit code of a command that failed.
pub(crate) const FAILED: u8 = 2;

/// The status of a command that `SIGPIPE` ends, which Rust programs ignore.
const NOBODY_READS: i32 = 128 + 13;

/// Like `println!`.
macro_rules! say {
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}

/// Prints to standard output. If that fails, the command ends.
pub(crate) fn print(text: impl Display) {
    let mut output = std::io::stdout().lock();
    let Err(error) = write!(output, "{text}").and_then(|()| output.flush()) else {
        return;
    };
    if error.kind() != ErrorKind::BrokenPipe {
        print_error(format_args!("dlock: standard output: {error}"));
        std::process::exit(FAILED.into());
    }
    std::process::exit(NOBODY_READS);
}

/// Prints a line to standard error, if it has a reader.
pub(crate) fn print_error(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
