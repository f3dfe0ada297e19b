//! What the suites about faults have in common: a client behind a proxy that gives up soon, one beside it that does not,
//! and operations with a time limit.
//!
//! No test may fail because the machine stood still for some seconds. So limits only tell "in time" from "never" and
//! from "when a lease ended", what is only late is asked again ([`answered`]), and what needs a moment that can be
//! missed is tried in rounds ([`in_rounds`]).

use std::fmt::{Debug, Display};
use std::time::{Duration, Instant};

use dlock::store::{Reason, StoreError};
use dlock::{Error, Lock, LockClient, LockClientBuilder, LockGuard, LockKind};
use futures_util::{StreamExt, stream};

use crate::{Command, Proxy, Store, eventually};

/// What one step of a hasty client may take.
pub const TIMEOUT: Duration = Duration::from_millis(400);
/// How long an acquire or a release of an [`impatient`] client goes on through failures.
pub const RETRY_FOR: Duration = Duration::from_millis(1500);
/// The lease of the clients here; no test waits for its end, nor may anything else.
pub const LEASE: Duration = Duration::from_secs(90);
/// What a test waits for the worst that may happen on the way to a success: some timeouts, some repetitions.
pub const SOON: Duration = Duration::from_secs(5);
/// What a machine that stands still now and then may add to a time limit.
pub const SLACK: Duration = Duration::from_secs(20);
/// How long is gone on with what must succeed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// At most sixty requests renewed ten thousand locks since then, beside those that keep the session: one a second, at most.
///
/// # Panics
/// When there were more.
pub fn are_few(requests: u64, since: Instant) {
    let seconds = since.elapsed().as_secs();
    println!("{requests} requests in {seconds} s");
    assert!(requests <= 60 + seconds, "{requests} requests in {seconds} s");
}

/// A client that is quick to call a step failed, and repeats it for a long time where it repeats at all.
///
/// # Panics
/// When it cannot connect.
pub async fn hasty(url: &str) -> LockClient {
    built(|| hasty_builder(url)).await
}

/// The same, to be built.
pub fn hasty_builder(url: &str) -> LockClientBuilder {
    let builder = LockClient::builder().url(url).lease(LEASE);
    builder.timeout(TIMEOUT).retry_for(PATIENCE)
}

/// A hasty client whose acquires and releases also give up soon.
///
/// # Panics
/// When it cannot connect.
pub async fn impatient(url: &str) -> LockClient {
    built(|| hasty_builder(url).retry_for(RETRY_FOR)).await
}

/// A client whose steps are never late.
///
/// # Panics
/// When it cannot connect.
pub async fn patient(url: &str) -> LockClient {
    built(|| hasty_builder(url).timeout(PATIENCE)).await
}

/// A client with nothing but the defaults, except that its steps are never late.
///
/// # Panics
/// When it cannot connect.
pub async fn ordinary(url: &str) -> LockClient {
    let builder = LockClient::builder().url(url);
    let built = builder.timeout(PATIENCE).build().await;
    built.unwrap_or_else(|error| panic!("the server is there: {error}"))
}

/// Builds it until it is connected.
///
/// # Panics
/// When it cannot connect.
pub async fn built(builder: impl Fn() -> LockClientBuilder) -> LockClient {
    answered(|| builder().build()).await.expect("the server is there")
}

/// A server, a hasty client behind a proxy, and a patient one beside it.
pub async fn setting() -> (Store, Proxy, LockClient, LockClient) {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (behind, beside) = (hasty(&proxy.url()).await, patient(&store.as_server().url()).await);
    (store, proxy, behind, beside)
}

/// The same for suites about faults that last: the client behind the proxy gives up soon, the one beside it
/// does not.
pub async fn setting_of_faults() -> (Store, Proxy, LockClient, LockClient) {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (behind, beside) = (
        impatient(&proxy.url()).await,
        patient(&store.as_server().url()).await,
    );
    (store, proxy, behind, beside)
}

