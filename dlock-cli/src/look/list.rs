//! `dlock list`.

use std::process::ExitCode;

use dlock::{Error, LockClient};

use super::args::ListArgs;
use super::survey::{Row, Survey};
use super::text::{clean, json_line, time};
use crate::output;

/// Lists all held locks that match.
pub(super) async fn list(client: &LockClient, args: &ListArgs) -> Result<ExitCode, Error> {
    let survey = Survey::of(client, &args.pattern).await?;
    let rows: Vec<_> = survey.rows.iter().filter(|row| is_meant(row, args)).collect();
    for row in &rows {
        match args.json {
            true => say!("{}", json_line(&row.json())),
            false => say!("{}", row.line()),
        }
    }
    // Not on standard output, which has a line for each lock.
    if rows.is_empty() && !args.json {
        output::print_error(none(args));
    }
    let is_unknown = |row: &&Row| {
        let is_held = row.holder.holds > 0;
        is_held && row.held().is_none() && (!args.expiring || row.holder.is_near_its_end())
    };
    let unknown = survey.rows.iter().filter(is_unknown).count();
    if args.older_than.is_some() && unknown > 0 {
        output::print_error(format_args!(
            "of {unknown} more it is not known for how long: presence is off there, they are new, or their client has \
             more than it publishes"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says that none of those that were asked for is held.
fn none(args: &ListArgs) -> String {
    let held = match (args.older_than, args.expiring) {
        (None, false) => "no lock is held".to_owned(),
        (None, true) => "no lock is held that is near the end of its lease".to_owned(),
        (Some(least), false) => format!("no lock is known to be held for longer than {}", time(least)),
        (Some(least), true) => format!(
            "no lock is known to be held for longer than {} and near the end of its lease",
            time(least)
        ),
    };
    match args.pattern.as_str() {
        "" => held,
        pattern if pattern.contains('*') => format!("{held} whose name fits \"{}\"", clean(pattern)),
        pattern => format!("{held} whose name begins with \"{}\"", clean(pattern)),
    }
}

fn is_meant(row: &Row, args: &ListArgs) -> bool {
    // An unknown age is not older than anything.
    let is_old = (args.older_than).is_none_or(|least| row.held().is_some_and(|held| held >= least));
    is_old && (!args.expiring || row.holder.is_near_its_end())
}
