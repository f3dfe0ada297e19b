//! `dlock doctor`: what endangers the locks of a store.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dlock::store::doctor::Verdict;
use dlock::{Diagnosis, Error, LockClient};
use serde_json::json;

use crate::look::{clean, json_line, told};
use crate::{runtime, stores};

/// Exit code if something needs action.
const ILL: u8 = 1;

/// Examine the store: what endangers locks there, what that costs, and what to do about it.
///
/// Tests what locks rely on with scratch keys, for some seconds, with at most a hundred operations a second on each
/// server; changes nothing else, and leaves no key behind, unless the finding `scratch` says so. The lease is that of
/// the URL (?lease=10s). Exit status 0: nothing is bad; 1: something is; 2: the store could not be examined.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// How long callers of the service wait before they give up, as in 15s
    #[arg(long, value_name = "DURATION", value_parser = some_time)]
    callers_wait: Option<Duration>,

    /// Only read: no tests on scratch keys
    #[arg(long)]
    read_only: bool,

    /// Count what cannot be seen as bad for the exit status
    #[arg(long)]
    strict: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Examines the store of this URL.
pub(crate) fn run(url: String, args: &DoctorArgs) -> Result<ExitCode, String> {
    runtime::block_on(carry_out(url, args))?.map_err(|error| told(&error))
}

/// No lease is short enough for callers that do not wait.
fn some_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => {
            Err("callers that do not wait gain nothing by a short lease: leave it out".to_owned())
        }
        Ok(time) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

async fn carry_out(url: String, args: &DoctorArgs) -> Result<ExitCode, Error> {
    let client = stores::onlooker(url).build().await?;
    let code = doctor(&client, args).await;
    client.shutdown(Duration::ZERO).await;
    code
}

async fn doctor(client: &LockClient, args: &DoctorArgs) -> Result<ExitCode, Error> {
    let mut doctor = client.doctor().probe(!args.read_only);
    if let Some(wait) = args.callers_wait {
        doctor = doctor.callers_wait(wait);
    }
    let diagnosis = doctor.await?;
    match args.json {
        true => say!("{}", json_line(&as_json(&diagnosis))),
        false => diagnosis
            .to_string()
            .lines()
            .for_each(|line| say!("{}", clean(line))),
    }
    let is_ill = |verdict| verdict == Verdict::Bad || args.strict && verdict == Verdict::Unknown;
    Ok(
        match diagnosis.findings.iter().any(|finding| is_ill(finding.verdict)) {
            true => ExitCode::from(ILL),
            false => ExitCode::SUCCESS,
        },
    )
}

fn as_json(diagnosis: &Diagnosis) -> serde_json::Value {
    let findings: Vec<_> = (diagnosis.findings.iter())
        .map(|finding| {
            json!({
                "check": finding.check,
                "verdict": finding.verdict.as_str(),
                "why": finding.why,
                "remedy": finding.remedy,
            })
        })
        .collect();
    let what_if: Vec<_> = (diagnosis.what_if.iter())
        .map(|row| json!({ "event": row.event, "locks": row.lost, "callers": row.waits }))
        .collect();
    json!({ "findings": findings, "what_if": what_if })
}
