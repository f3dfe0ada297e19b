//! Runs a world from its plan to its end.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use dlock::LockClient;
use dlock::sim;
use dlock::store::member::QuorumMember;
use dlock::stores::quorum::Quorum;
use futures_util::FutureExt;
use tokio::runtime::{Builder, RngSeed, Runtime};
use tokio::time::{Instant, Sleep};

use crate::chance::{mix, stream};
use crate::check::{self, CLEANUP, PANIC, Violation, WAITING};
use crate::connection::SimConnection;
use crate::count::Counts;
use crate::fault::Order;
use crate::host::{Host, User};
use crate::panics;
use crate::plan::{Millis, Plan, Runtimes, Scheduler, Stores};
use crate::trace::{Keep, Line, Trace, Who};
use crate::user::{Me, service, user};
use crate::world::{Stillness, World, carry_out_due, streams, tell, with};

/// How long a world goes on after all users are done: positions in the queues of stores last for 5 s.
const AFTER: Millis = 8_000;
/// Results that a store did not accept are sent again, with pauses of up to this time.
const REPEATS: Millis = 8_000;
/// Users that are not done this long after the last fault never will be.
const ENDLESS: Millis = 600_000;
/// A user that is polled this many times at one moment is in an endless loop.
const MOST_ROUNDS: u32 = 100_000;

impl World {
    fn goes_in_circles(&mut self) {
        let story = "a task goes round in circles and lets no time pass";
        self.violated(WAITING, story.to_owned());
    }
}

/// The result of a world.
pub(crate) struct Outcome {
    pub(crate) violation: Option<Violation>,
    pub(crate) counts: Counts,
    pub(crate) digest: u64,
    pub(crate) trace: Vec<Line>,
}

pub(crate) fn run(plan: &Rc<Plan>, keep: Keep) -> Outcome {
    sim::reset();
    crate::user::threads::begin(plan.seed);
    let _watched = panics::watch();
    // Users are caught by their host; this is for the simulation itself.
    let ran = catch_unwind(AssertUnwindSafe(|| match plan.runtimes {
        Runtimes::One => in_one_runtime(plan, keep),
        Runtimes::Each => in_runtimes_of_their_own(plan, keep),
    }));
    let world = World::end();
    let (at, mut violation) = (world.now, world.checks.violation);
    if let Some(story) = panics::take().or_else(|| ran.err().map(|_| "a panic".to_owned())) {
        let of = PANIC;
        violation.get_or_insert(Violation { of, at, story });
    }
    Outcome {
        violation,
        counts: world.counts,
        digest: world.trace.digest,
        trace: world.trace.lines,
    }
}

/// A process that runs.
struct Process {
    client: LockClient,
    host: Host,
}

impl Process {
    /// Starts a process: what its users have done in an earlier life is done.
    async fn start(plan: &Plan, process: usize) -> Process {
        let incarnation = with(|world| world.clocks[process].incarnation);
        let client = connect(plan, process, incarnation).await;
        let name = match incarnation {
            0 => format!("p{process}"),
            again => format!("p{process}'{again}"),
        };
        let progress = with(|world| {
            world.checks.name_client(sim::id_of(&client), name);
            world.client_begins(process, &client);
            world.progress[process].clone()
        });
        let service = plan.records.and_then(|common| service(process, &client, common));
        let users = plan.processes[process].users.iter().zip(progress).enumerate();
        let users = users.map(|(index, (of, done))| -> User {
            let me = Me { process, user: index };
            Box::pin(user(me, (client.clone(), service.clone()), of.clone(), done))
        });
        let rng = stream(
            plan.seed,
            &[streams::HOST, process as u64, u64::from(incarnation)],
        );
        Process {
            host: Host::new(users, plan.scheduler, rng),
            client,
        }
    }
}

async fn connect(plan: &Plan, process: usize, incarnation: u32) -> LockClient {
    let millis = Duration::from_millis;
    let builder = LockClient::builder();
    let builder = match plan.stores {
        Stores::One => builder.store(SimConnection::connect(process, incarnation, 0)),
        Stores::Quorum(members) => {
            let member = |store| {
                let connection: Arc<dyn QuorumMember> =
                    Arc::new(SimConnection::connect(process, incarnation, store));
                (format!("store {store}"), connection)
            };
            let quorum = Quorum::new((0..members).map(member));
            let quorum = quorum.max_lease(millis(plan.settings.max_lease()));
            builder.store(quorum.trust_fresh_servers(!plan.settings.members_abstain))
        }
    };
    builder
        .lease(millis(plan.settings.lease))
        .retry_for(millis(plan.settings.retry_for))
        .build()
        .await
        .expect("settings that are valid")
}

