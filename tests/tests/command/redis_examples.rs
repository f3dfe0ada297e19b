//! The examples for queues and fleets, as processes on a real server: they are killed at random.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dlock_tests::bins::{Running, example, fleet, output, run, teller};
use dlock_tests::child;
use dlock_tests::faults::in_rounds;
use dlock_tests::{Flavor, Server, eventually};
use nix::sys::signal::Signal;
use redis::Value;

const MS: Duration = Duration::from_millis(1);

/// A consumer with short times, so that what a killed one has left is soon delivered again.
fn consumer(server: &Server, name: &str) -> Running {
    let url = server.url();
    let args = [
        "--url", &url, "--name", name, "--idle", "600ms", "--lease", "1500ms", "--takes", "60ms",
    ];
    Running::start(&example("consumer"), &args)
}

/// Adds payments to the stream.
fn produce(server: &Server, count: u64) {
    let args = ["--url", &server.url(), "--produce", &count.to_string()];
    let made = run("consumer", &args, Duration::from_secs(60));
    assert!(made.status.success(), "{made:?}");
}

async fn pending(server: &Server) -> u64 {
    match server.command(&["XPENDING", "payments", "consumers"]).await {
        Value::Array(summary) => redis::from_redis_value(summary[0].clone()).expect("a number"),
        other => panic!("{other:?}"),
    }
}

/// It takes as long as consumers are killed, and the leases of what they had claimed: some ten seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_of_a_stream_happen_once_while_its_consumers_are_killed() {
    const COUNT: u64 = 300;
    let server = Server::start(Flavor::from_env()).await;
    produce(&server, COUNT);
    let mut consumers: Vec<_> = (0..3).map(|n| consumer(&server, &format!("c{n}"))).collect();
    let (begun, mut kills) = (Instant::now(), 0_u32);
    loop {
        tokio::time::sleep(MS * fastrand::u32(150..450)).await;
        let done: u64 = server.query(&["HLEN", "ledger:payments"]).await;
        if done == COUNT && pending(&server).await == 0 {
            break;
        }
        let logs = || {
            consumers
                .iter()
                .map(Running::log)
                .collect::<Vec<_>>()
                .join("---\n")
        };
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "{done} of {COUNT} after {kills} kills:\n{}",
            logs()
        );
        if kills < 25 {
            let victim = fastrand::usize(..consumers.len());
            assert!(
                consumers[victim].is_alive(),
                "it ended by itself:\n{}",
                consumers[victim].log()
            );
            consumers[victim].kill();
            // Some come back under their name, some do not.
            let name = match fastrand::bool() {
                true => format!("c{victim}"),
                false => format!("c{victim}-{kills}"),
            };
            consumers[victim] = consumer(&server, &name);
            kills += 1;
        }
    }
    let ledger: HashMap<String, u64> = server.query(&["HGETALL", "ledger:payments"]).await;
    let balance: u64 = server.query(&["GET", "balance:payments"]).await;
    assert_eq!(
        balance,
        COUNT * (COUNT + 1) / 2,
        "a payment was made twice, or never"
    );
    assert_eq!(ledger.values().sum::<u64>(), balance);
    assert_eq!(server.query::<u64>(&["EXISTS", "aside:payments"]).await, 0);
    let attempts: HashMap<String, u64> = server.query(&["HGETALL", "attempts:payments"]).await;
    let repeated = attempts.values().filter(|&&attempts| attempts > 1).count();
    println!(
        "{kills} kills, {repeated} of {COUNT} messages attempted again, {:?}",
        begun.elapsed()
    );
    assert!(kills >= 5 && repeated > 0, "{kills} kills cut no attempt short");
    assert_eq!(attempts.len() as u64, COUNT);
}

/// The connections of a consumer break: it opens others, and no payment is given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payments_are_made_while_the_connections_of_their_consumer_break() {
    const COUNT: u64 = 60;
    let server = Server::start(Flavor::from_env()).await;
    produce(&server, COUNT);
    let consumer = consumer(&server, "c0");
    for n in 0..5 {
        let some = async || server.query::<u64>(&["HLEN", "ledger:payments"]).await > n * 6;
        eventually("some payments are made", some).await;
        let _ = server.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    }
    let done = async || server.query::<u64>(&["HLEN", "ledger:payments"]).await == COUNT;
    eventually("all payments are made", done).await;
    eventually("nothing is pending", async || pending(&server).await == 0).await;
    assert_eq!(server.query::<u64>(&["EXISTS", "aside:payments"]).await, 0);
    let balance: u64 = server.query(&["GET", "balance:payments"]).await;
    assert_eq!(balance, COUNT * (COUNT + 1) / 2, "{}", consumer.log());
}

