//! What the tests of the doctor have in common, on every store.

use dlock::store::doctor::{Finding, Verdict};
use dlock::{Diagnosis, LockClient};

/// What it finds by reading only.
pub(crate) async fn read(client: &LockClient) -> Diagnosis {
    client.doctor().await.expect("a diagnosis")
}

/// What it finds by trying, too.
pub(crate) async fn tried(client: &LockClient) -> Diagnosis {
    client.doctor().probe(true).await.expect("a diagnosis")
}

#[track_caller]
pub(crate) fn found<'d>(diagnosis: &'d Diagnosis, check: &str) -> &'d Finding {
    let finding = diagnosis.findings.iter().find(|finding| finding.check == check);
    finding.unwrap_or_else(|| panic!("no finding {check}: {diagnosis}"))
}

#[track_caller]
pub(crate) fn is(diagnosis: &Diagnosis, check: &str, verdict: Verdict, why: &str) {
    let finding = found(diagnosis, check);
    assert!(
        finding.verdict == verdict && finding.why.contains(why),
        "{finding:?}"
    );
    assert_eq!(finding.remedy.is_some(), verdict != Verdict::Good, "{finding:?}");
}

/// All of these checks are there and good, but for those that depend on how fast this machine is just now.
#[track_caller]
pub(crate) fn are_good(diagnosis: &Diagnosis, checks: &[&str]) {
    for check in checks {
        let finding = found(diagnosis, check);
        assert!(
            finding.verdict == Verdict::Good || *check == "request-times",
            "{finding:?} in\n{diagnosis}"
        );
    }
}
