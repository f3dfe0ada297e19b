//! A configuration in etcd that only the holder of a lock changes: `cargo run -p dlock-examples --features etcd --bin config --
//! --help`.
//!
//! etcd itself compares the fencing token in the transaction that writes. `--stall` proves it: the process stalls
//! between acquiring the lock and writing, for longer than its lease; what another process has written in between
//! remains.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use dlock::LockClient;
use dlock_etcd::{EtcdLocks, TransactionError};

#[derive(Parser)]
struct Args {
    /// Servers of the cluster, `host:port`
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1:2379")]
    etcd: Vec<String>,
    /// What the keys of the locks begin with
    #[arg(long, default_value = "dlock/")]
    namespace: String,
    /// The key to write
    #[arg(long, default_value = "config/version")]
    key: String,
    /// Its new value
    value: String,
    /// The lease of the lock
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    lease: Duration,
    /// Stands still for so long before it writes
    #[arg(long, value_parser = humantime::parse_duration)]
    stall: Option<Duration>,
    /// Accepts servers that can end leases which were renewed
    #[arg(long)]
    allow_old_server: bool,
}

// On one thread: what stalls the writer stalls the renewal of its lock, too.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("config: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let locks = EtcdLocks::builder(args.etcd)
        .namespace(args.namespace)
        .allow_old_server(args.allow_old_server)
        .connect()
        .await?;
    let client = LockClient::builder().store(locks.clone()).build().await?;
    let guard = client.lock(&*args.key).lease(args.lease).acquire().await?;
    // Built while the lock is held, like a request that arrives late.
    let write = locks.transaction(&guard)?.put(&*args.key, &*args.value);
    if let Some(stall) = args.stall {
        println!("standing still");
        std::thread::sleep(stall);
    }
    let ended = match write.commit().await {
        Ok(committed) => {
            println!("written at revision {}", committed.revision);
            Ok(ExitCode::SUCCESS)
        }
        Err(TransactionError::Lost { .. }) => {
            println!("not written: another process has the lock, or had it");
            Ok(ExitCode::from(2))
        }
        // etcd carries a write of unknown outcome out only before the release, or never.
        Err(error) => Err(error.into()),
    };
    // A lost lock needs no release.
    let _ = guard.release().await;
    client.shutdown(Duration::from_secs(1)).await;
    ended
}
