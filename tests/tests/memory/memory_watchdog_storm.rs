//! The watchdog where many are held and renewals go wrong in every way there is: refused, lost, answered late, in part
//! or never, by a panic, and with suspect servers. A model of what the store has confirmed says of each
//! hold until when it lasts: it is told then, neither before nor long after, and what can be kept is kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, DoubtSender, Doubts, GrantId, Holder, Lane, Reason,
    ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::{HoldState, Lock, LockClient, LockGuard, LockKey, Loss};
use dlock_tests::{margin, paused};
use fastrand::Rng;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
/// So late a loss is told at most: where many are held they are looked at together, by a timer of whole milliseconds.
const LATE: Duration = Duration::from_millis(12);
const LANES: u32 = 4;

/// What is known of a grant from what the store was asked, and what it was heard to answer.
#[derive(Debug, Clone, Copy)]
struct Known {
    until: Instant,
    fixed: bool,
    /// It was taken away, as far as the client can have heard.
    gone: bool,
    asked: u32,
    /// So many have held it, one after the other.
    holders: u32,
}

#[derive(Default)]
struct Model {
    grants: HashMap<GrantId, Known>,
    /// By the last of their fencing tokens. A lock that was forced open has two grants for a while: the key does not tell
    /// which of them a guard is of.
    by_token: BTreeMap<u64, GrantId>,
    trouble: bool,
    renew_calls: u32,
}

/// A store in memory, the way to which is bad.
struct Moody {
    memory: Arc<MemoryStore>,
    model: Mutex<Model>,
    rng: Mutex<Rng>,
    doubts: DoubtSender,
}

enum Mood {
    Well,
    Late,
    Never,
    Panics,
    Fails,
    InPart,
    Short,
}

impl Moody {
    fn new(rng: Rng) -> Arc<Moody> {
        Arc::new(Moody {
            memory: Arc::new(MemoryStore::new()),
            model: Mutex::default(),
            rng: Mutex::new(rng),
            doubts: DoubtSender::new(),
        })
    }

    /// A client has acquired the lock; the grant is answered.
    fn comes_in(&self, token: u64) -> GrantId {
        let mut model = self.model.lock();
        let (_, &id) = (model.by_token.range(token..).next()).expect("a token that was granted");
        model.grants.entry(id).and_modify(|known| known.holders += 1);
        id
    }

    fn known(&self, id: GrantId) -> Known {
        self.model.lock().grants[&id]
    }

    fn up_to(&self, time: Duration) -> Duration {
        self.rng.lock().u32(0..1000) * (time / 1000)
    }

    fn mood(&self) -> Mood {
        if !self.model.lock().trouble {
            return Mood::Well;
        }
        match self.rng.lock().u32(0..100) {
            0..60 => Mood::Well,
            60..68 => Mood::Late,
            68..76 => Mood::Never,
            76..80 => Mood::Panics,
            80..88 => Mood::Fails,
            88..96 => Mood::InPart,
            _ => Mood::Short,
        }
    }
}

/// Whether a lock's lease is fixed is in its name.
fn is_fixed(key: &LockKey) -> bool {
    key.as_str().contains("fixed")
}

/// The store that the client has.
struct Way(Arc<Moody>);

