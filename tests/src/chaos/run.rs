//! A run from the first server to the last log.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::time::sleep;

use super::event::{Done, Life, word};
use super::faults::{Fiend, Kind};
use super::history::History;
use super::log::Log;
use super::options::Options;
use super::report::Report;
use super::rest::{rest, settled};
use super::store::KEYS;
use super::storm::{Plan, storm};
use super::team::{MakesOrders, Team};
use super::topology::Deployment;
use super::wanted::Wanted;
use super::witness::{ENOUGH, witnessed};
use super::worker::Orders;
use super::{progress, register};

/// A storm before each rest lasts about so long.
const STORM: Duration = Duration::from_secs(35);
/// The same where something is broken on purpose: it ends as soon as that was found.
const BROKEN_STORM: Duration = Duration::from_secs(4);
/// How long a first lock may take: members of a quorum do not vote at once.
const TO_START: Duration = Duration::from_secs(60);

/// What a run was, beyond what stands in its logs.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) history: History,
    /// Processes that crashed.
    pub(crate) crashed: Vec<String>,
    pub(crate) took: Duration,
}

/// What the workers of a run are told.
#[derive(Debug)]
struct Brief {
    options: Options,
    seed: u64,
    deployment: Arc<Deployment>,
    register: std::net::SocketAddr,
    logs: std::path::PathBuf,
}

impl MakesOrders for Brief {
    fn orders(&self, life: Life) -> Orders {
        let of_life = (life.slot as u64) << 32 | life.life;
        Orders {
            slot: life.slot,
            life: life.life,
            seed: fastrand::Rng::with_seed(self.seed ^ of_life.wrapping_mul(0x9E37_79B9_7F4A_7C15)).u64(..),
            tasks: self.options.tasks.into(),
            store: self.deployment.store_of(life.slot),
            register: self.register,
            logs: self.logs.clone(),
            broken: self.options.broken,
        }
    }
}

/// Runs it, with the logs in `dir`.
///
/// # Errors
/// When the harness fails, which says nothing of dlock.
pub(crate) async fn run(options: &Options, seed: u64, kinds: &[Kind], dir: &Path) -> anyhow::Result<Ran> {
    let begun = Instant::now();
    let topology = options.topology;
    let log = Arc::new(Log::open(&dir.join("faults.log"))?);
    let names: Vec<_> = kinds.iter().map(Kind::to_string).collect();
    log.say(Done::Run {
        topology: topology.name().to_owned(),
        seed,
        kinds: names.join(","),
        broken: word(options.broken.map_or(String::new(), |how| format!("{how:?}"))),
    });
    let register = register::serve(&dir.join("register.log"))?;
    let deployment = Arc::new(
        Deployment::start(
            topology,
            options.processes.into(),
            kinds.contains(&Kind::ClockStep),
        )
        .await?,
    );
    let brief = Brief {
        options: options.clone(),
        seed,
        deployment: deployment.clone(),
        register,
        logs: dir.to_owned(),
    };
    let team = Arc::new(Team::new(options.processes.into(), brief, log.clone()));
    for slot in 0..team.len() {
        team.start(slot)?;
    }
    let client = deployment.direct().open(None).await?;
    for key in 0..KEYS {
        let guard = Wanted::whole(&client, key).wait(TO_START).acquire().await;
        guard
            .context("no lock can be acquired at the beginning")?
            .release()
            .await?;
    }
    let fiend = Arc::new(Fiend::new(deployment.clone(), team.clone(), log.clone(), client));
    let progress = tokio::spawn(progress::show(fiend.clone()));
    let outcome = storms(options, seed, kinds, dir, &fiend).await;
    progress.abort();
    deployment.keep_logs(dir)?;
    outcome?;
    end(&fiend, Duration::from_secs(options.margin.into())).await?;
    team.look_for_failures();
    let crashed = team.failures.lock().clone();
    Ok(Ran {
        history: History::load(dir)?,
        crashed,
        took: begun.elapsed(),
    })
}

async fn storms(
    options: &Options,
    seed: u64,
    kinds: &[Kind],
    dir: &Path,
    fiend: &Arc<Fiend>,
) -> anyhow::Result<()> {
    let margin = Duration::from_secs(options.margin.into());
    let total = Duration::from_secs_f64(options.minutes * 60.0);
    let each = if options.broken.is_some() {
        BROKEN_STORM
    } else {
        STORM
    };
    let storms = total.div_duration_f64(each).round().max(1.0) as u32;
    let mut plan = Plan::new(seed, kinds.to_vec());
    let begun = Instant::now();
    let mut rounds = 0;
    let one = async |round: u32, plan: &mut Plan, until: Instant| {
        let number = round.into();
        fiend.log.say(Done::Go { number });
        fiend.team.go();
        storm(fiend, plan, until).await?;
        rest(fiend, number, margin).await
    };
    while rounds < storms {
        rounds += 1;
        let until = match options.broken {
            // At each rest, what was broken needs time to recover.
            Some(_) => Instant::now() + each,
            None => begun + total * rounds / storms,
        };
        one(rounds, &mut plan, until).await?;
        if options.broken.is_some() && !Report::new(&History::load(dir)?, &[]).is_clean() {
            return Ok(());
        }
    }
    // On a slow machine, or where a kind of fault mostly came without holders or waiters: some more of those.
    let last = begun + total + total / 2;
    while options.broken.is_none() && Instant::now() < last {
        let counts = witnessed(&History::load(dir)?);
        let few = |kind: &&Kind| counts.get(&kind.to_string()).is_none_or(|count| *count < ENOUGH);
        let few: Vec<_> = kinds.iter().filter(few).copied().collect();
        if few.is_empty() {
            break;
        }
        let lasts = Duration::from_secs(4) * u32::try_from(few.len()).unwrap_or(u32::MAX);
        rounds += 1;
        let mut plan = Plan::new(seed.wrapping_add(rounds.into()), few);
        one(rounds, &mut plan, last.min(Instant::now() + lasts)).await?;
    }
    Ok(())
}

/// Ends everything in good order, and sees that nothing is left.
async fn end(fiend: &Arc<Fiend>, margin: Duration) -> anyhow::Result<()> {
    for life in fiend.team.end().await {
        let what = life.to_string();
        let why = word("it does not end when it is told to");
        fiend.log.say(Done::Stuck { what, why });
    }
    fiend.leave().await;
    let until = Instant::now() + margin;
    let deployment = &fiend.deployment;
    let mut left = settled(until, || async { Ok(deployment.connections().await) }).await?;
    left.extend(settled(until, || deployment.leftovers()).await?);
    for what in left {
        let (what, why) = (word(what), word("all clients had ended"));
        fiend.log.say(Done::Leftover { what, why });
    }
    sleep(Duration::ZERO).await;
    Ok(())
}
