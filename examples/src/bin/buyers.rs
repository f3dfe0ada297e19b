//! Buyers for the checkout: `cargo run -p dlock-examples --bin buyers`.
//!
//! Sets the stock of an article, lets more buyers at it than there are pieces, and counts what they were
//! told and what the store says. With locks nothing is sold twice; against `checkout --without-locks` the
//! two sides do not match.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// How long a buyer waits for an answer: longer than the checkout lets it wait for a lock.
const PATIENCE: Duration = Duration::from_secs(120);
/// The largest answer that is read.
const LARGEST: usize = 64 * 1024;

/// Lets many buyers at a few copies of the checkout, and counts.
///
/// Ends with 0 when nothing was sold that was not there, with 1 when something was, with 2 when there was
/// nobody to ask.
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
            // Who closes the pipe early has seen enough.
            let _ = writeln!(std::io::stdout(), "{tally}");
            if tally.oversold() > 0 {
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
    shop.ask(Method::PUT, "", Some(json!({ "stock": args.stock })))
        .await?
        .expect(200, "set the stock")?;

    let started = Instant::now();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let next = Arc::new(AtomicUsize::new(0));
    let buyers = args.buyers as usize;
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..args.at_a_time.min(args.buyers) {
        let (shop, answers, next) = (shop.clone(), answers.clone(), next.clone());
        crowd.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < buyers {
                let answer = shop
                    .ask(Method::POST, "/buy", Some(json!({ "quantity": 1 })))
                    .await;
                lock(&answers).push(answer);
            }
        });
    }
    show_progress(&mut crowd, buyers, || lock(&answers).len()).await;
    let took = started.elapsed();

    let item = shop.ask(Method::GET, "", None).await?;
    let item = item.expect(200, "look at the stock")?;
    let answers = std::mem::take(&mut *lock(&answers));
    Ok(Tally::new(args, took, answers, &item))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the crowd, and tells people at a terminal how far it is.
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

/// The copies of the checkout.
struct Shop {
    client: Client<HttpConnector, Full<Bytes>>,
    items: Vec<String>,
    turn: AtomicUsize,
}

/// What a copy answered.
struct Answer {
    status: u16,
    body: Value,
}

impl Answer {
    fn expect(self, status: u16, what: &str) -> Result<Value, String> {
        if self.status == status {
            return Ok(self.body);
        }
        let detail = self.body["detail"].as_str().unwrap_or("is this a checkout?");
        Err(format!("cannot {what}: {}, {detail}", self.status))
    }
}

impl Shop {
    fn new(args: &Args) -> Result<Shop, String> {
        let mut items = Vec::new();
        for url in &args.urls {
            let item = format!("{}/items/{}", url.trim_end_matches('/'), args.sku);
            let uri: Uri = item
                .parse()
                .map_err(|_| format!("{url} is no URL, as in http://127.0.0.1:3000"))?;
            if uri.scheme_str() != Some("http") || uri.host().is_none() {
                return Err(format!("{url} does not begin with http:// and a host"));
            }
            items.push(item);
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(2)));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Shop {
            client,
            items,
            turn: AtomicUsize::new(0),
        })
    }

    /// Asks the next copy. One that takes no connection has not seen the request, so the one after it is
    /// asked; one that falls silent may have done what was asked, and nobody is asked again.
    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<Answer, String> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut refused = String::new();
        for n in 0..self.items.len() {
            let url = format!("{}{path}", self.items[(turn + n) % self.items.len()]);
            let mut request = Request::builder().method(method.clone()).uri(&url);
            if body.is_some() {
                request = request.header("content-type", "application/json");
            }
            let bytes = body.as_ref().map(Value::to_string).unwrap_or_default();
            let request = request
                .body(Full::new(Bytes::from(bytes)))
                .map_err(|error| format!("cannot ask {url}: {error}"))?;
            let answer = async {
                let response = self.client.request(request).await.map_err(Broken::Request)?;
                let status = response.status().as_u16();
                let body = Limited::new(response.into_body(), LARGEST).collect().await;
                let body = body.map_err(|_| Broken::HalfWay)?.to_bytes();
                Ok(Answer {
                    status,
                    body: serde_json::from_slice(&body).unwrap_or_default(),
                })
            };
            match tokio::time::timeout(PATIENCE, answer).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Broken::Request(error))) if error.is_connect() => {
                    refused = format!(
                        "no checkout answers at {url}: start one with cargo run -p dlock-examples --bin checkout"
                    );
                }
                Ok(Err(_)) => return Err(format!("{url} broke off")),
                Err(_) => return Err(format!("{url} did not answer in {PATIENCE:?}")),
            }
        }
        Err(refused)
    }
}

