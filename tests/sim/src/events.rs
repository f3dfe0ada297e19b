//! Future events, in order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::plan::Millis;
use crate::world::Event;

/// The events to come. The heap keeps their order alone, since it moves what it keeps.
#[derive(Default)]
pub(crate) struct Events {
    order: BinaryHeap<Reverse<Place>>,
    scheduled: u64,
    slots: Vec<Option<Event>>,
    free: Vec<u32>,
}

/// The place of an event in the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    at: Millis,
    /// Among those of the same moment the order is drawn; what must not overtake each other has the same one.
    tie: u32,
    number: u64,
    slot: u32,
}

impl Events {
    pub(crate) fn push(&mut self, at: Millis, tie: u32, event: Event) {
        self.scheduled += 1;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("fewer than four billion events at a time")
        });
        self.slots[slot as usize] = Some(event);
        self.order.push(Reverse(Place {
            at,
            tie,
            number: self.scheduled,
            slot,
        }));
    }

    /// When the next one happens.
    pub(crate) fn next_at(&self) -> Option<Millis> {
        self.order.peek().map(|Reverse(next)| next.at)
    }

    pub(crate) fn pop(&mut self) -> Option<(Millis, Event)> {
        let Reverse(next) = self.order.pop()?;
        self.free.push(next.slot);
        let event = self.slots[next.slot as usize].take()?;
        Some((next.at, event))
    }
}