/// Messages that are no payments do not keep the payments of a killed consumer from being made.
/// A consumer reads all messages and is killed before it makes a payment.
async fn all_go_to_a_killed_consumer(server: &Server) {
    let read = [
        "XREADGROUP",
        "GROUP",
        "consumers",
        "killed",
        "STREAMS",
        "payments",
        ">",
    ];
    let _ = server.command(&read).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_are_no_payments_are_put_aside() {
    const COUNT: u64 = 100;
    let server = Server::start(Flavor::from_env()).await;
    for _ in 0..COUNT {
        let _ = server.command(&["XADD", "payments", "*", "x", "y"]).await;
    }
    produce(&server, COUNT);
    all_go_to_a_killed_consumer(&server).await;
    assert_eq!(pending(&server).await, 2 * COUNT);
    let consumer = consumer(&server, "c0");
    let done = async || server.query::<u64>(&["HLEN", "ledger:payments"]).await == COUNT;
    eventually("all payments are made", done).await;
    eventually("nothing is pending", async || pending(&server).await == 0).await;
    assert_eq!(server.query::<u64>(&["LLEN", "aside:payments"]).await, COUNT);
    assert!(consumer.log().contains("it is no payment"), "{}", consumer.log());
}

/// Redis 6.2, where it is there, has nil for such a message in its answer; later ones leave it out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_messages_that_were_deleted_do_not_keep_payments_from_being_made() {
    const COUNT: u64 = 20;
    let flavor = match Flavor::Redis62.binary() {
        Ok(_) => Flavor::Redis62,
        Err(_) => Flavor::from_env(),
    };
    let server = Server::start(flavor).await;
    produce(&server, COUNT);
    all_go_to_a_killed_consumer(&server).await;
    let ids = async || -> Vec<String> {
        let all: Vec<(String, Vec<String>)> = server.query(&["XRANGE", "payments", "-", "+"]).await;
        all.into_iter().map(|(id, _)| id).collect()
    };
    for deleted in ids().await.iter().step_by(4) {
        let _ = server.command(&["XDEL", "payments", deleted]).await;
    }
    let left = ids().await.len() as u64;
    assert_eq!(left, COUNT * 3 / 4);
    let consumer = consumer(&server, "c0");
    let done = async || server.query::<u64>(&["HLEN", "ledger:payments"]).await == left;
    eventually("all payments that are left are made", done).await;
    assert!(!consumer.log().contains("cannot read"), "{}", consumer.log());
}

/// What a shell has started would go on beside the jobs of the next leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduler_that_resigns_kills_what_its_jobs_have_started() {
    let job = "report 1h sleep 600 & echo started $!; wait";
    let leader = Running::start(&example("scheduler"), &["--job", job]);
    let started = || {
        let log = leader.log();
        let pid = log.lines().find_map(|line| line.strip_prefix("started "))?;
        pid.parse::<u32>().ok()
    };
    eventually("the job runs", async || started().is_some()).await;
    let pid = started().expect("it has started");
    // Empty for a process that nobody has waited for yet.
    let runs = || std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
    assert!(runs());
    leader.signal(Signal::SIGTERM);
    eventually("the sleep is killed", async || !runs()).await;
}

/// What a job has left in the background when it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduler_kills_what_a_job_that_has_ended_left_behind() {
    let job = "report 1h sleep 600 & echo started $!";
    let leader = Running::start(&example("scheduler"), &["--job", job]);
    eventually("the job ends", async || leader.log().contains(" done token=")).await;
    let log = leader.log();
    let pid = log.lines().find_map(|line| line.strip_prefix("started "));
    let pid: u32 = pid.expect("it has started").parse().expect("a number");
    let runs = || std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty());
    eventually("the sleep is killed", async || !runs()).await;
}

