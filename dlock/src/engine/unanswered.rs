//! The requests of a client that have no reply yet, and when to log a warning about them.

use std::collections::VecDeque;
use std::time::Duration;

use crate::base::moment::Moment;

/// The earliest time after which a request is reported.
const SHORTEST: Duration = Duration::from_secs(5);

/// How long a request may stay unanswered until it is reported, if each operation may take `timeout`.
pub(crate) fn told_after(timeout: Duration) -> Duration {
    timeout.saturating_mul(3).max(SHORTEST)
}

/// The requests that have no reply yet, and have not been reported.
#[derive(Debug)]
pub(crate) struct Unanswered<K> {
    told_after: Duration,
    /// In the order in which they were sent, which is nearly that of their replies. The first one is there.
    requests: VecDeque<Request<K>>,
    /// How many of them are there.
    left: usize,
    next: u64,
    /// Whether a task sleeps until the next warning is due.
    is_watched: bool,
}

#[derive(Debug)]
struct Request<K> {
    number: u64,
    sent: Moment,
    /// `None` once it was answered or reported.
    of: Option<K>,
}

/// So many places of answered requests are not worth a look.
const FEW: usize = 64;

impl<K> Unanswered<K> {
    pub(crate) fn new(told_after: Duration) -> Unanswered<K> {
        Unanswered {
            told_after,
            requests: VecDeque::new(),
            left: 0,
            next: 0,
            is_watched: false,
        }
    }

    /// Records that a request was sent. Returns its number, and whether a task has to begin to [watch](Self::next_due).
    pub(crate) fn sent(&mut self, of: K, now: Moment) -> (u64, bool) {
        let number = self.next;
        self.next += 1;
        self.requests.push_back(Request {
            number,
            sent: now,
            of: Some(of),
        });
        self.left += 1;
        (number, !std::mem::replace(&mut self.is_watched, true))
    }

    /// Records that the request has its reply, or that its caller no longer waits.
    pub(crate) fn answered(&mut self, number: u64) -> Option<K> {
        let of = self.find(number)?.of.take()?;
        self.left -= 1;
        while self.requests.front().is_some_and(|first| first.of.is_none()) {
            self.requests.pop_front();
        }
        if self.requests.len() > FEW + 2 * self.left {
            // Behind one that stays without a reply.
            self.requests.retain(|request| request.of.is_some());
        }
        Some(of)
    }

    /// What a request is about that has no reply yet.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut K> {
        self.find(number)?.of.as_mut()
    }

    fn find(&mut self, number: u64) -> Option<&mut Request<K>> {
        // Where it is if none is missing in between, and at most so far behind.
        let first = self.requests.front()?.number;
        let most = usize::try_from(number.checked_sub(first)?).ok()?;
        let at = match self.requests.get(most) {
            Some(request) if request.number == number => most,
            _ => self
                .requests
                .binary_search_by_key(&number, |request| request.number)
                .ok()?,
        };
        self.requests.get_mut(at)
    }

    /// Forgets all requests; returns what they are about.
    pub(crate) fn take(&mut self) -> Vec<K> {
        self.left = 0;
        let requests = std::mem::take(&mut self.requests);
        requests.into_iter().filter_map(|request| request.of).collect()
    }

    /// When to report the next request. `None` ends the watch.
    pub(crate) fn next_due(&mut self) -> Option<Moment> {
        let first = self.requests.front();
        self.is_watched = first.is_some();
        first.map(|first| first.sent + self.told_after)
    }

    /// Returns the requests to report now, each once, with the time that they have had no reply.
    pub(crate) fn overdue(&mut self, now: Moment) -> Vec<(K, Duration)> {
        let mut overdue = Vec::new();
        while let Some(first) = self.requests.front()
            && now.since(first.sent) >= self.told_after
        {
            let (number, since) = (first.number, now.since(first.sent));
            overdue.extend(self.answered(number).map(|of| (of, since)));
        }
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn request_is_told_of_after_three_timeouts_and_not_before_five_seconds() {
        for (timeout, after) in [
            (s(0), s(5)),
            (s(1), s(5)),
            (s(2), s(6)),
            (Duration::MAX, Duration::MAX),
        ] {
            assert_eq!(told_after(timeout), after, "{timeout:?}");
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Sent,
        Answered(u64),
        Looks,
    }
    use Event::{Answered, Looks, Sent};

    #[test]
    fn request_without_reply_is_told_of_once_when_it_is_due() {
        // after, what happened: whether the watch has to begin, what is told of, when the next is due
        for events in [
            vec![
                (0, Sent, true, vec![], Some(5)),
                (1, Sent, false, vec![], Some(5)),
                (2, Answered(0), false, vec![], Some(6)),
                (5, Looks, false, vec![], Some(6)),
                (7, Looks, false, vec![(1, 6)], None),
                (9, Looks, false, vec![], None),
                // Told of, and answered after all.
                (9, Answered(1), false, vec![], None),
                (10, Sent, true, vec![], Some(15)),
            ],
            vec![
                (0, Sent, true, vec![], Some(5)),
                (3, Sent, false, vec![], Some(5)),
                (9, Looks, false, vec![(0, 9), (1, 6)], None),
            ],
            vec![
                (0, Sent, true, vec![], Some(5)),
                (1, Answered(0), false, vec![], None),
                (2, Sent, true, vec![], Some(7)),
            ],
        ] {
            let mut unanswered = Unanswered::new(s(5));
            for (row, (after, event, begins, told, due)) in events.into_iter().enumerate() {
                let now = START + s(after);
                let (mut began, mut overdue) = (false, Vec::new());
                match event {
                    Sent => {
                        let number = unanswered.next;
                        began = unanswered.sent(number, now).1;
                    }
                    Answered(number) => drop(unanswered.answered(number)),
                    Looks => overdue = unanswered.overdue(now),
                }
                let told: Vec<_> = told
                    .into_iter()
                    .map(|(number, since)| (number, s(since)))
                    .collect();
                assert_eq!((began, overdue), (begins, told), "{row} {event:?}");
                let due = due.map(|due| START + s(due));
                assert_eq!(unanswered.next_due(), due, "{row} {event:?}");
            }
        }
    }

    #[test]
    fn replies_in_any_order_are_found_and_leave_no_room_behind() {
        use std::collections::BTreeMap;

        // xorshift
        let mut last = 7_u64;
        let mut random = move |below: usize| {
            last ^= last << 13;
            last ^= last >> 7;
            last ^= last << 17;
            usize::try_from(last % 1_000_003).unwrap() % below
        };
        let (mut unanswered, mut model) = (Unanswered::new(s(5)), BTreeMap::new());
        let stays = unanswered.sent(0, START).0;
        for of in 1..20_000 {
            model.insert(unanswered.sent(of, START).0, of);
            while model.len() > 100 || random(2) == 0 && !model.is_empty() {
                let nth = random(model.len());
                let number = *model.keys().nth(nth).unwrap();
                assert_eq!(unanswered.get_mut(number).copied(), model.get(&number).copied());
                assert_eq!(unanswered.answered(number), model.remove(&number));
                assert_eq!(unanswered.answered(number), None);
            }
            assert!(unanswered.requests.len() <= FEW + 2 * (model.len() + 1));
        }
        assert_eq!(unanswered.get_mut(stays), Some(&mut 0));
        assert_eq!(unanswered.get_mut(20_000), None);
        let mut left = unanswered.take();
        left.retain(|of| *of != 0);
        assert_eq!(left, model.into_values().collect::<Vec<_>>());
    }
}
