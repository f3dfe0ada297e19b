//! The command line.

use std::time::Duration;

use clap::Parser;

const EXAMPLES: &str = "\
Examples:
  checkout
      in memory, on 127.0.0.1:3000
  checkout --locks redis://localhost --store redis://localhost --listen 127.0.0.1:3001
      one of several copies that share their locks and their stock
  checkout --demo
      with buttons on its page, http://localhost:3000, for what goes wrong otherwise
  checkout --without-locks --locks redis://localhost --store redis://localhost
      the same without locks: it sells more than there is

Try it:
  curl -X PUT  localhost:3000/items/sneaker       -H 'content-type: application/json' -d '{\"stock\": 100}'
  curl -X POST localhost:3000/items/sneaker/buy   -H 'content-type: application/json' -d '{\"quantity\": 1}'
  curl         localhost:3000/items/sneaker
  curl -X POST localhost:3000/accounts/ada/charge -H 'content-type: application/json' -d '{\"amount\": 5}'
  curl         'localhost:3000/lock?hold_ms=1000'
  curl         localhost:3000/live                # and /ready, for an orchestrator
  curl -X POST localhost:3000/items/sneaker/buy   -H 'content-type: application/json' -d '{\"quantity\": 1}' \\
       -H 'Idempotency-Key: \"cart-42\"'   # as often as you like: it is one order

Or let 200 buyers at it: cargo run -p dlock-examples --bin buyers
Or open http://localhost:3000 in a browser: the page has the buttons and shows the sales live; /console has the locks.

Logs go to stdout, as RUST_LOG says (info by default). Ctrl-C or SIGTERM ends it: no lock is acquired any more but by
requests that hold one, requests under way have 5 s to finish, and all locks are released.";

/// A shop that must not sell more than it has: a service on dlock.
///
/// A sale reads the stock, thinks, and writes the new one. The lock `item:SKU` makes sure that no other sale of it runs
/// at the same time, in this process or in another one; its fencing token makes sure that a copy which was stopped in
/// between cannot write later.
#[derive(Debug, Parser)]
#[command(name = "checkout", version, after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where to listen, host and port; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:3000")]
    pub(crate) listen: String,

    /// Where the locks are: memory:// (of this process), redis://user:password@host:6379/0, …
    #[arg(
        long,
        env = "CHECKOUT_LOCKS",
        hide_env_values = true,
        value_name = "URL",
        default_value = "memory://"
    )]
    pub(crate) locks: String,

    /// Where stock and accounts are: memory:// (of this process), redis://…; as a rule the same as --locks
    #[arg(
        long,
        env = "CHECKOUT_STORE",
        hide_env_values = true,
        value_name = "URL",
        default_value = "memory://"
    )]
    pub(crate) store: String,

    /// The lease of the locks, renewed while they are held: after a crash, sales go on within it
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) lease: Duration,

    /// The time between reading the stock and writing it, at most 1min
    #[arg(long, value_name = "DURATION", default_value = "5ms", value_parser = think)]
    pub(crate) think: Duration,

    /// For how long to serve on after SIGTERM while GET /ready answers 503, until nobody sends requests here any more
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    pub(crate) leave_after: Duration,

    /// Serve GET /metrics, in Prometheus' text format
    #[arg(long)]
    pub(crate) metrics: bool,

    /// Take no locks and check no tokens, to see what happens; every `fencing_token` is null then, and
    /// idempotency keys are known to this process only
    #[arg(long)]
    pub(crate) without_locks: bool,

    /// Give the page buttons that go wrong, on an article of their own: without locks, and without keys
    #[arg(long)]
    pub(crate) demo: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; as in 250ms, 10s or 2min"))
}

fn think(text: &str) -> Result<Duration, String> {
    let think = duration(text)?;
    if think > Duration::from_secs(60) {
        Err("more than 1min".to_owned())
    } else {
        Ok(think)
    }
}
