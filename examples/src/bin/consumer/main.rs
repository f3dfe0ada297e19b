//! A consumer of a Redis stream: `cargo run -p dlock-examples --bin consumer`, and `--help` for what it can do.
//!
//! It shows a [`TaskOnceLayer`] between a queue that delivers a message **at least once** and an effect that must
//! happen **exactly once**, while consumers are killed at any point. Three things work together, and each of them is
//! needed:
//!
//! | | what it is for |
//! |---|---|
//! | `stream.rs`: `XREADGROUP`, `XAUTOCLAIM`, `XACK` | no message is lost: one that was not acknowledged is delivered again |
//! | the layer, by the message's id | a message that is delivered again while it is worked on is left to that attempt; one that was done gets its result, without work |
//! | `ledger.rs`: an effect that a repetition does not double | a consumer that was killed between the effect and the layer's record |
//!
//! Only messages that are done, or that no attempt may follow, are acknowledged. All other messages stay pending and
//! are delivered again: when [`TaskOnceError::retry_after`] says, or after `--idle`.

mod connection;
mod ledger;
mod stream;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use dlock::{LockClient, LockKey, OnFailure};
use dlock_tower::task::{Done, TaskOnceError, TaskOnceLayer};
use redis::RedisResult;
use tokio::task::JoinSet;
use tower::{Layer, Service, ServiceExt, service_fn};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::ledger::Ledger;
use crate::stream::{Message, Stream};

const EXAMPLES: &str = "\
Examples:
  consumer --produce 100        adds 100 payments to the stream, and ends
  consumer --name one           consumes; start it on several machines, and kill it as you like
  redis-cli HGETALL ledger:payments        what each message has effected
  redis-cli GET balance:payments           their sum";

/// Consumes a Redis stream of payments, each once.
#[derive(Debug, Parser)]
#[command(name = "consumer", version, after_help = EXAMPLES)]
struct Args {
    /// The server with the stream, the ledger and the claims
    #[arg(
        long,
        env = "DLOCK_URL",
        value_name = "URL",
        default_value = "redis://localhost"
    )]
    url: String,

    /// The stream. The consumers of a stream are one group
    #[arg(long, default_value = "payments")]
    stream: String,

    /// The name of this consumer in the group
    #[arg(long, default_value = "consumer")]
    name: String,

    /// Adds so many payments to the stream and ends
    #[arg(long, value_name = "COUNT")]
    produce: Option<u64>,

    /// Messages that were not acknowledged for this long, at least 100ms, are delivered to another consumer
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = idle)]
    idle: Duration,

    /// After a crash, another consumer works on a message after this time at the latest
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    lease: Duration,

    /// How long a payment takes
    #[arg(long, value_name = "DURATION", default_value = "100ms", value_parser = humantime::parse_duration)]
    takes: Duration,

    /// Messages at a time in this process
    #[arg(long, default_value_t = 4)]
    at_most: usize,
}

/// With less, a consumer would look for messages of others all the time, and never for new ones.
fn idle(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(idle) if idle < Duration::from_millis(100) => Err("it is less than 100ms".to_owned()),
        parsed => parsed.map_err(|error| error.to_string()),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .init();
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("consumer: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let stream = Stream::open(&args.url, &args.stream, &args.name, args.idle).await?;
    if let Some(count) = args.produce {
        return Ok(stream.produce(count).await?);
    }
    let client = LockClient::builder().url(&args.url).build().await?;
    let ledger = Ledger::open(&args.url, &args.stream).await?;

    let group = args.stream.clone();
    let layer = TaskOnceLayer::new(client.clone(), move |message: &Message| -> LockKey {
        format!("{group}:{}", message.id).into()
    })?;
    let layer = layer
        .lease(args.lease)
        // A message that kills each consumer, or always fails, is finally put aside.
        .on_failure(OnFailure::AtMost(50))
        .tell_claim(|message, claim| message.claim = Some(claim.clone()))
        .at_most_here(args.at_most);
    layer.check()?;
    let mut consumer = layer.layer(service_fn(move |message: Message| {
        let (ledger, takes) = (ledger.clone(), args.takes);
        async move { ledger.pay(message, takes).await }
    }));

    tracing::info!("consuming {} as {}", args.stream, args.name);
    let mut running = JoinSet::new();
    let end = end();
    tokio::pin!(end);
    loop {
        while running.try_join_next().is_some() {}
        // Fetches no message while all places are taken.
        let next = async {
            ServiceExt::<Message>::ready(&mut consumer)
                .await
                .map_err(|error| error.to_string())?;
            stream.next().await.map_err(|error| error.to_string())
        };
        let message = tokio::select! {
            () = &mut end => break,
            message = next => match message {
                Ok(message) => message,
                Err(error) => {
                    tracing::warn!("cannot read the stream: {error}");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    continue;
                }
            },
        };
        let (id, call, stream) = (message.id.clone(), consumer.call(message), stream.clone());
        running.spawn(async move {
            if let Err(error) = settle(&stream, &id, call.await).await {
                tracing::warn!("{id} not acknowledged: {error}");
            }
        });
    }
    // Work that is dropped here releases its claim at once, and its message is delivered to another consumer.
    running.shutdown().await;
    client.shutdown(Duration::from_secs(5)).await;
    tracing::info!("ended");
    Ok(())
}

/// Acknowledges a message that needs no further attempt.
async fn settle(
    stream: &Stream,
    id: &str,
    outcome: Result<Done<String>, TaskOnceError<String>>,
) -> RedisResult<()> {
    match outcome {
        Ok(Done::Earlier(receipt)) => {
            tracing::info!("{id} was done before: {receipt}");
            stream.acknowledge(id).await
        }
        Ok(done) => {
            tracing::info!("{id} done: {}", done.into_inner());
            stream.acknowledge(id).await
        }
        Err(error) if error.is_done() => stream.acknowledge(id).await,
        Err(error) if error.is_given_up() || error.is_permanent() => {
            tracing::error!("{id} is put aside: {error}");
            stream.put_aside(id).await
        }
        // It stays pending, and is delivered again.
        Err(error) => {
            tracing::info!("{id} not done: {error}");
            match error.retry_after() {
                Some(pause) => stream.deliver_after(id, pause).await,
                None => Ok(()),
            }
        }
    }
}

/// Waits until the consumer is asked to end.
async fn end() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
