//! What users do with locks, well and badly.

mod attribute;
mod counter;
mod habit;
mod hold;
mod holder;
mod once;
mod record;
mod service;
pub(crate) mod threads;
mod work;

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use dlock::{LockClient, sim};
use futures_util::FutureExt;

use self::hold::hold;
pub(crate) use self::service::{Service, service};
use crate::plan::{self, Millis, Task};
use crate::trace::Who;
use crate::words;
use crate::world::{if_any, with};

/// What a user panics with on purpose.
pub(crate) struct OnPurpose;

/// Which user it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Me {
    pub(crate) process: usize,
    pub(crate) user: usize,
}

impl Me {
    fn both(self) -> (usize, usize) {
        (self.process, self.user)
    }

    fn says(self, what: impl FnOnce() -> String) {
        with(|world| {
            if world.trace.is_on() {
                let what = what();
                world
                    .trace
                    .write(world.now, Who::User(self.process, self.user), what);
            }
        });
    }
}

/// Counted among those that are at work, until it is dropped.
struct AtWork;

impl AtWork {
    fn begin() -> AtWork {
        with(|world| world.at_work += 1);
        AtWork
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if_any(|world| world.at_work -= 1);
    }
}

/// Whatever a user does, one task after the other. `done` of them were done in an earlier life of the process.
pub(crate) fn user(
    me: Me,
    (client, service): (LockClient, Option<Service>),
    plan: plan::User,
    done: usize,
) -> impl Future<Output = ()> {
    // Counted by the world from its beginning: the process may be gone before its users are polled at all.
    let at_work = AtWork;
    async move {
        let _at_work = at_work;
        let begins = plan.begins.saturating_sub(with(|world| world.now));
        sleep(begins).await;
        for task in plan.tasks.into_iter().skip(done) {
            let done = AssertUnwindSafe(async {
                match task {
                    Task::Pause(pause) => sleep(pause).await,
                    Task::Record(task) => record::record(me, &client, &task).await,
                    Task::Once(task) => once::once(me, &client, &task).await,
                    Task::Ask(task) => service::ask(me, service.clone(), &task).await,
                    Task::Lock(lock) => hold(me, client.clone(), lock, Vec::new()).await,
                    Task::Unowned {
                        semaphore,
                        amount,
                        wait,
                        lasts,
                        habit,
                    } => counter::unowned(me, &client, (semaphore, amount), (wait, lasts), habit).await,
                    Task::Latch { latch, step } => counter::latch(me, &client, latch, step).await,
                    Task::ShutDown(deadline) => shut_down(me, &client, deadline).await,
                    Task::ShutDownAmidSet { within, deadline } => {
                        let until = with(|world| world.now) + within;
                        while !has_part_of_set(&client) && with(|world| world.now) < until {
                            sleep(1).await;
                        }
                        shut_down(me, &client, deadline).await;
                    }
                    Task::Permits { semaphore, change } => {
                        counter::change(me, &client, semaphore, change).await
                    }
                }
            });
            if let Err(panic) = done.catch_unwind().await
                && !panic.is::<OnPurpose>()
            {
                std::panic::resume_unwind(panic);
            }
            with(|world| world.progress[me.process][me.user] += 1);
        }
    }
}

/// Whether some call for several locks has some of them, and not all.
fn has_part_of_set(client: &LockClient) -> bool {
    client.held() > sim::left(client).grants
}

/// Shuts down the client of a process during its work: from then on it acquires nothing, and it releases everything.
async fn shut_down(me: Me, client: &LockClient, deadline: Millis) {
    me.says(|| {
        format!(
            "shuts its client down, and gives guards {}",
            words::millis(deadline)
        )
    });
    with(|world| world.closes(me.process));
    if has_part_of_set(client) {
        with(|world| {
            world
                .counts
                .sometimes("a client that was shut down with a set that was not complete")
        });
    }
    let report = client.shutdown(Duration::from_millis(deadline)).await;
    me.says(|| {
        let (lost, unconfirmed) = (report.lost, report.unconfirmed);
        format!(
            "has shut its client down: {lost} guards were lost, and {unconfirmed} releases are unconfirmed"
        )
    });
    crate::check::closed(me.both(), client, report.unconfirmed);
}

async fn sleep(time: Millis) {
    if time > 0 {
        tokio::time::sleep(Duration::from_millis(time)).await;
    }
}
