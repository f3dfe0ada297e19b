//! The workloads of benches/peers/stores.sh with what people use on PostgreSQL today. Arguments: workload, URL, tasks, seconds,
//! seconds of warm-up, prefix of the keys, and `advisory` or `lease-row`.
//!
//! `advisory` is `pg_advisory_lock` with a connection for each task, since such a lock belongs to its connection. `lease-row`
//! is a row with a lease: one statement acquires and one releases, over one connection, pipelined; a busy lock is asked for
//! again after 50 ms.
//!
//! Prints `ready`, waits for a line, works, prints `done` and one line of JSON, and ends when standard input does.

use std::io::BufRead;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::{Client, NoTls, Statement};

const AGAIN: Duration = Duration::from_millis(50);
const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS peers_leases (key text PRIMARY KEY, holder text, until timestamptz NOT NULL)";
const ACQUIRE: &str = "INSERT INTO peers_leases VALUES ($1, $2, clock_timestamp() + interval '30 s') \
     ON CONFLICT (key) DO UPDATE SET holder = $2, until = clock_timestamp() + interval '30 s' \
     WHERE peers_leases.until < clock_timestamp() OR peers_leases.holder IS NULL RETURNING key";
const RELEASE: &str = "UPDATE peers_leases SET holder = NULL WHERE key = $1 AND holder = $2";

#[derive(Default)]
struct Task {
    waits: Vec<u64>,
    pairs: u64,
    errors: u64,
}

/// A lock as one task has it.
#[derive(Clone)]
enum Lock {
    Advisory {
        client: Arc<Client>,
        key: String,
    },
    Row {
        client: Arc<Client>,
        acquire: Statement,
        release: Statement,
        key: String,
        holder: String,
    },
}

type Outcome = Result<(), tokio_postgres::Error>;

impl Lock {
    async fn acquire(&self) -> Outcome {
        match self {
            Lock::Advisory { client, key } => {
                client
                    .query("SELECT pg_advisory_lock(hashtextextended($1, 0))", &[key])
                    .await?;
            }
            Lock::Row {
                client,
                acquire,
                key,
                holder,
                ..
            } => {
                while client.query(acquire, &[key, holder]).await?.is_empty() {
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
        Ok(())
    }

    async fn release(&self) -> Outcome {
        match self {
            Lock::Advisory { client, key } => {
                client
                    .query("SELECT pg_advisory_unlock(hashtextextended($1, 0))", &[key])
                    .await?;
            }
            Lock::Row {
                client,
                release,
                key,
                holder,
                ..
            } => {
                client.execute(release, &[key, holder]).await?;
            }
        }
        Ok(())
    }
}

async fn connect(url: &str) -> Arc<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a server");
    tokio::spawn(connection);
    Arc::new(client)
}

async fn locks(args: &[String], tasks: usize) -> Vec<Lock> {
    let mut locks = Vec::new();
    let shared = connect(&args[1]).await;
    // Two processes may come at once.
    let _ = shared.batch_execute(TABLE).await;
    let acquire = shared.prepare(ACQUIRE).await.expect("a statement");
    let release = shared.prepare(RELEASE).await.expect("a statement");
    for i in 0..tasks {
        let key = match args[0].as_str() {
            "parallel" => format!("{}{i}", args[5]),
            _ => format!("{}0", args[5]),
        };
        locks.push(match args[6].as_str() {
            "advisory" => Lock::Advisory {
                client: connect(&args[1]).await,
                key,
            },
            _ => Lock::Row {
                client: shared.clone(),
                acquire: acquire.clone(),
                release: release.clone(),
                holder: format!("{}-{i}", std::process::id()),
                key,
            },
        });
    }
    locks
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if !["parallel", "contended"].contains(&args[0].as_str()) {
        std::process::exit(3);
    }
    let seconds: f64 = args[3].parse().expect("seconds");
    let warmup: f64 = args[4].parse().expect("seconds of warm-up");
    let locks = locks(&args, args[2].parse().expect("tasks")).await;
    measure(&locks, warmup).await;
    println!("ready");
    let mut input = std::io::stdin().lock();
    if input.read_line(&mut String::new()).expect("standard input") == 0 {
        std::process::exit(1);
    }
    let done = measure(&locks, seconds).await;
    println!("done");
    report(&args[0], seconds, done);
    while input.read_line(&mut String::new()).is_ok_and(|read| read > 0) {}
}

async fn measure(locks: &[Lock], seconds: f64) -> Vec<Task> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let running: Vec<_> = locks
        .iter()
        .map(|lock| tokio::spawn(pairs(lock.clone(), end)))
        .collect();
    let mut done = Vec::new();
    for task in running {
        done.push(task.await.expect("a task panicked"));
    }
    done
}

async fn pairs(lock: Lock, end: Instant) -> Task {
    let mut task = Task::default();
    loop {
        let now = Instant::now();
        if now >= end {
            return task;
        }
        if lock.acquire().await.is_err() {
            task.errors += 1;
            continue;
        }
        task.waits.push(now.elapsed().as_nanos() as u64);
        match lock.release().await {
            Ok(()) => task.pairs += 1,
            Err(_) => task.errors += 1,
        }
    }
}

fn report(workload: &str, seconds: f64, done: Vec<Task>) {
    let task_pairs: Vec<u64> = done.iter().map(|task| task.pairs).collect();
    let errors: u64 = done.iter().map(|task| task.errors).sum();
    let mut waits: Vec<u64> = done.into_iter().flat_map(|task| task.waits).collect();
    waits.sort_unstable();
    let quantile = |q: f64| {
        let at = (waits.len() as f64 * q) as usize;
        waits
            .get(at.min(waits.len().saturating_sub(1)))
            .map_or(0.0, |nanos| *nanos as f64 / 1e3)
    };
    let line = serde_json::json!({
        "workload": workload,
        "seconds": seconds,
        "task_pairs": task_pairs,
        "p50_us": quantile(0.5),
        "p99_us": quantile(0.99),
        "p999_us": quantile(0.999),
        "errors": errors,
        "version": env!("TOKIO_POSTGRES_VERSION"),
        "runtime": "Rust",
    });
    println!("{line}");
}
