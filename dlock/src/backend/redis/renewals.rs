//! Renewals: all that come together are one step, since a service may hold hundreds of thousands of locks and
//! what each of them costs shows.

use std::future::Future;
use std::sync::Arc;

use super::kinds::KindStep;
use super::node::Done;
use super::script::{Answer, OneRenewal, Verb};
use super::{RedisBackend, strange};
use crate::backend::{BackendError, Kind, Reason, RenewRequest, Renewal};

type Answers = Vec<Result<Renewal, BackendError>>;

/// Queues these renewals now; the answers stand in their order.
pub(super) fn renew(
    backend: Arc<RedisBackend>,
    requests: Vec<RenewRequest>,
) -> impl Future<Output = Result<Answers, BackendError>> + Send + 'static {
    // Whether a request is among the plain ones, and the steps of the others.
    let (mut plain, mut places, mut others) = (Vec::with_capacity(requests.len()), Vec::new(), Vec::new());
    for request in requests {
        let is_plain = matches!(request.kind, Kind::Lock | Kind::Fenced | Kind::Fair);
        if is_plain {
            plain.push(OneRenewal {
                key: backend.name(&request.key),
                grant: request.grant,
                lease: request.lease,
            });
        } else {
            places.push(plain.len() + others.len());
            let key = backend.name(&request.key);
            others.push(backend.step_on(key, Verb::As(KindStep::Renew(request))));
        }
    }
    let together = (!plain.is_empty()).then(|| send(&backend, plain.clone()));
    async move {
        let mut answers = match together {
            Some(step) => match step.await {
                // Refused as a whole, perhaps because of one of them.
                Err(error) if error.reason == Reason::Refused && plain.len() > 1 => {
                    one_by_one(&backend, plain).await
                }
                answer => answer?,
            },
            None => Vec::new(),
        };
        for (at, step) in places.into_iter().zip(others) {
            let answer = step.await.and_then(|done| match done.answer {
                Answer::Renewed => Ok(Renewal::Renewed),
                Answer::Gone => Ok(Renewal::Gone),
                other => Err(strange(&other)),
            });
            answers.insert(at, answer);
        }
        Ok(answers)
    }
}

/// One step for all of these.
fn send(
    backend: &RedisBackend,
    all: Vec<OneRenewal>,
) -> impl Future<Output = Result<Answers, BackendError>> + Send + use<> {
    let key = all.first().map_or_else(|| "".into(), |first| first.key.clone());
    let step = backend.step_on(key, Verb::Renew(all));
    async move {
        let Done { answer, .. } = step.await?;
        match answer {
            Answer::Renewals(answers) => Ok(answers),
            other => Err(strange(&other)),
        }
    }
}

/// A step for each, so that one that is refused harms no other.
async fn one_by_one(backend: &RedisBackend, all: Vec<OneRenewal>) -> Answers {
    let steps: Vec<_> = all.into_iter().map(|one| send(backend, vec![one])).collect();
    let mut answers = Vec::with_capacity(steps.len());
    for step in steps {
        let answer = step.await;
        answers.push(answer.and_then(|mut one| one.pop().unwrap_or_else(|| Err(strange(&Answer::Gone)))));
    }
    answers
}
