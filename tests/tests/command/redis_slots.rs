//! Slots of time on five machines whose clocks differ, and which are killed and stopped at random moments. What they wrote down
//! is judged as a resource that refuses old fencing tokens would have seen it.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dlock_tests::bins::Running;
use dlock_tests::faults::patient;
use dlock_tests::{Clock, Flavor, Server};
use nix::sys::signal::Signal;

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
/// How far the clocks of the machines are ahead, in seconds; that of the store is in the middle.
const AHEAD: [u32; 5] = [0, 15, 30, 45, 60];
const STORE_AHEAD: u32 = 30;
/// A takeover waits so long.
const LEASE: Duration = Duration::from_millis(400);

/// How many slots are to be done: 1,000, or as `DLOCK_SLOTS` says.
fn wanted() -> usize {
    let wanted = std::env::var("DLOCK_SLOTS").ok();
    wanted.map_or(1000, |wanted| wanted.parse().expect("DLOCK_SLOTS is a number"))
}

/// How long a slot is: 20 ms, or as `DLOCK_SLOT` says.
fn period() -> Duration {
    let period = std::env::var("DLOCK_SLOT").ok();
    period.map_or(20 * MS, |period| {
        humantime::parse_duration(&period).expect("DLOCK_SLOT is a time")
    })
}

fn since_1970(ahead: u32) -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + SEC * ahead
}

struct Fleet {
    server: Server,
    clocks: Vec<Clock>,
    machines: Vec<Machine>,
    begun: Duration,
    /// How the machines are started, but for what differs.
    args: Vec<String>,
    log: PathBuf,
    killed: HashSet<String>,
    stopped: HashSet<String>,
}

struct Machine {
    by: &'static str,
    life: usize,
    running: Running,
}

