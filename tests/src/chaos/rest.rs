//! Quiet times: everything is healed, no worker sends new requests, and the checks of that state run.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::LockClient;

use super::event::{Done, word};
use super::faults::Fiend;
use super::store::{KEYS, LONGEST_LEASE};
use super::team::Restless;
use super::wanted::Wanted;

/// Retries continue at least this long, however long other steps took.
const AT_LEAST: Duration = Duration::from_secs(1);
/// How long servers may take for a fail-over on their own.
const TO_BE_WHOLE: Duration = Duration::from_secs(20);

/// Waits until everything is at rest, and checks that every lock can be acquired and that nothing is left.
///
/// # Errors
/// When a server cannot be reached at all.
pub(crate) async fn rest(fiend: &Arc<Fiend>, number: u64, margin: Duration) -> anyhow::Result<()> {
    let deployment = &fiend.deployment;
    deployment.heal();
    if !fiend.is_whole(TO_BE_WHOLE).await {
        eprintln!("chaos: not every group has one master and its replicas after {TO_BE_WHOLE:?}");
    }
    fiend.log.say(Done::Rest { number });
    let bound = LONGEST_LEASE + deployment.topology.slowness() + margin;
    let until = Instant::now() + bound;
    let mut stuck = BTreeSet::new();
    for restless in fiend.team.rest(number, until).await {
        tell(fiend, &restless, bound, &mut stuck);
    }
    let mut asked = fiend.histories();
    fresh(fiend, until, bound, &mut stuck).await;
    let left = loop {
        let left = settled(Instant::now(), || deployment.leftovers()).await?;
        let now = fiend.histories();
        if !left.is_empty() && now.is_some() && now != asked {
            // A fail-over that had begun before: what the new master lacks of the last requests was taken back by none.
            asked = now;
            fresh(fiend, until, bound, &mut stuck).await;
        } else if left.is_empty() || Instant::now() > until {
            break left;
        }
    };
    for key in stuck {
        let what = format!("key{key}");
        let why = word(format!(
            "not available within {bound:?} after everything was healed"
        ));
        fiend.log.say(Done::Stuck { what, why });
    }
    for what in left {
        let (what, why) = (word(what), word(format!("{bound:?} after everything was healed")));
        fiend.log.say(Done::Leftover { what, why });
    }
    Ok(())
}

/// Reports why a worker is not at rest.
fn tell(fiend: &Fiend, restless: &Restless, bound: Duration, stuck: &mut BTreeSet<usize>) {
    let life = restless.life;
    let say = |why: String| {
        let (what, why) = (life.to_string(), word(why));
        fiend.log.say(Done::Stuck { what, why });
    };
    match &restless.busy {
        _ if !restless.up => say(format!("not connected within {bound:?}")),
        None => say("does not answer".to_owned()),
        Some(busy) if !busy.keys.is_empty() => stuck.extend(&busy.keys),
        Some(busy) if busy.tasks > 0 => say(format!("{} tasks do not come to their end", busy.tasks)),
        Some(busy) => {
            let what = life.to_string();
            let why = word(format!(
                "no caller asks, and it holds {} and waits for {}",
                busy.held, busy.waited_for
            ));
            fiend.log.say(Done::Leftover { what, why });
        }
    }
}

/// The time until then, and a little longer.
fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(AT_LEAST)
}

/// A client that has seen nothing of it takes every lock.
async fn fresh(fiend: &Fiend, until: Instant, bound: Duration, stuck: &mut BTreeSet<usize>) {
    let why = match tokio::time::timeout(left(until), fiend.deployment.direct().open(None)).await {
        Ok(Ok(client)) => return takes_all(&client, until, stuck).await,
        // Everything was healed, and a server that is away would be waited for: this is of dlock.
        Ok(Err(error)) => format!("no connection: {error}"),
        Err(_) => format!("no connection within {bound:?}"),
    };
    let (what, why) = ("everything".to_owned(), word(why));
    fiend.log.say(Done::Stuck { what, why });
}

async fn takes_all(client: &LockClient, until: Instant, stuck: &mut BTreeSet<usize>) {
    let takes = (0..KEYS).map(|key| {
        let wanted = Wanted::whole(client, key);
        async move {
            let end = Instant::now() + left(until);
            // A step that fails may be tried again until the time is over.
            loop {
                let wait = end
                    .saturating_duration_since(Instant::now())
                    .max(Duration::from_millis(1));
                match wanted.clone().wait(wait).acquire().await {
                    Ok(guard) => {
                        drop(guard);
                        return None;
                    }
                    Err(_) if Instant::now() < end => tokio::time::sleep(Duration::from_millis(20)).await,
                    Err(_) => return Some(key),
                }
            }
        }
    });
    stuck.extend(futures_util::future::join_all(takes).await.into_iter().flatten());
    client.shutdown(AT_LEAST).await;
}

/// What is still there when the time is over; repeats the check until nothing is.
pub(crate) async fn settled<F>(until: Instant, look: impl Fn() -> F) -> anyhow::Result<Vec<String>>
where
    F: Future<Output = anyhow::Result<Vec<String>>>,
{
    let until = until.max(Instant::now() + AT_LEAST);
    loop {
        let left = look().await?;
        if left.is_empty() || Instant::now() > until {
            return Ok(left);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
