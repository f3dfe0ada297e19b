//! What happened, line by line: time, process or store, event.

use std::fmt::Write as _;

use crate::plan::Millis;

/// Whom a line is about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Who {
    Process(usize),
    User(usize, usize),
    Store(usize),
    World,
}

/// What is kept of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    /// A number that two equal traces have in common.
    Digest,
    Lines,
}

#[derive(Debug)]
pub(crate) struct Trace {
    keep: Keep,
    line: String,
    pub(crate) text: String,
    pub(crate) digest: u64,
}

impl Trace {
    pub(crate) fn new(keep: Keep) -> Trace {
        Trace {
            keep,
            line: String::new(),
            text: String::new(),
            digest: 0xCBF2_9CE4_8422_2325,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.keep != Keep::Nothing
    }

    pub(crate) fn write(&mut self, at: Millis, who: Who, event: &str) {
        self.line.clear();
        let _ = write!(self.line, "{:>5}.{:03}  ", at / 1000, at % 1000);
        let at = self.line.len();
        let _ = match who {
            Who::Process(process) => write!(self.line, "p{process}"),
            Who::User(process, user) => write!(self.line, "p{process}/u{user}"),
            Who::Store(store) => write!(self.line, "store {store}"),
            Who::World => write!(self.line, "world"),
        };
        let width = self.line.len() - at;
        self.line
            .extend(std::iter::repeat_n(' ', 10_usize.saturating_sub(width)));
        let _ = writeln!(self.line, "{event}");
        match self.keep {
            Keep::Nothing => {}
            // FNV-1a
            Keep::Digest => {
                for byte in self.line.bytes() {
                    self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
                }
            }
            Keep::Lines => self.text.push_str(&self.line),
        }
    }
}
