//! PostgreSQL frozen, killed and restarted, and each statement with its reply lost: every step ends in time, tells
//! honestly whether it was done, and may be repeated.

use std::time::Duration;

use dlock::Error;
use dlock::record::{
    ClaimReply, ClaimRequest, ClaimState, ForgetReply, OwnerReply, RecordState, Records, SlotOutcome,
    SlotRequest,
};
use dlock::store::{Outcome, Reason, StoreError};
use dlock_postgres::PostgresRecords;
use dlock_tests::faults::{PATIENCE, SOON, answered, in_rounds, within};
use dlock_tests::postgres::{PgProxy, Postgres, fresh_table};
use dlock_tests::records::{ask, ask_for, claimed, fresh_key};
use dlock_tests::{Direction, NetFault, Swallow, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_postgres::{Config, NoTls};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// What one step may take.
const TIMEOUT: Duration = Duration::from_millis(400);

/// Records by one connection that gives up soon, once it stands.
async fn hasty(config: Config, table: &str) -> Records {
    connected(config, table, TIMEOUT).await
}

/// The same, never late.
async fn patient(config: Config, table: &str) -> Records {
    connected(config, table, PATIENCE).await
}

async fn connected(config: Config, table: &str, limit: Duration) -> Records {
    let builder = || PostgresRecords::builder(config.clone(), NoTls).table(table);
    let maker = builder().connections(1).timeout(PATIENCE);
    maker.connect().await.unwrap().create_table().await.unwrap();
    let made = answered(|| builder().connections(1).timeout(limit).connect()).await;
    let records = Records::new(made.expect("the server is there"));
    // It may have lost its connection by being late, and then makes another.
    answered(|| records.claim(ask(&fresh_key()))).await.unwrap();
    records
}

fn is_unknown<T: std::fmt::Debug>(outcome: Result<T, StoreError>) {
    let error = outcome.unwrap_err();
    assert_eq!(
        (error.outcome, &error.reason),
        (Outcome::Unknown, &Reason::Unreachable),
        "{error}"
    );
}

fn is_sent<T>(outcome: &Result<T, StoreError>) -> bool {
    matches!(outcome, Err(error) if error.outcome == Outcome::Unknown)
}

fn is_not_done<T: std::fmt::Debug>(outcome: Result<T, StoreError>, reason: Reason) -> String {
    let error = outcome.unwrap_err();
    assert_eq!(
        (error.outcome, &error.reason),
        (Outcome::NotDone, &reason),
        "{error}"
    );
    error.message
}

/// A step of the story of a record, what its SQL says, and how often it may be repeated with the same answer.
#[derive(Debug, Clone, Copy)]
enum Step {
    Claim,
    TakeOver,
    Extend,
    Read,
    Complete,
    Replay,
    Release,
}

const STEPS: [(Step, &str); 7] = [
    (Step::Claim, "Claims a record"),
    (Step::TakeOver, "Claims a record"),
    (Step::Extend, "Lets the claim last"),
    (Step::Read, "What became of a claim"),
    (Step::Complete, "Stores the result"),
    (Step::Replay, "Claims a record"),
    (Step::Release, "Forgets the record"),
];

impl Step {
    /// Does what comes before it, and gives the claim that the step is about.
    async fn prepare(self, beside: &Records) -> ClaimRequest {
        let first = ask_for(&fresh_key(), MS, DAY);
        match self {
            Step::Claim => {}
            Step::TakeOver => {
                claimed(beside, first.clone(), 1).await;
                sleep(10 * MS).await;
                let mut next = ask(&first.key);
                next.key = first.key;
                return next;
            }
            _ => {
                claimed(beside, first.clone(), 1).await;
                if matches!(self, Step::Replay) {
                    let stored = beside
                        .complete(&first.key, &first.token, b"x".to_vec(), DAY)
                        .await;
                    assert_eq!(stored.unwrap(), OwnerReply::Done);
                }
            }
        }
        first
    }

    /// Does it; the answer as text, without what differs from one record to the next.
    async fn run(self, on: &Records, claim: &ClaimRequest) -> Result<String, StoreError> {
        let (key, token) = (&claim.key, &claim.token);
        let owner = |reply: OwnerReply| format!("{reply:?}");
        match self {
            Step::Claim | Step::TakeOver | Step::Replay => Ok(match on.claim(claim.clone()).await? {
                ClaimReply::Claimed { attempt, .. } => format!("attempt {attempt}"),
                other => format!("{other:?}"),
            }),
            Step::Extend => Ok(owner(on.extend(key, token, DAY, DAY).await?)),
            Step::Complete => Ok(owner(on.complete(key, token, b"x".to_vec(), DAY).await?)),
            Step::Release => Ok(owner(on.release(key, token).await?)),
            Step::Read => Ok(format!("{:?}", on.read(key, token).await?)),
        }
    }

    fn answer(self) -> &'static str {
        match self {
            Step::Claim => "attempt 1",
            Step::TakeOver => "attempt 2",
            Step::Replay => "Completed { response: [120] }",
            Step::Read => "Open",
            _ => "Done",
        }
    }
}

