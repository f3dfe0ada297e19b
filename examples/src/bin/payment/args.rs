//! The command line.

use std::time::Duration;

use clap::Parser;

/// Pay from an account: once for each idempotency key, and one payment at a time.
#[derive(Debug, Parser)]
#[command(version, about, long_about = None)]
pub(crate) struct Args {
    /// The database, as in postgres://user@localhost/bank. It gets the tables that it lacks.
    #[arg(long, env = "BANK_URL", hide_env_values = true)]
    pub(crate) url: String,
    /// Makes the account with this balance, if it is not there.
    #[arg(long, value_name = "BALANCE")]
    pub(crate) open: Option<i64>,
    /// The account.
    #[arg(long, default_value = "1")]
    pub(crate) account: String,
    /// How much to pay.
    #[arg(long, default_value_t = 5)]
    pub(crate) amount: i64,
    /// The idempotency key: letters, digits, - and _. A payment under the same key happens once.
    #[arg(long)]
    pub(crate) key: String,
    /// The lease of the lock and of the claim.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    pub(crate) lease: Duration,
    /// Stand still for so long before the commit, as a process does that is stopped: nothing is renewed meanwhile.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) stall: Option<Duration>,
}
