//! The attributes of the `dlock` crate: `#[distributed_lock]`, and `#[once]` (in `once`, from the same parts).
//!
//! Use it from there, as `dlock::distributed_lock`: its expansion calls that crate.
//!
//! The modules: `reader` and `options` parse the brackets of the attribute, with `value`, `key` and `keys` for the
//! right-hand sides; `function` parses the function; `arguments` ensures that no argument outlives the lock; `expand` puts the
//! pieces together, or `async_trait` if that attribute ran first.

mod arguments;
mod async_trait;
mod expand;
mod function;
mod key;
mod keys;
mod locked;
mod names;
mod once;
mod options;
mod reader;
mod suggest;
mod value;

use proc_macro::TokenStream;

/// Runs an async function once at a time for each key, across all processes.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// #[distributed_lock(key = "order:{order_id}", wait = "3s")]
/// async fn pay(order_id: u64) -> Result<String, Error> {
///     // Never twice at a time for one order.
///     Ok(format!("paid {order_id}"))
/// }
///
/// #[tokio::main]
/// async fn main() -> Result<(), Error> {
///     // Once, at the start of the service; "redis://…" there.
///     dlock::set_default(LockClient::connect("memory://").await?)?;
///
///     println!("{}", pay(42).await?);
///     Ok(())
/// }
/// ```
///
/// The lock is acquired before the body and released after it: on return, `?`, panic, and when the future is dropped.
/// It is renewed for as long as the body runs. All arguments are dropped before the lock is released, except for what a
/// pattern leaves of one, as `Job { id, .. }: Job` does, where `#[instrument]`, `#[once]`, another `#[distributed_lock]`
/// or an attribute that names `id` stands below: that is dropped after it.
/// The function keeps its signature; its future is `Send` if it was.
///
/// **Begin and commit a transaction in the body.** A transaction that the caller began is committed after the lock was
/// released, and the next holder reads the data from before the commit. If the locks are in the same PostgreSQL database,
/// [`hold_in`](https://github.com/dlock-rs/dlock/blob/main/docs/postgres.md#the-effect-and-the-lock-commit-together) keeps
/// the lock until the commit.
///
/// Inside the body, code that asks for the same key [re-enters](#re-entry) the lock, and `dlock::current()` returns the
/// hold, with its fencing token.
///
/// # Options
///
/// | option | default | meaning |
/// |---|---|---|
/// | `key = …`, `key(…)` | required | [the name of the lock](#the-key) |
/// | `keys = […]` | – | [several locks](#several-keys) instead: all of them or none |
/// | `kind = read` | `lock` | [what to lock as](#kinds): `lock`, `fair`, `read`, `write` or `fenced` |
/// | `group = "orders"` | the text of `key = "…"` (of the first with a text of several), or none | the name of these locks in metrics and traces: the same text for all calls |
/// | `prefer_writers = true` | `false` | with `kind = write`: [readers yield](#kinds) to waiting calls |
/// | `lock = expr` | the client of `dlock::default_client` | which `LockClient`: a field, an argument, a call; it is cloned before the body |
/// | `wait = "3s"` | no limit | the longest wait for the lock; `wait = try` asks once |
/// | `lease = "1m"` | the client's, 30 s | the lease, renewed while the body runs; after a crash the lock becomes available when it expires |
/// | `fixed_lease = "10s"` | none | a fixed lease instead: never renewed, and the lock is lost when it is over |
/// | `max_hold = "5m"` | none | when to end the renewal of a body that is stuck |
/// | `min_hold = "1m"` | none | how long the lock stays held at least, even if the body ends sooner; only with `wait = try` are calls in that time refused. For work that must run once use `#[once]` |
/// | `max_waiters = 16` | no limit | how many calls may wait for a key in this process; more are refused at once |
/// | `on_lost = ignore` | `cancel` | what happens to the body [when the lock is lost](#losing-the-lock) |
/// | `on_busy = path` | – | what to return when [another caller holds the lock](#errors) |
/// | `on_error = path` | `From<dlock::Error>` | what to return when [the lock fails](#errors) |
/// | `crate = path` | `::dlock` | the `dlock` crate, if it has another name |
///
/// Times are literals with a unit (`"30s"`, `"250ms"`, `"1m 30s"`), parsed at compile time, or expressions that return
/// a [`Duration`](std::time::Duration). `max_waiters` is a number or an expression that returns a `usize`. Expressions
/// may use the arguments.
///
/// # The key
///
/// ```
/// use dlock::{Error, LockClient, LockKey, distributed_lock};
///
/// struct Order {
///     id: u64,
///     customer: Customer,
/// }
///
/// struct Customer {
///     name: String,
/// }
///
/// impl Order {
///     fn lock_key(&self) -> LockKey {
///         format!("order:{}", self.id).into()
///     }
/// }
///
/// // One lock.
/// #[distributed_lock(key = "nightly-report")]
/// async fn report() -> Result<(), Error> {
///     Ok(())
/// }
///
/// // A format string, which captures arguments and their fields.
/// #[distributed_lock(key = "order:{order.id}:{order.customer.name}:{step:03}")]
/// async fn ship(order: Order, step: u32) -> Result<(), Error> {
///     Ok(())
/// }
///
/// // What `format!` takes, for other expressions.
/// #[distributed_lock(key("customer:{}", order.customer.name.to_lowercase()))]
/// async fn notify(order: &Order) -> Result<(), Error> {
///     Ok(())
/// }
///
/// // Anything that converts into a `LockKey`.
/// #[distributed_lock(key = order.lock_key())]
/// async fn cancel(order: &Order) -> Result<(), Error> {
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # dlock::set_default(LockClient::memory())?;
/// # report().await?;
/// # let order = || Order { id: 1, customer: Customer { name: "Ann".into() } };
/// # ship(order(), 1).await?; notify(&order()).await?; cancel(&order()).await
/// # }
/// ```
///
/// The key is computed once, before everything else. A `?` in it returns from the function. A key is 1 to 512 bytes
/// long, has no control characters and no braces, and does not begin with `dlock:`; a computed key that violates this is an
/// `Error::InvalidKey` of that call, and the body does not run.
///
/// Of several texts that a user may choose, only the last may have the separator: with `"doc:{tenant}:{name}"`, tenant `a` with
/// name `b:c` and tenant `a:b` with name `c` have one key. For a lock such calls only wait for each other; with `#[once]` the
/// second does not run, and gets the result of the first.
///
/// # Several keys
///
/// `keys = [from, to]` takes several locks at once (`dlock::MultiLock`), all of them or none. Calls with common keys
/// cannot deadlock, in whatever order they name them: a call asks for all keys in one operation, and only if some of
/// them stay busy does it take them one by one, in an order that is the same for all calls. A call inside of a function
/// that holds some of the keys asks for the others, and those stay held while it waits: give it a `wait`, or take all of
/// them outside. Each element is a value as
/// for `key =`; any other expression is iterated over, and yields `LockKey`s or values that convert into one. A key
/// that is named twice counts once.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// #[distributed_lock(keys = ["account:{from}", "account:{to}"], lock = client, wait = "3s")]
/// async fn transfer(client: &LockClient, from: u64, to: u64) -> Result<(), Error> {
///     // Whatever takes one of the two accounts alone waits; here it enters.
///     withdraw(client, from).await
/// }
///
/// #[distributed_lock(key = "account:{account}", lock = client)]
/// async fn withdraw(client: &LockClient, account: u64) -> Result<(), Error> {
/// #     let _ = account;
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # transfer(&LockClient::memory(), 1, 2).await
/// # }
/// ```
///
/// In the body `dlock::current()` is a view of all of them: it is lost when one is, and
/// `fencing_token_of` has the token of each.
///
/// # Kinds
///
/// `kind = read` admits other readers and excludes writers; `kind = write` excludes all. They are two sides of one lock
/// of that name. A plain lock of the same name cannot be beside it: while one of them is held, the other fails with
/// `KeyTaken`, without waiting, and in its body with `WouldDeadlock`. So use one of the two for a name, everywhere. With
/// `prefer_writers = true` readers yield while a call waits to write (see `RwLock::prefer_writers`). `kind = fair` serves
/// in order of arrival across processes, and `kind = fenced` shares its fencing tokens with Redisson's fenced lock.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// #[distributed_lock(key = "page:{id}", kind = read, lock = client)]
/// async fn show(client: &LockClient, id: u64) -> Result<String, Error> {
///     Ok("as it is".into())
/// }
///
/// #[distributed_lock(key = "page:{id}", kind = write, lock = client)]
/// async fn edit(client: &LockClient, id: u64) -> Result<(), Error> {
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # let client = LockClient::memory();
/// # show(&client, 1).await?;
/// # edit(&client, 1).await
/// # }
/// ```
///
/// # Errors
///
/// **The body never runs without the lock.** If it is not available, the function returns an error of its own error
/// type, which needs `From<dlock::Error>`: `dlock::Error` itself, `anyhow::Error`, `Box<dyn Error>`, an enum with such
/// a variant. With the feature `axum`, `dlock::Error` is a response.
///
/// `on_error` names a function that creates the return value for any failure, for functions that return no `Result` or
/// a `Result` with another error. `on_busy` names one only for the case that another caller holds the lock,
/// of this client or another one (`dlock::Error::is_busy`; a refusal by `max_waiters` is no such case), and takes precedence over
/// `on_error`. Both receive the `dlock::Error`.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// #[derive(Debug)]
/// enum Outcome {
///     Done,
///     Skipped,
///     Failed(String),
/// }
///
/// fn skipped(_: Error) -> Outcome {
///     Outcome::Skipped
/// }
///
/// fn failed(error: Error) -> Outcome {
///     Outcome::Failed(error.to_string())
/// }
///
/// #[distributed_lock(key = "cleanup", lock = client, wait = try, on_busy = skipped, on_error = failed)]
/// async fn clean_up(client: &LockClient) -> Outcome {
///     Outcome::Done
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # let client = LockClient::memory();
/// assert!(matches!(clean_up(&client).await, Outcome::Done));
/// let elsewhere = client.lock("cleanup").acquire().await?;
/// assert!(matches!(clean_up(&client).await, Outcome::Skipped));
/// # drop(elsewhere);
/// # Ok(()) }
/// ```
///
/// If the release fails after the body is done, the return value does not change: the failure is logged, and the lock
/// ends with its lease.
///
/// Under an `IdempotencyLayer` of dlock-tower, a handler that answers with the error of a locked function whose body
/// did not begin releases the request's idempotency key (feature `axum` of dlock). Functions with a reference, a number
/// or `self` among their arguments cannot be handlers, and their errors release nothing. **Any other locked function
/// that a handler calls after an effect counts as the handler**: its refusal releases the key, and a retry repeats the
/// effect. Such a handler must return `dlock_tower::idempotency::Outcome::Final` with the error.
///
/// # Losing the lock
///
/// When the lock is lost while the body runs (the store was unreachable for a whole lease, the lock was forced open, a
/// fixed lease or `max_hold` is over), the body is dropped where it stands, as on cancellation, and the function
/// returns `Error::Lost`. With `on_lost = ignore` the body continues, and checks with `dlock::current()` whether it
/// still holds the lock:
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// async fn copy_one(_file: u32) {}
///
/// #[distributed_lock(key = "copy", lock = client, on_lost = ignore)]
/// async fn copy(client: &LockClient) -> Result<u32, Error> {
///     let held = dlock::current().expect("the body runs in the lock's frame");
///     for n in 0..100 {
///         if !held.is_held() {
///             return Ok(n);
///         }
///         copy_one(n).await;
///     }
///     Ok(100)
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # assert_eq!(copy(&LockClient::memory()).await?, 100);
/// # Ok(()) }
/// ```
///
/// # Re-entry
///
/// A locked function that is called inside another one with the same key enters at once, if both use the same client or
/// clones of it. The lease is that of the outermost one (`lease`, `fixed_lease`, `max_hold`, `min_hold`); what happens to
/// the body of each on a loss or an error, its own options say. Branches that run side by side inside (`join!`, `select!`) exclude each other. A spawned
/// task does not inherit the lock: if the body awaits a task that takes the same key, it waits for itself, until `wait`
/// ends it.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// struct Stock {
///     locks: LockClient,
///     count: std::sync::atomic::AtomicU32,
/// }
///
/// impl Stock {
///     #[distributed_lock(key = "stock:{item}", lock = self.locks)]
///     async fn swap(&self, item: u64) -> Result<(), Error> {
///         self.take(item).await?; // enters
///         self.take(item).await
///     }
///
///     #[distributed_lock(key = "stock:{item}", lock = self.locks, wait = "1s")]
///     async fn take(&self, item: u64) -> Result<(), Error> {
/// #         self.count.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
///         Ok(())
///     }
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # Stock { locks: LockClient::memory(), count: 2.into() }.swap(7).await
/// # }
/// ```
///
/// # Cancel safety
///
/// The future may be dropped at any point. While it waits, it leaves no trace on the store; while the body runs, the
/// body is dropped and then the lock is released in the background.
///
/// A closure in another thread is not dropped with the body: that of `spawn_blocking`, or of `interact` of deadpool, runs
/// on without the lock. Acquire the lock once more in the body, which re-enters, and move that guard into the closure. The
/// lock is released with its last guard. `dlock::current()` is `None` in the closure.
///
/// ```
/// use dlock::{Error, LockClient, distributed_lock};
///
/// fn save(_token: u64) {}
///
/// #[distributed_lock(key = "report", lock = client)]
/// async fn report(client: &LockClient) -> Result<(), Error> {
///     let guard = client.lock("report").acquire().await?;
///     let written = tokio::task::spawn_blocking(move || {
///         save(guard.fencing_token());
///         drop(guard); // not before
///     });
///     written.await.expect("the closure does not panic");
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # report(&LockClient::memory()).await
/// # }
/// ```
///
/// # Where it can be used
///
/// On every async function, with every receiver, in `impl`s and in `impl`s of traits; under `#[async_trait]`; together
/// with `#[instrument]` and `#[debug_handler]` in either order. The span of an `#[instrument]` below this attribute
/// covers the wait for the lock, that of one above it only the body (under `#[async_trait]` both cover it). Attributes
/// that remove the `async`, such as `#[tokio::main]`, go below this one.
///
/// The return value is kept while the lock is released, so a function that returns something that is not `Send` has a
/// future that is not `Send`.
#[proc_macro_attribute]
pub fn distributed_lock(options: TokenStream, item: TokenStream) -> TokenStream {
    expand::attribute(options.into(), item.into()).into()
}