fn runtime(plan: &Plan, number: u64) -> Runtime {
    let seed = mix(plan.seed ^ mix(streams::RUNTIME ^ number));
    Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .rng_seed(RngSeed::from_bytes(&seed.to_le_bytes()))
        .on_thread_unpark(crate::world::follow)
        .build()
        .expect("a runtime without I/O")
}

/// Whether the world is over; for as long as it is not, when it has to be looked at again.
struct Ending {
    since: Option<Millis>,
    limit: Millis,
    /// How long it goes on after all users are done.
    after: Millis,
}

impl Ending {
    fn new(plan: &Plan) -> Ending {
        Ending {
            since: None,
            limit: plan.faults_end() + ENDLESS,
            after: AFTER + plan.records.map_or(0, |_| REPEATS),
        }
    }

    fn is_over(&mut self, world: &mut World) -> bool {
        if let Some(story) = panics::take() {
            world.violated(PANIC, story);
        }
        if world.checks.violation.is_some() {
            return true;
        }
        if world.at_work > 0 {
            self.since = None;
            if world.now > self.limit {
                let waiting: Vec<_> = world
                    .checks
                    .waiting()
                    .map(|waiter| format!("p{}/u{} for {}", waiter.process, waiter.user, waiter.key))
                    .collect();
                let story = format!(
                    "{} users are not done {ENDLESS} ms after the last fault; waiting: {}",
                    world.at_work,
                    waiting.join(", ")
                );
                world.violated(WAITING, story);
                return true;
            }
            return false;
        }
        let faults_end = world.plan.faults_end();
        let since = *self.since.get_or_insert(world.now.max(faults_end));
        world.now >= since + self.after
    }

    /// The moment at which it may be over.
    fn at(&self) -> Option<Millis> {
        self.since.map(|since| since + self.after)
    }
}

/// Looks for leftovers.
fn look_around(processes: &[Option<&LockClient>]) {
    let living: Vec<_> = processes
        .iter()
        .flatten()
        .map(|client| sim::id_of(client))
        .collect();
    let left: Vec<_> = processes
        .iter()
        .enumerate()
        .filter_map(|(process, client)| Some((process, sim::left((*client)?))))
        .collect();
    let stores = with(|world| {
        if world.checks.violation.is_none() {
            world.all_done(&left);
        }
        world.stores.len()
    });
    for store in 0..stores {
        let (entries, queued) =
            crate::store::inside(store, |memory| (sim::entries(memory), sim::positions(memory)));
        with(|world| {
            if world.checks.violation.is_none() {
                world.orphans(store, &entries, &living);
            }
            if world.checks.violation.is_none() {
                world.records_left(store);
            }
            if world.checks.violation.is_none() && queued > 0 {
                world.violated(
                    CLEANUP,
                    format!("store {store} keeps {queued} positions of waiters that left"),
                );
            }
        });
    }
    if with(|world| world.checks.violation.is_none()) {
        crate::check::balance();
    }
}

