//! `#[distributed_lock]` without `lock = …`: the process-wide client. One test, for it is set once.

use std::sync::atomic::{AtomicU32, Ordering};

use dlock::{Error, LockClient, distributed_lock};

static RUNS: AtomicU32 = AtomicU32::new(0);

#[distributed_lock(key = "report")]
async fn report() -> Result<(), Error> {
    RUNS.fetch_add(1, Ordering::SeqCst);
    Ok(())
}

#[tokio::test]
async fn without_a_default_client_the_body_does_not_run_and_with_one_it_does() {
    let error = report().await.unwrap_err();
    assert!(matches!(error, Error::NoDefaultClient), "{error}");
    assert!(error.to_string().contains("dlock::set_default"), "{error}");
    assert_eq!(RUNS.load(Ordering::SeqCst), 0);

    dlock::set_default(LockClient::memory()).unwrap();
    report().await.unwrap();
    assert_eq!(RUNS.load(Ordering::SeqCst), 1);
}
