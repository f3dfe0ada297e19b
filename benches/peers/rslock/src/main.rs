//! The workloads of benches/peers with rslock. Arguments: workload, URL, tasks, seconds, seconds of warm-up, prefix of
//! the keys.
//!
//! Prints `ready`, waits for a line, works, prints `done` and one line of JSON, and ends when standard input does.

use std::io::BufRead;
use std::time::{Duration, Instant};

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
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let connect = || LockManager::new(vec![args[1].as_str()]);
    let driver = Driver {
        workload: args[0].clone(),
        tasks: args[2].parse().expect("tasks"),
        prefix: args[5].clone(),
        mine: connect(),
        theirs: connect(),
    };
    let seconds: f64 = args[3].parse().expect("seconds");
    let warmup: f64 = args[4].parse().expect("seconds of warm-up");

    if !["parallel", "contended", "wakeup"].contains(&args[0].as_str()) {
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
