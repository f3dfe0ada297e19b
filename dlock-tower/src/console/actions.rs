//! The console's actions for an operator: ending a hold, asking a holder to stop, forgetting a record.

use std::fmt;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::response::Response;
use dlock::operations::Intervention;
use dlock::record::{ForgetReply, RecordKey};
use dlock::{Error, LockClient, LockKey};
use http::request::Parts;
use http::{Request, StatusCode, header};
use serde_json::{Value, json};

use super::answer::{Sender, data, failed, foreign, problem};
use super::view::millis;

/// The header with the token: a form cannot send it, and neither can a page of another site unless CORS permits it.
pub(super) const TOKEN: &str = "x-dlock-console";
/// More than any action needs.
const MOST_BYTES: usize = 16 * 1024;

/// Names the operator, from the head of the request.
pub(super) type Operator = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

/// Actions that are allowed.
#[derive(Clone)]
pub(super) struct Actions {
    /// Known only to a client that can read the console's own answers.
    pub(super) token: String,
    pub(super) operator: Option<Operator>,
}

/// The requested action.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Break,
    Revoke,
    Forget,
}

impl fmt::Debug for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Actions").finish_non_exhaustive()
    }
}

impl Actions {
    pub(super) fn new(operator: Option<Operator>) -> Actions {
        let token = uuid::Uuid::new_v4().simple().to_string();
        Actions { token, operator }
    }

    /// Reads what to do, if the request comes from the console's own page, or from a program that knows the token.
    pub(super) async fn order(&self, action: Action, request: Request<Body>) -> Result<Order, Box<Response>> {
        let (head, body) = request.into_parts();
        self.admit(&head)?;
        let body = to_bytes(body, MOST_BYTES).await.ok();
        let asked = body.and_then(|body| serde_json::from_slice::<Value>(&body).ok());
        let Some(asked) = asked.filter(Value::is_object) else {
            return Err(Box::new(bad("the body is not a JSON object of at most 16 KiB")));
        };
        let operator = self.operator.as_ref().and_then(|operator| operator(&head));
        Ok(Order {
            action,
            asked,
            operator,
        })
    }

    fn admit(&self, head: &Parts) -> Result<(), Box<Response>> {
        let value = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let token = value(TOKEN).unwrap_or_default();
        let refusal = if Sender::of(head) != Sender::Own {
            foreign("only the console's own page and programs may act")
        } else if !is_same(token, &self.token) {
            problem(
                StatusCode::FORBIDDEN,
                "urn:dlock:problem:console-token",
                "The token is not that of this process",
                "send `actions.token` of api/state in the header x-dlock-console",
            )
        } else if !value(header::CONTENT_TYPE.as_str()).is_some_and(is_json) {
            problem(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "about:blank",
                "The body is not announced as JSON",
                "send it as application/json",
            )
        } else {
            return Ok(());
        };
        Err(Box::new(refusal))
    }
}

/// An action that an operator has ordered.
pub(super) struct Order {
    action: Action,
    asked: Value,
    operator: Option<String>,
}

impl Order {
    /// Acts, and writes it to the log of the process.
    pub(super) async fn carry_out(self, client: &LockClient) -> Response {
        match self.action {
            Action::Forget => forget(client, &self.asked, self.operator).await,
            Action::Break | Action::Revoke => {
                intervene(client, self.action, &self.asked, self.operator).await
            }
        }
    }
}

/// Whether this content type is JSON, whatever its parameters.
fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}

/// In constant time.
fn is_same(a: &str, b: &str) -> bool {
    let differs = a.bytes().zip(b.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    a.len() == b.len() && differs == 0
}

async fn intervene(client: &LockClient, action: Action, asked: &Value, operator: Option<String>) -> Response {
    let [Some(key), Some(holder), Some(reason)] =
        ["key", "holder", "reason"].map(|name| asked[name].as_str().map(str::to_owned))
    else {
        return bad("it takes `key`, `holder` (the id of the hold) and `reason`, as texts");
    };
    let intervention = signed(reason, operator);
    let log = Log {
        key: Some(&key),
        holder: Some(&holder),
        ..Log::of(action, &intervention)
    };
    let lock = LockKey::raw(key.clone());
    let done = match action {
        Action::Break => client.break_hold(lock, &holder, intervention).await,
        _ => client.revoke(lock, &holder, intervention).await,
    };
    log.write(done.as_ref().copied());
    match done {
        Ok(done) => data(json!({ "done": done }).to_string()),
        Err(error) => failed(&error),
    }
}

/// An action in the log of the process.
struct Log<'a> {
    action: Action,
    key: Option<&'a str>,
    holder: Option<&'a str>,
    record: Option<&'a str>,
    by: String,
    reason: String,
}

