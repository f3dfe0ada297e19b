//! A payment that happens once and never concurrently with another one: `cargo run -p dlock-examples
//! --features postgres --bin payment -- --help`.
//!
//! Three things commit in one transaction of PostgreSQL: the payment itself, the record under its idempotency key,
//! and the lock of its account. So whatever happens (the process dies at any step, or stalls for longer than its
//! lease), either all of it happened or nothing, and no other process changed the account in between. `--stall`
//! proves it: the process stalls with its transaction open and its lease over, and another payment from the same
//! account waits for it.
//!
//! | file | |
//! |---|---|
//! | `args.rs` | the command line |
//! | `bank.rs` | the accounts, and the transaction |

mod args;
mod bank;

use std::process::ExitCode;

use clap::Parser;

use crate::args::Args;
use crate::bank::{Bank, Outcome};

// On one thread: what stalls the payment stalls the renewal of its lock, too.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("payment: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut bank = Bank::open(&args.url, args.lease).await?;
    if let Some(balance) = args.open {
        bank.create(&args.account, balance).await?;
    }
    let outcome = bank.pay(&args).await?;
    Ok(match outcome {
        Outcome::Paid(receipt) => {
            println!("{receipt}");
            ExitCode::SUCCESS
        }
        Outcome::Before(receipt) => {
            println!("{receipt} (before)");
            ExitCode::SUCCESS
        }
        Outcome::Refused(why) => {
            println!("not paid: {why}");
            ExitCode::from(2)
        }
    })
}
