//! Which faults count: those that came while a lock was held and waited for.

use std::collections::BTreeMap;

use super::clock::Nanos;
use super::event::Share;
use super::history::History;

/// How often a kind of fault must occur; otherwise the run proves nothing about it.
pub(crate) const ENOUGH: u64 = 5;

/// For each kind, how many faults came while one task held a lock and another waited for it: where the fault strikes
/// one process, that one had to be among the two.
pub(crate) fn witnessed(history: &History) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for (at, counted) in faults(history) {
        *counts.entry(history.faults[at].kind.clone()).or_insert(0) += u64::from(counted);
    }
    counts
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Over { slot: usize, key: usize, holds: bool },
    Comes { slot: usize, key: usize, holds: bool },
    Fault { at: usize },
}

/// How many hold and wait, by key and slot.
type Crowd = BTreeMap<(usize, usize), [u64; 2]>;

fn faults(history: &History) -> Vec<(usize, bool)> {
    let mut events: Vec<(Nanos, What)> = Vec::new();
    let mut span = |from: Nanos, to: Nanos, slot, key, holds| {
        if from < to {
            events.push((from, What::Comes { slot, key, holds }));
            events.push((to, What::Over { slot, key, holds }));
        }
    };
    // A task that shares a key mostly waits for no other holder.
    for hold in history.holds.iter().filter(|hold| hold.share == Share::All) {
        let (slot, key) = (hold.id.life.slot, hold.key);
        let over = hold.over.unwrap_or(history.end);
        span(hold.asked, hold.granted.unwrap_or(over), slot, key, false);
        if let Some((from, to)) = hold.certain() {
            span(from, to, slot, key, true);
        }
    }
    for (at, fault) in history.faults.iter().enumerate() {
        events.push((fault.begin, What::Fault { at }));
    }
    events.sort_unstable();
    let mut crowd = Crowd::new();
    let mut counted = Vec::new();
    for (_, what) in events {
        match what {
            What::Comes { slot, key, holds } => {
                crowd.entry((key, slot)).or_default()[usize::from(holds)] += 1;
            }
            What::Over { slot, key, holds } => {
                crowd.entry((key, slot)).or_default()[usize::from(holds)] -= 1;
            }
            What::Fault { at } => counted.push((at, is_witnessed(&crowd, history.faults[at].slot))),
        }
    }
    counted
}

fn is_witnessed(crowd: &Crowd, struck: Option<usize>) -> bool {
    let keys = crowd.keys().map(|(key, _)| *key);
    let mut keys: Vec<_> = keys.collect();
    keys.dedup();
    keys.into_iter().any(|key| {
        let of_key = crowd.range((key, 0)..=(key, usize::MAX));
        let (mut waiters, mut holders, mut waits, mut holds) = (false, false, false, false);
        for ((_, slot), [waiting, holding]) in of_key {
            waiters |= *waiting > 0;
            holders |= *holding > 0;
            waits |= struck == Some(*slot) && *waiting > 0;
            holds |= struck == Some(*slot) && *holding > 0;
        }
        waiters && holders && (struck.is_none() || waits || holds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::event::Life;

    /// Process 0 holds key 0 from 10 on, process 1 waits for it from 20 until 40, process 2 waits for key 1.
    fn counted(faults: &str) -> u64 {
        let mut history = History::default();
        history.add_orchestrator(faults).unwrap();
        let logs = [
            "1 ask 1 0 all 2000 wait\n10 got 1 100\n10 held 1\n60 held 1\n60 let 1 drop\n",
            "20 ask 1 0 all 2000 wait\n40 no 1 NotAcquired\n",
            "5 ask 1 1 all 2000 wait\n80 quit 1\n",
        ];
        for (slot, log) in logs.into_iter().enumerate() {
            history.add_worker(Life { slot, life: 0 }, log).unwrap();
        }
        witnessed(&history)["wipe"]
    }

    #[test]
    fn a_fault_counts_when_a_lock_is_held_and_waited_for() {
        for (fault, counts) in [
            ("30 begin 1 wipe * -\n", 1),
            ("30 begin 1 wipe p0 -\n", 1),
            ("30 begin 1 wipe p1 -\n", 1),
            // It has nothing to do with that lock.
            ("30 begin 1 wipe p2 -\n", 0),
            // No task waits yet, or any more.
            ("15 begin 1 wipe * -\n", 0),
            ("50 begin 1 wipe * -\n", 0),
            ("70 begin 1 wipe * -\n", 0),
            ("25 begin 1 wipe * -\n30 begin 2 wipe * -\n35 end 1\n", 2),
        ] {
            assert_eq!(counted(fault), counts, "{fault}");
        }
    }

    #[test]
    fn killed_worker_waits_no_more() {
        assert_eq!(counted("25 kill p1.0\n30 begin 1 wipe * -\n"), 0);
    }
}