fn in_one_runtime(plan: &Rc<Plan>, keep: Keep) {
    let runtime = runtime(plan, 0);
    let epoch = runtime.block_on(async { Instant::now() });
    World::begin(plan.clone(), epoch, Trace::new(keep));
    let context = sim::Process::new(mix(plan.seed ^ streams::PROCESS), epoch.into_std());
    with(|world| {
        world
            .clocks
            .iter_mut()
            .for_each(|clock| clock.context = Some(context.clone()))
    });
    let _entered = context.enter();
    runtime.block_on(async {
        let mut processes = Vec::new();
        for process in 0..plan.processes.len() {
            processes.push(Process::start(plan, process).await);
        }
        let mut ending = Ending::new(plan);
        {
            let mut timer = pin!(tokio::time::sleep_until(epoch));
            let mut order: Vec<_> = (0..processes.len()).collect();
            let mut rng = stream(plan.seed, &[streams::STEPS]);
            let (mut rounds, mut before) = (0, 0);
            // All have one clock.
            with(|world| world.running = Some(0));
            std::future::poll_fn(|cx| {
                let now = millis_since(epoch);
                rounds = if before == now { rounds + 1 } else { 0 };
                before = now;
                carry_out_due(now);
                if plan.scheduler == Scheduler::Random {
                    rng.shuffle(&mut order);
                }
                let mut any = false;
                for process in &order {
                    any |= processes[*process].host.poll_ready(cx);
                }
                let is_over = with(|world| {
                    if rounds > MOST_ROUNDS {
                        world.goes_in_circles();
                    }
                    world.weather.orders.clear();
                    ending.is_over(world)
                });
                if is_over {
                    return Poll::Ready(());
                }
                if any {
                    // The library's own tasks come in between.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                let next = with(|world| {
                    let next = world.next_event().into_iter().chain(ending.at()).min();
                    let next = next.unwrap_or(now + ENDLESS);
                    world.driver = Some((next, cx.waker().clone()));
                    next
                });
                wake_at(&mut timer, epoch, next, cx);
                Poll::Pending
            })
            .await;
        }
        let clients: Vec<_> = processes.iter().map(|process| Some(&process.client)).collect();
        look_around(&clients);
        is_over();
    });
}

/// Messages of values that are dropped from now on are ignored.
fn is_over() {
    with(|world| {
        tell!(world, Who::World, "is over");
        world.clocks.iter_mut().for_each(|clock| clock.alive = false);
    });
}

