//! The history of a run, read from its logs.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use anyhow::Context;

use super::clock::Nanos;
use super::event::{Done, HoldId, Life, Line, Register, Said, Share};

/// How the holder learned of the loss of a hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Loss {
    /// The last check that answered held began then; 0 for none.
    pub(crate) before: Nanos,
    /// The first that answered lost began then.
    pub(crate) at: Nanos,
    /// And had answered then.
    pub(crate) heard: Nanos,
    pub(crate) why: String,
}

/// The answer of the register to a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) at: Nanos,
    pub(crate) key: usize,
    pub(crate) token: u64,
    pub(crate) hold: HoldId,
    /// The token that stood in its way.
    pub(crate) refused_by: Option<u64>,
}

/// One acquire, and the hold that came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) id: HoldId,
    pub(crate) key: usize,
    pub(crate) share: Share,
    pub(crate) asked: Nanos,
    /// When the grant was asked for at the earliest: for a hold that may have been handed off inside its process, when
    /// the first holder of that grant asked.
    pub(crate) origin: Nanos,
    /// When the acquire had returned with a guard.
    pub(crate) granted: Option<Nanos>,
    pub(crate) token: u64,
    /// When the last check began that answered held.
    pub(crate) held: Option<Nanos>,
    pub(crate) lost: Option<Loss>,
    /// When `lost()` had fired, or had not, and the longest time between two checks since one had answered lost.
    pub(crate) told: Option<(Nanos, Nanos)>,
    /// When its release began.
    pub(crate) let_go: Option<Nanos>,
    /// What that answered.
    pub(crate) gone: Option<(Nanos, String)>,
    /// When it was neither asked for nor held any more.
    pub(crate) over: Option<Nanos>,
    /// What contradicts itself in it.
    pub(crate) wrong: Vec<String>,
}

impl Hold {
    fn new(id: HoldId, key: usize, share: Share, asked: Nanos) -> Hold {
        Hold {
            id,
            key,
            share,
            asked,
            origin: asked,
            granted: None,
            token: 0,
            held: None,
            lost: None,
            told: None,
            let_go: None,
            gone: None,
            over: None,
            wrong: Vec::new(),
        }
    }

    /// The interval in which the guard certainly answered "held": from the return of the acquire to the beginning of
    /// the last check, since a loss is final.
    pub(crate) fn certain(&self) -> Option<(Nanos, Nanos)> {
        match (self.granted, self.held) {
            (Some(from), Some(to)) if to >= from => Some((from, to)),
            _ => None,
        }
    }
}

/// What was done to break it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) number: u64,
    pub(crate) kind: String,
    /// The slot that it struck; `None` for all.
    pub(crate) slot: Option<usize>,
    pub(crate) what: String,
    pub(crate) begin: Nanos,
    pub(crate) end: Option<Nanos>,
}

/// When a store may have forgotten what it had granted, or had granted what it forgot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Forgotten {
    pub(crate) from: Nanos,
    pub(crate) to: Nanos,
    /// `None` for every key.
    pub(crate) key: Option<usize>,
    /// Whether there may have been two masters: the grants of one of them in that time may be lost.
    pub(crate) splits: bool,
}

/// Something that was found while it ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) at: Nanos,
    pub(crate) what: String,
    pub(crate) why: String,
}

/// Everything that a run recorded.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) topology: String,
    pub(crate) seed: u64,
    /// The kinds of faults that were to be made.
    pub(crate) kinds: Vec<String>,
    /// The beginning.
    pub(crate) origin: Nanos,
    /// The last thing that happened.
    pub(crate) end: Nanos,
    pub(crate) holds: Vec<Hold>,
    pub(crate) writes: Vec<Write>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) forgotten: Vec<Forgotten>,
    pub(crate) stuck: Vec<Found>,
    pub(crate) leftovers: Vec<Found>,
    /// The lives that ran on one thread.
    pub(crate) single: Vec<Life>,
    /// The lives that were killed, and when.
    pub(crate) killed: HashMap<Life, Nanos>,
}