/// Matches the calls that carry a step of this name.
pub fn step(name: &'static str) -> impl Fn(&Command) -> bool + Send + 'static {
    move |command| {
        let by_script = command.is_script() && command.args().iter().any(|arg| &arg[..] == name.as_bytes());
        by_script || command.step_by_commands() == Some(name)
    }
}

/// A lock that is held as one kind, and the kind that waiters request meanwhile.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    /// What it is held as.
    pub holds: LockKind,
    /// What it is asked for.
    pub asks: LockKind,
    /// Readers stand back for the caller.
    pub prefers_writers: bool,
}

impl Pair {
    /// The pairs of holder and caller that exclude each other.
    pub const ALL: [Pair; 7] = [
        Pair::same(LockKind::Mutex),
        Pair::same(LockKind::Fair),
        Pair::same(LockKind::Fenced),
        Pair::same(LockKind::Write),
        Pair {
            holds: LockKind::Write,
            ..Pair::same(LockKind::Read)
        },
        Pair {
            holds: LockKind::Read,
            ..Pair::same(LockKind::Write)
        },
        Pair {
            holds: LockKind::Read,
            prefers_writers: true,
            ..Pair::same(LockKind::Write)
        },
    ];

    const fn same(kind: LockKind) -> Pair {
        Pair {
            holds: kind,
            asks: kind,
            prefers_writers: false,
        }
    }

    /// The lock as it is held.
    pub fn held(self, client: &LockClient, key: &str) -> Lock {
        client.lock(key).kind(self.holds)
    }

    /// The lock as it is asked for.
    pub fn asked(self, client: &LockClient, key: &str) -> Lock {
        let lock = client.lock(key).kind(self.asks);
        match self.prefers_writers {
            true => lock.prefer_writers(),
            false => lock,
        }
    }
}

impl Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} under {}", self.asks, self.holds)?;
        match self.prefers_writers {
            true => write!(f, ", preferred"),
            false => Ok(()),
        }
    }
}

/// What the step that acquires a lock of this kind is called.
pub fn acquiring(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Mutex => "acquire",
        LockKind::Fair => "fair",
        LockKind::Fenced => "fenced",
        LockKind::Read => "read",
        LockKind::Write => "write",
        other => panic!("what takes a lock of kind {other} has no name here"),
    }
}

/// What the step that renews a lock of this kind is called.
pub fn renewing(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Read => "renew_read",
        LockKind::Write => "renew_write",
        _ => "renew",
    }
}

/// What the step that releases a lock of this kind is called.
pub fn releasing(kind: LockKind) -> &'static str {
    match kind {
        LockKind::Fair => "release_fair",
        LockKind::Read => "release_read",
        LockKind::Write => "release_write",
        _ => "release",
    }
}

/// What the same step is called where the lock has a minimum that is not over yet.
pub fn keeping(kind: LockKind) -> &'static str {
    match releasing(kind) {
        "release" => "keep",
        with_minimum => with_minimum,
    }
}

/// Awaits many requests, so few at a time that a busy machine answers each of them before its time limit.
pub async fn some_at_a_time<F: Future>(requests: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    stream::iter(requests).buffered(200).collect().await
}

/// Runs it and sees that it kept its time, or nearly.
///
/// # Panics
/// When it did not.
pub async fn within<T>(limit: Duration, what: impl Display, work: impl Future<Output = T>) -> T {
    let started = Instant::now();
    // An end by force, for what would hang for ever.
    let Ok(output) = tokio::time::timeout(limit + 2 * SLACK, work).await else {
        panic!(
            "{what} did not end in {:?}, at most {limit:?} were stated",
            limit + 2 * SLACK
        );
    };
    let took = started.elapsed();
    assert!(
        took < limit + SLACK,
        "{what} took {took:?}, at most {limit:?} were stated"
    );
    output
}

