//! `dlock show`.

use std::process::ExitCode;

use dlock::{Error, LockClient, LockKey};
use serde_json::json;

use super::NOT_HELD;
use super::args::ShowArgs;
use super::diagnosis::{Diagnoses, Diagnosis};
use super::survey::{Row, Survey, place, wait_line};
use super::text::{clean, json_line, time};

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
    let waits = match Survey::of(client, &args.key).await {
        Ok(survey) => survey.waits,
        // The holders are known without a scan.
        Err(Error::Refused { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    let waits: Vec<_> = waits.into_iter().filter(|(_, wait)| wait.key == key).collect();
    let mut diagnoses = Diagnoses::new(client);
    for holder in holders {
        let (holder, diagnosis) = diagnoses.of(holder).await?;
        let row = Row {
            key: key.clone(),
            holder,
            waiters: waits.len(),
        };
        if args.json {
            let mut object = row.json();
            object["diagnosis"] = diagnosis.json();
            say!("{}", json_line(&object));
        } else {
            print(&row, &diagnosis);
        }
    }
    if !args.json {
        for (client, wait) in &waits {
            say!("  {}", wait_line(client, wait));
        }
    }
    Ok(ExitCode::SUCCESS)
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
