//! The waiters of one key in this process, in order of arrival.
//!
//! The *head* talks to the store for all of them. There is no head while the lock is held in this process and its grant
//! keeps the role of the head. Each head has a number: a head with an older number was replaced.

use std::collections::VecDeque;

use crate::base::broken;

/// How many waiters that have left a queue may keep in any case.
const SPARE: usize = 16;

/// The queue's view of a waiter. Clones are the same waiter.
pub(crate) trait QueuedWaiter: Clone {
    fn is(&self, other: &Self) -> bool;

    /// How many waiters there may be, including this one.
    fn limit(&self) -> Option<usize>;

    /// A number that grows in the order of arrival. A waiter that comes back keeps its number.
    fn arrival(&self) -> u64;

    /// Its position in the store's queue.
    fn position(&self) -> Option<u64>;

    /// Whether it stands behind others from now on.
    fn set_in_line(&self, in_line: bool);

    /// Whether it has left while it stood behind others.
    fn has_left(&self) -> bool;

    /// Whether it missed its poll deadline, so that it would not take what it gets.
    fn is_overdue(&self) -> bool;
}

/// Where a new waiter is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InsertAt {
    /// Behind all others, unless there are as many as it accepts.
    End,
    /// In front of the waiters that arrived later: it had a position before.
    Again,
}

/// There are more waiters than the new one accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany {
    pub(crate) limit: usize,
}

/// The waiter that is the head from now on.
#[derive(Debug)]
pub(crate) struct NextHead<W> {
    pub(crate) waiter: W,
    /// Its prepared request is sent at once, by the thread that makes it the head.
    pub(crate) sends: bool,
}

#[derive(Debug)]
pub(crate) struct WaitQueue<W> {
    /// The number of the head.
    number: u64,
    head: Option<W>,
    /// The waiter to which the lock was last handed off.
    offered: Option<W>,
    /// Whether the head knows that it has to wait, so it counts.
    head_waits: bool,
    /// In order of arrival.
    behind: VecDeque<W>,
    /// How many waiters behind it have left.
    left: usize,
}

