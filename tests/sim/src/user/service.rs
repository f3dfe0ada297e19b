//! Users that send requests with an idempotency key to a service of their process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dlock::record::OnOrphan;
use dlock::store::Kind;
use dlock::{Held, LockClient, LockKey};
use dlock_tower::idempotency::caller::public;
use dlock_tower::idempotency::{Idempotency, REPLAYED};
use dlock_tower::{IdempotencyLayer, LockLayer, NotStarted, key};
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};

use super::habit::with_habit;
use super::record::{Asks, Effect};
use super::{AtWork, Me, OnPurpose, sleep};
use crate::check::Begins;
use crate::plan::record::{Answer, Ask, LockAt, Records};
use crate::plan::{Habit, Millis};
use crate::world::{if_any, with};

/// Between two tries.
const PAUSE: Millis = 30;
/// Before the second piece of a body that comes in pieces.
const PIECE: Millis = 25;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, BoxError>;
pub(crate) type Service = BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, Failure>;

/// The service fails without a response.
#[derive(Debug)]
pub(crate) struct Failure;

/// What the handler is to do with a request.
#[derive(Clone)]
struct Job {
    me: Me,
    name: String,
    task: Ask,
    /// The number of the effect that it has, and of the asker.
    effect: Arc<AtomicU64>,
    asks: u64,
}

/// The service of a process.
pub(crate) fn service(process: usize, client: &LockClient, common: Records) -> Option<Service> {
    let millis = Duration::from_millis;
    let records = client.records().ok()?;
    let mut layer = IdempotencyLayer::new(records, public())
        .lease(millis(common.lease))
        .retention(millis(common.retention));
    if common.leaves_orphans {
        layer = layer.on_orphan(OnOrphan::Leave);
    }
    if common.retries_ambiguous {
        layer = layer.retry_ambiguous();
    }
    if common.cancels {
        layer = layer.cancel_on_disconnect();
    }
    // One that waited under the lock outside would keep it from all others.
    if let Some(wait) = common.wait
        && common.lock != Some(LockAt::Outside)
    {
        layer = layer.wait(millis(wait));
    }
    layer.check().expect("options that are valid");
    let handle = layer.handle();
    with(|world| world.checks.records.service_begins(process, handle));
    let locks = LockLayer::new(client.clone(), key::header("x-account")).wait(millis(2 * common.lease));
    let handler = service_fn(handle_request);
    Some(match common.lock {
        None => BoxCloneSyncService::new(layer.layer(handler).map_response(boxed)),
        Some(LockAt::Inside) => {
            BoxCloneSyncService::new(layer.layer(locks.layer(handler)).map_response(boxed))
        }
        Some(LockAt::Outside) => {
            BoxCloneSyncService::new(locks.layer(layer.layer(handler)).map_response(boxed))
        }
    })
}

fn boxed<B>(response: Response<B>) -> Response<Body>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    response.map(|body| body.map_err(Into::into).boxed_unsync())
}

/// A section under the lock of a layer, until it is dropped.
struct Section(u64);

impl Drop for Section {
    fn drop(&mut self) {
        if_any(|world| world.section_ends(self.0));
    }
}

async fn handle_request(request: Request<Full<Bytes>>) -> Result<Response<Body>, Failure> {
    let extensions = request.extensions();
    let job = extensions.get::<Job>().expect("what to do").clone();
    let claim = extensions.get::<Idempotency>().expect("a claim").clone();
    if job.task.answer == Answer::NotStarted {
        let mut response = text(StatusCode::SERVICE_UNAVAILABLE, "closed".into());
        response.extensions_mut().insert(NotStarted::of(extensions));
        return Ok(response);
    }
    // It may run on without its client.
    let _at_work = AtWork::begin();
    let who = (job.me.process, job.me.user);
    let effect = with(|world| {
        world.asker_works(job.asks);
        let key = claim.record_key();
        world.checks.records.name(key, &job.name);
        let told = (claim.attempt(), claim.fence());
        Effect(world.effect_begins(who, (key, claim.claim_token()), told, true))
    });
    job.effect.store(effect.0, Ordering::Relaxed);
    let _section = extensions.get::<Held>().map(|held| {
        let begins = Begins {
            who,
            kind: Kind::Mutex,
            amount: 1,
            stands_for: None,
            is_second: false,
        };
        let account = LockKey::from(format!("a{}", job.task.account));
        let frame = with(|world| world.section_begins(begins, account, held.clone(), &[]));
        Section(frame.section)
    });
    sleep(job.task.work).await;
    let status = match job.task.answer {
        Answer::Refuses => StatusCode::CONFLICT,
        Answer::Fails => StatusCode::BAD_GATEWAY,
        Answer::Panics => std::panic::panic_any(OnPurpose),
        Answer::Breaks => return Err(Failure),
        Answer::Done | Answer::Streams | Answer::NotStarted => StatusCode::OK,
    };
    let padding = "x".repeat(job.task.size);
    let result = format!("{} {} {} {padding}", effect.0, job.name, status.as_u16());
    with(|world| world.effect_brings(effect.0, result.as_bytes()));
    if job.task.answer != Answer::Streams {
        return Ok(text(status, result));
    }
    let (first, second) = result.split_at(result.len() / 2);
    let pieces = [(0, first.to_owned()), (PIECE, second.to_owned())];
    let body = stream::unfold(pieces.into_iter(), |mut pieces| async move {
        let (pause, piece) = pieces.next()?;
        sleep(pause).await;
        Some((Ok::<_, BoxError>(Frame::data(Bytes::from(piece))), pieces))
    });
    Ok(Response::new(StreamBody::new(body).boxed_unsync()))
}