enum Broken {
    Request(hyper_util::client::legacy::Error),
    HalfWay,
}

/// What came of it.
struct Tally {
    args: Args,
    took: Duration,
    sold: usize,
    sold_out: usize,
    unanswered: usize,
    others: BTreeMap<String, usize>,
    tokens: Vec<u64>,
    store_sold: u64,
    store_left: u64,
}

impl Tally {
    fn new(args: Args, took: Duration, answers: Vec<Result<Answer, String>>, item: &Value) -> Tally {
        let mut tally = Tally {
            args,
            took,
            sold: 0,
            sold_out: 0,
            unanswered: 0,
            others: BTreeMap::new(),
            tokens: Vec::new(),
            store_sold: item["sold"].as_u64().unwrap_or_default(),
            store_left: item["stock"].as_u64().unwrap_or_default(),
        };
        for answer in answers {
            match answer {
                Ok(Answer { status: 201, body }) => {
                    tally.sold += 1;
                    tally.tokens.extend(body["fencing_token"].as_u64());
                }
                Ok(Answer { status: 409, .. }) => tally.sold_out += 1,
                Ok(Answer { status, body }) => {
                    let kind = body["type"].as_str().unwrap_or("without a type");
                    *tally.others.entry(format!("{status} {kind}")).or_default() += 1;
                }
                Err(_) => tally.unanswered += 1,
            }
        }
        tally
    }

    fn distinct_tokens(&self) -> usize {
        self.tokens.iter().collect::<HashSet<_>>().len()
    }

    fn oversold(&self) -> usize {
        self.sold.saturating_sub(self.args.stock as usize)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Args {
            urls,
            buyers,
            at_a_time,
            stock,
            sku,
            ..
        } = &self.args;
        let copies = if urls.len() == 1 {
            "1 copy".to_owned()
        } else {
            format!("{} copies", urls.len())
        };
        writeln!(
            f,
            "{buyers} buyers, {at_a_time} at a time, {stock} pieces of \"{sku}\", {copies}, {:.1?}",
            self.took
        )?;
        writeln!(f, "  told \"sold\"       {:>5}", self.sold)?;
        writeln!(f, "  told \"sold out\"   {:>5}", self.sold_out)?;
        for (other, count) in &self.others {
            writeln!(f, "  told otherwise    {count:>5}  {other}")?;
        }
        if self.unanswered > 0 {
            writeln!(
                f,
                "  told nothing      {:>5}  their copy broke off; they may have bought or not",
                self.unanswered
            )?;
        }
        writeln!(
            f,
            "  sold by the store {:>5}  {} left",
            self.store_sold, self.store_left
        )?;
        match self.tokens.len() {
            0 => writeln!(f, "  fencing tokens     none  (without locks there are none)")?,
            all => {
                let distinct = self.distinct_tokens();
                let say = if distinct == all {
                    "no token twice"
                } else {
                    "SOME TOKENS TWICE"
                };
                writeln!(f, "  fencing tokens    {distinct:>5}  {say}")?;
            }
        }
        match self.oversold() {
            0 => f.write_str("not one oversold"),
            over => write!(f, "OVERSOLD by {over}"),
        }
    }
}