impl<W: QueuedWaiter> WaitQueue<W> {
    /// Creates a queue of one waiter, which is the head.
    pub(crate) fn new(head: W, number: u64) -> WaitQueue<W> {
        WaitQueue {
            number,
            head: Some(head),
            offered: None,
            head_waits: false,
            behind: VecDeque::new(),
            left: 0,
        }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Adds a waiter. The head does not count until it knows that it has to wait.
    pub(crate) fn join(&mut self, waiter: &W, at: InsertAt) -> Result<(), TooMany> {
        let waiting = self.waiting() + usize::from(self.head.is_some() && self.head_waits);
        match (
            at,
            waiter
                .limit()
                .filter(|limit| waiting >= *limit && !broken!(MaxWaitersIgnored)),
        ) {
            (InsertAt::End, Some(limit)) => return Err(TooMany { limit }),
            (InsertAt::End, None) => {
                waiter.set_in_line(true);
                self.behind.push_back(waiter.clone());
            }
            (InsertAt::Again, _) => self.put_back(waiter.clone()),
        }
        Ok(())
    }

    /// Returns how many wait behind the head.
    pub(crate) fn waiting(&self) -> usize {
        self.behind.len() - self.left
    }

    pub(crate) fn is_waited_in(&self) -> bool {
        self.head.is_some() || self.waiting() > 0
    }

    /// Returns the head, and the waiter to which the lock was handed off; each once, or a waiter that was just woken
    /// would count as woken some time ago at the second check.
    pub(crate) fn served(&self) -> impl Iterator<Item = &W> {
        let is_head = |waiter: &W| self.head.as_ref().is_some_and(|head| head.is(waiter));
        let offered = self.offered.iter().filter(move |waiter| !is_head(waiter));
        self.head
            .iter()
            .chain(offered.filter(|_| !broken!(HandoffToUnpolledWaiter)))
    }

    /// Returns the head and those behind it.
    pub(crate) fn all(&self) -> impl Iterator<Item = &W> {
        self.head.iter().chain(&self.behind)
    }

    /// Records that a waiter behind others has left. That is cheap in the middle of a long queue, which is cleaned up
    /// when half of it has left.
    pub(crate) fn leaves(&mut self) {
        self.left += 1;
        if self.left > SPARE && self.left > self.behind.len() / 2 {
            self.behind.retain(|waiter| !waiter.has_left());
            self.left = 0;
        }
    }

    /// Makes the head, which has to wait, count from now on. Returns the excess waiters, which are removed.
    pub(crate) fn head_waits(&mut self) -> Vec<W> {
        let mut turned_away = Vec::new();
        if std::mem::replace(&mut self.head_waits, true) {
            return turned_away;
        }
        self.left = 0;
        for waiter in std::mem::take(&mut self.behind) {
            if waiter.has_left() {
                continue;
            }
            // Including the head.
            let ahead = self.behind.len() + 1;
            if waiter.limit().is_none_or(|limit| ahead < limit) {
                self.behind.push_back(waiter);
            } else {
                waiter.set_in_line(false);
                turned_away.push(waiter);
            }
        }
        turned_away
    }

    /// Offers the lock to the head, if it sleeps until the next notification.
    pub(crate) fn offer_to_head(&mut self, takes: impl FnOnce(&W) -> bool) -> Option<W> {
        let head = self.head.clone().filter(takes)?;
        self.offered = Some(head.clone());
        Some(head)
    }

    /// Offers the lock to the next waiter, which leaves the queue if `takes` returns true.
    pub(crate) fn offer_to_next(&mut self, takes: impl FnOnce(&W) -> bool) -> Option<W> {
        let next = self.next();
        self.offer(next, takes)
    }

    /// Offers the lock in the order of the store's queue: `positions` are the next ones there, in reverse order.
    pub(crate) fn offer_in_store_order(
        &mut self,
        positions: &mut Vec<u64>,
        takes: impl FnOnce(&W) -> bool,
    ) -> Option<W> {
        let next = self.next_at(positions);
        self.offer(next, takes)
    }

    fn offer(&mut self, next: Option<W>, takes: impl FnOnce(&W) -> bool) -> Option<W> {
        let waiter = next?;
        if !waiter.is_overdue() && takes(&waiter) {
            self.offered = Some(waiter.clone());
            return Some(waiter);
        }
        self.put_back(waiter);
        None
    }

    fn next(&mut self) -> Option<W> {
        loop {
            let waiter = self.behind.pop_front()?;
            waiter.set_in_line(false);
            if !waiter.has_left() || broken!(LeftWaiterIsServed) {
                return Some(waiter);
            }
            self.left -= 1;
        }
    }

    /// Usually this is the next one here, too.
    fn next_at(&mut self, positions: &mut Vec<u64>) -> Option<W> {
        while let Some(position) = positions.pop() {
            let is_there = |waiter: &W| waiter.position() == Some(position) && !waiter.has_left();
            if let Some(at) = self.behind.iter().position(is_there) {
                let waiter = self.behind.remove(at)?;
                waiter.set_in_line(false);
                return Some(waiter);
            }
        }
        None
    }

    /// Puts a waiter in front of those behind the head that arrived later.
    pub(crate) fn put_back(&mut self, waiter: W) {
        waiter.set_in_line(true);
        let at = match broken!(PutBackBehind) {
            true => self.behind.len(),
            false => {
                let is_earlier = |other: &W| other.arrival() < waiter.arrival();
                self.behind.partition_point(is_earlier)
            }
        };
        self.behind.insert(at, waiter);
    }

    /// Removes the head while the lock is held in this process.
    pub(crate) fn head_rests(&mut self) {
        self.head = None;
        self.head_waits = true;
    }

    /// Ends the head: the next waiter is the head now. `None` if none is left, and the queue is over. `quietly` says
    /// that the role was taken from a waiter that was not polled, as this one may not be either.
    pub(crate) fn head_ends(&mut self, quietly: bool) -> Option<NextHead<W>> {
        let next = self.next();
        self.head = next.clone();
        self.head_waits = true;
        next.map(|waiter| NextHead {
            sends: !quietly && !waiter.is_overdue(),
            waiter,
        })
    }

    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    pub(crate) fn head(&self) -> Option<&W> {
        self.head.as_ref()
    }

    /// Takes from a waiter that missed its poll deadline what it was offered, and its role as the head, which has
    /// `number` from now on. Returns whether it was the head.
    pub(crate) fn withdraw(&mut self, waiter: &W, is_told: bool, number: impl FnOnce() -> u64) -> bool {
        let is_waiter = |other: &Option<W>| other.as_ref().is_some_and(|other| other.is(waiter));
        if is_waiter(&self.offered) {
            self.offered = None;
        }
        let was_head = !is_told && is_waiter(&self.head);
        if was_head {
            self.number = number();
        }
        was_head
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    thread_local! {
        static ARRIVALS: Cell<u64> = const { Cell::new(0) };
    }

    #[derive(Debug)]
    struct Named {
        name: &'static str,
        limit: Option<usize>,
        arrival: u64,
        position: Option<u64>,
        in_line: Cell<bool>,
        left: Cell<bool>,
        overdue: Cell<bool>,
    }

    impl QueuedWaiter for Rc<Named> {
        fn is(&self, other: &Self) -> bool {
            Rc::ptr_eq(self, other)
        }

        fn limit(&self) -> Option<usize> {
            self.limit
        }

        fn arrival(&self) -> u64 {
            self.arrival
        }

        fn position(&self) -> Option<u64> {
            self.position
        }

        fn set_in_line(&self, in_line: bool) {
            self.in_line.set(in_line);
        }

        fn has_left(&self) -> bool {
            self.left.get()
        }

        fn is_overdue(&self) -> bool {
            self.overdue.get()
        }
    }

    fn waiter(name: &'static str, limit: Option<usize>, position: Option<u64>) -> Rc<Named> {
        let arrival = ARRIVALS.get();
        ARRIVALS.set(arrival + 1);
        Rc::new(Named {
            name,
            limit,
            arrival,
            position,
            in_line: Cell::new(false),
            left: Cell::new(false),
            overdue: Cell::new(false),
        })
    }

    /// A queue of these waiters, the first of which is the head.
    fn queue(names: &[&'static str]) -> (WaitQueue<Rc<Named>>, Vec<Rc<Named>>) {
        let all: Vec<_> = (0..)
            .zip(names)
            .map(|(at, name)| waiter(name, None, Some(at)))
            .collect();
        let mut queue = WaitQueue::new(all[0].clone(), 1);
        for waiter in &all[1..] {
            queue.join(waiter, InsertAt::End).unwrap();
        }
        (queue, all)
    }

    /// The heads, one after the other, until the queue is over.
    fn order(queue: &mut WaitQueue<Rc<Named>>) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.head_ends(false).map(|next| next.waiter))
            .map(|waiter| waiter.name)
            .collect()
    }

    fn leaves(queue: &mut WaitQueue<Rc<Named>>, waiter: &Rc<Named>) {
        waiter.left.set(true);
        queue.leaves();
    }

    #[test]
    fn request_of_the_next_head_is_sent_at_once_unless_it_may_not_be_polled() {
        for (quietly, overdue, sends) in [
            (false, false, true),
            (false, true, false),
            (true, false, false),
            (true, true, false),
        ] {
            let (mut queue, all) = queue(&["a", "b"]);
            all[1].overdue.set(overdue);
            let next = queue.head_ends(quietly).unwrap();
            assert_eq!(
                (next.waiter.name, next.sends),
                ("b", sends),
                "{quietly} {overdue}"
            );
        }
    }

    #[test]
    fn lock_is_not_offered_to_a_waiter_that_is_overdue() {
        for (overdue, offered) in [(false, Some("b")), (true, None)] {
            let (mut queue, all) = queue(&["a", "b"]);
            all[1].overdue.set(overdue);
            let next = queue.offer_to_next(|_| true);
            assert_eq!(next.map(|waiter| waiter.name), offered, "{overdue}");
        }
    }

    #[test]
    fn heads_follow_in_the_order_of_arrival_but_for_those_that_come_back() {
        let back = waiter("back", Some(1), None);
        let (mut queue, _) = queue(&["a", "b", "c"]);
        queue.join(&waiter("d", None, None), InsertAt::End).unwrap();
        queue.join(&back, InsertAt::Again).unwrap();
        assert_eq!(queue.waiting(), 4);
        assert_eq!(order(&mut queue), ["back", "b", "c", "d"]);
        assert!(!queue.is_waited_in());
    }

    #[test]
    fn waiters_that_come_back_keep_their_order() {
        for returns in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let [x, y] = ["x", "y"].map(|name| waiter(name, None, None));
            let (mut queue, _) = queue(&["a", "b"]);
            let back = [x, y, waiter("z", None, None)];
            queue.join(&waiter("c", None, None), InsertAt::End).unwrap();
            for at in returns {
                queue.join(&back[at], InsertAt::Again).unwrap();
            }
            assert_eq!(order(&mut queue), ["x", "y", "b", "z", "c"], "{returns:?}");
        }
    }