/// With records that give up after `limit`; `answered` where the step is to succeed in spite of the fault.
async fn each_step(arm: impl Fn(&PgProxy, &'static str) -> NetFault, limit: Duration, answered: bool) {
    let (server, table) = (Postgres::start().await, fresh_table());
    let beside = patient(server.config(), &table).await;
    for (step, sql) in STEPS {
        let round = async || {
            let proxy = PgProxy::start(server.addr());
            let behind = connected(server.config_at(proxy.addr()), &table, limit).await;
            let claim = step.prepare(&beside).await;
            let fault = arm(&proxy, sql);
            let outcome = within(limit.min(SOON), format!("{step:?}"), step.run(&behind, &claim)).await;
            if !fault.fired() {
                return Err(outcome);
            }
            match answered {
                // On the next connection, at once.
                true => assert_eq!(outcome.unwrap(), step.answer(), "{step:?}"),
                false => is_unknown(outcome),
            }
            // A repeated request gets the lost response, here and there.
            for records in [&behind, &beside] {
                let again = dlock_tests::faults::answered(|| step.run(records, &claim)).await;
                assert_eq!(again.unwrap(), step.answer(), "{step:?} again");
            }
            Ok(())
        };
        in_rounds("the step is sent before its time is over", round).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_that_hangs_is_an_unknown_outcome_and_the_step_may_be_repeated() {
    each_step(
        |proxy, sql| proxy.swallow(1, Swallow::Hang, move |request| request.runs(sql)),
        TIMEOUT,
        false,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_breaks_before_the_reply_costs_a_repetition() {
    each_step(
        |proxy, sql| proxy.swallow(1, Swallow::Cut, move |request| request.runs(sql)),
        PATIENCE,
        true,
    )
    .await;
}

/// Another client has claimed and released the record since: no trace of an earlier release would refuse it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_that_arrives_when_its_time_is_over_does_nothing() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let beside = patient(server.config(), &table).await;
    for (sql, slot) in [
        ("Claims a record, or", None),
        ("Claims a record for a time slot", Some(SlotRequest::nearest(DAY))),
    ] {
        let claim = async |records: &Records, request: ClaimRequest| match slot {
            None => records.claim(request).await.map(Some),
            Some(slot) => {
                let reply = records.claim_slot(request, slot).await?;
                Ok(match reply.outcome {
                    SlotOutcome::Claim(claim) => Some(claim),
                    _ => None,
                })
            }
        };
        let round = async || {
            let proxy = PgProxy::start(server.addr());
            let behind = hasty(server.config_at(proxy.addr()), &table).await;
            let request = ask(&fresh_key());
            let late = proxy.hold(1, move |request| request.runs(sql));
            let outcome = within(TIMEOUT, "claim", claim(&behind, request.clone())).await;
            if !late.fired() {
                return Err(outcome);
            }
            is_unknown(outcome);
            let (key, next) = (&request.key, ask(&request.key));
            let reply = claim(&beside, next.clone()).await.unwrap();
            assert!(
                matches!(reply, Some(ClaimReply::Claimed { attempt: 1, .. })),
                "{reply:?}"
            );
            assert_eq!(beside.release(key, &next.token).await.unwrap(), OwnerReply::Done);
            late.release();
            late.swallowed().await;
            let look = beside.inspect(key, false).await.unwrap();
            let state = look.record.map(|record| record.state);
            assert!(
                matches!(state, None | Some(RecordState::Released)),
                "{sql}: {state:?}"
            );
            Ok(())
        };
        in_rounds("the claim is sent before its time is over", round).await;
    }
}

/// The second time it would remove what another process has done since, or find nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_may_have_been_removed_is_not_removed_again() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let beside = patient(server.config(), &table).await;
    let round = async || {
        let proxy = PgProxy::start(server.addr());
        let behind = connected(server.config_at(proxy.addr()), &table, PATIENCE).await;
        let claim = Step::Replay.prepare(&beside).await;
        let fault = proxy.swallow(1, Swallow::Cut, |request| request.runs("Removes a record"));
        let outcome = within(SOON, "the removal", behind.forget(&claim.key)).await;
        if !fault.fired() {
            return Err(outcome);
        }
        is_unknown(outcome);
        assert_eq!(beside.forget(&claim.key).await.unwrap(), ForgetReply::Missing);
        Ok(())
    };
    in_rounds("the removal is sent before its time is over", round).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_breaks_before_the_statement_costs_a_repetition() {
    each_step(
        |proxy, sql| proxy.lose(1, move |request| request.runs(sql)),
        PATIENCE,
        true,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connecting_and_preparing_survive_the_loss_of_every_message() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let _made = hasty(server.config(), &table).await;
    for then in [Some(Swallow::Hang), Some(Swallow::Cut), None] {
        for k in 1.. {
            // Whether the fault struck. Without one a machine that stood still may be all that was in the way.
            let round = async || {
                let proxy = PgProxy::start(server.addr());
                let fault = match then {
                    Some(then) => proxy.swallow(k, then, |_| true),
                    None => proxy.lose(k, |_| true),
                };
                let builder = PostgresRecords::builder(server.config_at(proxy.addr()), NoTls).table(&table);
                let connecting = builder.connections(1).timeout(TIMEOUT).connect();
                let store = match within(TIMEOUT, "connecting", connecting).await {
                    Ok(store) => store,
                    Err(Error::Unreachable { .. }) if fault.fired() => return Ok(true),
                    Err(error @ Error::Unreachable { .. }) => return Err(error.to_string()),
                    Err(error) => panic!("{error}"),
                };
                let records = Records::new(store);
                let request = ask(&fresh_key());
                let first = within(TIMEOUT, "the first claim", records.claim(request.clone())).await;
                answered(|| records.claim(request.clone())).await.unwrap();
                match first {
                    Err(error) if !fault.fired() => Err(error.to_string()),
                    _ => Ok(fault.fired()),
                }
            };
            if !in_rounds("it passes without a fault", round).await {
                assert!(k > 5, "with {k} requests");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_server_keeps_no_caller_waiting() {
    let (server, table) = (Postgres::start().await, fresh_table());
    in_rounds("the claim is sent before its time is over", async || {
        let records = hasty(server.config(), &table).await;
        let key = fresh_key();
        let claim = ask(&key);
        let token = claim.token.clone();
        answered(|| records.claim(claim.clone())).await.unwrap();
        let (_, fence) = claimed(&patient(server.config(), &table).await, claim.clone(), 1).await;
        server.stop();
        let frozen = ask(&fresh_key());
        let outcome = within(TIMEOUT, "claim", records.claim(frozen.clone())).await;
        let mut proven = is_sent(&outcome);
        if proven {
            is_unknown(outcome);
            // The connection is given up with the step that got no answer, unless the next one was quicker; no other
            // is to be had, so nothing is sent.
            let extend = async || within(TIMEOUT, "extend", records.extend(&key, &token, SEC, DAY)).await;
            let outcome = extend().await;
            if is_sent(&outcome) {
                proven = false;
            } else {
                is_not_done(outcome, Reason::Unreachable);
            }
            is_not_done(extend().await, Reason::Unreachable);
            let many = join_all((0..500).map(|_| records.claim(ask(&fresh_key()))));
            for outcome in within(TIMEOUT, "many claims", many).await {
                is_not_done(outcome, Reason::Unreachable);
            }
        } else {
            is_not_done(outcome, Reason::Unreachable);
        }
        server.cont();
        for (request, is) in [(frozen, None), (claim, Some(fence))] {
            let again = answered(|| records.claim(request.clone())).await.unwrap();
            let ClaimReply::Claimed { attempt: 1, fence } = again else {
                panic!("{again:?}")
            };
            assert!(is.is_none_or(|is| is == fence));
        }
        proven
            .then_some(())
            .ok_or("a step was sent too late, or too early")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_committed_survives_a_kill_and_connections_come_back_by_themselves() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let records = hasty(server.config(), &table).await;
    let (open, done) = (ask(&fresh_key()), ask(&fresh_key()));
    let again = async |request: &ClaimRequest| {
        let reply = answered(|| records.claim(request.clone())).await.unwrap();
        let ClaimReply::Claimed { attempt: 1, fence } = reply else {
            panic!("{reply:?}")
        };
        fence
    };
    again(&open).await;
    let (fence, token) = (again(&done).await, &done.token);
    answered(|| records.complete(&done.key, token, b"x".to_vec(), DAY))
        .await
        .unwrap();
    for graceful in [false, true] {
        match graceful {
            true => server.shutdown(),
            false => server.kill(),
        }
        let claim = || within(TIMEOUT, "claim", records.claim(ask(&fresh_key())));
        // Until the end of the connection is noticed, the outcome of what was sent is unknown.
        let noticed = |error: &StoreError| error.outcome == Outcome::NotDone;
        eventually("it is noticed", || async {
            claim().await.is_err_and(|error| noticed(&error))
        })
        .await;
        let said = is_not_done(claim().await, Reason::Unreachable);
        assert!(said.contains(&server.addr().to_string()), "{said}");
        server.restart().await;
        let became = answered(|| records.read(&done.key, token)).await.unwrap();
        assert_eq!(
            became,
            ClaimState::Completed {
                response: b"x".to_vec()
            }
        );
        again(&open).await;
        assert!(again(&ask(&fresh_key())).await > fence);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_the_server_gives_up_was_not_done_and_keeps_its_connection() {
    let (server, table) = (Postgres::start().await, fresh_table());
    // A fifth of the time is left when the server gives up: what does not use it has to make a new connection.
    in_rounds("the server gives up in time", async || {
        let proxy = PgProxy::start(server.addr());
        let records = hasty(server.config_at(proxy.addr()), &table).await;
        let claim = ask(&fresh_key());
        let connected = proxy.count(|request| request.runs("statement_timeout"));
        let mut client = server.client().await;
        let tx = client.transaction().await.unwrap();
        tx.batch_execute(&format!("LOCK TABLE {table}")).await.unwrap();
        let outcome = within(TIMEOUT, "claim", records.claim(claim.clone())).await;
        tx.rollback().await.unwrap();
        let again = answered(|| records.claim(claim.clone())).await.unwrap();
        assert!(
            matches!(again, ClaimReply::Claimed { attempt: 1, .. }),
            "{again:?}"
        );
        let now = proxy.count(|request| request.runs("statement_timeout"));
        if matches!(&outcome, Err(error) if error.outcome == Outcome::Unknown) || now != connected {
            return Err(outcome);
        }
        is_not_done(outcome, Reason::Unreachable);
        Ok(())
    })
    .await;
}

/// A server that takes no writes is no place for records: a step says so when its time is over, and that it was not done;
/// and the records go on as soon as there is a primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_only_reads_is_told_and_used_again_when_it_writes() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let records = hasty(server.config(), &table).await;
    server.only_reads(true).await;
    let claim = ask(&fresh_key());
    eventually("it is noticed", || async {
        let asked = within(TIMEOUT, "claim", records.claim(ask(&fresh_key()))).await;
        asked.is_err_and(|error| error.message.contains("dlock needs the primary"))
    })
    .await;
    let said = is_not_done(records.claim(claim.clone()).await, Reason::Unreachable);
    assert!(said.contains("dlock needs the primary"), "{said}");
    assert!(said.contains(&server.addr().to_string()), "{said}");
    let error = PostgresRecords::connect(server.config(), NoTls)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    server.only_reads(false).await;
    eventually("it is used again", || async {
        matches!(
            records.claim(claim.clone()).await,
            Ok(ClaimReply::Claimed { attempt: 1, .. })
        )
    })
    .await;
}

/// Records leave a demoted primary for the promoted standby, with all that was replicated, and waiters hear its news.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_follow_a_promoted_standby() {
    let (first, table) = (Postgres::start().await, fresh_table());
    let second = Postgres::standby_of(&first).await;
    let records = patient(first.config_with(second.addr()), &table).await;
    let (open, done) = (ask(&fresh_key()), ask(&fresh_key()));
    let (_, fence) = claimed(&records, open.clone(), 1).await;
    let (token, _) = claimed(&records, done.clone(), 1).await;
    records
        .complete(&done.key, &token, b"x".to_vec(), DAY)
        .await
        .unwrap();
    let standby = second.client().await;
    let replicated = format!("SELECT count(*) FROM {table} WHERE state = 'completed' OR key = $1");
    eventually("it is replicated", || async {
        let row = standby.query_one(&replicated, &[&open.key.as_str()]).await;
        row.is_ok_and(|row| row.get::<_, i64>(0) == 2)
    })
    .await;
    let mut watch = records.watch(&open.key);
    watch.changed().await;
    second.promote().await;
    first.demote().await;
    assert_eq!(claimed(&records, open.clone(), 1).await.1, fence);
    assert_eq!(
        records.claim(ask(&done.key)).await.unwrap(),
        ClaimReply::Completed {
            response: b"x".to_vec()
        }
    );
    assert!(claimed(&records, ask(&fresh_key()), 1).await.1 > fence);
    let beside = patient(second.config(), &table).await;
    beside
        .complete(&open.key, &open.token, b"y".to_vec(), DAY)
        .await
        .unwrap();
    let notifications = async {
        while !matches!(
            records.claim(ask(&open.key)).await,
            Ok(ClaimReply::Completed { .. })
        ) {
            watch.changed().await;
        }
    };
    within(SOON, "the notification", notifications).await;
}

/// The same without a connection that breaks: the server stays, and takes no writes any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_leave_a_server_that_became_read_only() {
    let (first, table) = (Postgres::start().await, fresh_table());
    let second = Postgres::standby_of(&first).await;
    let records = patient(first.config_with(second.addr()), &table).await;
    let noise = fresh_key();
    let mut watch = records.watch(&noise);
    watch.changed().await;
    let standby = second.client().await;
    eventually("the table is replicated", || async {
        standby.query(&format!("SELECT FROM {table}"), &[]).await.is_ok()
    })
    .await;
    second.promote().await;
    first.only_reads(true).await;
    let beside = patient(second.config(), &table).await;
    eventually("the second is used", || async {
        let request = ask(&fresh_key());
        claimed(&records, request.clone(), 1).await;
        matches!(
            beside.claim(ask(&request.key)).await.unwrap(),
            ClaimReply::InProgress { .. }
        )
    })
    .await;
    // Waiters hear of what happens there, though the connection to the other one was not closed.
    let (token, _) = claimed(&beside, ask(&noise), 1).await;
    beside.complete(&noise, &token, b"x".to_vec(), DAY).await.unwrap();
    within(PATIENCE, "the notification", watch.changed()).await;
}

/// A host that accepts connections and answers nothing hides none of the hosts behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_host_does_not_hide_the_next() {
    let (frozen, table) = (Postgres::start().await, fresh_table());
    let server = Postgres::standby_of(&frozen).await;
    server.promote().await;
    frozen.stop();
    let config = frozen.config_with(server.addr());
    let builder = || PostgresRecords::builder(config.clone(), NoTls).table(&table);
    let store = answered(|| builder().timeout(4 * SEC).connect()).await.unwrap();
    answered(|| store.create_table()).await.unwrap();
    let records = Records::new(store);
    let claim = ask(&fresh_key());
    let reply = answered(|| records.claim(claim.clone())).await.unwrap();
    assert!(
        matches!(reply, ClaimReply::Claimed { attempt: 1, .. }),
        "{reply:?}"
    );
}

/// Expired records are removed however long that takes for one of them: the statements are cut to their time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweep_finishes_where_rows_take_long_to_remove() {
    let server = Postgres::shared().await;
    for (rows, each) in [(600, 5 * MS), (3, SEC)] {
        let (table, client) = (fresh_table(), server.client().await);
        let builder = PostgresRecords::builder(server.config(), NoTls).table(&table);
        let store = builder
            .timeout(2 * SEC)
            .sweep_every(None)
            .connect()
            .await
            .unwrap();
        answered(|| store.create_table()).await.unwrap();
        let sql = format!(
            "CREATE FUNCTION slow_{table}() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN PERFORM pg_sleep({}); RETURN OLD; END $$;
             CREATE TRIGGER slow BEFORE DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION slow_{table}();
             INSERT INTO {table} SELECT 'k' || i, 1, 'completed', 't', '', 1, i, clock_timestamp(), clock_timestamp(), 'x'
               FROM generate_series(1, {rows}) i",
            each.as_secs_f64()
        );
        client.batch_execute(&sql).await.unwrap();
        let count = format!("SELECT count(*) FROM {table}");
        // A busy machine may need more than one sweep, as any store does that sweeps now and then.
        eventually("the rows are removed", || async {
            let _ = store.remove_expired().await;
            client.query_one(&count, &[]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_of_a_completion_through_broken_connections() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let proxy = PgProxy::start(server.addr());
    let (behind, beside) = (
        hasty(server.config_at(proxy.addr()), &table).await,
        patient(server.config(), &table).await,
    );
    for (blocked, refused) in [(false, false), (false, true), (true, false)] {
        let (key, noise) = (fresh_key(), fresh_key());
        let (token, _) = claimed(&beside, ask(&key), 1).await;
        let (mut watch, mut other) = (behind.watch(&key), behind.watch(&noise));
        watch.changed().await;
        other.changed().await;
        // The news are lost with the connection.
        match blocked {
            true => proxy.block(Direction::Both),
            false => proxy.cut(),
        }
        if refused {
            proxy.refuse();
        }
        beside.complete(&key, &token, b"x".to_vec(), DAY).await.unwrap();
        sleep(300 * MS).await;
        proxy.unblock(Direction::Both);
        proxy.accept();
        let found = async {
            loop {
                watch.changed().await;
                match behind.claim(ask(&key)).await {
                    Ok(ClaimReply::Completed { .. }) => return,
                    Ok(ClaimReply::InProgress { .. }) | Err(_) => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        within(SOON, "the notification", found).await;
    }
}

/// A server does not notice that a client is gone while it waits for its standby. A client that opens a new connection after each
/// time-out uses up all that the server accepts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_that_is_missing_leaves_no_connections_behind() {
    let (server, table) = (Postgres::start().await, fresh_table());
    let records = connected(server.config(), &table, SEC).await;
    let db = server.client().await;
    let standby = async |name: &str| {
        let set = format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'");
        for sql in [&*set, "SELECT pg_reload_conf()"] {
            db.batch_execute(sql).await.unwrap();
        }
        // It takes effect once the checkpointer has read it.
        sleep(SEC).await;
    };
    standby("nobody").await;
    let waiting = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let mut most = 0;
    for _ in 0..8 {
        let claims = (0..3).map(|_| records.claim(ask(&fresh_key())));
        for claimed in join_all(claims).await {
            assert!(claimed.is_err(), "{claimed:?}");
        }
        most = most.max(waiting().await);
    }
    assert!((1..=3).contains(&most), "{most} wait");
    eventually("no process is left", async || waiting().await == 0).await;
    standby("").await;
    answered(|| records.claim(ask(&fresh_key()))).await.unwrap();
}
