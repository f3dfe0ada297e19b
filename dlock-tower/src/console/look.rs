//! Surveys the store for all pages: one survey at a time, in a task of its own, however many requests wait for it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dlock::LockClient;
use futures_util::FutureExt;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{OnceCell, watch};
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::filter::Filter;
use super::survey::Survey;
use super::timeline::Timeline;
use super::view;

/// A survey is kept for this many times its duration, so that surveys of a large store take at most a fifth of the
/// time.
const REST: u32 = 4;

/// The survey that all requests within a while share.
pub(super) struct Look {
    every: Duration,
    last: Mutex<Option<SurveyTask>>,
}

/// A survey that runs or has ended.
struct SurveyTask {
    seen: watch::Receiver<Option<Arc<Seen>>>,
    /// An operator has acted since it began.
    is_stale: bool,
    /// Aborts the task when the console is dropped: it keeps the client alive.
    handle: AbortOnDropHandle<()>,
}

struct Seen {
    at: Instant,
    until: Instant,
    /// `None` if the survey panicked: no other one is made before `until`.
    survey: Option<Arc<Survey>>,
    /// The unfiltered answer.
    all: OnceCell<Bytes>,
}

impl Look {
    /// Creates it, with the shortest time between two surveys.
    pub(super) fn new(every: Duration) -> Look {
        Look {
            every,
            last: Mutex::new(None),
        }
    }

    /// Returns the matching locks as JSON, with the token of actions, and the age of the survey; `None` if it panicked.
    pub(super) async fn at(
        &self,
        client: &LockClient,
        timeline: &Timeline,
        token: Option<&str>,
        filter: Filter,
    ) -> Option<(Bytes, Duration)> {
        let seen = self.seen(client).await?;
        let survey = seen.survey.clone()?;
        let written = |filter| {
            timeline.look(client);
            let (events, actions) = (timeline.json(), token.map(|token| json!({ "token": token })));
            // A hundred thousand locks take a while: let the other tasks of this thread run.
            spawn_blocking(move || {
                let mut seen = view::of_survey(&survey, &filter);
                (seen["events"], seen["actions"]) = (events, actions.into());
                Bytes::from(seen.to_string())
            })
        };
        let json = match filter.is_open() {
            true => {
                let all = seen.all.get_or_try_init(|| written(filter)).await;
                all.ok()?.clone()
            }
            false => written(filter).await.ok()?,
        };
        Some((json, seen.at.elapsed()))
    }

    /// Returns the survey; `None` if it panicked.
    pub(super) async fn survey(&self, client: &LockClient) -> Option<Arc<Survey>> {
        self.seen(client).await?.survey.clone()
    }

    /// Waits for the survey that runs, or uses the last one while it is kept. Only the store's own timeouts limit it.
    async fn seen(&self, client: &LockClient) -> Option<Arc<Seen>> {
        loop {
            let (mut seen, is_stale) = self.latest(client);
            let ended = seen.wait_for(Option::is_some).await.ok()?.clone();
            // One survey at a time: the next begins when the stale survey has ended.
            if !is_stale {
                return ended;
            }
        }
    }

    /// Returns the survey that runs or is kept, and whether it is stale; starts one if there is none.
    fn latest(&self, client: &LockClient) -> (watch::Receiver<Option<Arc<Seen>>>, bool) {
        let mut last = self.last.lock();
        if let Some(task) = last.as_ref().filter(|task| !task.is_over()) {
            return (task.seen.clone(), task.is_stale);
        }
        let (sender, seen) = watch::channel(None);
        let (client, every) = (client.clone(), self.every);
        let handle = tokio::spawn(async move {
            let began = Instant::now();
            let survey = AssertUnwindSafe(survey(client)).catch_unwind().await;
            let at = Instant::now();
            sender.send_replace(Some(Arc::new(Seen {
                at,
                until: at + every.max((at - began) * REST),
                survey: survey.ok().flatten(),
                all: OnceCell::new(),
            })));
        });
        *last = Some(SurveyTask {
            seen: seen.clone(),
            is_stale: false,
            handle: AbortOnDropHandle::new(handle),
        });
        (seen, false)
    }

    /// Drops an answer that no page has asked for lately: for a large store it is large.
    pub(super) fn tidy(&self) {
        let mut last = self.last.lock();
        let is_old = |seen: &Arc<Seen>| seen.until.elapsed() > self.every;
        if last
            .as_ref()
            .is_some_and(|task| task.seen.borrow().as_ref().is_some_and(is_old))
        {
            *last = None;
        }
    }

    /// Makes the next request survey again, also if a survey runs.
    pub(super) fn again(&self) {
        if let Some(task) = &mut *self.last.lock() {
            task.is_stale = true;
        }
    }
}

impl SurveyTask {
    /// Whether the next request needs another survey.
    fn is_over(&self) -> bool {
        match &*self.seen.borrow() {
            Some(seen) => self.is_stale || Instant::now() >= seen.until,
            // The runtime of the request that started it has ended.
            None => self.handle.is_finished(),
        }
    }
}

async fn survey(client: LockClient) -> Option<Arc<Survey>> {
    let (found, health) = (client.survey("", false).await, client.health());
    let survey = spawn_blocking(move || Arc::new(Survey::of(found, health)));
    survey.await.ok()
}
