//! The samples of docs/cron.md: each is taken from the page, and runs once on a fleet.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::SlotReply;
use dlock_tests::faults::{PATIENCE, patient};
use dlock_tests::{Flavor, Server, bins, child};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio_cron_scheduler::{Job, JobScheduler};

const PAGE: &str = include_str!("../../../docs/cron.md");

/// The blocks of the page in this language.
fn blocks(language: &str) -> Vec<&'static str> {
    let begin = format!("```{language}\n");
    let blocks = PAGE.split(&begin).skip(1);
    blocks.map(|rest| rest.split("\n```").next().unwrap()).collect()
}

/// A fleet whose machines have the jobs of the page as programs, which write down that they ran, and in which slot.
struct Fleet {
    server: Server,
    shop: PathBuf,
    /// As in the variable `TZ`.
    time_zone: &'static str,
}

impl Fleet {
    async fn new(time_zone: &'static str) -> Fleet {
        let server = Server::start(Flavor::from_env()).await;
        let shop = server.data_dir().join("shop");
        fs::create_dir(&shop).unwrap();
        for job in [
            "poll-orders",
            "count-stock",
            "noon-report",
            "close-the-month",
            "nightly",
        ] {
            let log = shop.join("log");
            let script = format!(
                "#!/bin/sh\necho \"{job} ${{DLOCK_SLOT-none}} $DLOCK_ATTEMPT\" >> {}\nexit \"${{STATUS-0}}\"\n",
                log.display()
            );
            fs::write(shop.join(job), script).unwrap();
            fs::set_permissions(shop.join(job), fs::Permissions::from_mode(0o755)).unwrap();
        }
        // Whatever the hour: noon was yesterday.
        let date = "#!/bin/sh\nexec /bin/date -d yesterday \"$@\"\n";
        fs::write(shop.join("date"), date).unwrap();
        fs::set_permissions(shop.join("date"), fs::Permissions::from_mode(0o755)).unwrap();
        Fleet {
            server,
            shop,
            time_zone,
        }
    }

    /// Has the shell run a line of the page, as a machine of the fleet.
    async fn sh(&self, line: &str, env: &[(&str, &str)]) -> Output {
        let dlock = bins::dlock();
        let line = line
            .replace("/opt/shop", self.shop.to_str().unwrap())
            .replace("/usr/bin/dlock", dlock.to_str().unwrap());
        let dirs = [
            self.shop.as_path(),
            dlock.parent().unwrap(),
            "/usr/bin".as_ref(),
            "/bin".as_ref(),
        ];
        let path = std::env::join_paths(dirs).unwrap();
        let mut command = child::command("sh");
        command.args(["-c", &line]).env("PATH", path);
        command.env("DLOCK_URL", self.server.url()).stdin(Stdio::null());
        command.env("TZ", self.time_zone).envs(env.iter().copied());
        tokio::task::spawn_blocking(move || bins::output(command, PATIENCE))
            .await
            .unwrap()
    }

    /// The same on several machines at once.
    async fn on(&self, machines: usize, line: &str) {
        let outputs = join_all((0..machines).map(|_| self.sh(line, &[]))).await;
        for output in outputs {
            assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
        }
    }

    fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.shop.join("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}

/// The command of a crontab's line: without its five fields, and with its percent signs unescaped.
fn command_of(line: &str) -> String {
    let mut rest = line;
    for _ in 0..5 {
        rest = rest.split_once(char::is_whitespace).unwrap().1.trim_start();
    }
    rest.replace("\\%", "%")
}

/// The half of a slot of five minutes: the nearest slot changes in the middle of one, the day at the beginning.
fn half_slot() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_secs() / 150
}

/// Returns what a round brings that begins and ends in one slot. If the slot changes meanwhile, the round is repeated.
async fn in_one_slot<T>(round: impl AsyncFn() -> T) -> T {
    // While the command is built, the slot may change.
    tokio::task::spawn_blocking(bins::dlock).await.unwrap();
    loop {
        let begun = half_slot();
        let outcome = round().await;
        if half_slot() == begun {
            return outcome;
        }
    }
}

#[tokio::test]
async fn lines_of_the_crontab_run_once_on_three_machines() {
    let crontab = blocks("cron").join("\n");
    let lines: Vec<_> = crontab
        .lines()
        .filter(|line| line.contains("dlock run"))
        .collect();
    assert_eq!(lines.len(), 4, "{crontab}");
    // The second is that of Kathmandu, in a form that needs no list of time zones.
    for (time_zone, noon) in [("UTC0", "T12:00:00Z"), ("<+0545>-5:45", "T06:15:00Z")] {
        let mut log = in_one_slot(async || {
            let fleet = Fleet::new(time_zone).await;
            for line in &lines {
                let command = command_of(line);
                fleet.on(3, &command).await;
                fleet.on(1, &command).await;
            }
            fleet.log()
        })
        .await;
        log.sort();
        let jobs: Vec<_> = log.iter().map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(
            jobs,
            ["close-the-month", "count-stock", "noon-report", "poll-orders"],
            "{log:?}"
        );
        for line in &log {
            let slot = line.split(' ').nth(1).unwrap();
            match line.split(' ').next() {
                Some("close-the-month") => assert_eq!(slot, "none"),
                Some("noon-report") => assert!(slot.ends_with(noon), "{line}"),
                _ => assert!(slot.ends_with("0:00Z") || slot.ends_with("5:00Z"), "{line}"),
            }
        }
    }
}

#[tokio::test]
async fn unit_of_systemd_runs_once() {
    let unit = blocks("ini").join("\n");
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let line = line.expect("the unit starts something");
    // dlock passes the signal on: the command would get it twice.
    assert!(unit.lines().any(|line| line == "KillMode=mixed"), "{unit}");
    let log = in_one_slot(async || {
        let fleet = Fleet::new("UTC0").await;
        fleet.on(3, line).await;
        fleet.log()
    })
    .await;
    assert_eq!(log.len(), 1, "{log:?}");
}

#[tokio::test]
async fn pods_of_a_cron_job_run_their_slot_once() {
    let fleet = Fleet::new("UTC0").await;
    let yaml = blocks("yaml").join("\n");
    let args = yaml.split_once("args:\n").unwrap().1.trim();
    let script = args.strip_prefix("- ").expect("one argument");
    assert!(yaml.contains("fieldPath: metadata.labels['batch.kubernetes.io/job-name']"));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 60;
    let name = |minutes: u64| format!("nightly-{minutes}");
    let slot = |minutes: u64| {
        let at = UNIX_EPOCH + Duration::from_secs(minutes * 60);
        humantime::format_rfc3339(at).to_string()
    };
    // A pod that fails is started again, and then there is one in another cluster.
    let job = name(now - 60);
    for (status, exits) in [("3", 3), ("0", 0), ("0", 0)] {
        let output = fleet.sh(script, &[("JOB_NAME", &job), ("STATUS", status)]).await;
        assert_eq!(output.status.code(), Some(exits), "{output:?}");
    }
    let first = slot(now - 60);
    assert_eq!(
        fleet.log(),
        [format!("nightly {first} 1"), format!("nightly {first} 2")]
    );
    // The next firing, one that comes late, and one by hand.
    for job in [name(now), name(now - 60), name(now - 120), "try-1".to_owned()] {
        let output = fleet.sh(script, &[("JOB_NAME", &job)]).await;
        assert_eq!(output.status.code(), Some(0), "{output:?}");
    }
    assert_eq!(fleet.log()[2..], [format!("nightly {} 1", slot(now))]);
    // What the annotation says of a time zone.
    let annotated =
        script.split("\"@").next().unwrap().to_owned() + "2016-05-19T03:00:00-07:00 other -- true";
    let output = fleet.sh(&annotated, &[]).await;
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.success() && said.contains("2016-05-19T10:00:00Z"),
        "{said}"
    );
}