/// A period that is not on time on a slow machine is followed by another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_begin_with_their_periods_however_long_they_take() {
    let job = "tick 1s date +began_%s%N; sleep 0.5";
    let leader = Running::start(&example("scheduler"), &["--job", job]);
    // The first run begins when the leader does.
    let begins_with_a_second = || {
        let log = leader.log();
        let begins = log.lines().filter_map(|line| line.strip_prefix("began_"));
        let into_second = |begin: &str| begin.parse::<u64>().expect("nanoseconds") % 1_000_000_000;
        begins.skip(1).any(|begin| into_second(begin) < 250_000_000)
    };
    eventually("a run begins with its period", async || begins_with_a_second()).await;
}

/// As when a fleet is deployed with another period for a job.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_runs_on_when_its_period_becomes_longer() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let mut last = 0;
    for job in ["tick 200ms true", "tick 400ms true", "tick 300ms true"] {
        let leader = Running::start(&example("scheduler"), &["--url", &url, "--job", job]);
        eventually("it runs", async || runs_of(&leader.log()).len() >= 2).await;
        leader.signal(Signal::SIGTERM);
        eventually("it resigns", async || leader.log().contains("resigned")).await;
        let runs = runs_of(&leader.log());
        assert!(runs[0].0 > last, "{runs:?} after {last}");
        last = runs[runs.len() - 1].0;
    }
    // The clock of a former leader was a day ahead.
    let ahead = (last + 86_400_000).to_string();
    server
        .command(&["HSET", "ledger:scheduler:tick", "slot", &ahead])
        .await;
    let leader = Running::start(
        &example("scheduler"),
        &["--url", &url, "--job", "tick 200ms true"],
    );
    let says = async || leader.log().contains("by a clock that is ahead");
    eventually("it says why it does not run", says).await;
    assert!(runs_of(&leader.log()).is_empty());
}

/// The ledger has noted the run, and its answer is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_that_the_ledger_has_noted_without_an_answer_begins_in_its_period() {
    const PERIOD: u64 = 8_000;
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let args = ["--url", &url, "--lease", "300s", "--job", "tick 8s true"];
    let leader = Running::start(&example("scheduler"), &args);
    eventually("it has run", async || !runs_of(&leader.log()).is_empty()).await;
    let unanswered = || -> Vec<u64> {
        let log = leader.log();
        let lines = log
            .lines()
            .filter_map(|line| line.split_once(" tick ")?.1.split_once(" not run yet"));
        lines.map(|(slot, _)| slot.parse().expect("a number")).collect()
    };
    in_rounds("it is asked again in the same period", async || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let before = unanswered().len();
        tokio::time::sleep(MS * (PERIOD - now % PERIOD).saturating_sub(300) as u32).await;
        server.stop();
        eventually("it has no answer", async || unanswered().len() > before).await;
        server.cont();
        let slot = unanswered()[before];
        let later = async || runs_of(&leader.log()).last().is_some_and(|run| run.0 >= slot);
        eventually("it runs again", later).await;
        match runs_of(&leader.log()).iter().any(|run| run.0 == slot) {
            true => Ok(()),
            false => Err(leader.log()),
        }
    })
    .await;
}

#[test]
fn what_the_examples_cannot_do_is_refused() {
    let twice = ["--job", "tick 1s true", "--job", "tick 1h true"];
    for (program, args, why) in [
        ("scheduler", &twice[..], "two jobs have the name tick"),
        ("consumer", &["--idle", "0s"], "it is less than 100ms"),
    ] {
        let refused = run(program, args, Duration::from_secs(60));
        let error = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && error.contains(why), "{error}");
    }
}

