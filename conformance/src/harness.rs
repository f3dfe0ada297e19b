//! Runs one test.

use std::future::Future;
use std::sync::Arc;

use crate::case::Case;
use crate::fixture::Fixture;
use crate::need::{Check, Need};

/// The expansion of `conform!` for each test.
#[doc(hidden)]
pub fn __test<F: Fixture>(fixture: impl Future<Output = F>, needs: &[Need], check: Check) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime for the test");
    runtime.block_on(async {
        let case = Case::new(Arc::new(fixture.await)).await;
        checked(case.clone(), needs, check).await;
        case.clean_up().await;
        if let Some(why) = case.left_out() {
            println!("left out: {why}");
        }
    });
}

/// Runs a test if the store has what it needs.
pub(crate) async fn checked(case: Case, needs: &[Need], check: Check) {
    for need in needs {
        let can = case.can();
        let is_there = match need {
            Need::Kind(kind) => {
                if !case.has(*kind) {
                    case.refuses(*kind).await;
                }
                case.has(*kind)
            }
            Need::MinHold => can.min_hold,
            Need::PreferWriters => can.prefer_writers,
            Need::Limits => can.limits,
            Need::Notifications => can.notifications,
            Need::Inspection => can.inspection,
        };
        if !is_there {
            return case.leave_out(format!("the store says that it has no {need:?}"));
        }
    }
    check(case).await;
}
