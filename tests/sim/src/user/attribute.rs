//! Functions with the attribute.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use dlock::{Error, Held, LockKey, distributed_lock};

use crate::plan::{self, Lock};

use super::holder::keys_of;

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Longer than any world.
const WITHOUT_END: Duration = Duration::from_secs(24 * 60 * 60);

macro_rules! locked {
    ($($name:ident($($options:tt)*))*) => {$(
        #[distributed_lock(key = key, wait = wait, $($options)*)]
        async fn $name(key: LockKey, wait: Duration, work: impl FnOnce(Held) -> Boxed) -> Result<(), Error> {
            inside(work).await;
            Ok(())
        }
    )*};
}

locked! {
    plain(on_lost = cancel)
    runs_on(on_lost = ignore)
    fair(kind = fair)
    fenced(kind = fenced)
    read(kind = read)
    write(kind = write)
    preferred(kind = write, prefer_writers = true)
}

#[distributed_lock(keys = keys, wait = wait)]
async fn several(keys: Vec<LockKey>, wait: Duration, work: impl FnOnce(Held) -> Boxed) -> Result<(), Error> {
    inside(work).await;
    Ok(())
}

async fn inside(work: impl FnOnce(Held) -> Boxed) {
    let held = dlock::current().expect("the body runs in the frame of its lock");
    work(held).await;
}

/// Runs work in the function for its kind of lock, by the default client.
pub(super) async fn locked(task: &Lock, work: impl FnOnce(Held) -> Boxed) -> Result<(), Error> {
    let mut keys = keys_of(task);
    let wait = task.wait.map_or(WITHOUT_END, Duration::from_millis);
    if !task.also.is_empty() {
        return several(keys.collect(), wait, work).await;
    }
    let key = keys.next().expect("a first key");
    match task.kind {
        plan::Kind::Fair => fair(key, wait, work).await,
        plan::Kind::Fenced => fenced(key, wait, work).await,
        plan::Kind::Read => read(key, wait, work).await,
        plan::Kind::Write if task.preferred => preferred(key, wait, work).await,
        plan::Kind::Write => write(key, wait, work).await,
        _ if task.call == plan::Call::AttributeRunsOn => runs_on(key, wait, work).await,
        _ => plain(key, wait, work).await,
    }
}
