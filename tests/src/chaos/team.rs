//! The worker processes, as the orchestrator sees them.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, io};

use anyhow::Context;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::{mpsc, watch};

use super::event::{Done, Life};
use super::log::Log;
use super::worker::Orders;
use crate::child;

/// How long a process that is told to end may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a worker has said so far.
#[derive(Debug, Clone, Default)]
struct Told {
    up: bool,
    /// The last rest to which it has come.
    rests: u64,
    busy: Option<String>,
    acquired: u64,
    bye: bool,
    /// Its standard output has ended.
    ended: bool,
}

/// A process at work.
#[derive(Debug)]
struct Worker {
    life: Life,
    child: Child,
    orders: mpsc::UnboundedSender<String>,
    told: watch::Receiver<Told>,
}

/// A place among the workers.
#[derive(Debug, Default)]
struct Slot {
    worker: Option<Worker>,
    lives: u64,
    /// What was acquired in the lives before.
    acquired: u64,
}

/// All workers.
#[derive(Debug)]
pub(crate) struct Team {
    slots: Vec<Mutex<Slot>>,
    orders: Box<dyn MakesOrders>,
    log: Arc<Log>,
    /// What they were told last.
    order: Mutex<String>,
    /// Processes that ended by themselves, without an order.
    pub(crate) failures: Mutex<Vec<String>>,
}

/// What the worker of a slot is told, for each life anew.
pub(crate) trait MakesOrders: std::fmt::Debug + Send + Sync {
    fn orders(&self, life: Life) -> Orders;
}