impl Store for Way {
    fn capabilities(&self) -> Capabilities {
        self.0.memory.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let sent = Instant::now();
        let moody = self.0.clone();
        let step = Store::acquire(moody.memory.clone(), request.clone());
        Box::pin(async move {
            let reply = step.await;
            sleep(moody.up_to(40 * MS)).await;
            if let Ok(AcquireReply::Acquired(granted)) = &reply {
                let known = Known {
                    until: sent + request.lease - margin(request.lease),
                    fixed: is_fixed(&request.key),
                    gone: false,
                    asked: 0,
                    holders: 0,
                };
                let mut model = moody.model.lock();
                model.grants.insert(request.grant, known);
                model.by_token.insert(granted.last_token, request.grant);
            }
            reply
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        Box::pin(async move { Store::release(self.0.memory.clone(), request).await })
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Box::pin(async move {
            let sent = Instant::now();
            let moody = self.0.clone();
            {
                let mut model = moody.model.lock();
                model.renew_calls += 1;
                for request in &requests {
                    if let Some(known) = model.grants.get_mut(&request.grant) {
                        known.asked += 1;
                    }
                }
            }
            let mood = moody.mood();
            match mood {
                Mood::Never => std::future::pending().await,
                Mood::Panics if requests.len() > 1 => std::panic::resume_unwind(Box::new("the store's own")),
                Mood::Fails => {
                    sleep(moody.up_to(100 * MS)).await;
                    return Err(StoreError::unknown("in a bad mood"));
                }
                _ => {}
            }
            let way = moody.up_to(20 * MS);
            if let Mood::InPart = mood {
                for request in &requests {
                    if moody.rng.lock().u32(0..100) < 3 {
                        Store::force_release(moody.memory.clone(), request.key.clone()).await?;
                    }
                }
            }
            let mut answers = Store::renew(moody.memory.clone(), requests.clone()).await?;
            sleep(way).await;
            match mood {
                Mood::Late => sleep(moody.up_to(4 * SEC)).await,
                Mood::Short => answers.truncate(answers.len() / 2),
                Mood::InPart => {
                    for answer in &mut answers {
                        let fails = moody.rng.lock().u32(0..10) < 3;
                        if fails && matches!(answer, Ok(Renewal::Renewed)) {
                            *answer = Err(StoreError::not_done(Reason::Unreachable, "not this one"));
                        }
                    }
                }
                _ => {}
            }
            // What the client hears in this moment.
            let now = Instant::now();
            let mut model = moody.model.lock();
            for (request, answer) in requests.iter().zip(&answers) {
                let Some(known) = model.grants.get_mut(&request.grant) else {
                    continue;
                };
                match answer {
                    Ok(Renewal::Renewed) if now < known.until && !known.fixed => {
                        known.until = known.until.max(sent + request.lease - margin(request.lease));
                        known.asked = 0;
                    }
                    Ok(Renewal::Gone) => known.gone = true,
                    _ => {}
                }
            }
            drop(model);
            Ok(answers)
        })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        Box::pin(async move { Store::inspect(self.0.memory.clone(), key).await })
    }
    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(async move { Store::list(self.0.memory.clone(), prefix).await })
    }
    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        Box::pin(async move { Store::force_release(self.0.memory.clone(), key).await })
    }
    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(self.0.memory.clone(), kind, key, grant)
    }
    fn lane(&self, key: &LockKey) -> Lane {
        Lane(key.as_str().bytes().map(u32::from).sum::<u32>() % LANES)
    }
    fn doubts(&self) -> Doubts {
        self.0.doubts.subscribe()
    }
}

/// What came about.
#[derive(Default)]
struct Counts {
    held: AtomicUsize,
    handed_on: AtomicUsize,
    expired: AtomicUsize,
    gone: AtomicUsize,
    max_held: AtomicUsize,
    /// Expired though hardly anything was tried.
    given_up: AtomicUsize,
}

fn count(what: &AtomicUsize) {
    what.fetch_add(1, SeqCst);
}

/// Some lock of many: nearly all are for one alone, some are wanted by several, which hand them off.
fn some_lock(client: &LockClient, rng: &mut Rng, me: usize) -> (Lock, Option<Duration>) {
    let some_time = rng.u32(1..20) * SEC / 2;
    let own = format!("own{me}");
    match rng.u32(0..12) {
        0 => (client.lock(format!("fixed{me}")).fixed_lease(some_time), None),
        1 => {
            let most = some_time;
            (client.lock(own).lease(6 * SEC).max_hold(most), Some(most))
        }
        2 => (client.lock(own).lease(SEC).min_hold(some_time / 3), None),
        3 => (client.lock(own).lease(200 * MS), None),
        4 => (client.lock(own).lease(3 * SEC), None),
        5 => (client.lock(own), None),
        6..9 => {
            let which = rng.u32(0..10);
            let lease = if which < 5 { 200 * MS } else { 6 * SEC };
            (client.lock(format!("shared{which}")).lease(lease), None)
        }
        _ => (client.lock(own).lease(6 * SEC), None),
    }
}

