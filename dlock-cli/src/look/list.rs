//! `dlock list`.

use std::process::ExitCode;

use dlock::{Error, LockClient};

use super::args::ListArgs;
use super::survey::{Row, Survey};
use super::text::{clean, json_line};

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
    if rows.is_empty() && !args.json {
        // Not on standard output, which has a line for each lock.
        match args.pattern.as_str() {
            "" => eprintln!("no lock is held"),
            pattern if pattern.contains('*') => {
                eprintln!("no lock is held whose name fits \"{}\"", clean(pattern))
            }
            pattern => eprintln!("no lock is held whose name begins with \"{}\"", clean(pattern)),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn is_meant(row: &Row, args: &ListArgs) -> bool {
    // An unknown age is not older than anything.
    let is_old = (args.older_than).is_none_or(|least| row.held().is_some_and(|held| held >= least));
    is_old && (!args.expiring || row.is_near_its_end())
}