/// Three schedulers, of which each leader is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_of_three_schedulers_run_once_in_each_period_while_leaders_are_killed() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    // No leader that this machine keeps waiting loses its lease.
    let args = ["--url", &url, "--lease", "12s", "--job", "tick 200ms true"];
    let start = || Running::start(&example("scheduler"), &args);
    let mut fleet: Vec<_> = (0..3).map(|_| start()).collect();
    let mut logs = Vec::new();
    for _ in 0..3 {
        let leader = || fleet.iter().position(|one| runs_of(&one.log()).len() >= 3);
        eventually("a leader runs jobs", async || leader().is_some()).await;
        let leader = leader().expect("it has run jobs");
        let leading = fleet
            .iter()
            .filter(|one| one.log().contains("leading with token"));
        assert_eq!(leading.count(), 1);
        fleet[leader].kill();
        logs.push(std::mem::replace(&mut fleet[leader], start()).log());
    }
    let mut runs: Vec<_> = logs.iter().flat_map(|log| runs_of(log)).collect();
    let by_time = runs.clone();
    runs.sort_unstable();
    assert_eq!(
        runs, by_time,
        "an older leader ran a job later, or a period was repeated"
    );
    let count = runs.len();
    runs.dedup_by_key(|(period, _)| *period);
    assert_eq!(runs.len(), count, "two runs in a period: {by_time:?}");
    let terms: HashSet<u64> = runs.iter().map(|(_, token)| *token).collect();
    assert_eq!(terms.len(), 3, "{runs:?}");
}

/// As if a newer leader had been at it, whose token is one greater.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resource_refuses_a_scheduler_with_an_older_token() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let args = ["--url", &url, "--lease", "300s", "--job", "tick 200ms true"];
    let leader = Running::start(&example("scheduler"), &args);
    eventually("it has run", async || !runs_of(&leader.log()).is_empty()).await;
    let newer = (runs_of(&leader.log())[0].1 + 1).to_string();
    server
        .command(&["HSET", "ledger:scheduler:tick", "token", &newer])
        .await;
    eventually("it is refused", async || leader.log().contains("refused: token")).await;
    let runs = runs_of(&leader.log()).len();
    tokio::time::sleep(600 * MS).await;
    assert!(runs_of(&leader.log()).len() <= runs + 1, "it goes on");
}

/// The periods whose job was done, and the token under which.
fn runs_of(log: &str) -> Vec<(u64, u64)> {
    let done = log
        .lines()
        .filter_map(|line| line.split_once(" tick ")?.1.split_once(" done token="));
    done.map(|(period, token)| {
        (
            period.parse().expect("a number"),
            token.trim().parse().expect("a token"),
        )
    })
    .collect()
}

/// What the workers of a fleet say: when (the clock of this machine, as text), and what.
fn said(log: &str) -> impl Iterator<Item = (&str, &str)> {
    log.lines().filter_map(|line| {
        let (at, rest) = line.trim_start().split_once(char::is_whitespace)?;
        Some((at, rest.trim_start().strip_prefix("INFO ")?.trim()))
    })
}