impl Fleet {
    /// Starts a machine for each of these sources of ticks.
    async fn start(by: [&'static str; 5], args: &[String]) -> Fleet {
        let clock = |ahead| {
            let clock = Clock::new().unwrap();
            clock.set(SEC * ahead).unwrap();
            clock
        };
        let store_clock = clock(STORE_AHEAD);
        let server = Server::builder(Flavor::from_env())
            .clock(Some(&store_clock))
            .start()
            .await;
        let log = server.data_dir().join("ticks");
        fs::write(&log, "").unwrap();
        let mut fleet = Fleet {
            clocks: AHEAD
                .iter()
                .map(|ahead| clock(*ahead))
                .chain([store_clock])
                .collect(),
            machines: Vec::new(),
            begun: since_1970(0),
            args: args.to_vec(),
            log,
            killed: HashSet::new(),
            stopped: HashSet::new(),
            server,
        };
        for (nth, by) in by.into_iter().enumerate() {
            let running = fleet.life(nth, by, 0);
            fleet.machines.push(Machine { by, life: 0, running });
        }
        fleet
    }

    fn life(&self, nth: usize, by: &str, life: usize) -> Running {
        let lease = humantime::format_duration(LEASE);
        let url = format!("{}?lease={lease}&timeout=60s&retry_for=60s", self.server.url());
        let name = format!("{nth}.{life}");
        let mut args = vec!["--url", &url, "--name", &name, "--by", by];
        args.extend(["--log", self.log.to_str().unwrap()]);
        args.extend(self.args.iter().map(String::as_str));
        Running::with_clock(Path::new(env!("CARGO_BIN_EXE_ticker")), &self.clocks[nth], &args)
    }

    fn name(&self, nth: usize) -> String {
        format!("{nth}.{}", self.machines[nth].life)
    }

    /// The machine that is in the middle of its work.
    fn at_work(&self) -> Option<usize> {
        let mut log = File::open(&self.log).unwrap();
        let end = log.seek(SeekFrom::End(0)).unwrap();
        log.seek(SeekFrom::Start(end.saturating_sub(500))).unwrap();
        let mut tail = String::new();
        log.read_to_string(&mut tail).unwrap();
        let (last, _) = tail
            .lines()
            .rev()
            .find_map(|line| {
                let (name, event) = line.split_once(' ')?;
                (event.starts_with("begin ") || event.starts_with("did ")).then_some((name, event))
            })
            .filter(|(_, event)| event.starts_with("begin "))?;
        (0..self.machines.len()).find(|nth| self.name(*nth) == last)
    }

    fn seen(&self) -> Seen {
        Seen::read(&fs::read_to_string(&self.log).unwrap())
    }

    /// Kills and stops machines, mostly while they work, until this is so of what they wrote, and some attempts were cut short.
    async fn disturb_until(&mut self, is_over: impl Fn(&Seen) -> bool) {
        let begun = Instant::now();
        loop {
            let seen = self.seen();
            let in_time = begun.elapsed() < 600 * SEC + period() * wanted() as u32 * 5;
            assert!(
                in_time,
                "{} slots; at the end:\n{}",
                seen.records.len(),
                seen.tail()
            );
            let eager = seen.taken_over() < 3;
            if is_over(&seen) && !eager {
                return;
            }
            let (pause, looks) = match eager {
                true => (fastrand::u32(1..50), 1000),
                false => (fastrand::u32(50..1000), fastrand::u32(..3) * 50),
            };
            tokio::time::sleep(MS * pause).await;
            let victim = self.at_work_within(looks).await;
            let victim = victim.unwrap_or_else(|| fastrand::usize(..self.machines.len()));
            let name = self.name(victim);
            if eager || fastrand::bool() {
                self.killed.insert(name);
                let (by, life) = (self.machines[victim].by, self.machines[victim].life + 1);
                self.machines[victim].running.kill();
                let running = self.life(victim, by, life);
                self.machines[victim] = Machine { by, life, running };
            } else {
                self.stopped.insert(name);
                self.machines[victim].running.signal(Signal::SIGSTOP);
                tokio::time::sleep(LEASE.mul_f64(2.0 * fastrand::f64())).await;
                self.machines[victim].running.signal(Signal::SIGCONT);
            }
        }
    }

    async fn at_work_within(&self, looks: u32) -> Option<usize> {
        for _ in 0..looks {
            if let Some(machine) = self.at_work() {
                return Some(machine);
            }
            tokio::time::sleep(MS).await;
        }
        None
    }

    /// Ends all machines, and judges what they have written.
    async fn judge(&mut self) -> Seen {
        for nth in 0..self.machines.len() {
            self.killed.insert(self.name(nth));
            self.machines[nth].running.kill();
        }
        let seen = self.seen();
        for (name, clock) in &seen.clocks {
            let nth: usize = name.split('.').next().unwrap().parse().unwrap();
            let is = Duration::from_micros(*clock);
            let [least, most] = [self.begun, since_1970(0)].map(|time| time + SEC * AHEAD[nth]);
            assert!(least <= is && is <= most, "machine {nth} has another clock");
        }
        seen.judge(&self.killed, &self.stopped);
        let records = patient(&self.server.url()).await.records().unwrap();
        let key = patient(&self.server.url())
            .await
            .once("ticks")
            .record_key()
            .unwrap();
        let record = records
            .inspect(&key, false)
            .await
            .unwrap()
            .record
            .expect("it is kept");
        let last = record
            .slot()
            .expect("it has slots")
            .duration_since(UNIX_EPOCH)
            .unwrap();
        // A machine may have been killed before it could write.
        let known = *seen.records.last_key_value().unwrap().0;
        assert!(
            last.as_micros() as u64 >= known,
            "{record:?}, and {known} was done"
        );
        println!(
            "{} slots done, {} attempts, {} effects refused, {} kills, {} stops",
            seen.records.len(),
            seen.attempts.len(),
            seen.refused,
            self.killed.len() - self.machines.len(),
            self.stopped.len()
        );
        seen
    }
}

/// An attempt of a slot, by what was written.
#[derive(Debug)]
struct Attempt {
    name: String,
    slot: u64,
    number: u64,
    skipped: u64,
    begun: usize,
    did: Option<usize>,
    /// What the call has said of it.
    told: Option<&'static str>,
}

/// What the machines have written.
#[derive(Debug, Default)]
struct Seen {
    text: String,
    clocks: Vec<(String, u64)>,
    /// By the fencing token.
    attempts: BTreeMap<u64, Attempt>,
    /// Which attempt did a slot, as any machine was told.
    records: BTreeMap<u64, u64>,
    refused: usize,
    ended: usize,
}

impl Seen {
    fn read(text: &str) -> Seen {
        let mut seen = Seen {
            text: text.to_owned(),
            ..Seen::default()
        };
        let mut last: BTreeMap<&str, u64> = BTreeMap::new();
        let mut highest = 0;
        for (at, line) in text.lines().enumerate() {
            let words: Vec<_> = line.split(' ').collect();
            let (name, event) = (words[0], words[1]);
            let number = |nth: usize| -> u64 { words[nth].parse().unwrap_or_else(|_| panic!("{line}")) };
            match event {
                "up" => seen.clocks.push((name.to_owned(), number(2))),
                "begin" => {
                    let attempt = Attempt {
                        name: name.to_owned(),
                        slot: number(2),
                        number: number(4),
                        skipped: number(5),
                        begun: at,
                        did: None,
                        told: None,
                    };
                    highest = highest.max(number(3));
                    last.insert(name, number(3));
                    assert!(
                        seen.attempts.insert(number(3), attempt).is_none(),
                        "a token twice: {line}"
                    );
                }
                "did" => {
                    seen.attempts.get_mut(&number(3)).unwrap().did = Some(at);
                    seen.refused += usize::from(number(3) < highest);
                }
                "ran" | "earlier" => {
                    let token = *seen.records.entry(number(2)).or_insert(number(3));
                    assert_eq!(token, number(3), "a slot was done twice by its record: {line}");
                }
                "end" => seen.ended += 1,
                "unrecorded" | "lost" | "elsewhere" | "missed" => {}
                _ => panic!("{line}"),
            }
            let told = ["ran", "lost", "unrecorded"]
                .into_iter()
                .find(|told| *told == event);
            if let (Some(told), Some(token)) = (told, last.get(name)) {
                seen.attempts.get_mut(token).unwrap().told.get_or_insert(told);
            }
        }
        seen
    }

