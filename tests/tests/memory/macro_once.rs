//! `#[once]`: the body runs once for each key, and what a call without a result returns.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dlock::{LockClient, NotRun, OnceError, distributed_lock, once};
use dlock_tests::paused_for;
use tokio::time::sleep;

const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
enum Failure {
    Own(String),
    Once(NotRun),
}

impl From<NotRun> for Failure {
    fn from(why: NotRun) -> Failure {
        Failure::Once(why)
    }
}

impl From<std::num::ParseIntError> for Failure {
    fn from(error: std::num::ParseIntError) -> Failure {
        Failure::Own(error.to_string())
    }
}

#[once(key = "parse:{text}", client = client, keep = "30d")]
async fn parse(client: &LockClient, runs: &AtomicU32, text: &str) -> Result<u32, Failure> {
    runs.fetch_add(1, Ordering::SeqCst);
    sleep(SEC).await;
    let number = text.trim().parse()?;
    if number == 13 {
        return Err(Failure::Own("no".to_owned()));
    }
    Ok(number)
}

struct Job {
    id: u32,
    client: LockClient,
    _text: String,
}

impl From<dlock::Error> for Failure {
    fn from(error: dlock::Error) -> Failure {
        Failure::Own(error.to_string())
    }
}

#[distributed_lock(key = "job:{id}", lock = client)]
#[once(key = "job:{id}", client = client)]
async fn carry_out(Job { id, client, .. }: Job) -> Result<u32, Failure> {
    Ok(id)
}

#[tokio::test]
async fn an_attribute_below_a_lock_names_the_parts_of_a_pattern() {
    let job = Job {
        id: 3,
        client: LockClient::memory(),
        _text: String::new(),
    };
    assert!(matches!(carry_out(job).await, Ok(3)));
}

#[test]
fn body_runs_once_for_each_key_and_again_after_a_failure() {
    paused_for(100 * DAY, async {
        let (client, runs) = (LockClient::memory(), AtomicU32::new(0));
        let count = || runs.load(Ordering::SeqCst);
        for _ in 0..3 {
            assert!(matches!(parse(&client, &runs, "7").await, Ok(7)));
        }
        assert_eq!(count(), 1);
        assert!(matches!(parse(&client, &runs, "8").await, Ok(8)));
        for times in [3, 4] {
            assert!(matches!(parse(&client, &runs, "x").await, Err(Failure::Own(_))));
            assert_eq!(count(), times);
        }
        assert!(matches!(parse(&client, &runs, "13").await, Err(Failure::Own(why)) if why == "no"));
        sleep(31 * DAY).await;
        assert!(matches!(parse(&client, &runs, "7").await, Ok(7)));
        assert_eq!(count(), 6);
    });
}

#[once(key = "job:{id}", client = client)]
async fn with_items(client: &LockClient, id: u32) -> Result<u32, Failure> {
    use std::io::Result;
    enum Failure {}
    fn rows(id: u32) -> Result<u32> {
        let never: Option<Failure> = None;
        Ok(id + u32::from(never.is_some()))
    }
    Ok(rows(id).unwrap_or_default())
}

#[tokio::test]
async fn items_of_the_body_may_have_the_names_of_the_return_type() {
    assert!(matches!(with_items(&LockClient::memory(), 3).await, Ok(3)));
}

macro_rules! once_only {
    ($name:ident, $body:block) => {
        #[once(key = "made", client = LockClient::memory())]
        async fn $name() -> Result<u32, NotRun> $body
    };
}

once_only!(body_of_a_macro, { Ok(7) });

#[tokio::test]
async fn body_may_be_of_a_macro() {
    assert!(matches!(body_of_a_macro().await, Ok(7)));
}

#[test]
fn call_without_a_result_says_why() {
    paused_for(DAY, async {
        let (client, runs) = (LockClient::memory(), AtomicU32::new(0));
        let (ran, elsewhere) = tokio::join!(parse(&client, &runs, "7"), parse(&client, &runs, "7"));
        assert!(matches!(ran, Ok(7)));
        assert!(
            matches!(
                elsewhere,
                Err(Failure::Once(NotRun::Elsewhere { attempt: 1, .. }))
            ),
            "{elsewhere:?}"
        );
        client.shutdown(SEC).await;
        let closed = parse(&client, &runs, "9").await;
        assert!(
            matches!(
                &closed,
                Err(Failure::Once(NotRun::Failed(OnceError::Store(
                    dlock::Error::ClientClosed
                ))))
            ),
            "{closed:?}"
        );
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    });
}