impl History {
    /// Reads the logs in a directory.
    ///
    /// # Errors
    /// When they are not all there, or make no sense.
    pub(crate) fn load(dir: &Path) -> anyhow::Result<History> {
        let mut history = History::default();
        history.add_orchestrator(&read(&dir.join("faults.log"))?)?;
        history.add_register(&read(&dir.join("register.log"))?)?;
        let mut lives = BTreeMap::new();
        for file in fs::read_dir(dir).with_context(|| format!("cannot look into {}", dir.display()))? {
            let path = file?.path();
            let life = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .map(Life::from_str);
            if let Some(Ok(life)) = life {
                lives.insert(life, path);
            }
        }
        for (life, path) in lives {
            history.add_worker(life, &read(&path)?)?;
        }
        Ok(history)
    }

    pub(crate) fn add_orchestrator(&mut self, text: &str) -> anyhow::Result<()> {
        for line in lines::<Done>(text)? {
            let at = line.at;
            self.end = self.end.max(at);
            match line.event {
                Done::Run {
                    topology,
                    seed,
                    kinds,
                    ..
                } => {
                    (self.topology, self.seed, self.origin) = (topology, seed, at);
                    self.kinds = kinds.split(',').map(str::to_owned).collect();
                }
                Done::Begin {
                    fault,
                    kind,
                    reach,
                    what,
                } => self.faults.push(Fault {
                    number: fault,
                    kind,
                    slot: reach.strip_prefix('p').and_then(|slot| slot.parse().ok()),
                    what,
                    begin: at,
                    end: None,
                }),
                Done::End { fault } => {
                    let ended = self.faults.iter_mut().rev().find(|known| known.number == fault);
                    ended.context("a fault ends that has not begun")?.end = Some(at);
                }
                Done::Loses { from, key } => self.forgotten.push(Forgotten {
                    from,
                    to: at,
                    key: key.parse().ok(),
                    splits: false,
                }),
                Done::Splits { from, to, key, .. } => self.forgotten.push(Forgotten {
                    from,
                    to,
                    key: Some(key),
                    splits: true,
                }),
                Done::Missed { fault } => self.faults.retain(|known| known.number != fault),
                Done::Kill { life } => drop(self.killed.insert(life, at)),
                Done::Stuck { what, why } => self.stuck.push(Found { at, what, why }),
                Done::Leftover { what, why } => self.leftovers.push(Found { at, what, why }),
                Done::Rest { .. } | Done::Go { .. } => {}
            }
        }
        Ok(())
    }

    pub(crate) fn add_register(&mut self, text: &str) -> anyhow::Result<()> {
        for Line { at, event } in lines::<Register>(text)? {
            let (key, token, hold, refused_by) = match event {
                Register::Took { key, token, hold } => (key, token, hold, None),
                Register::Refused {
                    key,
                    token,
                    hold,
                    last,
                } => (key, token, hold, Some(last)),
            };
            self.writes.push(Write {
                at,
                key,
                token,
                hold,
                refused_by,
            });
        }
        Ok(())
    }

    pub(crate) fn add_worker(&mut self, life: Life, text: &str) -> anyhow::Result<()> {
        let mut holds: BTreeMap<u64, Hold> = BTreeMap::new();
        for Line { at, event } in lines::<Said>(text).with_context(|| format!("the log of {life}"))? {
            self.end = self.end.max(at);
            let number = match &event {
                Said::Hello { threads } => {
                    if *threads == 1 {
                        self.single.push(life);
                    }
                    continue;
                }
                Said::Rests { held, waited_for } => {
                    // It says so only when both are 0.
                    if held + waited_for > 0 {
                        let what = format!("{life} rests and holds {held}, waits for {waited_for}");
                        let why = "its books are not empty".to_owned();
                        self.leftovers.push(Found { at, what, why });
                    }
                    continue;
                }
                Said::Bye { lost, unconfirmed } => {
                    if lost + unconfirmed > 0 {
                        let what = format!("{lost} holds and {unconfirmed} unconfirmed releases in {life}");
                        let why = "its client was shut down at rest".to_owned();
                        self.leftovers.push(Found { at, what, why });
                    }
                    continue;
                }
                Said::Ask { hold, key, share, .. } => {
                    let id = HoldId { life, number: *hold };
                    holds.insert(*hold, Hold::new(id, *key, *share, at));
                    continue;
                }
                Said::Got { hold, .. }
                | Said::No { hold, .. }
                | Said::Quit { hold }
                | Said::Held { hold }
                | Said::Lost { hold, .. }
                | Said::Told { hold, .. }
                | Said::Deaf { hold, .. }
                | Said::Healed { hold }
                | Said::Again { hold, .. }
                | Said::Wrote { hold, .. }
                | Said::Let { hold, .. }
                | Said::Gone { hold, .. } => *hold,
            };
            let hold = holds.get_mut(&number).context("a hold that was not asked for")?;
            hold.add(at, event);
        }
        let killed = self.killed.get(&life).copied();
        for hold in holds.values_mut() {
            // Whatever it said before.
            hold.over = hold.over.into_iter().chain(killed).min();
        }
        let mut holds: Vec<_> = holds.into_values().collect();
        find_origins(&mut holds);
        self.holds.extend(holds);
        Ok(())
    }
}