/// Holds it for a while, and sees that what is told is told in time.
async fn hold(moody: &Moody, guard: LockGuard, rng: &mut Rng, max_hold: Option<Duration>, counts: &Counts) {
    let began = Instant::now();
    let key = guard.key().clone();
    let id = moody.comes_in(guard.fencing_token());
    count(&counts.held);
    if moody.known(id).holders > 1 {
        count(&counts.handed_on);
    }
    let for_at_most = match key.as_str().starts_with("shared") {
        true => 40,
        false if rng.bool() => 8000,
        false => 40_000,
    };
    let end = began + rng.u32(0..for_at_most) * MS;
    let loss = loop {
        let ensures = Instant::now() + rng.u32(0..for_at_most / 2) * MS;
        tokio::select! {
            biased;
            loss = guard.lost() => break Some(loss),
            () = sleep_until(end) => break None,
            () = sleep_until(ensures) => {}
        }
        tokio::select! {
            biased;
            loss = guard.lost() => break Some(loss),
            _ = guard.ensure(rng.u32(0..3000) * MS) => {}
            () = sleep(rng.u32(0..200) * MS) => {}
        }
    };
    let (known, now) = (moody.known(id), Instant::now());
    let early = known.until.saturating_duration_since(now);
    let late = now.saturating_duration_since(known.until);
    assert!(late <= LATE, "{key}: {late:?} late with {loss:?} of {known:?}");
    match loss {
        None => {
            let said = guard.remaining();
            assert!(said <= early, "{key}: {said:?} are said to be left of {known:?}");
        }
        Some(Loss::Gone) => {
            assert!(known.gone, "{key}: {known:?}");
            count(&counts.gone);
        }
        Some(loss) => {
            assert!(
                early <= 2 * MS,
                "{key}: {early:?} early with {loss:?} of {known:?}"
            );
            let tried = known.fixed || known.asked > 1;
            match loss {
                Loss::MaxHold => count(&counts.max_held),
                Loss::Expired if tried => count(&counts.expired),
                Loss::Expired => count(&counts.given_up),
                other => panic!("{key}: {other:?}"),
            }
        }
    }
    let too_long = max_hold.map_or(Duration::ZERO, |most| (now - began).saturating_sub(most));
    assert!(too_long <= LATE, "{key}: {too_long:?} longer than it may be held");
    if rng.bool() {
        // Of what was lost, that is an error.
        let _ = guard.release().await;
    }
}

async fn storm(seed: u64, many: usize) {
    let mut rng = Rng::with_seed(seed);
    let moody = Moody::new(rng.fork());
    let client = LockClient::builder()
        .store(Way(moody.clone()))
        .build()
        .await
        .unwrap();
    let counts: Arc<Counts> = Arc::default();
    let stop = Instant::now() + 30 * SEC;
    moody.model.lock().trouble = true;
    let holder = |me| {
        let (client, moody, mut rng, counts) = (client.clone(), moody.clone(), rng.fork(), counts.clone());
        tokio::spawn(async move {
            while Instant::now() < stop {
                let (lock, max_hold) = some_lock(&client, &mut rng, me);
                match lock.wait(rng.u32(1..5000) * MS).acquire().await {
                    Ok(guard) => {
                        hold(&moody, guard, &mut rng, max_hold, &counts).await;
                    }
                    // Some waits end before the store replies.
                    Err(error) => assert!(error.is_busy() || error.is_unavailable(), "{error}"),
                }
                sleep(rng.u32(0..200) * MS).await;
            }
        })
    };
    let holders: Vec<_> = (0..many).map(holder).collect();
    while Instant::now() < stop {
        sleep(rng.u32(0..4000) * MS).await;
        moody.doubts.tell(Lane(rng.u32(0..LANES)));
    }
    for holder in holders {
        holder.await.unwrap();
    }
    assert_eq!(client.held(), 0);
    let [held, handed_on, expired, gone, max_held, given_up] = [
        &counts.held,
        &counts.handed_on,
        &counts.expired,
        &counts.gone,
        &counts.max_held,
        &counts.given_up,
    ]
    .map(|count| count.load(SeqCst));
    println!(
        "{held} held, {handed_on} handed off, {expired} expired, {gone} gone, {max_held} max held, {given_up} given up"
    );
    let least = many / 20;
    assert!(
        [held, handed_on, expired, gone, max_held]
            .into_iter()
            .all(|count| count > least)
    );
    // Where all that is under way hangs, nothing can be tried for a while.
    assert!(given_up <= held / 500, "{given_up} of {held}");

    // In fair weather what is held is kept, and by no more renewals than it takes.
    moody.model.lock().trouble = false;
    let lock = |me| client.lock(format!("own{me}")).lease(6 * SEC).acquire();
    let guards = join_all((0..many).map(lock)).await;
    sleep(20 * SEC).await;
    let before = moody.model.lock().renew_calls;
    for lane in 0..LANES {
        moody.doubts.tell(Lane(lane));
    }
    sleep(60 * SEC).await;
    assert!(
        guards
            .iter()
            .all(|guard| guard.as_ref().is_ok_and(|guard| guard.state() == HoldState::Held))
    );
    let calls = moody.model.lock().renew_calls - before;
    assert!((30 * LANES..120 * LANES).contains(&calls), "{calls}");
    drop(guards);
    sleep(SEC).await;
    assert_eq!(client.held(), 0);
}

#[test]
fn what_can_be_kept_is_kept_and_every_loss_is_told_in_time_where_renewals_go_wrong_in_every_way() {
    let seeds = std::env::var("DLOCK_TEST_SEEDS").map_or(0..1, |seeds| {
        let (from, to) = seeds.split_once("..").expect("FROM..TO");
        from.parse().unwrap()..to.parse().unwrap()
    });
    for seed in seeds {
        for many in [100, 400] {
            paused(storm(seed, many));
        }
    }
}
