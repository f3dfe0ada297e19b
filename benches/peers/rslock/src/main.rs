//! The workloads of benches/peers with rslock. Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of
//! the keys, a number that other drivers need, and worker threads: the processors without, 1 is a runtime on one thread.
//!
//! The workload `scripts` is what any lock on scripts could reach at most: the acquire and the release of a Redisson-style
//! lock, sent one by one over the multiplexed connection of the `redis` crate, and nothing else.
//!
//! Prints `ready`, waits for a line, works, prints `done` and one line of JSON, and ends when standard input does.

use std::io::BufRead;
use std::time::{Duration, Instant};

use redis::Script;
use redis::aio::MultiplexedConnection;
use rslock::LockManager;

const TTL: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Task {
    waits: Vec<u64>,
    pairs: u64,
    errors: u64,
}

struct Driver {
    workload: String,
    tasks: usize,
    prefix: String,
    mine: LockManager,
    theirs: LockManager,
    scripts: Option<Scripts>,
}

/// The two scripts of a lock, and nothing else.
#[derive(Clone)]
struct Scripts {
    connection: MultiplexedConnection,
    acquire: Script,
    release: Script,
}

impl Scripts {
    async fn connect(url: &str) -> Scripts {
        let client = redis::Client::open(url).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await;
        Scripts {
            connection: connection.expect("a server"),
            acquire: Script::new(include_str!("../../service/src/acquire.lua")),
            release: Script::new(include_str!("../../service/src/release.lua")),
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = args.get(7).map(|threads| threads.parse().expect("threads"));
    let mut runtime = match threads {
        Some(1) => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if let Some(threads) = threads {
        runtime.worker_threads(threads);
    }
    let runtime = runtime.enable_all().build().expect("a runtime");
    runtime.block_on(run(args));
}

async fn run(args: Vec<String>) {
    let connect = || LockManager::new(vec![args[1].as_str()]);
    let driver = Driver {
        workload: args[0].clone(),
        tasks: args[2].parse().expect("tasks"),
        prefix: args[5].clone(),
        mine: connect(),
        theirs: connect(),
        scripts: match args[0] == "scripts" {
            true => Some(Scripts::connect(&args[1]).await),
            false => None,
        },
    };
    let seconds: f64 = args[3].parse().expect("seconds");
    let warmup: f64 = args[4].parse().expect("seconds of warm-up");

    if !["parallel", "contended", "wakeup", "scripts"].contains(&args[0].as_str()) {
        std::process::exit(3);
    }
    driver.measure(warmup).await;
    println!("ready");
    let mut input = std::io::stdin().lock();
    if input.read_line(&mut String::new()).expect("standard input") == 0 {
        std::process::exit(1);
    }
    let done = driver.measure(seconds).await;
    println!("done");
    driver.report(done, seconds);
    while input.read_line(&mut String::new()).is_ok_and(|read| read > 0) {}
}

impl Driver {
    async fn measure(&self, seconds: f64) -> Vec<Task> {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        if self.workload == "wakeup" {
            return vec![self.wakeup(end).await];
        }
        let mut running = Vec::new();
        for i in 0..self.tasks {
            if let Some(scripts) = &self.scripts {
                running.push(tokio::spawn(bare(scripts.clone(), format!("{}{i}", self.prefix), end)));
                continue;
            }
            let manager = self.mine.clone();
            let key = match self.workload.as_str() {
                "parallel" => format!("{}{i}", self.prefix),
                _ => format!("{}0", self.prefix),
            };
            running.push(tokio::spawn(pairs(manager, key, end)));
        }
        let mut done = Vec::new();
        for task in running {
            done.push(task.await.expect("a task panicked"));
        }
        done
    }

    /// From the call of `unlock` with one manager to the return of `lock` with the other one, which waits meanwhile.
    async fn wakeup(&self, end: Instant) -> Task {
        let mut task = Task::default();
        let mut sleep = 20_000;
        while Instant::now() < end {
            let Ok(lock) = self.mine.lock(self.prefix.as_str(), TTL).await else {
                task.errors += 1;
                continue;
            };
            let (theirs, key) = (self.theirs.clone(), self.prefix.clone());
            let waiter = tokio::spawn(async move {
                let lock = theirs.lock(key.as_str(), TTL).await.ok()?;
                let now = Instant::now();
                theirs.unlock(&lock).await;
                Some(now)
            });
            // 20 to 120 ms, in steps that are no fraction of a retry delay
            sleep = 20_000 + (sleep + 38_197) % 100_000;
            tokio::time::sleep(Duration::from_micros(sleep)).await;
            let released = Instant::now();
            self.mine.unlock(&lock).await;
            match waiter.await.expect("the waiter panicked") {
                Some(now) => {
                    task.waits.push((now - released).as_nanos() as u64);
                    task.pairs += 1;
                }
                None => task.errors += 1,
            }
        }
        task
    }

    fn report(&self, done: Vec<Task>, seconds: f64) {
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
            "workload": self.workload,
            "seconds": seconds,
            "task_pairs": task_pairs,
            "p50_us": quantile(0.5),
            "p99_us": quantile(0.99),
            "p999_us": quantile(0.999),
            "errors": errors,
            "version": env!("RSLOCK_VERSION"),
            "runtime": concat!("Rust, redis ", env!("REDIS_VERSION")),
        });
        println!("{line}");
    }
}

async fn pairs(manager: LockManager, key: String, end: Instant) -> Task {
    let mut task = Task::default();
    loop {
        let now = Instant::now();
        if now >= end {
            return task;
        }
        match manager.lock(key.as_str(), TTL).await {
            Ok(lock) => {
                task.waits.push(now.elapsed().as_nanos() as u64);
                manager.unlock(&lock).await;
                task.pairs += 1;
            }
            Err(_) => task.errors += 1,
        }
    }
}

/// The two scripts by turns.
async fn bare(mut scripts: Scripts, key: String, end: Instant) -> Task {
    let mut task = Task::default();
    let holder = format!("8d2f6c1e-9b5a-4f0e-9a53-4f0f8a6b7c1d:{key}");
    let channel = format!("redisson_lock__channel:{{{key}}}");
    loop {
        let now = Instant::now();
        if now >= end {
            return task;
        }
        let mut acquire = scripts.acquire.key(&key);
        let acquired = acquire.arg(TTL.as_millis() as u64).arg(&holder);
        let acquired: redis::RedisResult<Option<i64>> = acquired.invoke_async(&mut scripts.connection).await;
        task.waits.push(now.elapsed().as_nanos() as u64);
        let mut release = scripts.release.key(&key);
        let released = release.key(&channel).arg(&holder);
        let released: redis::RedisResult<Option<i64>> = released.invoke_async(&mut scripts.connection).await;
        match (acquired, released) {
            (Ok(None), Ok(Some(1))) => task.pairs += 1,
            _ => task.errors += 1,
        }
    }
}
