//! Buyers for the checkout: `cargo run -p dlock-examples --bin buyers`.
//!
//! Sets the stock of an article, starts more buyers than there are pieces, and compares the answers to the buyers
//! with the store. With locks nothing is sold twice; with `checkout --without-locks` the two sides do not match.

mod shop;
mod tally;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use hyper::Method;
use serde_json::json;

use crate::shop::Shop;
use crate::tally::Tally;

/// Lets many buyers at a few copies of the checkout, and counts.
///
/// Ends with 0 when nothing was oversold, no buyer bought twice, the store has recorded each sale that a buyer was told,
/// and no fencing token was given twice; with 1 otherwise; with 2 when no shop was reachable.
#[derive(Debug, Parser)]
#[command(
    name = "buyers",
    after_help = "Example:\n  buyers --url http://127.0.0.1:3000 --url http://127.0.0.1:3001"
)]
struct Args {
    /// A copy of the checkout; once for each, and buyers take them in turn
    #[arg(long = "url", value_name = "URL", default_value = "http://127.0.0.1:3000")]
    urls: Vec<String>,
    /// How many buyers there are; each buys one piece
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    buyers: u32,
    /// How many of them are at it at the same time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    at_a_time: u32,
    /// How many pieces there are
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    stock: u32,
    /// Each buyer sends its purchase this often under one idempotency key, as after lost answers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    retry_each: Option<u32>,
    /// What is sold: letters, digits, `-`, `_`, `.`
    #[arg(long, default_value = "sneaker", value_parser = sku)]
    sku: String,
}

fn sku(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || !text.chars().all(plain) {
        return Err("it is made of letters, digits, '-', '_' and '.'".to_owned());
    }
    Ok(text.to_owned())
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(args).await {
        Ok(tally) => {
            // A reader that closes the pipe early has seen enough.
            let _ = writeln!(std::io::stdout(), "{tally}");
            if tally.is_bad() {
                ExitCode::FAILURE
            } else {
                ExitCode::SUCCESS
            }
        }
        Err(error) => {
            eprintln!("buyers: {error}");
            ExitCode::from(2)
        }
    }
}

async fn run(args: Args) -> Result<Tally, String> {
    let shop = Arc::new(Shop::new(&args)?);
    shop.ask(Method::PUT, "", Some(json!({ "stock": args.stock })), None)
        .await?
        .expect(200, "set the stock")?;

    let started = Instant::now();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let next = Arc::new(AtomicUsize::new(0));
    let (buyers, retry_each) = (args.buyers as usize, args.retry_each);
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..args.at_a_time.min(args.buyers) {
        let (shop, answers, next) = (shop.clone(), answers.clone(), next.clone());
        crowd.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < buyers {
                let told = shop.buy(retry_each).await;
                lock(&answers).push(told);
            }
        });
    }
    show_progress(&mut crowd, buyers, || lock(&answers).len()).await;
    let took = started.elapsed();

    let item = shop.ask(Method::GET, "", None, None).await?;
    let item = item.expect(200, "look at the stock")?;
    let answers = std::mem::take(&mut *lock(&answers));
    Ok(Tally::new(args, took, answers, &item))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the crowd, and shows the progress at a terminal.
async fn show_progress(crowd: &mut tokio::task::JoinSet<()>, all: usize, served: impl Fn() -> usize) {
    let watched = std::io::stderr().is_terminal();
    let mut ticks = tokio::time::interval(Duration::from_millis(200));
    loop {
        tokio::select! {
            done = crowd.join_next() => if done.is_none() { break },
            _ = ticks.tick(), if watched => {
                eprint!("\r{} of {all} buyers served", served());
                let _ = std::io::stderr().flush();
            }
        }
    }
    if watched {
        eprint!("\r\x1b[K");
    }
}