#[tokio::test]
async fn slot_is_done_again_by_hand_as_the_page_says() {
    let recipe = blocks("sh")
        .into_iter()
        .find(|block| block.contains("record forget"));
    let [forget, again] = recipe.expect("a recipe").lines().collect::<Vec<_>>()[..] else {
        panic!("{recipe:?}")
    };
    let again = |slot: &str| again.replace("TIME", slot);
    let tick = "dlock run --every 5min poll-orders -- /opt/shop/poll-orders";
    let fleet = Fleet::new("UTC0").await;
    let a_while_ago = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() - 600;
    let slot = UNIX_EPOCH + Duration::from_secs(a_while_ago / 300 * 300);
    let slot = humantime::format_rfc3339(slot).to_string();
    let run = async |line: &str| {
        let output = fleet.sh(line, &[]).await;
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
        (fleet.log().len(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run(&again(&slot)).await.0, 1);
    assert_eq!(run(forget).await.0, 1);
    assert_eq!(run(tick).await.0, 2);
    let (count, said) = run(&again(&slot)).await;
    assert!(
        count == 2 && said.contains("is over: a later one was begun"),
        "{said}"
    );
    assert_eq!(run(forget).await.0, 2);
    assert_eq!(run(&again(&slot)).await.0, 3, "{:?}", fleet.log());
    assert_eq!(fleet.log()[2], format!("poll-orders {slot} 1"));
    // The present slot, once more.
    assert_eq!(run(tick).await.0, 4);
    // What is older than the record is over, too, and says so.
    let old = tick
        .replace("--every 5min", "--slot 2026-01-01T00:00:00Z")
        .replace("poll-orders --", "old --");
    let (count, said) = run(&old).await;
    assert!(
        count == 4 && said.contains("is over: it is older than --keep"),
        "{said}"
    );
}

/// Three seconds, in which three schedulers tick each second. What is judged: no slot is done twice, whatever the ticks do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokio_cron_scheduler_fires_once_on_three_machines() {
    let server = Server::start(Flavor::from_env()).await;
    let done = Arc::new(Mutex::new(Vec::new()));
    let asked = Arc::new(AtomicU32::new(0));
    let mut machines = Vec::new();
    for _ in 0..3 {
        let client = patient(&server.url()).await;
        let once = client.once("poll-orders").every(Duration::from_secs(1));
        let (done, asked) = (done.clone(), asked.clone());
        let job = Job::new_async("* * * * * *", move |_, _| {
            let (once, done, asked) = (once.clone(), done.clone(), asked.clone());
            Box::pin(async move {
                asked.fetch_add(1, Ordering::Relaxed);
                let reply = once.run(async |claim| {
                    done.lock().push(claim.slot());
                    Ok::<_, String>(())
                });
                let reply = reply.await.unwrap();
                assert!(!matches!(reply, SlotReply::Unrecorded(..)), "{reply:?}");
            })
        });
        let scheduler = JobScheduler::new().await.unwrap();
        scheduler.add(job.unwrap()).await.unwrap();
        scheduler.start().await.unwrap();
        machines.push((scheduler, client));
    }
    dlock_tests::eventually("nine ticks", async || asked.load(Ordering::Relaxed) >= 9).await;
    for (scheduler, _) in &mut machines {
        scheduler.shutdown().await.unwrap();
    }
    let done = done.lock().clone();
    assert!(done.len() >= 2 && done.is_sorted_by(|a, b| a < b), "{done:?}");
    assert!(asked.load(Ordering::Relaxed) as usize > done.len());
}