    #[test]
    fn waiters_that_have_left_are_passed_over_and_swept() {
        let names = ["w"; 100];
        let (mut queue, all) = queue(&names);
        for waiter in &all[1..60] {
            leaves(&mut queue, waiter);
            assert!(queue.behind.len() <= 2 * queue.waiting() + 2 * SPARE);
        }
        assert_eq!(queue.waiting(), 40);
        assert_eq!(order(&mut queue).len(), 40);
    }

    #[test]
    fn head_counts_only_when_it_has_to_wait_and_the_last_to_come_go_then() {
        // limits of those behind, in their order: which are turned away
        for (limits, turned_away) in [
            (vec![Some(2), Some(2)], vec![1]),
            (vec![Some(1), None], vec![0]),
            (vec![Some(3), Some(3), None], vec![]),
            (vec![None, None, Some(3)], vec![2]),
        ] {
            let mut queue = WaitQueue::new(waiter("head", None, None), 1);
            let all: Vec<_> = limits.iter().map(|limit| waiter("w", *limit, None)).collect();
            for waiter in &all {
                queue.join(waiter, InsertAt::End).unwrap();
            }
            let gone = queue.head_waits();
            let at = |gone: &Rc<Named>| all.iter().position(|waiter| waiter.is(gone)).unwrap();
            assert_eq!(gone.iter().map(at).collect::<Vec<_>>(), turned_away, "{limits:?}");
            assert!(gone.iter().all(|waiter| !waiter.in_line.get()));
            assert_eq!(queue.head_waits().len(), 0, "told once");
        }
        let (mut queue, _) = queue(&["a", "b"]);
        let third = waiter("c", Some(2), None);
        queue.join(&third, InsertAt::End).unwrap();
        queue.head_waits();
        let fourth = waiter("d", Some(2), None);
        assert_eq!(queue.join(&fourth, InsertAt::End), Err(TooMany { limit: 2 }));
    }