/// A failure that may only mean that the answer came too late.
pub trait Unanswered {
    /// Whether it may.
    fn is_unanswered(&self) -> bool;
}

impl Unanswered for Error {
    fn is_unanswered(&self) -> bool {
        matches!(self, Error::Unreachable { .. } | Error::OutcomeUnknown { .. })
    }
}

impl Unanswered for StoreError {
    fn is_unanswered(&self) -> bool {
        self.reason == Reason::Unreachable
    }
}

/// Asks until there is an answer: what a machine that stood still made too late is asked again.
///
/// # Errors
/// The answer, when it is one. After a minute the failure.
pub async fn answered<T, E: Unanswered, F>(asking: impl Fn() -> F) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let begun = Instant::now();
    loop {
        match asking().await {
            Err(error) if error.is_unanswered() && begun.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            answer => return answer,
        }
    }
}

/// Tries it until it was done: for what needs a moment that a machine which stood still misses. A round that missed it
/// gives what it saw instead.
///
/// # Panics
/// When no round of fifty hit the moment.
pub async fn in_rounds<T, M: Debug>(what: &str, round: impl AsyncFn() -> Result<T, M>) -> T {
    let mut missed = Vec::new();
    for _ in 0..50 {
        match round().await {
            Ok(done) => return done,
            Err(instead) => missed.push(instead),
        }
    }
    panic!("not once in fifty rounds: {what}; instead {missed:?}");
}

/// Takes the lock, asking once, and releases it.
///
/// # Panics
/// When it is not free.
pub async fn is_free(client: &LockClient, key: &str) {
    is_free_as(client, key, LockKind::Mutex).await;
}

/// The same with a lock of this kind; of a read-write lock with both sides.
///
/// # Panics
/// When it is not free.
pub async fn is_free_as(client: &LockClient, key: &str, kind: LockKind) {
    for kind in sides(kind) {
        let guard = answered(|| client.lock(key).kind(*kind).try_acquire()).await;
        let guard = guard.unwrap_or_else(|error| panic!("\"{key}\" should be free: {error}"));
        guard.release().await.expect("the server is there");
    }
}

/// Waits for the lock, far less than a lease, and releases it.
///
/// # Panics
/// When it does not become available.
pub async fn is_free_soon(client: &LockClient, key: &str) {
    is_free_soon_as(client, key, LockKind::Mutex).await;
}

/// The same with a lock of this kind; of a read-write lock with both sides.
///
/// # Panics
/// When it does not become available.
pub async fn is_free_soon_as(client: &LockClient, key: &str, kind: LockKind) {
    for kind in sides(kind) {
        let guard = client.lock(key).kind(*kind).wait(SOON + SLACK).acquire().await;
        let guard = guard.unwrap_or_else(|error| panic!("\"{key}\" should become available: {error}"));
        guard.release().await.expect("the server is there");
    }
}

/// Readers come in where others read, and writers where readers stand back: a test of availability asks as both.
fn sides(kind: LockKind) -> &'static [LockKind] {
    match kind {
        LockKind::Read | LockKind::Write => &[LockKind::Read, LockKind::Write],
        LockKind::Fair => &[LockKind::Fair],
        LockKind::Fenced => &[LockKind::Fenced],
        _ => &[LockKind::Mutex],
    }
}

/// Sees by the server's own word that a renewed lock is still held.
///
/// # Panics
/// When it is not.
pub async fn is_confirmed(guard: &LockGuard) {
    // More than any lease has, so that the server has to be asked.
    let outcome = answered(|| guard.ensure(1000 * LEASE)).await;
    assert!(
        matches!(outcome, Err(Error::InvalidOption { .. })) && guard.is_held(),
        "the server does not confirm it: {outcome:?}"
    );
}

/// Waits until a client that was kept from its server has it again, on another connection if need be.
pub async fn is_back(client: &LockClient) {
    eventually("the client is back", || async {
        client.inspect("nothing").await.is_ok()
    })
    .await;
}