    fn tail(&self) -> String {
        let lines: Vec<_> = self.text.lines().collect();
        lines[lines.len().saturating_sub(50)..].join("\n")
    }

    /// No slot is done twice, none after a later one, no two attempts run at a time unless one was stopped, and each attempt
    /// without a record is explained.
    fn judge(&self, killed: &HashSet<String>, stopped: &HashSet<String>) {
        let mut before: Option<(&u64, &Attempt)> = None;
        for (token, attempt) in &self.attempts {
            let is_record = self.records.get(&attempt.slot) == Some(token);
            match attempt.told {
                Some("ran") => assert!(is_record && attempt.did.is_some(), "{token}: {attempt:?}"),
                Some(_) => {}
                None => assert!(killed.contains(&attempt.name), "{token} has no end: {attempt:?}"),
            }
            assert!(
                attempt.did.is_some() || !is_record,
                "{token} has an answer without work"
            );
            if let Some((earlier, past)) = before {
                let both = format!("{earlier}: {past:?}\n{token}: {attempt:?}");
                assert!(past.slot <= attempt.slot, "a slot after a later one:\n{both}");
                let was_done = self.records.get(&past.slot) == Some(earlier);
                assert!(
                    past.slot < attempt.slot || !was_done,
                    "a slot again after it was done:\n{both}"
                );
                let counts = past.slot < attempt.slot || past.number < attempt.number;
                assert!(counts, "an attempt that is not counted:\n{both}");
                let overlaps = past.did.is_some_and(|did| attempt.begun < did) || attempt.begun < past.begun;
                assert!(
                    !overlaps || stopped.contains(&past.name),
                    "two at a time:\n{both}"
                );
                assert!(
                    !overlaps || !was_done,
                    "a result of an attempt that was overtaken:\n{both}"
                );
                let period = period().as_micros() as u64;
                let between = ((attempt.slot - past.slot) / period).saturating_sub(1);
                assert!(attempt.skipped <= between, "so many were not left out:\n{both}");
            }
            before = Some((token, attempt));
        }
        for (slot, token) in &self.records {
            let attempt = self.attempts.get(token);
            assert!(
                attempt.is_some_and(|attempt| attempt.slot == *slot),
                "{slot} was done by {token}: {attempt:?}"
            );
        }
    }

    fn taken_over(&self) -> usize {
        self.attempts
            .values()
            .filter(|attempt| attempt.number > 1)
            .count()
    }
}

fn args(period: Duration) -> Vec<String> {
    let takes = humantime::format_duration(period / 2).to_string();
    let period = humantime::format_duration(period).to_string();
    ["--period", &period, "--takes", &takes]
        .map(str::to_owned)
        .to_vec()
}

/// As long as the slots are, half a minute: some machines go by dlock's own loop, others by ticks at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_are_done_once_by_machines_whose_clocks_differ_while_these_are_killed_and_stopped() {
    let mut fleet = Fleet::start(["loop", "ticks", "loop", "ticks", "loop"], &args(period())).await;
    let begun = since_1970(STORE_AHEAD);
    fleet.disturb_until(|seen| seen.records.len() >= wanted()).await;
    let seen = fleet.judge().await;
    let by_the_store = begun - SEC..=since_1970(STORE_AHEAD) + SEC;
    for slot in seen.records.keys().map(|slot| Duration::from_micros(*slot)) {
        assert!(
            by_the_store.contains(&slot),
            "{slot:?} is not by the store's clock"
        );
        assert_eq!(slot.as_micros() % period().as_micros(), 0);
    }
}

/// As long as a thousand slots take whose machines are killed and stopped at work: some fifteen seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_named_slot_is_done_once_and_in_order_while_machines_are_killed_and_stopped() {
    let mut named = args(10 * MS);
    let count = wanted() as u64;
    let first = since_1970(STORE_AHEAD).as_secs() - count - 60;
    named.extend(["--named".to_owned(), first.to_string(), count.to_string()]);
    let mut fleet = Fleet::start(["names"; 5], &named).await;
    fleet.disturb_until(|seen| seen.ended > 0).await;
    let seen = fleet.judge().await;
    let all: Vec<u64> = (first..first + count).map(|slot| slot * 1_000_000).collect();
    let done: Vec<u64> = seen.records.keys().copied().collect();
    assert_eq!(done, all, "each of them");
}