    #[test]
    fn lock_is_offered_to_the_next_that_takes_it() {
        let (mut queue, all) = queue(&["a", "b", "c"]);
        assert!(queue.offer_to_next(|_| false).is_none());
        let offered = queue.offer_to_next(|waiter| waiter.name == "b").unwrap();
        assert!(offered.is(&all[1]) && !all[1].in_line.get());
        let served: Vec<_> = queue.served().map(|waiter| waiter.name).collect();
        assert_eq!(served, ["a", "b"]);
        assert_eq!(order(&mut queue), ["c"]);
    }

    #[test]
    fn head_that_is_offered_the_lock_is_served_once() {
        let (mut queue, _) = queue(&["a", "b"]);
        assert!(queue.offer_to_head(|_| false).is_none());
        assert!(queue.offer_to_head(|_| true).is_some());
        assert_eq!(queue.served().count(), 1);
        queue.head_rests();
        assert!(queue.offer_to_head(|_| true).is_none(), "no waiter is the head");
        assert!(queue.is_waited_in());
    }

    #[test]
    fn order_of_the_store_goes_before_the_order_of_arrival() {
        let (mut queue, all) = queue(&["a", "b", "c", "d"]);
        leaves(&mut queue, &all[2]);
        // of another process, of one that has left, and then those that are there
        let mut positions = vec![1, 3, 2, 9];
        let mut offered = || {
            queue
                .offer_in_store_order(&mut positions, |_| true)
                .map(|waiter| waiter.name)
        };
        assert_eq!([offered(), offered(), offered()], [Some("d"), Some("b"), None]);
        assert_eq!(order(&mut queue), [""; 0]);
    }

    #[test]
    fn withdrawn_waiter_is_no_head_and_has_no_offer() {
        // has it the head's number with it, is it the head: was it taken from it?
        for (is_told, name, taken) in [(false, "a", true), (true, "a", false), (false, "b", false)] {
            let (mut queue, all) = queue(&["a", "b"]);
            let waiter = all.iter().find(|waiter| waiter.name == name).unwrap();
            queue.offer_to_head(|_| true);
            assert_eq!(queue.withdraw(waiter, is_told, || 7), taken, "{is_told} {name}");
            assert_eq!(queue.number(), if taken { 7 } else { 1 });
        }
    }
}
