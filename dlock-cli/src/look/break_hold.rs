//! `dlock break`, `revoke` and `force-unlock`.

use std::process::ExitCode;

use dlock::operations::Intervention;
use dlock::{Error, LockClient, LockKey};
use serde_json::json;

use super::NOT_HELD;
use super::args::{HoldArgs, InterventionArgs};
use super::text::{clean, json_line};

/// Ends a hold, if it still exists.
pub(super) async fn break_hold(client: &LockClient, args: &HoldArgs) -> Result<ExitCode, Error> {
    let key = LockKey::raw(args.key.as_str());
    let is_done = client
        .break_hold(key, &args.holder, intervention(&args.why))
        .await?;
    Ok(told(args, "broken", is_done))
}

/// Asks its holder to stop.
pub(super) async fn revoke(client: &LockClient, args: &HoldArgs) -> Result<ExitCode, Error> {
    let key = LockKey::raw(args.key.as_str());
    let is_done = client.revoke(key, &args.holder, intervention(&args.why)).await?;
    Ok(told(args, "its holder is asked to stop", is_done))
}

/// Takes a lock away from its holder, whichever client that is.
pub(super) async fn force_unlock(client: &LockClient, key: &str) -> Result<ExitCode, Error> {
    Ok(if client.force_release(LockKey::raw(key)).await? {
        say!("{}  released", clean(key));
        ExitCode::SUCCESS
    } else {
        say!("{}  was free", clean(key));
        ExitCode::from(NOT_HELD)
    })
}

/// Builds the intervention.
pub(super) fn intervention(args: &InterventionArgs) -> Intervention {
    let user = || std::env::var("USER").ok();
    let by = args.by.clone().or_else(user).filter(|by| !by.is_empty());
    let intervention = Intervention::new(args.reason.as_str()).audited(!args.no_audit);
    match by {
        Some(by) => intervention.by(by),
        None => intervention,
    }
}

fn told(args: &HoldArgs, done: &str, is_done: bool) -> ExitCode {
    let (key, holder) = (clean(&args.key), clean(&args.holder));
    match (args.json, is_done) {
        (true, _) => {
            let told = json!({ "key": args.key, "holder": { "id": args.holder }, "done": is_done });
            say!("{}", json_line(&told));
        }
        (false, true) => say!("{key}  {done} ({holder})"),
        (false, false) => say!("{key}  is not held by {holder} any more: nothing was changed"),
    }
    match is_done {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(NOT_HELD),
    }
}
