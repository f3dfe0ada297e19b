//! Sequences of random steps, with the replies that the store in memory gives.

use std::fmt::Debug;
use std::iter;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::LockKey;
use dlock::store::counter::CounterStep;
use dlock::store::{AcquireRequest, GrantId, Kind};
use dlock::stores::memory::MemoryStore;
use fastrand::Rng;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Peer, Reply, SetReply, is_gone, is_released, is_renewed};

const SAME: Promise = Promise("The replies to a sequence of steps are those of the store in memory");
const TOKENS_GROW: Promise = Promise("Fencing tokens of a key grow");

const SEQUENCES: u64 = 60;
const STEPS: usize = 40;
/// So many replies about each family of kinds are compared, however slow the store is.
const ENOUGH: usize = 16;
/// How long the sequences may take together, once these are compared.
const TIME: Duration = Duration::from_secs(3);
/// Queue positions of a sequence that takes longer may have ended.
const SPOILED: Duration = Duration::from_secs(4);
/// For how long a store is asked again whose reply is behind that of memory.
const CATCH_UP: Duration = Duration::from_secs(2);
/// How often it is asked again at least, however long that takes.
const CATCH_UP_REQUESTS: u32 = 20;

/// Kinds that may share a key.
type Family = &'static [Kind];

const FAMILIES: [Family; 5] = [
    &[Kind::Mutex, Kind::Fair, Kind::Fenced],
    &[Kind::Read, Kind::Read, Kind::Write],
    &[Kind::Permit],
    &[Kind::Unowned],
    &[Kind::Latch],
];

/// Each of several keys has a kind of data, and three clients take random steps on them, one at a time.
pub async fn random_steps_have_the_replies_of_memory(case: Case) {
    let begun = Instant::now();
    let of_store = |family: &&Family| family.iter().any(|kind| case.has(*kind));
    let families: Vec<Family> = FAMILIES.iter().filter(of_store).copied().collect();
    let mut compared = Vec::new();
    let lacks = |compared: &[Kind], family: &Family| {
        compared.iter().filter(|kind| family.contains(kind)).count() < ENOUGH
    };
    for seed in 0..SEQUENCES {
        let lacking = families.iter().copied().filter(|family| lacks(&compared, family));
        let lacking: Vec<Family> = lacking.take(2).collect();
        if lacking.is_empty() {
            break;
        }
        let sequence = Sequence::new(&case, format!("first-{seed}"), Rng::with_seed(seed), &lacking).await;
        compared.extend(sequence.run().await);
    }
    if let Some(family) = families.iter().find(|family| lacks(&compared, family)) {
        return case.leave_out(format!(
            "the store is too slow to be compared with memory: {family:?}"
        ));
    }
    // One that no run before had: its seed is told with what it breaks.
    for seed in iter::once(fastrand::u64(SEQUENCES..)).chain(0..SEQUENCES) {
        let (mut random, mut families) = (Rng::with_seed(seed), families.clone());
        random.shuffle(&mut families);
        families.truncate(2);
        Sequence::new(&case, seed.to_string(), random, &families)
            .await
            .run()
            .await;
        if begun.elapsed() > TIME {
            break;
        }
    }
}

struct Sequence<'a> {
    case: &'a Case,
    random: Rng,
    begun: Instant,
    /// The clients, and what stands for them in memory.
    peers: Vec<(Peer, Peer)>,
    keys: Vec<(LockKey, Vec<Kind>)>,
    /// The last fencing token of each key; fenced locks may have a counter of their own.
    tokens: Vec<[u64; 2]>,
    /// All grants so far, with their clients. Some of them have ended.
    grants: Vec<(usize, Held)>,
    /// Waiters for fair locks.
    waiters: Vec<(usize, AcquireRequest)>,
    said: Vec<String>,
    /// The kind of each reply that was compared.
    compared: Vec<Kind>,
}

