//! The processes of a measurement: started together, ended together.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::args::Plan;
use super::messages::{Answer, Order, Outcome};

/// How long the others may take to end, beyond their part of the measurement.
const PATIENCE: Duration = Duration::from_secs(20);

/// The role of a process.
pub(super) enum Team {
    /// The only process, or the first, with the others that it started.
    Leader(Vec<Worker>),
    Member(Member),
}

/// Another process, as its leader sees it.
pub(super) struct Worker {
    number: usize,
    child: Child,
    orders: mpsc::UnboundedSender<Order>,
    answers: mpsc::UnboundedReceiver<Answer>,
}

/// The leader, as a worker sees it.
pub(super) struct Member {
    go: mpsc::UnboundedReceiver<()>,
}

impl Team {
    /// Starts the other processes of the plan.
    pub(super) fn start(plan: &Plan, stop: &CancellationToken) -> Result<Team, String> {
        let workers = (1..plan.processes).map(|number| {
            let mut plan = plan.clone();
            plan.process = number;
            Worker::start(plan, stop.clone())
        });
        Ok(Team::Leader(workers.collect::<Result<_, _>>()?))
    }

    /// Waits for all processes to come here.
    pub(super) async fn meet(&mut self, stop: &CancellationToken) -> Result<(), String> {
        match self {
            Team::Leader(workers) => {
                for worker in workers.iter_mut() {
                    tokio::select! {
                        answer = worker.answer() => match answer? {
                            Answer::Arrived => {}
                            Answer::Failed(why) => return Err(why),
                            Answer::Done(_) => return Err(worker.silent()),
                        },
                        () = stop.cancelled() => return Ok(()),
                    }
                }
                for worker in workers {
                    worker.tell(Order::Go);
                }
            }
            Team::Member(member) => {
                say(&Answer::Arrived)?;
                tokio::select! {
                    _ = member.go.recv() => {}
                    () = stop.cancelled() => {}
                }
            }
        }
        Ok(())
    }

    /// Waits until the others are done; returns their results.
    pub(super) async fn outcomes(&mut self) -> Result<Vec<Outcome>, String> {
        let Team::Leader(workers) = self else {
            return Ok(Vec::new());
        };
        let mut outcomes = Vec::new();
        for worker in workers {
            let outcome = loop {
                match tokio::time::timeout(PATIENCE, worker.answer()).await {
                    Ok(Ok(Answer::Arrived)) => {}
                    Ok(Ok(Answer::Done(outcome))) => break *outcome,
                    Ok(Ok(Answer::Failed(why)) | Err(why)) => return Err(why),
                    Err(_) => return Err(worker.silent()),
                }
            };
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    /// Ends the others, which release what they hold.
    pub(super) async fn dismiss(self) {
        if let Team::Leader(workers) = self {
            // All at once first.
            for worker in &workers {
                worker.tell(Order::Stop);
            }
            for worker in workers {
                worker.end().await;
            }
        }
    }
}

impl Worker {
    fn start(plan: Plan, stop: CancellationToken) -> Result<Worker, String> {
        let number = plan.process;
        let failed = |error: std::io::Error| format!("process {number} could not be started: {error}");
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .arg("bench-worker")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("process {number} has no input and output"));
        };
        let (orders, queue) = mpsc::unbounded_channel();
        tokio::spawn(write_orders(input, queue, stop.clone()));
        let (answered, answers) = mpsc::unbounded_channel();
        tokio::spawn(read_answers(output, answered, stop));
        let worker = Worker {
            number,
            child,
            orders,
            answers,
        };
        worker.tell(Order::Plan(Box::new(plan)));
        Ok(worker)
    }

    /// The end of a worker is noticed by its answers.
    fn tell(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    async fn answer(&mut self) -> Result<Answer, String> {
        self.answers.recv().await.ok_or_else(|| self.silent())
    }

    fn silent(&self) -> String {
        format!("process {} ended before it was done", self.number)
    }

    async fn end(self) {
        let Worker {
            mut child, orders, ..
        } = self;
        // This closes its input.
        drop(orders);
        if tokio::time::timeout(PATIENCE, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
    }
}

/// Passes its answers on. If it ends without a result, the others need not go on.
async fn read_answers(output: ChildStdout, answers: mpsc::UnboundedSender<Answer>, stop: CancellationToken) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(answer) = serde_json::from_str(&line) else {
            break;
        };
        let is_done = matches!(answer, Answer::Done(_));
        if answers.send(answer).is_err() || is_done {
            return;
        }
    }
    stop.cancel();
}

async fn write_orders(
    mut input: ChildStdin,
    mut queue: mpsc::UnboundedReceiver<Order>,
    stop: CancellationToken,
) {
    let mut stopped = false;
    loop {
        let order = tokio::select! {
            order = queue.recv() => order,
            () = stop.cancelled(), if !stopped => {
                stopped = true;
                Some(Order::Stop)
            }
        };
        let Some(order) = order else { return };
        let mut line = serde_json::to_vec(&order).expect("an order is plain data");
        line.push(b'\n');
        if input.write_all(&line).await.is_err() {
            return;
        }
    }
}

/// Sends an answer to the leader.
pub(super) fn say(answer: &Answer) -> Result<(), String> {
    use std::io::Write as _;
    let line = serde_json::to_string(answer).map_err(|error| error.to_string())?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|error| format!("the process that started this one is gone: {error}"))
}

/// The first line of a worker's input.
pub(super) fn read_plan() -> Result<Plan, String> {
    match read_order() {
        Some(Order::Plan(plan)) => Ok(*plan),
        _ => Err("bench-worker is started by bench, which tells it what to do".to_owned()),
    }
}

/// Listens for further orders of the leader. In a separate thread, since a read of the standard input cannot be
/// cancelled, and would keep the runtime from ending.
pub(super) fn join(stop: CancellationToken) -> Team {
    let (pass, go) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Some(Order::Go) = read_order() {
            let _ = pass.send(());
        }
        stop.cancel();
    });
    Team::Member(Member { go })
}

fn read_order() -> Option<Order> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}