/// Apalis workers on three machines: firings of one schedule, and exports of tenants. The machines that make a report are
/// killed in the middle of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn firings_of_a_fleet_are_done_once_and_its_tenants_keep_to_their_limit() {
    let server = Server::start(Flavor::from_env()).await;
    let (url, program) = (server.url(), fleet());
    let start = || {
        let args = [
            "--url",
            &url,
            "--schedule",
            "* * * * * *",
            "--takes",
            "300ms",
            "--lease",
            "1500ms",
            "--exports",
            "5",
        ];
        Running::start(&program, &args)
    };
    let mut machines: Vec<_> = (0..3).map(|_| start()).collect();
    // Exports, of which no machine is killed: 3 machines, 2 tenants, 5 of each, 2 at a time.
    let begun = Instant::now();
    let exports = loop {
        tokio::time::sleep(50 * MS).await;
        let logs: Vec<_> = machines.iter().map(Running::log).collect();
        let steps: Vec<_> = logs
            .iter()
            .flat_map(|log| said(log))
            .filter(|(_, text)| text.starts_with("export "))
            .map(|(at, text)| (at.to_owned(), text.to_owned()))
            .collect();
        if steps.iter().filter(|(_, text)| text.ends_with(" done")).count() == 30 {
            break steps;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{logs:?}");
    };
    for tenant in ["tenant 0", "tenant 1"] {
        let mut steps: Vec<_> = exports.iter().filter(|(_, text)| text.contains(tenant)).collect();
        steps.sort();
        let (mut now, mut most) = (0_i32, 0);
        for (_, text) in steps {
            now += if text.ends_with("begins") { 1 } else { -1 };
            most = most.max(now);
        }
        assert_eq!((now, most), (0, 2), "{tenant}: {exports:?}");
    }
    // Reports. A machine that is started again no longer knows of the firing in which it was killed: so the next one is
    // killed when the others have taken that over.
    let (mut logs, mut killed, mut at_the_end) = (Vec::new(), Vec::new(), Vec::new());
    let begun = Instant::now();
    let done = loop {
        tokio::time::sleep(20 * MS).await;
        let all: Vec<_> = logs
            .iter()
            .cloned()
            .chain(machines.iter().map(Running::log))
            .collect();
        let done: Vec<String> = all
            .iter()
            .flat_map(|log| said(log))
            .filter_map(|(_, text)| text.strip_suffix(" done").map(str::to_owned))
            .filter(|text| text.starts_with("report ") && !at_the_end.contains(text))
            .collect();
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "{killed:?} were not taken over: {all:?}"
        );
        if !killed.iter().all(|firing| done.contains(firing)) {
            continue;
        }
        if killed.len() == 3 {
            break done;
        }
        let working = machines.iter_mut().find_map(|machine| {
            let log = machine.log();
            let (_, last) = said(&log)
                .filter(|(_, text)| text.starts_with("report "))
                .last()?;
            let firing = last.strip_suffix(" begins")?.to_owned();
            Some((machine, firing))
        });
        if let Some((machine, firing)) = working {
            machine.kill();
            let log = machine.log();
            match said(&log).any(|(_, text)| text == format!("{firing} done")) {
                // Meanwhile, and perhaps not recorded: another machine may do it again.
                true => at_the_end.push(firing),
                false => killed.push(firing),
            }
            logs.push(std::mem::replace(machine, start()).log());
        }
    };
    let mut once = done.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), done.len(), "a firing was done twice: {done:?}");
    assert!(once.len() >= 4, "{once:?}");
}

/// Two tellers that share the accounts, and customers of each at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawals_over_grpc_from_two_tellers_do_not_lose_each_other() {
    let server = Server::start(Flavor::from_env()).await;
    let (url, program, dir) = (server.url(), teller(), tempfile::tempdir().unwrap());
    let data = dir.path().to_str().expect("UTF-8");
    let tellers = [0, 1].map(|_| {
        let args = [
            "serve",
            "--url",
            &url,
            "--data",
            data,
            "--open",
            "1000",
            "--listen",
            "127.0.0.1:0",
        ];
        Running::start(&program, &args)
    });
    let begun = Instant::now();
    let addresses = loop {
        let logs = [0, 1].map(|n: usize| tellers[n].log());
        let listening = logs
            .iter()
            .filter_map(|log| log.split_once("listening on ")?.1.lines().next());
        let addresses: Vec<_> = listening.map(str::to_owned).collect();
        if addresses.len() == 2 {
            break addresses;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{logs:?}");
        tokio::time::sleep(20 * MS).await;
    };
    let withdraw = |from: &str, account: &str, amount: &str, times: &str| {
        let mut command = child::command(&program);
        command.args([
            "withdraw",
            "--from",
            from,
            "--account",
            account,
            "--amount",
            amount,
        ]);
        command.args(["--times", times, "--at-once", "8"]);
        tokio::task::spawn_blocking(move || output(command, Duration::from_secs(60)))
    };
    let customers: Vec<_> = addresses
        .iter()
        .flat_map(|from| [withdraw(from, "7", "1", "40"), withdraw(from, "8", "2", "20")])
        .collect();
    for customer in customers {
        let ended = customer.await.unwrap();
        assert!(
            ended.status.success(),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
    }
    for account in ["7", "8"] {
        let left = std::fs::read_to_string(dir.path().join(account)).unwrap();
        assert_eq!(left, "920", "withdrawals from account {account} were lost");
    }
    let files = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(files, 2, "something was left beside the accounts");
    // The service's own error passes as it is.
    let refused = withdraw(&addresses[0], "7", "10000", "1").await.unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && error.contains("there is only 920"),
        "{error}"
    );
    for teller in tellers {
        teller.signal(Signal::SIGTERM);
        let says_so = async || teller.log().lines().any(|line| line.ends_with(" ended"));
        eventually("it ends by itself", says_so).await;
    }
}
