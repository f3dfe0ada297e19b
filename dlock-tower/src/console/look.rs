//! Surveys the store for all pages: one survey at a time, however many ask.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dlock::LockClient;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::filter::Filter;
use super::survey::Survey;
use super::timeline::Timeline;
use super::view;

/// A survey is kept for this many times its duration, so that surveys of a large store take at most a fifth of the
/// time.
const REST: u32 = 4;

/// The answer to all requests within a while.
pub(super) struct Look {
    every: Duration,
    last: Mutex<Option<Seen>>,
}

struct Seen {
    until: Instant,
    survey: Arc<Survey>,
    /// The unfiltered answer.
    all: Bytes,
}

impl Look {
    /// Creates it, with the shortest time between two surveys.
    pub(super) fn new(every: Duration) -> Look {
        Look {
            every,
            last: Mutex::new(None),
        }
    }

    /// Returns the matching locks as JSON, with the token of actions. A request that arrives during a survey waits for
    /// its result, and surveys itself if that is cancelled. The store's own timeouts limit it.
    pub(super) async fn at(
        &self,
        client: &LockClient,
        timeline: &Timeline,
        token: Option<&str>,
        filter: Filter,
    ) -> Bytes {
        let written = |survey: Arc<Survey>, filter| {
            timeline.look(client);
            let (events, actions) = (timeline.json(), token.map(|token| json!({ "token": token })));
            async {
                // A hundred thousand locks take a while: let the other tasks of this thread run.
                let write = move || {
                    let mut seen = view::of_survey(&survey, &filter);
                    (seen["events"], seen["actions"]) = (events, actions.into());
                    Bytes::from(seen.to_string())
                };
                spawn_blocking(write).await.unwrap_or_default()
            }
        };
        let mut last = self.last.lock().await;
        let is_new = last.as_ref().is_some_and(|seen| Instant::now() < seen.until);
        if !is_new {
            let began = Instant::now();
            let (found, health) = (client.survey("", false).await, client.health());
            let Ok(survey) = spawn_blocking(move || Arc::new(Survey::of(found, health))).await else {
                // The runtime is ending.
                return Bytes::new();
            };
            let all = written(survey.clone(), Filter::default()).await;
            let until = Instant::now() + self.every.max(began.elapsed() * REST);
            *last = Some(Seen { until, survey, all });
        }
        match &*last {
            Some(seen) if filter.is_open() => seen.all.clone(),
            Some(seen) => {
                let survey = seen.survey.clone();
                drop(last);
                written(survey, filter).await
            }
            None => Bytes::new(),
        }
    }

    /// Drops an answer that no page has asked for lately: for a large store it is large.
    pub(super) fn tidy(&self) {
        if let Ok(mut last) = self.last.try_lock()
            && last
                .as_ref()
                .is_some_and(|seen| seen.until.elapsed() > self.every)
        {
            *last = None;
        }
    }

    /// Makes the next request survey again.
    pub(super) async fn again(&self) {
        *self.last.lock().await = None;
    }
}
