//! The format of the logs of a run: one line for each event, beginning with the time; words and numbers are separated
//! by spaces.
//!
//! A worker's log is called `p<slot>.<life>.log`; a slot is a worker's place among the processes, and each process that
//! takes it is a life. What the orchestrator does stands in `faults.log`, what the register answered in `register.log`.

use std::fmt;
use std::str::{FromStr, SplitAsciiWhitespace};

use super::clock::Nanos;

/// One process: its place among the workers, and which of those that had it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Life {
    pub(crate) slot: usize,
    pub(crate) life: u64,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{}.{}", self.slot, self.life)
    }
}

impl FromStr for Life {
    type Err = Nonsense;

    fn from_str(text: &str) -> Result<Life, Nonsense> {
        let parts = text.strip_prefix('p').and_then(|rest| rest.split_once('.'));
        let (slot, life) = parts.ok_or(Nonsense)?;
        Ok(Life {
            slot: slot.parse().map_err(|_| Nonsense)?,
            life: life.parse().map_err(|_| Nonsense)?,
        })
    }
}

/// One acquire of one process, and the hold that came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct HoldId {
    pub(crate) life: Life,
    pub(crate) number: u64,
}

impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.life, self.number)
    }
}

impl FromStr for HoldId {
    type Err = Nonsense;

    fn from_str(text: &str) -> Result<HoldId, Nonsense> {
        let (life, number) = text.rsplit_once('.').ok_or(Nonsense)?;
        Ok(HoldId {
            life: life.parse()?,
            number: number.parse().map_err(|_| Nonsense)?,
        })
    }
}

/// How much of a key an acquire asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// All of it: a lock, or the write side of a read-write lock.
    All,
    /// The read side.
    Read,
    /// Permits of a semaphore that has so many in all.
    Permits { amount: u32, total: u32 },
}

impl Share {
    /// Whether one holder at a time can have this or that.
    pub(crate) fn excludes(self, other: Share) -> bool {
        !matches!(
            (self, other),
            (Share::Read, Share::Read) | (Share::Permits { .. }, Share::Permits { .. })
        )
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Share::All => f.write_str("all"),
            Share::Read => f.write_str("read"),
            Share::Permits { amount, total } => write!(f, "{amount}/{total}"),
        }
    }
}

impl FromStr for Share {
    type Err = Nonsense;

    fn from_str(text: &str) -> Result<Share, Nonsense> {
        match text {
            "all" => return Ok(Share::All),
            "read" => return Ok(Share::Read),
            _ => {}
        }
        let (amount, total) = text.split_once('/').ok_or(Nonsense)?;
        Ok(Share::Permits {
            amount: amount.parse().map_err(|_| Nonsense)?,
            total: total.parse().map_err(|_| Nonsense)?,
        })
    }
}

/// A line that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a line of a log makes no sense")]
pub(crate) struct Nonsense;

/// Declares the events of a log with their word and their fields, which are written and read in this order.
macro_rules! events {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $word:literal { $($field:ident: $type:ty),* })* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) enum $name {
            $($(#[$of])* $variant { $($field: $type),* },)*
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $($name::$variant { $($field),* } => {
                        f.write_str($word)?;
                        $(write!(f, " {}", $field)?;)*
                        Ok(())
                    })*
                }
            }
        }

        impl $name {
            fn read(words: &mut SplitAsciiWhitespace<'_>) -> Result<$name, Nonsense> {
                let event = match words.next().ok_or(Nonsense)? {
                    $($word => $name::$variant { $($field: field(words)?),* },)*
                    _ => return Err(Nonsense),
                };
                Ok(event)
            }
        }
    };
}

fn field<T: FromStr>(words: &mut SplitAsciiWhitespace<'_>) -> Result<T, Nonsense> {
    words.next().ok_or(Nonsense)?.parse().map_err(|_| Nonsense)
}

events! {
    /// What a worker says. `hold` is a number that is unique in its process.
    Said {
        /// It is there, with so many threads that run its tasks.
        Hello = "hello" { threads: usize }
        /// It asks for a lock, or a share of it; the time is from before the call.
        Ask = "ask" { hold: u64, key: usize, share: Share, lease_ms: u64, how: String }
        /// The acquire has returned with a guard; the time is from after that.
        Got = "got" { hold: u64, token: u64 }
        /// The acquire has returned without one.
        No = "no" { hold: u64, why: String }
        /// The acquire was dropped half way.
        Quit = "quit" { hold: u64 }
        /// A check that began at this time answered that the lock is held.
        Held = "held" { hold: u64 }
        /// A check that began at `at` answered that it is lost; the time is from after the answer. The last one that
        /// answered held began at `before`.
        Lost = "lost" { hold: u64, before: u64, at: u64, why: String }
        /// `lost()` has fired; `gap` is the longest time between two checks since one answered lost.
        Told = "told" { hold: u64, gap: u64, why: String }
        /// `lost()` had not fired until now though checks answered lost, `gap` as above.
        Deaf = "deaf" { hold: u64, gap: u64 }
        /// A check answered held after one that answered lost.
        Healed = "healed" { hold: u64 }
        /// It entered the lock again, with this token.
        Again = "again" { hold: u64, token: u64 }
        /// The register has answered a write that was sent at `sent`; `last` is the token that it knows.
        Wrote = "wrote" { hold: u64, sent: u64, answer: String, last: u64 }
        /// It is about to give the lock back.
        Let = "let" { hold: u64, how: String }
        /// The lock is released, as far as its holder was told.
        Gone = "gone" { hold: u64, answer: String }
        /// It is at rest: nothing is asked for or held.
        Rests = "rests" { held: usize, waited_for: usize }
        /// Its client is shut down.
        Bye = "bye" { lost: usize, unconfirmed: usize }
    }
}

