//! `dlock record`: the record of work that is done once, or of a request.

use std::process::ExitCode;

use dlock::record::{ForgetReply, RecordKey, RecordState, RecordView};
use dlock::{Error, LockClient, LockKey};
use dlock_tower::idempotency::{Caller, KeptAnswer, KeyedRequest};
use serde_json::{Value, json};

use super::NOT_HELD;
use super::args::{RecordCommand, RecordName};
use super::break_hold::intervention;
use super::text::{clean, json_line, millis, time};

/// Exit code if an attempt is in progress.
const IN_PROGRESS: u8 = 3;

/// Shows a record, or forgets it.
pub(super) async fn record(client: &LockClient, command: &RecordCommand) -> Result<ExitCode, Error> {
    match command {
        RecordCommand::Show { name, result, json } => show(client, name, *result, *json).await,
        RecordCommand::Forget { name, why, json } => {
            let record = record_key(client, name)?;
            let reply = client.forget_record(&record, intervention(why)).await?;
            Ok(forgotten(name, &record, reply, *json))
        }
    }
}

fn record_key(client: &LockClient, name: &RecordName) -> Result<RecordKey, Error> {
    let key = name.key.as_str();
    if name.raw {
        return RecordKey::new(key);
    }
    let path = name.path.as_deref().unwrap_or_default();
    let mut request = KeyedRequest::new(&name.method, path, key).namespace(&name.namespace);
    if let Some(route) = &name.route {
        request = request.route(route);
    } else if name.path.is_none() {
        // A command line is taken literally, including braces.
        return client.once(LockKey::raw(key)).record_key();
    }
    if let Some(caller) = &name.caller {
        request = request.caller(&Caller::new(caller));
    }
    if let Some(host) = &name.host {
        request = request.host(host);
    }
    request.record_key()
}

async fn show(
    client: &LockClient,
    name: &RecordName,
    with_result: bool,
    as_json: bool,
) -> Result<ExitCode, Error> {
    let record = record_key(client, name)?;
    let look = client.inspect_record(&record, with_result).await?;
    let code = match look.record {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::from(NOT_HELD),
    };
    if as_json {
        say!("{}", json_line(&in_json(name, &record, look.record.as_ref())));
        return Ok(code);
    }
    let key = clean(&name.key);
    let Some(view) = look.record else {
        say!("{key}  no record");
        return Ok(code);
    };
    say!(
        "{key}  {}  attempt {}, token {}  forgotten in {}",
        state(&view.state),
        view.attempt,
        view.fence,
        time(view.expires_in)
    );
    say!("  record: {}", record.as_str());
    if let Some(slot) = view.slot() {
        say!("  slot: {}", humantime::format_rfc3339(slot));
    }
    if let Some(result) = result(&view.state) {
        say!("  result: {}", json_line(&result));
    }
    Ok(code)
}

fn state(state: &RecordState) -> String {
    match state {
        RecordState::Claimed { remaining, .. } => {
            format!("in progress, {} left of its lease", time(*remaining))
        }
        RecordState::Completed { size, .. } => format!("ended, {size} bytes are kept"),
        RecordState::Orphaned => "ended without a result".to_owned(),
        RecordState::Released => "not done".to_owned(),
        other => other.name().to_owned(),
    }
}

fn in_json(name: &RecordName, record: &RecordKey, view: Option<&RecordView>) -> Value {
    let mut object = json!({ "key": name.key, "record": record.as_str(), "state": null });
    if let Some(view) = view {
        let (lease_left, size) = match &view.state {
            RecordState::Claimed { remaining, .. } => (Some(millis(*remaining)), None),
            RecordState::Completed { size, .. } => (None, Some(*size)),
            _ => (None, None),
        };
        object["state"] = view.state.name().into();
        object["attempt"] = view.attempt.into();
        object["token"] = view.fence.into();
        object["slot"] = (view.slot()).map_or(Value::Null, |slot| {
            humantime::format_rfc3339(slot).to_string().into()
        });
        object["lease_left_ms"] = json!(lease_left);
        object["expires_in_ms"] = millis(view.expires_in).into();
        object["bytes"] = json!(size);
        object["result"] = json!(result(&view.state));
    }
    object
}

/// The result of work, or the response to a request; `None` if not requested.
fn result(state: &RecordState) -> Option<Value> {
    let RecordState::Completed {
        response: Some(bytes),
        ..
    } = state
    else {
        return None;
    };
    if let Some(stored) = bytes.strip_prefix(b"dlock-once/1 ") {
        let text = String::from_utf8_lossy(stored);
        let result = text.strip_prefix("result ").map(serde_json::from_str);
        return Some(match result {
            Some(Ok(result)) => result,
            _ => Value::from(text),
        });
    }
    Some(match KeptAnswer::read(bytes.clone()) {
        Ok(KeptAnswer::Response(response)) => {
            let headers: Vec<_> = (response.headers().iter())
                .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
                .collect();
            json!({
                "status": response.status().as_u16(),
                "headers": headers,
                "body": String::from_utf8_lossy(response.body()),
            })
        }
        Ok(KeptAnswer::Failed) => "it failed without a response".into(),
        Ok(_) => "its response was not kept".into(),
        Err(_) => String::from_utf8_lossy(bytes).into(),
    })
}

fn forgotten(name: &RecordName, record: &RecordKey, reply: ForgetReply, as_json: bool) -> ExitCode {
    let (word, code) = match reply {
        ForgetReply::Forgotten => ("forgotten", ExitCode::SUCCESS),
        ForgetReply::Missing => ("missing", ExitCode::from(NOT_HELD)),
        _ => ("in_progress", ExitCode::from(IN_PROGRESS)),
    };
    if as_json {
        let object = json!({ "key": name.key, "record": record.as_str(), "outcome": word });
        say!("{}", json_line(&object));
        return code;
    }
    let key = clean(&name.key);
    match reply {
        ForgetReply::Forgotten => say!("{key}  forgotten ({})", record.as_str()),
        ForgetReply::Missing => say!("{key}  no record"),
        ForgetReply::Claimed {
            remaining,
            attempt,
            fence,
        } => say!(
            "{key}  attempt {attempt} with token {fence} is in progress, {} left of its lease: nothing was changed",
            time(remaining)
        ),
        _ => say!("{key}  nothing was changed"),
    }
    code
}
