//! A hold from its grant on, which is checked again and again.

use std::time::Duration;

use dlock::{Held, HoldState, Loss};

use crate::chaos::clock::{self, Nanos, nanos};
use crate::chaos::event::{Said, word};
use crate::chaos::log::Log;

/// The pause between two checks.
const PERIOD: Duration = Duration::from_millis(5);
/// A check that answers held is logged when the last one in the log is this old.
const WRITTEN: Nanos = nanos_of_millis(20);
/// How long `lost()` is waited for when a check has answered that the lock is lost.
const DEAF: Nanos = nanos_of_millis(500);

const fn nanos_of_millis(millis: u64) -> Nanos {
    millis * 1_000_000
}

/// The payload of an intended panic.
pub(super) struct OnPurpose;

/// What is known of a hold.
pub(super) struct Hold<'a> {
    log: &'a Log,
    number: u64,
    /// When the last check began that answered held.
    held: Nanos,
    written: Nanos,
    /// The end of the last check, the first that answered lost, and the longest time between two since then.
    checked: Nanos,
    lost: Option<(Loss, Nanos)>,
    gap: Nanos,
    told: bool,
}

impl<'a> Hold<'a> {
    pub(super) fn new(log: &'a Log, number: u64) -> Hold<'a> {
        Hold {
            log,
            number,
            held: 0,
            written: 0,
            checked: 0,
            lost: None,
            gap: 0,
            told: false,
        }
    }

    /// Logs what the guard answers now, and returns whether the lock is held.
    pub(super) fn check(&mut self, view: &Held) -> bool {
        let hold = self.number;
        let at = clock::now();
        let state = view.state();
        let after = clock::now();
        if self.lost.is_some() {
            self.gap = self.gap.max(after - self.checked);
        }
        self.checked = after;
        match (state, self.lost) {
            (HoldState::Lost(loss), None) => {
                self.lost = Some((loss, after));
                let (before, why) = (self.held, word(format!("{loss:?}")));
                self.log.say_at(
                    after,
                    Said::Lost {
                        hold,
                        before,
                        at,
                        why,
                    },
                );
                false
            }
            (HoldState::Lost(_), Some(_)) => false,
            _ if self.lost.is_some() || self.told => {
                self.log.say_at(at, Said::Healed { hold });
                self.written = at;
                self.log.say_at(at, Said::Held { hold });
                true
            }
            _ => {
                self.held = at;
                if at - self.written >= WRITTEN {
                    self.write();
                }
                true
            }
        }
    }

    /// Logs the last check, however recent the previous one is: the lock is released next.
    pub(super) fn last_check(&mut self, view: &Held) -> bool {
        let held = self.check(view);
        if held && self.written != self.held {
            self.write();
        }
        held
    }

    fn write(&mut self) {
        self.written = self.held;
        self.log.say_at(self.held, Said::Held { hold: self.number });
    }

    /// The work was dropped since the lock was lost.
    pub(super) fn dropped(&mut self, loss: Loss) {
        if self.lost.is_none() {
            let (hold, before, at) = (self.number, self.held, clock::now());
            let why = word(format!("{loss:?}"));
            self.lost = Some((loss, at));
            self.log.say_at(
                at,
                Said::Lost {
                    hold,
                    before,
                    at,
                    why,
                },
            );
        }
    }

    fn tell(&mut self, loss: Loss) {
        let (hold, at) = (self.number, clock::now());
        if self.lost.is_some() {
            self.gap = self.gap.max(at - self.checked);
        }
        self.told = true;
        let (gap, why) = (self.gap, word(format!("{loss:?}")));
        self.log.say_at(at, Said::Told { hold, gap, why });
    }

    /// Holds the lock for so long, unless it is lost before or `enough` says that it may end. Whether it is held at the
    /// end.
    pub(super) async fn keep(&mut self, view: &Held, work: Duration, enough: impl Fn() -> bool) -> bool {
        let until = clock::now() + nanos(work);
        let lost = view.lost();
        tokio::pin!(lost);
        loop {
            let held = self.check(view);
            let now = clock::now();
            match self.lost {
                None if now >= until || enough() => return held,
                Some(_) if self.told => return false,
                Some((_, since)) if now - since >= DEAF => {
                    let (hold, gap) = (self.number, self.gap);
                    self.log.say_at(now, Said::Deaf { hold, gap });
                    return false;
                }
                _ => {}
            }
            let pause = match self.lost {
                None => PERIOD.min(Duration::from_nanos(until - now)),
                Some(_) => PERIOD,
            };
            tokio::select! {
                biased;
                loss = &mut lost, if !self.told => self.tell(loss),
                () = tokio::time::sleep(pause) => {}
            }
        }
    }
}