/// The most tokens between one holder of a grant and the next: an acquire reserves a block of them, and those that were
/// handed to a waiter that had gone are missing.
const BLOCK: u64 = 256;

/// Finds the holds that may have been handed off: the next tokens of the same key in the same process. Readers and permits
/// never are. Tokens count microseconds, so those of two grants are further apart, as a rule; where they are not, only an excuse is found too
/// easily.
fn find_origins(holds: &mut [Hold]) {
    let mut order: Vec<_> = (0..holds.len())
        .filter(|at| holds[*at].granted.is_some() && holds[*at].share == Share::All)
        .collect();
    order.sort_unstable_by_key(|at| (holds[*at].key, holds[*at].token));
    for pair in order.windows(2) {
        let (first, second) = (&holds[pair[0]], &holds[pair[1]]);
        if first.key == second.key && second.token - first.token <= BLOCK {
            holds[pair[1]].origin = first.origin.min(second.asked);
        }
    }
}

impl Hold {
    fn add(&mut self, at: Nanos, event: Said) {
        match event {
            Said::Got { token, .. } => (self.granted, self.token) = (Some(at), token),
            Said::No { .. } | Said::Quit { .. } => self.over = Some(at),
            Said::Held { .. } => self.held = self.held.max(Some(at)),
            Said::Lost {
                before,
                at: began,
                why,
                ..
            } => {
                if before > 0 {
                    self.held = self.held.max(Some(before));
                }
                self.lost = Some(Loss {
                    before,
                    at: began,
                    heard: at,
                    why,
                });
                self.over = Some(at);
            }
            Said::Told { gap, .. } | Said::Deaf { gap, .. } => self.told = Some((at, gap)),
            Said::Healed { .. } => self.wrong.push("it was lost, and held after that".to_owned()),
            Said::Again { token, .. } => {
                if token != self.token {
                    let ours = self.token;
                    self.wrong
                        .push(format!("it has token {ours}, and {token} when entered again"));
                }
            }
            Said::Let { .. } => {
                self.let_go = Some(at);
                self.over = self.over.or(Some(at));
            }
            Said::Gone { answer, .. } => {
                if answer == "ok" && self.lost.is_some() {
                    self.wrong
                        .push("it was lost, and its release answered that all is well".to_owned());
                }
                self.gone = Some((at, answer));
            }
            Said::Hello { .. }
            | Said::Ask { .. }
            | Said::Wrote { .. }
            | Said::Rests { .. }
            | Said::Bye { .. } => {}
        }
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The whole lines of a log: its writer may be killed in the middle of one.
fn lines<E>(text: &str) -> anyhow::Result<Vec<Line<E>>>
where
    Line<E>: FromStr,
    <Line<E> as FromStr>::Err: std::error::Error + Send + Sync + 'static,
{
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let line = |line: &str| line.parse().with_context(|| format!("in \"{line}\""));
    whole.lines().map(line).collect()
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of key {}", self.id, self.key)?;
        if self.share != Share::All {
            write!(f, " ({})", self.share)?;
        }
        write!(f, " with token {}", self.token)
    }
}