impl Log<'_> {
    fn of<'a>(action: Action, intervention: &Intervention) -> Log<'a> {
        Log {
            action,
            key: None,
            holder: None,
            record: None,
            by: intervention.by.clone(),
            reason: intervention.reason.clone(),
        }
    }

    /// Writes it down, unless it was refused before anything was sent to the store. After another error it may have been
    /// carried out.
    fn write(self, done: Result<bool, &Error>) {
        let Log {
            action,
            key,
            holder,
            record,
            by,
            reason,
        } = self;
        let (done, error) = match done {
            Ok(done) => (Some(done), None),
            Err(error) if is_misuse(error) => return,
            Err(error) => (None, Some(error.to_string())),
        };
        tracing::warn!(
            ?action,
            key,
            holder,
            record,
            by,
            reason,
            done,
            error,
            "the console was told to act"
        );
    }
}

/// Whether the error says that nothing was sent to the store.
fn is_misuse(error: &Error) -> bool {
    matches!(
        error,
        Error::Unsupported { .. } | Error::InvalidOption { .. } | Error::InvalidKey { .. }
    )
}

fn signed(reason: String, operator: Option<String>) -> Intervention {
    let intervention = Intervention::new(reason);
    match operator {
        Some(operator) => intervention.by(operator),
        None => intervention,
    }
}

async fn forget(client: &LockClient, asked: &Value, operator: Option<String>) -> Response {
    let [Some(record), Some(reason)] = ["record", "reason"].map(|name| asked[name].as_str()) else {
        return bad("it takes `record` (the name of the record as the store has it) and `reason`, as texts");
    };
    let key = match RecordKey::new(record) {
        Ok(key) => key,
        Err(error) => return failed(&error),
    };
    let intervention = signed(reason.to_owned(), operator);
    let log = Log {
        record: Some(record),
        ..Log::of(Action::Forget, &intervention)
    };
    let reply = client.forget_record(&key, intervention).await;
    let is_forgotten = |reply: &ForgetReply| matches!(reply, ForgetReply::Forgotten);
    log.write(reply.as_ref().map(is_forgotten));
    match reply {
        Ok(ForgetReply::Claimed {
            remaining,
            attempt,
            fence,
        }) => {
            let detail = format!(
                "attempt {attempt} with fencing token {fence} is at it, its claim lasts another {} ms: forgotten, the work \
                 would run twice at a time",
                millis(remaining)
            );
            problem(
                StatusCode::CONFLICT,
                "urn:dlock:problem:record-claimed",
                "The work is in progress",
                &detail,
            )
        }
        Ok(reply) => data(json!({ "done": is_forgotten(&reply) }).to_string()),
        Err(error) if is_misuse(&error) => failed(&error),
        Err(error) => problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "urn:dlock:problem:unavailable",
            "The record may or may not have been forgotten",
            &error.to_string(),
        ),
    }
}

fn bad(detail: &str) -> Response {
    problem(
        StatusCode::BAD_REQUEST,
        "about:blank",
        "The request makes no sense",
        detail,
    )
}

/// The answer where the service ends before the action does.
pub(super) fn interrupted() -> Response {
    problem(
        StatusCode::SERVICE_UNAVAILABLE,
        "urn:dlock:problem:unavailable",
        "The action may or may not have been carried out",
        "the service is ending",
    )
}

/// The answer of a read-only console.
pub(super) fn not_allowed() -> Response {
    problem(
        StatusCode::FORBIDDEN,
        "urn:dlock:problem:read-only",
        "This console only reads",
        "its service turns actions on by Console::allow_actions(true)",
    )
}
