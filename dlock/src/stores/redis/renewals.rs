//! Renewals: those that are requested together are one step, since a service may hold hundreds of thousands of locks
//! and the cost of each counts.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::kinds::KindStep;
use super::node::Done;
use super::script::{Answer, OneRenewal, Verb};
use super::{RedisStore, strange};
use crate::base::kind::Family;
use crate::store::{RenewRequest, Renewal, StoreError};

type Answers = Vec<Result<Renewal, StoreError>>;

/// Renewals in one step: as many as a call carries.
const TOGETHER: usize = 256;

/// Queues these renewals now; the answers are in their order.
pub(super) fn renew(
    store: Arc<RedisStore>,
    requests: Vec<RenewRequest>,
) -> impl Future<Output = Result<Answers, StoreError>> + Send + 'static {
    // Those of different slots cannot be sent together.
    let together = if store.servers.has_slots() { 1 } else { TOGETHER };
    let mut steps = Vec::new();
    let mut some: Vec<OneRenewal> = Vec::new();
    let mut requests = requests.into_iter().peekable();
    while let Some(request) = requests.next() {
        let RenewRequest { lease, grant, .. } = request;
        if !is_plain(&request) {
            let key = store.name(&request.key);
            steps.push(Step::Kind(
                store.step_on(key, Verb::As(KindStep::Renew(Box::new(request)))),
            ));
            continue;
        }
        some.push(OneRenewal {
            key: store.name_of(request.key),
            grant,
        });
        // Nearly always all have the same lease.
        let goes_on = |next: &RenewRequest| is_plain(next) && next.lease == lease;
        if some.len() == together || !requests.peek().is_some_and(goes_on) {
            let some = Arc::new(std::mem::take(&mut some));
            let step = send(&store, some.clone(), lease);
            steps.push(Step::Plain { step, some, lease });
        }
    }
    async move {
        let mut answers = Vec::new();
        for step in steps {
            match step {
                Step::Kind(step) => answers.push(step.await.and_then(|done| match done.answer {
                    Answer::Renewed => Ok(Renewal::Renewed),
                    Answer::Gone => Ok(Renewal::Gone),
                    other => Err(strange(&other)),
                })),
                Step::Plain { step, some, lease } => match step.await {
                    Ok(all) => answers.extend(all),
                    // Refused as a whole, perhaps because of one of them.
                    Err(error) if error.is_refused() && some.len() > 1 => {
                        answers.extend(one_by_one(&store, &some, lease).await);
                    }
                    Err(error) => answers.extend(some.iter().map(|_| Err(error.clone()))),
                },
            }
        }
        Ok(answers)
    }
}

enum Step<K, P> {
    Kind(K),
    Plain {
        step: P,
        some: Arc<Vec<OneRenewal>>,
        lease: Duration,
    },
}

/// Whether its data, while it is held, has the format of the plain lock.
fn is_plain(request: &RenewRequest) -> bool {
    request.kind.family() == Family::Plain
}

/// One step for all of these.
fn send(
    store: &RedisStore,
    all: Arc<Vec<OneRenewal>>,
    lease: Duration,
) -> impl Future<Output = Result<Answers, StoreError>> + Send + use<> {
    let key = all.first().map_or_else(|| "".into(), |first| first.key.clone());
    let step = store.step_on(key, Verb::Renew { all, lease });
    async move {
        let Done { answer, .. } = step.await?;
        match answer {
            Answer::Renewals(answers) => Ok(answers),
            other => Err(strange(&other)),
        }
    }
}

/// A step for each, so that a refused one does not affect the others.
async fn one_by_one(store: &RedisStore, all: &[OneRenewal], lease: Duration) -> Answers {
    let steps: Vec<_> = all
        .iter()
        .map(|one| send(store, Arc::new(vec![one.clone()]), lease))
        .collect();
    let mut answers = Vec::with_capacity(steps.len());
    for step in steps {
        match step.await {
            Ok(one) => answers.extend(one),
            Err(error) => answers.push(Err(error)),
        }
    }
    answers
}
