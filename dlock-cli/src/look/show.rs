//! `dlock show`.

use std::process::ExitCode;
use std::sync::Arc;

use dlock::operations::{ClientReport, SurveyedLock, WaitReport};
use dlock::store::Holder;
use dlock::{Error, LockClient, LockKey};
use serde_json::{Value, json};

use super::NOT_HELD;
use super::args::ShowArgs;
use super::diagnosis::{Diagnoses, Diagnosis};
use super::survey::{Row, place, wait_line};
use super::text::{clean, json_line, time, told};
use crate::output;

/// Shows all holders of this lock.
pub(super) async fn show(client: &LockClient, args: &ShowArgs) -> Result<ExitCode, Error> {
    // A command line is taken literally, including braces.
    let key = LockKey::raw(args.key.as_str());
    let holders = client.holders(key.clone()).await?;
    if holders.is_empty() {
        match args.json {
            true => say!(
                "{}",
                json_line(&json!({ "key": args.key, "holder": null, "waiters": 0 }))
            ),
            false => say!("{}  free", clean(&args.key)),
        }
        return Ok(ExitCode::from(NOT_HELD));
    }
    match args.json {
        true => show_json(client, &key, holders).await?,
        false => show_text(client, &key, holders).await?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn show_json(client: &LockClient, key: &LockKey, holders: Vec<Holder>) -> Result<(), Error> {
    let waits = waits(client, key).await;
    let mut diagnoses = Diagnoses::new(client);
    for holder in holders {
        let (holder, diagnosis) = diagnoses.of(holder).await?;
        let waiters = waits.as_ref().map_or(0, Vec::len);
        let mut object = row(key, holder, waiters).json();
        if let Err(why) = &waits {
            object["waiters"] = Value::Null;
            object["holder"]["unknown"]["waiters"] = json!(why);
        }
        object["diagnosis"] = diagnosis.json();
        say!("{}", json_line(&object));
    }
    Ok(())
}

/// The holders come first: the scan for the waiters takes minutes on a store with millions of keys.
async fn show_text(client: &LockClient, key: &LockKey, holders: Vec<Holder>) -> Result<(), Error> {
    let mut diagnoses = Diagnoses::new(client);
    for holder in holders {
        let (holder, diagnosis) = diagnoses.of(holder).await?;
        print(&row(key, holder, 0), &diagnosis);
    }
    for (client, wait) in waits(client, key).await.unwrap_or_default() {
        say!("  {}", wait_line(&client, &wait));
    }
    Ok(())
}

fn row(key: &LockKey, holder: Holder, waiters: usize) -> Row {
    let key = key.clone();
    Row { key, holder, waiters }
}

/// The calls that are known to wait for this lock, the longest wait first, or why they are not known: that is no reason to
/// hide the holders.
async fn waits(client: &LockClient, key: &LockKey) -> Result<Vec<(Arc<ClientReport>, WaitReport)>, String> {
    let clients = match client.clients().await {
        Ok(clients) => clients,
        // Then only the store's own data is known.
        Err(Error::Unsupported { .. }) => Vec::new(),
        Err(error) => {
            let why = told(&error);
            output::print_error(format_args!("which calls wait for it is not known: {why}"));
            return Err(why);
        }
    };
    let lock = SurveyedLock::new(key.clone(), Vec::new(), clients.into_iter().map(Arc::new));
    Ok(lock.waits)
}

fn print(row: &Row, diagnosis: &Diagnosis) {
    say!("{}", row.line());
    say!("  {}", diagnosis.line());
    if let Some(client) = &row.holder.client {
        say!("  client: {}, dlock {}", place(client), clean(&client.version));
    }
    if let Some(hold) = &row.holder.hold {
        say!(
            "  acquired at {}, {} ago, token {}",
            clean(&hold.location),
            time(hold.held),
            hold.token
        );
        for line in &hold.reentered {
            say!("  entered again at {}", clean(line));
        }
        if hold.suspect {
            say!("  suspect: the store has not confirmed the lease when that was due");
        }
        if let Some(note) = &hold.note {
            say!("  note: {}", clean(note));
        }
    }
}
