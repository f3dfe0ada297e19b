//! The `dlock` command: a look at the locks of a store, for people.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use dlock::backend::Holder;
use dlock::{Error, LockClient, LockKey};

/// Look at the locks of a store.
#[derive(Debug, Parser)]
#[command(version, about, long_about = None)]
struct Args {
    /// The store, as in redis://localhost:6379.
    ///
    /// A password belongs into the variable, where the list of processes does not show it.
    #[arg(
        long,
        env = "DLOCK_URL",
        default_value = "redis://localhost",
        hide_env_values = true
    )]
    url: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show who holds a lock.
    Show {
        /// The name of the lock.
        key: String,
    },
    /// List the locks that are held now.
    List {
        /// Only those whose names begin like this.
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Take a lock away from whoever holds it. The holder finds out at its next renewal.
    ForceUnlock {
        /// The name of the lock.
        key: String,
    },
}

/// No such lock is held.
const NOT_HELD: u8 = 1;
/// It could not be done.
const FAILED: u8 = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("dlock: {error}");
            ExitCode::from(FAILED)
        }
    }
}

async fn run(args: Args) -> Result<ExitCode, Error> {
    let client = LockClient::builder()
        .url(args.url)
        .service_name("dlock-cli")
        .build()
        .await?;
    // A command line means what it says, braces included.
    let code = match args.command {
        Command::Show { key } => match client.inspect(LockKey::raw(&*key)).await? {
            Some(holder) => {
                println!("{}", line(&key, &holder));
                ExitCode::SUCCESS
            }
            None => {
                println!("{key}  free");
                ExitCode::from(NOT_HELD)
            }
        },
        Command::List { prefix } => {
            for (key, holder) in client.list(&prefix).await? {
                println!("{}", line(key.as_str(), &holder));
            }
            ExitCode::SUCCESS
        }
        Command::ForceUnlock { key } => {
            if client.force_release(LockKey::raw(&*key)).await? {
                println!("{key}  released");
                ExitCode::SUCCESS
            } else {
                println!("{key}  was free");
                ExitCode::from(NOT_HELD)
            }
        }
    };
    client.shutdown(Duration::ZERO).await;
    Ok(code)
}

fn line(key: &str, holder: &Holder) -> String {
    let left = holder.remaining.map_or("no end".to_owned(), |left| {
        format!(
            "{} left",
            humantime::format_duration(Duration::from_millis(left.as_millis() as u64))
        )
    });
    let holds = if holder.holds == 1 {
        String::new()
    } else {
        format!("  {} holds", holder.holds)
    };
    format!("{key}  held by {}  {left}{holds}", holder.id)
}
