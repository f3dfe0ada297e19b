//! What happened, line by line: time, process or store, event.

use std::fmt;

use crate::plan::Millis;

/// The subject of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// A digest: equal for equal traces.
    Digest,
    /// The same, and the lines.
    Lines,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) at: Millis,
    pub(crate) who: Who,
    pub(crate) event: String,
}

/// What the line of a violation begins with.
pub(crate) const VIOLATION: &str = "VIOLATION of";

impl Line {
    pub(crate) fn is_violation(&self) -> bool {
        self.event.starts_with(VIOLATION)
    }
}

#[derive(Debug)]
pub(crate) struct Trace {
    keep: Keep,
    pub(crate) lines: Vec<Line>,
    pub(crate) digest: u64,
}

impl Trace {
    pub(crate) fn new(keep: Keep) -> Trace {
        Trace {
            keep,
            lines: Vec::new(),
            digest: 0xCBF2_9CE4_8422_2325,
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.keep != Keep::Nothing
    }

    pub(crate) fn write(&mut self, at: Millis, who: Who, event: String) {
        if !self.is_on() {
            return;
        }
        let line = Line { at, who, event };
        // FNV-1a
        for byte in line.to_string().bytes() {
            self.digest = (self.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
        if self.keep == Keep::Lines {
            self.lines.push(line);
        }
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Who::Process(process) => format!("p{process}"),
            Who::User(process, user) => format!("p{process}/u{user}"),
            Who::Store(store) => format!("store {store}"),
            Who::World => "world".to_owned(),
        };
        f.pad(&name)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { at, who, event } = self;
        write!(f, "{:>5}.{:03}  {who:<8}  {event}", at / 1000, at % 1000)
    }
}