impl<'a> Sequence<'a> {
    /// On keys of its own, which have this name in theirs.
    async fn new(case: &'a Case, name: String, random: Rng, families: &[Family]) -> Sequence<'a> {
        let memory = MemoryStore::new();
        let mut peers = Vec::new();
        for _ in 0..3 {
            let model = Peer::new(Arc::new(memory.clone()), case.patience());
            peers.push((case.peer().await, model));
        }
        // In a cluster the part in braces says where a key is. Twice as many keys as kinds of data, of which sets are made.
        let key = |at: usize| LockKey::raw(format!("{{{}-{name}}}:{at}", case.prefix()));
        let kinds = |family: &Family| family.iter().copied().filter(|kind| case.has(*kind)).collect();
        let keys: Vec<_> = (families.iter().chain(families).enumerate())
            .map(|(at, family)| (key(at), kinds(family)))
            .collect();
        Sequence {
            case,
            random,
            begun: Instant::now(),
            peers,
            tokens: vec![[0; 2]; keys.len()],
            keys,
            grants: Vec::new(),
            waiters: Vec::new(),
            said: vec![format!("sequence {name} of {families:?}")],
            compared: Vec::new(),
        }
    }

    /// Takes its steps, and returns the kinds whose replies were compared.
    async fn run(mut self) -> Vec<Kind> {
        for _ in 0..STEPS {
            self.step().await;
            if self.is_spoiled() {
                break;
            }
        }
        self.compared
    }

    fn is_spoiled(&self) -> bool {
        self.begun.elapsed() > SPOILED
    }

    /// Compares a reply with that of memory.
    fn same<T: Debug + PartialEq>(&mut self, kind: Kind, step: impl Debug, found: T, expected: T) {
        self.said.push(format!("{step:?}: {expected:?}"));
        if self.is_spoiled() {
            return;
        }
        if found != expected {
            self.fails(found);
        }
        self.compared.push(kind);
    }

    fn fails(&self, found: impl Debug) -> ! {
        SAME.is_broken(format_args!("{found:?}\n{}", self.said.join("\n")));
    }

    /// Asks the store, and again while its reply is behind that of memory: servers that a majority has not waited for
    /// catch up. Fails if the reply stays behind.
    async fn caught_up<T: Debug, F: Future<Output = T>>(
        &self,
        step: impl Debug,
        ask: impl Fn() -> F,
        is_behind: impl Fn(&T) -> bool,
    ) -> T {
        let was_spoiled = self.is_spoiled();
        let (begun, mut asked) = (Instant::now(), 0);
        loop {
            let found = ask().await;
            if was_spoiled || !is_behind(&found) {
                return found;
            }
            asked += 1;
            if begun.elapsed() > CATCH_UP && asked > CATCH_UP_REQUESTS {
                self.fails((step, "asked again", found));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn step(&mut self) {
        let at = self.random.usize(..self.keys.len());
        let by = self.random.usize(..self.peers.len());
        let kind = *self.random.choice(&self.keys[at].1).expect("a kind");
        match self.random.u32(..20) {
            0 => self.forces(by, at, kind).await,
            1..3 if kind == Kind::Mutex => self.takes_all(by).await,
            1..6 => self.releases().await,
            6..8 => self.renews().await,
            8..10 => self.looks(by, at, kind).await,
            10..13 if !self.waiters.is_empty() => self.waits().await,
            10..16 if matches!(kind, Kind::Permit | Kind::Unowned) => self.counts(by, at, kind).await,
            _ if kind == Kind::Latch => self.counts(by, at, kind).await,
            _ => self.takes(by, at, kind).await,
        }
    }

    /// Whether a plain lock of the key may overtake waiters for a fair one, or not: each store may decide.
    fn may_overtake(&self, kind: Kind, key: &LockKey) -> bool {
        let plain = matches!(kind, Kind::Mutex | Kind::Fenced);
        plain && self.waiters.iter().any(|(_, waiter)| waiter.key == *key)
    }

    async fn takes(&mut self, by: usize, at: usize, kind: Kind) {
        let key = self.keys[at].0.clone();
        if self.may_overtake(kind, &key) {
            return;
        }
        let mut request = self.peers[by].0.request(kind, &key, self.case.long());
        match kind {
            Kind::Fair => request.queue = self.random.bool(),
            Kind::Read => request.nested_in = self.writes(by, &key).await,
            Kind::Permit | Kind::Unowned => {
                request.permits = Some(self.random.u32(1..4));
                request.amount = self.random.u32(1..3);
                if kind == Kind::Permit && self.case.can().limits && self.random.bool() {
                    request.limit = Some(self.random.u32(1..4));
                }
            }
            _ => {}
        }
        self.asks(by, request).await;
    }

    /// The write grant of a client.
    async fn writes(&self, by: usize, key: &LockKey) -> Option<GrantId> {
        let mut grants = self.grants.iter().rev();
        let (_, held) =
            grants.find(|(owner, held)| (*owner, held.kind, &held.key) == (by, Kind::Write, key))?;
        let is_held = self.peers[by].1.renews(held, self.case.long()).await;
        is_held.then_some(held.grant)
    }

    async fn asks(&mut self, by: usize, request: AcquireRequest) {
        let at = self.at(&request.key);
        let (peer, model) = self.peers[by].clone();
        let expected = model.acquire(request.clone()).await;
        let step = (
            by,
            at,
            request.kind,
            request.grant,
            request.amount,
            request.queue,
            request.nested_in,
        );
        let is_granted = matches!(expected, Ok(Reply::Granted(_)));
        let is_behind = |found: &_| is_granted && matches!(found, Ok(Reply::Busy(_)));
        let ask = || peer.tries_as(request.clone());
        let found = self.caught_up(step, ask, is_behind).await;
        let (found, expected) = (found.expect("a reply"), expected.expect("a reply"));
        self.same(request.kind, step, replied(&found), replied(&expected));
        if let (Reply::Granted(tokens), Reply::Granted(_)) = (&found, &expected) {
            if !matches!(request.kind, Kind::Read | Kind::Permit | Kind::Unowned) {
                self.grow(&request, tokens.first, tokens.last);
            }
            self.waiters.retain(|(_, waiter)| waiter.grant != request.grant);
            self.has(by, &request);
        } else if request.queue
            && !self
                .waiters
                .iter()
                .any(|(_, waiter)| waiter.grant == request.grant)
        {
            self.waiters.push((by, request));
        }
    }

    fn grow(&mut self, request: &AcquireRequest, first: u64, last: u64) {
        let at = self.at(&request.key);
        let before = &mut self.tokens[at][usize::from(request.kind == Kind::Fenced)];
        TOKENS_GROW.holds(first > *before, (first, *before, &self.said));
        *before = last;
    }

    fn at(&self, key: &LockKey) -> usize {
        let at = self.keys.iter().position(|(name, _)| name == key);
        at.expect("one of the keys")
    }

    fn has(&mut self, by: usize, request: &AcquireRequest) {
        // These permits are returned by a number.
        if request.kind == Kind::Unowned {
            return;
        }
        self.grants.push((by, Held::asked_by(request)));
    }

    /// A waiter asks again, or gives up.
    async fn waits(&mut self) {
        let waiter = self.random.usize(..self.waiters.len());
        let (by, mut request) = self.waiters[waiter].clone();
        if self.random.u32(..4) == 0 {
            self.waiters.remove(waiter);
            self.has(by, &request);
            let last = self.grants.len() - 1;
            self.releases_grant(last).await;
        } else {
            request.last_asked = Some(Duration::from_millis(1));
            self.asks(by, request).await;
        }
    }

    async fn takes_all(&mut self, by: usize) {
        let (peer, model) = self.peers[by].clone();
        let keys = self.keys.iter().filter(|(_, kinds)| kinds.contains(&Kind::Mutex));
        let keys: Vec<_> = keys.map(|(key, _)| key.clone()).collect();
        let together: Vec<_> = keys.iter().map(|key| peer.together(Kind::Mutex, key)).collect();
        if together[0].is_none() || together.iter().any(|number| *number != together[0]) {
            return;
        }
        if keys.iter().any(|key| self.may_overtake(Kind::Mutex, key)) {
            return;
        }
        let requests: Vec<_> = (keys.iter())
            .map(|key| peer.request(Kind::Mutex, key, self.case.long()))
            .collect();
        let expected = model.acquire_all(requests.clone()).await.expect("a reply");
        let found = peer.acquire_all(requests.clone()).await.expect("a reply");
        let at = |reply: &SetReply| match reply {
            SetReply::Granted(_) => None,
            SetReply::Busy { at } => Some(*at),
        };
        self.same(Kind::Mutex, (by, "all"), at(&found), at(&expected));
        if let SetReply::Granted(tokens) = found {
            for (request, token) in requests.iter().zip(tokens) {
                self.grow(request, token, token);
                self.has(by, request);
            }
        }
    }

    async fn releases(&mut self) {
        if !self.grants.is_empty() {
            let grant = self.random.usize(..self.grants.len());
            self.releases_grant(grant).await;
        }
    }

    async fn releases_grant(&mut self, grant: usize) {
        let (by, held) = self.grants[grant].clone();
        let (peer, model) = self.peers[by].clone();
        let expected = model.release(held.release()).await.expect("a reply");
        let found = peer.release(held.release()).await.expect("a reply");
        self.same(
            held.kind,
            (by, "releases", held.grant),
            is_released(found),
            is_released(expected),
        );
    }

    async fn renews(&mut self) {
        if self.grants.is_empty() {
            return;
        }
        let (by, Held { kind, .. }) = self.grants[self.random.usize(..self.grants.len())];
        let (peer, model) = self.peers[by].clone();
        let of_peer = self.grants.iter().filter(|(owner, _)| *owner == by);
        let requests: Vec<_> = of_peer.map(|(_, held)| held.renewal(self.case.long())).collect();
        let is = |replies: &[_]| -> Vec<_> {
            (replies.iter())
                .map(|reply| (is_renewed(reply), is_gone(reply)))
                .collect()
        };
        let expected = model.renew(requests.clone()).await.expect("replies");
        let found = peer.renew(requests).await.expect("replies");
        self.same(kind, (by, "renews"), is(&found), is(&expected));
    }

    async fn forces(&mut self, by: usize, at: usize, kind: Kind) {
        if self.case.can().inspection && !matches!(kind, Kind::Latch | Kind::Unowned) {
            let (key, (peer, model)) = (self.keys[at].0.clone(), self.peers[by].clone());
            let expected = model.force_release(&key).await.expect("a reply");
            let ask = || async { peer.force_release(&key).await.expect("a reply") };
            // A server may still have a hold that was released.
            let is_behind = |found: &bool| *found && !expected;
            let found = self.caught_up((by, at, "forces"), ask, is_behind).await;
            self.same(kind, (by, at, "forces"), found, expected);
        }
    }

    async fn looks(&mut self, by: usize, at: usize, kind: Kind) {
        if self.case.can().inspection && !matches!(kind, Kind::Latch | Kind::Unowned) {
            let (key, (peer, model)) = (self.keys[at].0.clone(), self.peers[by].clone());
            let expected = model.inspect(&key).await.expect("a reply").len();
            let ask = || async { peer.inspect(&key).await.expect("a reply").len() };
            let is_behind = |found: &usize| *found != expected;
            let found = self.caught_up((by, at, "holders"), ask, is_behind).await;
            self.same(kind, (by, at, "holders"), found, expected);
        }
    }

    async fn counts(&mut self, by: usize, at: usize, kind: Kind) {
        let (key, (peer, model)) = (self.keys[at].0.clone(), self.peers[by].clone());
        let (few, unowned) = (self.random.u32(1..4), kind == Kind::Unowned);
        let step = match (kind, self.random.u32(..8)) {
            (Kind::Latch, 0..3) => CounterStep::SetCount { count: few.into() },
            (Kind::Latch, 3..6) => CounterStep::CountDown,
            (Kind::Latch, 6) => CounterStep::Count,
            (Kind::Latch, _) => CounterStep::DeleteLatch,
            (_, only_unset @ 0..2) => CounterStep::SetPermits {
                total: few,
                only_unset: only_unset == 0,
            },
            (_, 2) => CounterStep::AddPermits {
                by: few.into(),
                unowned,
            },
            (_, 3) => CounterStep::AddPermits {
                by: -i64::from(few),
                unowned,
            },
            (Kind::Unowned, 4) => CounterStep::Give { amount: few },
            (_, 5) => CounterStep::Drain,
            (_, 6) => CounterStep::DeletePermits,
            _ => CounterStep::Permits,
        };
        let id = peer.grant();
        let expected = model.count_as(&key, id, step).await.expect("a reply");
        let found = peer.count_as(&key, id, step).await.expect("a reply");
        self.same(kind, (by, at, step), found, expected);
    }
}

/// A reply without what depends on times and on the store.
fn replied(reply: &Reply) -> &'static str {
    match reply {
        Reply::Granted(_) => "granted",
        Reply::Busy(_) => "busy",
        Reply::TooFewPermits => "too few permits",
    }
}