fn millis_since(epoch: Instant) -> Millis {
    let since = Instant::now().saturating_duration_since(epoch);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn wake_at(timer: &mut Pin<&mut Sleep>, epoch: Instant, at: Millis, cx: &mut Context<'_>) {
    let at = epoch + Duration::from_millis(at);
    if timer.deadline() != at {
        timer.as_mut().reset(at);
    }
    if timer.as_mut().poll(cx).is_ready() {
        cx.waker().wake_by_ref();
    }
}

/// A process with a runtime, and so a clock, of its own.
struct Machine {
    runtime: Runtime,
    context: sim::Process,
    epoch: Instant,
    process: Option<Process>,
}

impl Machine {
    fn start(plan: &Plan, number: usize) -> Machine {
        let incarnation = with(|world| world.clocks[number].incarnation);
        let life = (number as u64) << 32 | u64::from(incarnation);
        let runtime = runtime(plan, 1 + life);
        let began = runtime.block_on(async { Instant::now() });
        // What the clock would have shown when the world began.
        let epoch = with(|world| {
            let clock = &mut world.clocks[number];
            clock.suspended = 0;
            let since = clock.millis(world.now);
            clock.epoch = began.checked_sub(Duration::from_millis(since)).unwrap_or(began);
            clock.epoch
        });
        let context = sim::Process::new(mix(plan.seed ^ mix(streams::PROCESS ^ life)), epoch.into_std());
        with(|world| world.clocks[number].context = Some(context.clone()));
        let process = {
            let _entered = context.enter();
            runtime.block_on(Process::start(plan, number))
        };
        Machine {
            runtime,
            context,
            epoch,
            process: Some(process),
        }
    }

    /// Runs until the clock of the process shows this much since the world began. What is due at that very moment is
    /// done first thing the next time.
    fn run_until(&mut self, local: Millis) {
        let Some(process) = &mut self.process else {
            return;
        };
        let _entered = self.context.enter();
        let target = self.epoch + Duration::from_millis(local);
        self.runtime.block_on(async {
            let mut timer = pin!(tokio::time::sleep_until(target));
            let mut rounds = 0;
            std::future::poll_fn(|cx| {
                if timer.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                rounds += 1;
                if rounds > MOST_ROUNDS {
                    with(World::goes_in_circles);
                    return Poll::Ready(());
                }
                if process.host.poll_ready(cx) {
                    cx.waker().wake_by_ref();
                }
                Poll::Pending
            })
            .await;
        });
    }

    /// Ends the process: the destructors of its users run, and the runtime is gone.
    fn end(mut self, number: usize) {
        let _entered = self.context.enter();
        {
            let _runtime = self.runtime.enter();
            drop(self.process.take());
        }
        // A runtime drops its tasks in an order that no seed decides. They would hardly be heard: the process is at its end.
        with(|world| world.clocks[number].alive = false);
        drop(self.runtime);
    }
}

fn in_runtimes_of_their_own(plan: &Rc<Plan>, keep: Keep) {
    // Only what it shows at the beginning counts.
    let epoch = runtime(plan, 0).block_on(async { Instant::now() });
    World::begin(plan.clone(), epoch, Trace::new(keep));
    let mut machines: Vec<_> = (0..plan.processes.len())
        .map(|number| Some(Machine::start(plan, number)))
        .collect();
    let mut rng = stream(plan.seed, &[streams::STEPS]);
    let mut order: Vec<_> = (0..machines.len()).collect();
    let mut ending = Ending::new(plan);
    loop {
        obey(plan, &mut machines);
        if with(|world| ending.is_over(world)) {
            break;
        }
        let (now, next) = with(|world| (world.now, world.end_of_step()));
        if plan.scheduler == Scheduler::Random {
            rng.shuffle(&mut order);
        }
        for number in &order {
            let local = with(|world| {
                world.now = now;
                let clock = &world.clocks[*number];
                clock.stopped.is_none().then(|| clock.tokio_millis(next))
            });
            if let (Some(machine), Some(local)) = (&mut machines[*number], local) {
                with(|world| world.running = Some(*number));
                machine.run_until(local);
                with(|world| world.running = None);
            }
        }
        with(|world| world.now = now);
        carry_out_due(next);
    }
    let clients: Vec<_> = machines
        .iter()
        .map(|machine| Some(&machine.as_ref()?.process.as_ref()?.client))
        .collect();
    look_around(&clients);
    is_over();
    for (number, machine) in machines.into_iter().enumerate() {
        machine.into_iter().for_each(|machine| machine.end(number));
    }
}

/// Carries out crashes, stops and ends of processes.
fn obey(plan: &Plan, machines: &mut [Option<Machine>]) {
    for order in with(|world| std::mem::take(&mut world.weather.orders)) {
        match order {
            Order::Stop(process) => with(|world| world.stands_still(process, Stillness::Stopped)),
            Order::Suspend(process) => with(|world| world.stands_still(process, Stillness::Suspended)),
            Order::Resume(process) => goes_on(plan, machines, process, Stillness::Stopped),
            Order::Wake(process) => goes_on(plan, machines, process, Stillness::Suspended),
            Order::Crash(process) => {
                // Before its destructors run, which send.
                with(|world| world.clocks[process].alive = false);
                stop(machines, process);
            }
            Order::End(process) => stop(machines, process),
            Order::Restart(process) => {
                if machines[process].is_none() {
                    with(|world| {
                        let clock = &mut world.clocks[process];
                        clock.incarnation += 1;
                        (clock.alive, clock.stopped) = (true, None);
                        let left = world.plan.processes[process].users.len();
                        world.at_work += left;
                        tell!(
                            world,
                            Who::Process(process),
                            "begins anew with the tasks that its users have not finished"
                        );
                    });
                    machines[process] = Some(Machine::start(plan, process));
                }
            }
        }
    }
}

fn stop(machines: &mut [Option<Machine>], process: usize) {
    if let Some(machine) = machines[process].take() {
        with(|world| {
            tell!(world, Who::Process(process), "is gone, with all that it knew");
            world.process_gone(process);
        });
        machine.end(process);
    }
}

/// Resumes a process, unless it was stopped for another reason.
fn goes_on(plan: &Plan, machines: &mut [Option<Machine>], process: usize, stillness: Stillness) {
    let goes_on = with(|world| world.goes_on(process, stillness));
    if let (true, Some(machine)) = (goes_on, &mut machines[process]) {
        jump(plan, machine, process);
    }
}

/// The clock of a process that stalled shows the present before any of its tasks runs, and so do its guards.
fn jump(plan: &Plan, machine: &mut Machine, process: usize) {
    let local = with(|world| world.clocks[process].tokio_millis(world.now));
    let target = machine.epoch + Duration::from_millis(local);
    let _entered = machine.context.enter();
    machine.runtime.block_on(async {
        let left = target.saturating_duration_since(Instant::now());
        // It lets tasks run after that, where it is awaited.
        let _ = tokio::time::advance(left).now_or_never();
        if mix(plan.seed ^ local) & 1 == 0 {
            check::time::ask_all(process);
        }
    });
    with(|world| {
        world.counts.sometimes("a process that stood still");
        tell!(world, Who::Process(process), "goes on: its clock has jumped");
    });
}