events! {
    /// What the orchestrator did, and what it found.
    Done {
        /// The run begins; the kinds of faults with a comma between, and what is broken on purpose.
        Run = "run" { topology: String, seed: u64, kinds: String, broken: String }
        /// A fault begins; `reach` is a slot, as in `p3`, or `*`.
        Begin = "begin" { fault: u64, kind: String, reach: String, what: String }
        /// It has ended.
        End = "end" { fault: u64 }
        /// Between `from` and the time of this line the store may have forgotten what it had granted of `key`, a
        /// number or `*`.
        Loses = "loses" { from: u64, key: String }
        /// Another server took over, and requests on `key` to the former one between `from` and `to` may be lost.
        Splits = "splits" { from: u64, to: u64, key: usize, why: String }
        /// The fault could not be made, and counts for nothing.
        Missed = "missed" { fault: u64 }
        /// A process was killed; the time is from before that.
        Kill = "kill" { life: Life }
        /// Everything is healed, and the workers are told to come to rest.
        Rest = "rest" { number: u64 }
        /// All work goes on.
        Go = "go" { number: u64 }
        /// A lock was not available in time.
        Stuck = "stuck" { what: String, why: String }
        /// Something was left.
        Leftover = "leftover" { what: String, why: String }
    }
}

events! {
    /// What the register answered.
    Register {
        /// It took a write.
        Took = "took" { key: usize, token: u64, hold: HoldId }
        /// It refused one, since it knew the token `last`.
        Refused = "refused" { key: usize, token: u64, hold: HoldId, last: u64 }
    }
}

/// An event and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line<E> {
    pub(crate) at: Nanos,
    pub(crate) event: E,
}

impl<E: fmt::Display> fmt::Display for Line<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.at, self.event)
    }
}

macro_rules! lines_of {
    ($($event:ident),*) => {$(
        impl FromStr for Line<$event> {
            type Err = Nonsense;

            fn from_str(text: &str) -> Result<Self, Nonsense> {
                let mut words = text.split_ascii_whitespace();
                let at = field(&mut words)?;
                let event = $event::read(&mut words)?;
                match words.next() {
                    None => Ok(Line { at, event }),
                    Some(_) => Err(Nonsense),
                }
            }
        }
    )*};
}

lines_of!(Said, Done, Register);

/// Text as one word of a log.
pub(crate) fn word(text: impl fmt::Display) -> String {
    let text = text.to_string();
    let words: Vec<_> = text.split_ascii_whitespace().collect();
    match words.is_empty() {
        true => "-".to_owned(),
        false => words.join("_"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let life = Life { slot: 3, life: 17 };
        let said = [
            Said::Hello { threads: 2 },
            Said::Ask {
                hold: 7,
                key: 1,
                share: Share::Permits { amount: 2, total: 3 },
                lease_ms: 2000,
                how: word("try, within 30 ms"),
            },
            Said::Lost {
                hold: 7,
                before: 5,
                at: 6,
                why: word(""),
            },
        ];
        for event in said {
            let line = Line { at: 12, event };
            assert_eq!(line.to_string().parse::<Line<Said>>().unwrap(), line);
        }
        let line = Line {
            at: 1,
            event: Done::Kill { life },
        };
        assert_eq!(line.to_string(), "1 kill p3.17\n");
        assert_eq!(line.to_string().parse::<Line<Done>>().unwrap(), line);
        let hold = HoldId { life, number: 9 };
        let line = Line {
            at: 2,
            event: Register::Took {
                key: 4,
                token: 5,
                hold,
            },
        };
        assert_eq!(line.to_string().parse::<Line<Register>>().unwrap(), line);
    }

    #[test]
    fn half_a_line_is_none() {
        for text in [
            "",
            "12",
            "12 got 7",
            "12 got 7 8 9",
            "x got 7 8",
            "12 grabbed 7 8",
            "12 ask 7 1 2 2000 wait",
        ] {
            assert_eq!(text.parse::<Line<Said>>(), Err(Nonsense), "{text}");
        }
    }
}