/// Runs an async function once for each key, in a whole fleet: the first call runs the body, and each later call gets
/// the kept result. See [`Once`](struct.Once.html) for what is promised.
///
/// ```
/// use dlock::{LockClient, NotRun, once};
///
/// #[once(key = "welcome:{user}", keep = "30d", client = client)]
/// async fn welcome(client: &LockClient, user: u64) -> Result<String, NotRun> {
///     Ok(format!("sent to {user}"))
/// }
///
/// #[tokio::main]
/// async fn main() -> Result<(), NotRun> {
///     let client = LockClient::connect("memory://").await.map_err(NotRun::from)?;
///     assert_eq!(welcome(&client, 7).await?, "sent to 7");
///     assert_eq!(welcome(&client, 7).await?, "sent to 7"); // from the store; nothing was sent
///     Ok(())
/// }
/// ```
///
/// The function returns a `Result` whose value is kept as JSON (so `Some(())` comes back as `None`, see
/// [`Once::run`](struct.Once.html#method.run)), and whose error type has `From<dlock::NotRun>`: for a call without a
/// result, because another process does the work, or the store failed. The error of the body is returned unchanged, and
/// the next call runs it again.
///
/// | option | default | meaning |
/// |---|---|---|
/// | `key = …`, `key(…)` | required | the name of the work, as in `#[distributed_lock]`: different work needs different names, whatever texts users choose |
/// | `client = expr` | the client of `dlock::default_client` | which `LockClient` |
/// | `keep = "30d"` | 1 day | how long the result is kept |
/// | `lease = "1m"` | the client's, 30 s | how long a crashed attempt blocks the next one |
/// | `wait = "3s"` | not at all | how long to wait for the result of another process |
/// | `attempts = 3` | no limit | how many attempts may fail before the failure is kept |
/// | `crate = path` | `::dlock` | the `dlock` crate, if it has another name |
///
/// `dlock::OnceClaim::current()` returns the claim in the body: the fencing token for what it writes, and the number of the
/// attempt. The attribute has no slots of time (`every`, `slot`), no `on_failure` and `on_orphan` beyond `attempts` (with
/// `attempts = 1` the body runs at most once, also if its process crashes), and does not tell a result of this call from an
/// earlier one: for these, call `client.once(…)` in a function without the attribute. There is no `on_error` either: the
/// function's `From<dlock::NotRun>` makes the error.
///
/// ```
/// use dlock::{LockClient, NotRun, OnceClaim, once};
///
/// async fn save(_token: u64) -> Result<(), NotRun> {
///     Ok(()) // where the resource refuses a smaller token
/// }
///
/// #[once(key = "close:{month}", client = client)]
/// async fn close(client: &LockClient, month: u32) -> Result<(), NotRun> {
///     let claim = OnceClaim::current().expect("the body runs under its claim");
///     save(claim.fencing_token()).await
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), NotRun> {
/// # close(&LockClient::memory(), 7).await
/// # }
/// ```
///
/// The arguments that the body names are moved into it; the others are dropped when the function returns. The function
/// keeps its signature.
///
/// It cannot be used under `#[async_trait]`: put it on a separate `async fn`, and call that from the method. Attributes
/// that remove the `async` go below it.
///
/// # Cancel safety
///
/// As `Once::run`: if it is dropped during the body, the claim is given up at once, and the next call runs the body
/// again.
#[proc_macro_attribute]
pub fn once(options: TokenStream, item: TokenStream) -> TokenStream {
    once::attribute(options.into(), item.into()).into()
}