fn text(status: StatusCode, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response
}

/// What a user is answered.
struct Told {
    status: StatusCode,
    replayed: bool,
    is_problem: bool,
    body: Bytes,
}

async fn send(service: Service, request: Request<Full<Bytes>>) -> Option<Told> {
    let response = service.oneshot(request).await.ok()?;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.ok()?.to_bytes();
    let kind = parts.headers.get(CONTENT_TYPE).map(|kind| kind.as_bytes());
    Some(Told {
        status: parts.status,
        replayed: parts.headers.contains_key(REPLAYED),
        is_problem: kind == Some(b"application/problem+json"),
        body,
    })
}

/// Sends a request until it is answered for good.
pub(super) async fn ask(me: Me, service: Option<Service>, task: &Ask) {
    let (Some(service), Some(common)) = (service, with(|world| world.plan.records)) else {
        return;
    };
    let name = format!("s{}", task.key);
    let waits = common.wait.is_some() && common.lock != Some(LockAt::Outside);
    let polls = !matches!(task.habit, Some(Habit::PollsNot { .. }));
    for _ in 0..=task.retries {
        let asks = Asks::begin(me, name.clone(), waits && polls);
        let effect = Arc::new(AtomicU64::new(0));
        let job = Job {
            me,
            name: name.clone(),
            task: task.clone(),
            effect: effect.clone(),
            asks: asks.id,
        };
        let sends = || {
            let request = Request::post("/pay")
                .header("idempotency-key", &name)
                .header("x-account", format!("a{}", task.account))
                .extension(job.clone())
                .body(Full::from(vec![task.variant; 3]))
                .expect("a request that is well-formed");
            send(service.clone(), request)
        };
        me.says(|| format!("sends a request with key {name}"));
        let told = with_habit(sends, task.habit).await;
        let since = asks.since;
        drop(asks);
        match told {
            None => with(|world| world.counts.sometimes("a client that went away")),
            Some(None) => with(|world| world.counts.sometimes("a service that failed without a response")),
            Some(Some(told)) => {
                let effect = effect.load(Ordering::Relaxed);
                if is_final(me, &name, since, effect, &told) {
                    return;
                }
            }
        }
        sleep(PAUSE).await;
    }
}

/// Judges an answer; whether there is nothing more to ask for.
fn is_final(me: Me, name: &str, since: Millis, effect: u64, told: &Told) -> bool {
    let who = (me.process, me.user);
    if told.is_problem {
        let what = String::from_utf8_lossy(&told.body);
        let (counted, is_final) = PROBLEMS.iter().find(|(kind, ..)| what.contains(kind)).map_or(
            ("a request with another problem", true),
            |(_, counted, is_final)| (counted, *is_final),
        );
        me.says(|| format!("is answered for {name}: {counted}"));
        with(|world| world.counts.sometimes(counted));
        return is_final;
    }
    with(|world| {
        if told.replayed {
            world.is_told_again(who, name, since, &told.body);
        } else if effect != 0 {
            world.counts.sometimes("a response of a request's own handler");
            world.is_told_first(who, name, effect, &told.body);
        } else {
            world.counts.sometimes("a request that was not begun");
            return false;
        }
        world.has_status(who, name, told.status.as_u16(), &told.body);
        told.status != StatusCode::BAD_GATEWAY
    })
}

/// By the end of their type, what they are counted as, and whether a retry is of no use.
const PROBLEMS: &[(&str, &str, bool)] = &[
    ("-in-progress", "a request that found an equal one at work", false),
    ("-mismatch", "a request that asked for something else", true),
    ("-outcome-unknown", "a request whose outcome is unknown", true),
    ("-result-unavailable", "a request whose result is not kept", true),
    ("-failed", "a request that had failed without a response", true),
    ("idempotency-unavailable", "a request that found no store", false),
    (":busy", "a request that found its lock held", false),
    (":lost", "a request whose lock was lost", false),
    (
        ":unavailable",
        "a request that found no store for its lock",
        false,
    ),
];