impl Team {
    pub(crate) fn new(slots: usize, orders: impl MakesOrders + 'static, log: Arc<Log>) -> Team {
        Team {
            slots: (0..slots).map(|_| Mutex::default()).collect(),
            orders: Box::new(orders),
            log,
            order: Mutex::new("rest 0".to_owned()),
            failures: Mutex::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Starts the worker of a slot; it goes to work when it is connected, if the others do.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(crate) fn start(&self, slot: usize) -> anyhow::Result<()> {
        let mut place = self.slots[slot].lock();
        let life = Life {
            slot,
            life: place.lives,
        };
        place.lives += 1;
        let orders = serde_json::to_string(&self.orders.orders(life))?;
        let mut command = child::command(program()?);
        command.arg("worker").arg(orders).env_remove("RUST_LOG");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = child::spawn(command).context("cannot start setpriv (package util-linux)")?;
        let stdin = ChildStdin::from_std(child.stdin.take().context("it has a standard input")?)?;
        let stdout = ChildStdout::from_std(child.stdout.take().context("it has a standard output")?)?;
        let (orders, inbox) = mpsc::unbounded_channel();
        let (tell, told) = watch::channel(Told::default());
        tokio::spawn(pass_on(inbox, stdin));
        tokio::spawn(listen(stdout, tell));
        let _ = orders.send(self.order.lock().clone());
        place.worker = Some(Worker {
            life,
            child,
            orders,
            told,
        });
        Ok(())
    }

    /// Kills a worker.
    pub(crate) fn kill(&self, slot: usize) {
        let mut place = self.slots[slot].lock();
        if let Some(mut worker) = place.worker.take() {
            self.log.say(Done::Kill { life: worker.life });
            let _ = worker.child.kill();
            let _ = worker.child.wait();
            place.acquired += worker.told.borrow().acquired;
        }
    }

    /// Stops a worker, or lets it go on.
    pub(crate) fn signal(&self, slot: usize, signal: Signal) {
        if let Some(worker) = &self.slots[slot].lock().worker
            && let Ok(pid) = i32::try_from(worker.child.id())
        {
            // One that has ended by itself is noticed elsewhere.
            let _ = signal::kill(Pid::from_raw(pid), signal);
        }
    }

    /// How many locks were acquired, as far as is known.
    pub(crate) fn acquired(&self) -> u64 {
        let of = |slot: &Mutex<Slot>| {
            let slot = slot.lock();
            let now = slot
                .worker
                .as_ref()
                .map_or(0, |worker| worker.told.borrow().acquired);
            slot.acquired + now
        };
        self.slots.iter().map(of).sum()
    }

    /// Notes the processes that ended by themselves.
    pub(crate) fn look_for_failures(&self) {
        for slot in &self.slots {
            let mut slot = slot.lock();
            if let Some(worker) = &mut slot.worker
                && let Ok(Some(status)) = worker.child.try_wait()
            {
                let life = worker.life;
                self.failures
                    .lock()
                    .push(format!("process {life} ended by itself ({status})"));
                self.log.say(Done::Kill { life });
                slot.worker = None;
            }
        }
    }

    fn tell_all(&self, order: String) {
        // A process that starts later is told at its start.
        self.order.lock().clone_from(&order);
        for slot in &self.slots {
            if let Some(worker) = &slot.lock().worker {
                let _ = worker.orders.send(order.clone());
            }
        }
    }

    fn told(&self, slot: usize) -> Option<(Life, watch::Receiver<Told>)> {
        let slot = self.slots[slot].lock();
        let worker = slot.worker.as_ref()?;
        Some((worker.life, worker.told.clone()))
    }

    /// All go to work.
    pub(crate) fn go(&self) {
        self.tell_all("go".to_owned());
    }

    /// All come to rest, for the `number`-th time: nothing new is asked for, and what is asked for ends. Returns the
    /// workers that do not by `until`, and what keeps them.
    pub(crate) async fn rest(&self, number: u64, until: Instant) -> Vec<Restless> {
        self.tell_all(format!("rest {number}"));
        let mut restless = Vec::new();
        for slot in 0..self.len() {
            let Some((life, mut told)) = self.told(slot) else {
                continue;
            };
            let rested = told.wait_for(|told| told.rests == number || told.ended);
            match tokio::time::timeout_at(until.into(), rested).await {
                Ok(Ok(told)) if !told.ended => {}
                _ => restless.push((slot, life)),
            }
        }
        let mut found = Vec::new();
        for (slot, life) in restless {
            found.push(self.ask(slot, life).await);
        }
        found
    }

    async fn ask(&self, slot: usize, life: Life) -> Restless {
        let nothing = Restless {
            life,
            up: false,
            busy: None,
        };
        let Some((_, mut told)) = self.told(slot) else {
            return nothing;
        };
        if !told.borrow().up {
            return nothing;
        }
        if let Some(worker) = &self.slots[slot].lock().worker {
            let _ = worker.orders.send("ask".to_owned());
        }
        let answered = told.wait_for(|told| told.busy.is_some());
        let busy = match tokio::time::timeout(PATIENCE, answered).await {
            Ok(Ok(told)) => told.busy.as_deref().and_then(Busy::read),
            _ => None,
        };
        Restless { life, up: true, busy }
    }

    /// Ends all in good order; returns the processes that do not.
    pub(crate) async fn end(&self) -> Vec<Life> {
        self.tell_all("end".to_owned());
        let mut left = Vec::new();
        for slot in 0..self.len() {
            let Some((life, mut told)) = self.told(slot) else {
                continue;
            };
            let said_bye = tokio::time::timeout(PATIENCE, told.wait_for(|told| told.bye || told.ended)).await;
            if !matches!(said_bye, Ok(Ok(told)) if told.bye) {
                left.push(life);
            }
            let mut place = self.slots[slot].lock();
            if let Some(mut worker) = place.worker.take() {
                place.acquired += worker.told.borrow().acquired;
                // What has said bye has nothing left to do.
                let _ = worker.child.kill();
                let _ = worker.child.wait();
            }
        }
        left
    }
}

/// A worker that does not come to rest.
#[derive(Debug)]
pub(crate) struct Restless {
    pub(crate) life: Life,
    /// Whether it ever was connected.
    pub(crate) up: bool,
    /// `None` when it does not answer.
    pub(crate) busy: Option<Busy>,
}

/// What keeps a worker.
#[derive(Debug)]
pub(crate) struct Busy {
    pub(crate) tasks: usize,
    pub(crate) held: usize,
    pub(crate) waited_for: usize,
    /// The keys that its tasks ask for.
    pub(crate) keys: Vec<usize>,
}

impl Busy {
    fn read(line: &str) -> Option<Busy> {
        let mut words = line.split_ascii_whitespace().skip(1);
        let mut number = || words.next()?.parse().ok();
        let (tasks, held, waited_for) = (number()?, number()?, number()?);
        let keys = words.next()?.split(',');
        Some(Busy {
            tasks,
            held,
            waited_for,
            keys: keys.filter_map(|key| key.parse().ok()).collect(),
        })
    }
}

fn program() -> io::Result<PathBuf> {
    env::current_exe()
}

async fn pass_on(mut orders: mpsc::UnboundedReceiver<String>, mut stdin: ChildStdin) {
    while let Some(order) = orders.recv().await {
        // A process that is gone is noticed elsewhere.
        if stdin.write_all(format!("{order}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn listen(stdout: ChildStdout, told: watch::Sender<Told>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "up" => told.send_modify(|told| told.up = true),
            "rests" => told.send_modify(|told| told.rests = rest.parse().unwrap_or_default()),
            "count" => told.send_modify(|told| told.acquired = rest.parse().unwrap_or(told.acquired)),
            "busy" => told.send_modify(|told| told.busy = Some(line.clone())),
            "bye" => told.send_modify(|told| told.bye = true),
            _ => {}
        }
    }
    told.send_modify(|told| told.ended = true);
}
