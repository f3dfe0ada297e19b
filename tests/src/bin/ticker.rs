//! A machine of a fleet that does the same work once in each slot of time, and records the results: for the suite
//! `redis_slots`, which kills and stops it, and checks the records.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Parser, ValueEnum};
use dlock::{LockClient, Once, OnceClaim, OnceError, SlotReply};
use tokio::time::sleep;

const SEC: Duration = Duration::from_secs(1);
const KEY: &str = "ticks";

#[derive(Parser)]
struct Args {
    #[arg(long)]
    url: String,
    /// Where the machines write, a line for each event.
    #[arg(long)]
    log: PathBuf,
    /// Of this life of the machine.
    #[arg(long)]
    name: String,
    #[arg(long)]
    by: By,
    #[arg(long, value_parser = humantime::parse_duration)]
    period: Duration,
    /// The longest that the work takes.
    #[arg(long, value_parser = humantime::parse_duration)]
    takes: Duration,
    /// The beginning of the first slot that is named, in seconds since 1970, and how many there are.
    #[arg(long, num_args = 2, default_values_t = [0, 0])]
    named: Vec<u64>,
}

/// Where the ticks come from.
#[derive(Clone, Copy, ValueEnum)]
enum By {
    /// dlock's own loop.
    Loop,
    /// A scheduler that knows no slots, and whose ticks come at any moment.
    Ticks,
    /// A scheduler that knows for which time it fires, and fires again until that is done.
    Names,
}

/// What is kept of a slot: which, and by which attempt it was done.
type Done = (u64, u64);
type Outcome = Result<SlotReply<Done>, OnceError<std::convert::Infallible>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let log = Log {
        file: File::options().append(true).open(&args.log)?,
        name: args.name.clone(),
    };
    let client = LockClient::connect(&args.url).await?;
    // By the machine's clock, which nothing else goes by.
    log.say(&format!("up {}", micros(SystemTime::now())));
    let once = client.once(KEY);
    let work = async |claim: OnceClaim| log.work(&claim, args.takes).await;
    match args.by {
        By::Loop => {
            let mut slots = patient(once).every(args.period).slots();
            loop {
                log.reply(slots.next(work).await);
            }
        }
        By::Ticks => {
            let every = once.every(args.period);
            loop {
                sleep(args.period.mul_f64(0.5 + fastrand::f64())).await;
                log.reply(every.run(work).await);
            }
        }
        By::Names => {
            let once = patient(once);
            for nth in 0..args.named[1] {
                let slot = UNIX_EPOCH + SEC * u32::try_from(args.named[0] + nth)?;
                while !log.reply(once.clone().slot(slot).run(work).await) {}
            }
            log.say("end");
            Ok(())
        }
    }
}

/// Looks after a slot whose machine crashes.
fn patient(once: Once) -> Once {
    once.wait(3600 * SEC)
}

fn micros(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()
}

struct Log {
    file: File,
    name: String,
}

impl Log {
    /// One `write(2)`, so that the order of lines is that of events, and none is lost with its writer.
    fn say(&self, event: &str) {
        let line = format!("{} {event}\n", self.name);
        (&self.file)
            .write_all(line.as_bytes())
            .expect("the log can be written");
    }

    async fn work(&self, claim: &OnceClaim, takes: Duration) -> Result<Done, std::convert::Infallible> {
        let slot = micros(claim.slot().expect("it has slots")) as u64;
        let (token, attempt, skipped) = (claim.fencing_token(), claim.attempt(), claim.skipped());
        self.say(&format!("begin {slot} {token} {attempt} {skipped}"));
        sleep(takes.mul_f64(fastrand::f64())).await;
        self.say(&format!("did {slot} {token}"));
        Ok((slot, token))
    }

    /// Writes it down, and returns whether the slot needs no further tick.
    fn reply(&self, outcome: Outcome) -> bool {
        let (event, is_over) = match outcome {
            Ok(SlotReply::Ran((slot, token))) => (format!("ran {slot} {token}"), true),
            Ok(SlotReply::Earlier((slot, token))) => (format!("earlier {slot} {token}"), true),
            Ok(SlotReply::Unrecorded((slot, token), _)) => (format!("unrecorded {slot} {token}"), false),
            Ok(SlotReply::Elsewhere { slot, running, .. }) => {
                (format!("elsewhere {} {}", micros(slot), micros(running)), false)
            }
            Ok(SlotReply::Missed { slot, last, .. }) => (
                format!("missed {} {}", micros(slot), last.map_or(0, micros)),
                true,
            ),
            Ok(other) => (format!("strange {other:?}"), false),
            Err(OnceError::Lost { .. }) => ("lost".to_owned(), false),
            Err(error) => (format!("error {error}"), false),
        };
        self.say(&event);
        is_over
    }
}
