//! A small shop on dlock: `cargo run -p dlock-examples --bin checkout`, and `--help` for what it can do.
//!
//! | file | |
//! |---|---|
//! | `service.rs` | what the shop does, with the lock as an attribute on a function |
//! | `routes.rs` | the HTTP side, with the lock and the idempotency keys as layers on routes |
//! | `page.rs`, `page.html` | the page at `/`, and what is shown on it live |
//! | `demo.rs` | what goes wrong otherwise, with `--demo` |
//! | `board/` | sales and replays: the notes from which the page is made |
//! | `store/` | stock and accounts, in memory or on Redis, with the check of the fencing token |
//! | `health.rs` | whether this copy is alive, and takes requests |
//! | `metrics.rs` | what is counted, for Prometheus |
//! | `error.rs` | what is answered when something goes wrong |
//! | `server.rs` | the port, the signals, the end |

mod args;
mod board;
mod demo;
mod error;
mod health;
mod metrics;
mod page;
mod routes;
mod server;
mod service;
mod store;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use dlock::LockClient;
use dlock_tower::IdempotencyLayer;
use dlock_tower::console::Console;
use dlock_tower::idempotency::{IdempotencyHandle, caller};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::args::Args;
use crate::board::Board;
use crate::health::Health;
use crate::routes::Keys;
use crate::server::{Ends, Signals};
use crate::service::Shop;
use crate::store::Store;

/// How long interrupted requests have to release their locks themselves, before the client releases them.
const LAST_CALL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(color)
        .with_target(false)
        .init();

    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever a server that is no Redis has said.
            let error: Vec<&str> = error.split_whitespace().collect();
            eprintln!("checkout: {}", error.join(" "));
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    let signals = Signals::new().map_err(|error| format!("cannot wait for signals: {error}"))?;
    let metrics = args.metrics.then(metrics::install).transpose()?;
    let listener = server::listen(&args.listen).await?;
    let store = Store::open(&args.store)
        .await
        .map_err(|error| format!("cannot open --store: {error}"))?;
    let locks = open_locks(&args).await?;
    let keys = open_keys(&locks)?;
    announce(&args, &store);

    let address = listener
        .local_addr()
        .map_err(|error| format!("cannot tell the port: {error}"))?;
    let (shared, locked) = (store.is_shared(), !args.without_locks);
    let board = Board::new(address.to_string(), locked);
    let shop = Shop::new(locks.clone(), store, board.clone(), args.think, locked);
    let shop = Arc::new(shop);
    let look = shared.then(|| {
        let shop = shop.clone();
        tokio::spawn(async move { shop.keep_up(page::SKUS).await })
    });

    tracing::info!("listening on http://{address}");
    tracing::info!("open that in a browser to see what is going on");
    let health = Health::new(locks.clone());
    let mut router = routes::router(shop, &keys, args.demo)
        .merge(health.router())
        // The console only reads. A public service must add its authentication around it.
        .nest_service("/console", Console::new(locks.clone()).router());
    if let Some(metrics) = metrics {
        router = router.merge(metrics::router(metrics));
    }
    let ends = Ends {
        leaves: || health.leaves(),
        leave_after: args.leave_after,
        ending: || {
            locks.drain();
            board.close();
        },
    };
    let served = server::serve(listener, router, signals, ends).await;
    if let Some(look) = look {
        look.abort();
    }
    let left = *served.as_ref().unwrap_or(&Duration::ZERO);
    end(&locks, &keys.handle(), left).await;
    match served {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("the server ended: {error}")),
    }
}

async fn open_locks(args: &Args) -> Result<LockClient, String> {
    // No lock is requested then, so there is no need to wait for the named server.
    let url = if args.without_locks {
        "memory://"
    } else {
        &args.locks
    };
    let client = LockClient::builder()
        .url(url)
        .lease(args.lease)
        .service_name("checkout")
        .presence(true)
        .build()
        .await;
    client.map_err(|error| match error {
        dlock::Error::InvalidOption {
            option: "lease",
            reason,
            ..
        } => {
            format!(
                "--lease cannot be {}: {reason}",
                humantime::format_duration(args.lease)
            )
        }
        error => format!("cannot open --locks: {error}"),
    })
}

/// The records of requests that came with a key, where the locks are.
fn open_keys(locks: &LockClient) -> Result<Keys, String> {
    let records = locks
        .records()
        .map_err(|error| format!("cannot keep idempotency keys on --locks: {error}"))?;
    // There is no sign-in here, so all callers are one: a client that knows a key and what was asked under it is shown
    // the answer. A shop with customers names them: `caller::extension(|user: &User| user.id)`.
    let keys = IdempotencyLayer::new(records, caller::public())
        .namespace("checkout")
        // After a crash a retry can take over as soon as another sale could.
        .lease(locks.lease());
    keys.check()
        .map_err(|error| format!("--lease does not fit the idempotency keys: {error}"))?;
    Ok(keys)
}

/// Warns at the start about options that could surprise later.
fn announce(args: &Args, store: &Store) {
    let shared_locks = !args.locks.starts_with("memory:");
    if args.without_locks {
        tracing::warn!("WITHOUT LOCKS: this will sell more than there is");
    } else if shared_locks {
        tracing::info!("locks shared with other copies, lease {:?}", args.lease);
    } else {
        tracing::info!(
            "locks in memory: other copies do not see them; share them with --locks redis://localhost"
        );
    }
    if store.is_shared() {
        tracing::info!(
            "stock on {store}, thinking for {:?} between read and write",
            args.think
        );
    } else {
        tracing::info!(
            "stock in memory, thinking for {:?} between read and write",
            args.think
        );
    }
    if args.demo {
        tracing::warn!(
            "DEMO: the page has buttons that sell \"{}\" without locks and keys",
            demo::SKU
        );
    }
    if store.is_shared() && !shared_locks && !args.without_locks {
        tracing::warn!("the stock is shared and the locks are not: give --locks the URL of --store as well");
    }
}

/// Ends handlers that run on for disconnected clients, which have what is left of the time, and releases all locks.
async fn end(locks: &LockClient, keys: &IdempotencyHandle, left: Duration) {
    let unfinished = keys.shutdown(left.max(LAST_CALL)).await;
    if unfinished > 0 {
        tracing::warn!(
            "requests with a key that were cut off, or whose answers were not stored: {unfinished}"
        );
    }
    let report = locks.shutdown(LAST_CALL).await;
    match (report.lost, report.unconfirmed) {
        (0, 0) => tracing::info!("nothing held, good-bye"),
        (lost, 0) => tracing::warn!("locks taken from work that was cut off: {lost}; nothing held, good-bye"),
        (_, unconfirmed) => tracing::warn!(
            "releases that the lock store did not confirm: {unconfirmed}; the leases end those locks, good-bye"
        ),
    }
}
