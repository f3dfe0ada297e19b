//! The operations on records: their statements, and how replies are interpreted.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::{try_join, try_join_all};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Statement};

use super::table::{Sql, Table};
use crate::failure::{self, Failure};
use crate::micros::micros;
use dlock::record::{
    ClaimReply, ClaimRequest, ClaimState, ClaimToken, Fingerprint, ForgetReply, OnOrphan, OwnerReply,
    RecordKey, RecordLook, RecordState, RecordView, SlotOutcome, SlotReply, SlotRequest,
};
use dlock::store::queue::ServerClock;
use dlock::store::{Reason, StoreError};

/// The record format of this version.
const FORMAT: i32 = 1;
/// The remaining time that is reported for an expired claim while a transaction has locked its row.
const SOON: Duration = Duration::from_millis(100);
/// How often a claim is tried while other transactions change the row.
const LOOKS: u32 = 4;
/// How often an extension is tried while the row is locked.
const LOOKS_TO_EXTEND: u32 = 3;

/// An operation.
#[derive(Debug)]
pub(super) enum Step {
    Claim(ClaimRequest),
    ClaimSlot(ClaimRequest, SlotRequest),
    /// The flag says whether to include the result.
    Inspect(RecordKey, bool),
    Forget(RecordKey),
    Extend(RecordKey, ClaimToken, Duration, Duration),
    Complete(RecordKey, ClaimToken, Vec<u8>, Duration),
    /// The flag says whether to forget the claim because no work was done.
    GiveBack(RecordKey, ClaimToken, bool),
    Read(RecordKey, ClaimToken),
    Sweep(u32),
}

/// The result of an operation.
#[derive(Debug)]
pub(super) enum Answer {
    Claim(ClaimReply),
    Owner(OwnerReply),
    State(ClaimState),
    Slot(SlotReply),
    Look(RecordLook),
    Forget(ForgetReply),
    Swept(u64),
}

/// A connection on which every statement is prepared.
pub(super) struct Prepared {
    client: Arc<Client>,
    statements: Vec<Statement>,
    clock: Mutex<ServerClock>,
}

impl Prepared {
    pub(super) async fn new(client: Arc<Client>, table: &Table) -> Result<Prepared, Failure> {
        let prepare = try_join_all(Sql::ALL.map(|sql| client.prepare(table.sql(sql))));
        let prepare = async { prepare.await.map_err(failure::of_step) };
        let (clock, statements) = try_join(clock_of(&client), prepare).await?;
        Ok(Prepared {
            client,
            statements,
            clock: Mutex::new(clock),
        })
    }

    /// The server's time, in µs, that corresponds to `deadline`: later a claim must have no effect.
    fn refuse_after(&self, deadline: Instant) -> i64 {
        self.clock.lock().at(deadline)
    }

    async fn ask(&self, sql: Sql, values: &[&(dyn ToSql + Sync)]) -> Result<Row, Failure> {
        let statement = &self.statements[sql as usize];
        self.client
            .query_one(statement, values)
            .await
            .map_err(failure::of_step)
    }

    /// Sends a claim, whose reply has the server's time.
    async fn claim(&self, sql: Sql, values: &[&(dyn ToSql + Sync)]) -> Result<Row, Failure> {
        let sent = Instant::now();
        let row = self.ask(sql, values).await?;
        let now: i64 = column(&row, "us")?;
        self.clock.lock().saw(now, sent, Instant::now());
        Ok(row)
    }

    /// Notifies the waiters, in all processes.
    pub(super) async fn tell(&self, channel: &str, key: &RecordKey) -> Result<(), Failure> {
        self.ask(Sql::Tell, &[&channel, &key.as_str()]).await.map(drop)
    }
}

/// Reads the clock of the server.
async fn clock_of(client: &Client) -> Result<ServerClock, Failure> {
    const CLOCK: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS us";
    let sent = Instant::now();
    let rows = client.query_typed(CLOCK, &[]).await.map_err(failure::of_step)?;
    let read = Instant::now();
    let row = rows
        .first()
        .ok_or_else(|| unreadable("a clock without a time".to_owned()))?;
    Ok(ServerClock::new(column(row, "us")?, sent, read))
}

/// The result of one attempt.
enum Look {
    Answer(Answer),
    /// A transaction has locked the row: try again.
    Held,
    /// A claim came too late, by the server's clock, and did nothing.
    Late,
}

impl Step {
    /// Sends the operation when first polled, and tries again while another transaction changes the row.
    pub(super) async fn run(&self, on: &Prepared, deadline: Instant) -> Result<Answer, Failure> {
        let mut pause = Duration::from_millis(2);
        let wait_until = self.wait_until(deadline);
        let mut looks = 1;
        let why = loop {
            let why = match self.look(on, looks, (wait_until, deadline)).await? {
                Look::Answer(answer) => return Ok(answer),
                Look::Held => "an open transaction holds the record, and may be about to complete it",
                // The clock may have been set, and its time is known now.
                Look::Late => "the claim came too late, by the server's clock, and did nothing",
            };
            if Instant::now() + pause * 2 > deadline {
                break why;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
            looks += 1;
        };
        let not_done = StoreError::not_done(Reason::Unreachable, why);
        Err(Failure::Answered(not_done))
    }

    /// Returns until when an extension waits for a transaction that has locked the row of an expired claim: it may be
    /// another claim. Half of the time limit, and at most a quarter of the lease.
    fn wait_until(&self, deadline: Instant) -> Instant {
        let now = Instant::now();
        match self {
            Step::Extend(_, _, lease, _) => now + ((deadline - now) / 2).min(*lease / 4),
            _ => now,
        }
    }

    async fn look(
        &self,
        on: &Prepared,
        looks: u32,
        (wait_until, deadline): (Instant, Instant),
    ) -> Result<Look, Failure> {
        match self {
            Step::Claim(request) => {
                let over = request.on_orphan == OnOrphan::TakeOver;
                let (lease, retention) = (micros(request.lease), micros(request.retention));
                let (key, token) = (request.key.as_str(), request.token.as_str());
                let fingerprint = &request.fingerprint[..];
                let refuse_after = on.refuse_after(deadline);
                let values: [&(dyn ToSql + Sync); 7] = [
                    &key,
                    &token,
                    &fingerprint,
                    &lease,
                    &retention,
                    &over,
                    &refuse_after,
                ];
                claimed(&on.claim(Sql::Claim, &values).await?, over, looks)
            }
            Step::ClaimSlot(request, slot) => {
                let over = request.on_orphan == OnOrphan::TakeOver;
                let (lease, retention) = (micros(request.lease), micros(request.retention));
                let (key, token) = (request.key.as_str(), request.token.as_str());
                let period = slot.period().map_or(0, micros);
                let at = slot.time().map_or(0, since_epoch);
                let ahead = micros(slot.ahead());
                let refuse_after = on.refuse_after(deadline);
                let values: [&(dyn ToSql + Sync); 9] = [
                    &key,
                    &token,
                    &lease,
                    &retention,
                    &over,
                    &period,
                    &at,
                    &ahead,
                    &refuse_after,
                ];
                claimed_slot(&on.claim(Sql::ClaimSlot, &values).await?, over, looks)
            }
            Step::Inspect(key, response) => seen(
                &on.ask(Sql::Inspect, &[&key.as_str(), response]).await?,
                *response,
            ),
            Step::Forget(key) => forgotten(&on.ask(Sql::Forget, &[&key.as_str()]).await?),
            Step::Extend(key, token, lease, retention) => {
                let (lease, retention) = (micros(*lease), micros(*retention));
                let values: [&(dyn ToSql + Sync); 4] = [&key.as_str(), &token.as_str(), &lease, &retention];
                let row = on.ask(Sql::Extend, &values).await?;
                let waits = column(&row, "expired")? && Instant::now() < wait_until;
                match owned(&row, "completed")? {
                    // Only the owner's transaction locks the row of a live claim. The extension does not wait for it;
                    // while the transaction is open, the claim cannot be taken over.
                    Look::Held if looks >= LOOKS_TO_EXTEND && !waits => {
                        Ok(Look::Answer(Answer::Owner(OwnerReply::Held)))
                    }
                    look => Ok(look),
                }
            }
            Step::Complete(key, token, response, retention) => {
                let retention = micros(*retention);
                let values: [&(dyn ToSql + Sync); 4] = [&key.as_str(), &token.as_str(), response, &retention];
                owned(&on.ask(Sql::Complete, &values).await?, "completed")
            }
            Step::GiveBack(key, token, forget) => {
                let values: [&(dyn ToSql + Sync); 3] = [&key.as_str(), &token.as_str(), forget];
                let row = on.ask(Sql::Release, &values).await?;
                if !column::<bool>(&row, "settled")? {
                    return Ok(Look::Held);
                }
                if column::<Option<String>>(&row, "state")?.is_none_or(|state| state == "released") {
                    return Ok(done());
                }
                owned(&row, "orphaned")
            }
            Step::Read(key, token) => read(&on.ask(Sql::Read, &[&key.as_str(), &token.as_str()]).await?),
            Step::Sweep(most) => {
                let row = on.ask(Sql::Sweep, &[&i64::from(*most)]).await?;
                let gone: i64 = column(&row, "gone")?;
                Ok(Look::Answer(Answer::Swept(gone.unsigned_abs())))
            }
        }
    }

    /// The record whose waiters must be notified after this reply. A result that its owner reads was committed in a
    /// transaction, without a notification.
    pub(super) fn notifications(&self, answer: &Answer) -> Option<&RecordKey> {
        match (self, answer) {
            (Step::Complete(key, ..) | Step::GiveBack(key, ..), Answer::Owner(OwnerReply::Done))
            | (Step::Read(key, _), Answer::State(ClaimState::Completed { .. }))
            | (Step::Forget(key), Answer::Forget(ForgetReply::Forgotten)) => Some(key),
            _ => None,
        }
    }
}

fn claimed(row: &Row, over: bool, looks: u32) -> Result<Look, Failure> {
    let reply = |reply| Ok(Look::Answer(Answer::Claim(reply)));
    if let (Some(attempt), Some(fence)) = (column(row, "attempt")?, column(row, "fence")?) {
        return reply(ClaimReply::Claimed {
            attempt: number(attempt),
            fence: fence_of(fence),
        });
    }
    if column(row, "late")? {
        return Ok(Look::Late);
    }
    let Some(state) = column::<Option<String>>(row, "state")? else {
        // There was no record, and another claim was faster.
        return Ok(Look::Held);
    };
    let (kept, mine, same): (bool, bool, bool) =
        (column(row, "kept")?, column(row, "mine")?, column(row, "same")?);
    let attempt = number(column(row, "seen_attempt")?);
    let held = || match looks < LOOKS {
        true => Ok(Look::Held),
        false => reply(ClaimReply::InProgress {
            remaining: SOON,
            attempt: attempt.max(1),
        }),
    };
    let given_back = mine && state == "released";
    if !kept && !given_back {
        // The record has expired, and another process is removing it or has claimed it.
        return held();
    }
    readable(row, &state)?;
    let remaining: i64 = column(row, "remaining")?;
    match &*state {
        _ if given_back => late(),
        _ if !same => reply(ClaimReply::Mismatch),
        "orphaned" if mine => late(),
        "completed" => reply(ClaimReply::Completed {
            response: column(row, "response")?,
        }),
        // Repeated by the owner, whose transaction has locked the row. With the lease over it may be another claim's.
        "claimed" if mine && remaining > 0 => reply(ClaimReply::Claimed {
            attempt,
            fence: fence_of(column(row, "seen_fence")?),
        }),
        "claimed" if mine => held(),
        "claimed" if remaining > 0 => reply(ClaimReply::InProgress {
            remaining: Duration::from_micros(remaining.unsigned_abs()),
            attempt,
        }),
        _ if column(row, "free")? && !over => reply(ClaimReply::Orphan { attempt }),
        // The owner's transaction is completing it, or another claim took it over first.
        _ => held(),
    }
}

fn claimed_slot(row: &Row, over: bool, looks: u32) -> Result<Look, Failure> {
    let (now, asked, latest): (i64, i64, i64) =
        (column(row, "us")?, column(row, "slot")?, column(row, "latest")?);
    let last: Option<i64> = column(row, "last")?;
    let reply = |slot: i64, outcome| {
        let last = last.map(i64::unsigned_abs);
        let reply = SlotReply::of_micros(now.unsigned_abs(), slot.unsigned_abs(), last, outcome);
        Ok(Look::Answer(Answer::Slot(reply)))
    };
    let claim = |claim| reply(asked, SlotOutcome::Claim(claim));
    if let (Some(attempt), Some(fence)) = (column(row, "attempt")?, column(row, "fence")?) {
        return claim(ClaimReply::Claimed {
            attempt: number(attempt),
            fence: fence_of(fence),
        });
    }
    if column(row, "late")? {
        return Ok(Look::Late);
    }
    let state: Option<String> = column(row, "state")?;
    let kept = column::<Option<bool>>(row, "kept")?.unwrap_or(false);
    let mine = column::<Option<bool>>(row, "mine")?.unwrap_or(false);
    if let Some(state) = state.as_deref().filter(|_| kept || mine) {
        readable(row, state)?;
    }
    if mine && state.as_deref() != Some("claimed") {
        return match last {
            Some(last) => reply(last, SlotOutcome::Missed),
            None => late(),
        };
    }
    if kept && last.is_none() {
        return claim(ClaimReply::Mismatch);
    }
    if asked > latest {
        return reply(asked, SlotOutcome::TooFarAhead);
    }
    let is_old: bool = column(row, "old")?;
    let (Some(state), Some(last), true) = (state, last, kept) else {
        // There was no record or it has expired, and another claim was faster.
        return match is_old {
            true => reply(asked, SlotOutcome::Missed),
            false => Ok(Look::Held),
        };
    };
    let attempt = number(column(row, "seen_attempt")?);
    let remaining: i64 = column(row, "remaining")?;
    let held = |slot| match looks < LOOKS {
        true => Ok(Look::Held),
        false => reply(
            slot,
            SlotOutcome::Claim(ClaimReply::InProgress {
                remaining: SOON,
                attempt: attempt.max(1),
            }),
        ),
    };
    match &*state {
        // Repeated by the owner, whose transaction has locked the row. With the lease over it may be another claim's.
        "claimed" if mine && remaining > 0 => reply(
            last,
            SlotOutcome::Claim(ClaimReply::Claimed {
                attempt,
                fence: fence_of(column(row, "seen_fence")?),
            }),
        ),
        "claimed" if mine => held(last),
        _ if last > latest => reply(asked, SlotOutcome::ClockWentBack),
        _ if last > asked || is_old => reply(asked, SlotOutcome::Missed),
        "completed" if last == asked => claim(ClaimReply::Completed {
            response: column(row, "response")?,
        }),
        "claimed" if remaining > 0 => claim(ClaimReply::InProgress {
            remaining: Duration::from_micros(remaining.unsigned_abs()),
            attempt,
        }),
        "claimed" | "orphaned" if last == asked && column(row, "free")? && !over => {
            claim(ClaimReply::Orphan { attempt })
        }
        // The owner's transaction is completing it, or another claim was faster.
        _ => held(asked),
    }
}

fn seen(row: &Row, response: bool) -> Result<Look, Failure> {
    let now: i64 = column(row, "us")?;
    let now = UNIX_EPOCH + Duration::from_micros(now.unsigned_abs());
    let look = |record| Ok(Look::Answer(Answer::Look(RecordLook::new(now, record))));
    let Some(state) = column::<Option<String>>(row, "state")? else {
        return look(None);
    };
    readable(row, &state)?;
    let print: Vec<u8> = column(row, "fingerprint")?;
    let time = |micros: i64| Duration::from_micros(u64::try_from(micros).unwrap_or(0));
    let of_slot = |print: &Fingerprint| dlock::record::slot_of_fingerprint(print).is_some();
    let print = Fingerprint::try_from(print).unwrap_or([0; 32]);
    let state = match &*state {
        "claimed" => RecordState::claimed(time(column(row, "remaining")?)),
        "orphaned" => RecordState::Orphaned,
        "completed" => {
            let size: Option<i64> = column(row, "size")?;
            let bytes = if response { column(row, "response")? } else { None };
            RecordState::completed(size.unwrap_or(0).unsigned_abs(), bytes)
        }
        _ if of_slot(&print) => RecordState::Released,
        // The remainder of a claim that was released.
        _ => return look(None),
    };
    look(Some(RecordView::new(
        state,
        number(column(row, "attempt")?),
        fence_of(column(row, "fence")?),
        time(column(row, "expires_in")?),
        print,
    )))
}

fn forgotten(row: &Row) -> Result<Look, Failure> {
    let reply = |reply| Ok(Look::Answer(Answer::Forget(reply)));
    let state: Option<String> = column(row, "state")?;
    let Some(state) = state else {
        return reply(ForgetReply::Missing);
    };
    readable(row, &state)?;
    if column(row, "gone")? {
        return reply(ForgetReply::Forgotten);
    }
    let remaining: i64 = column(row, "remaining")?;
    match &*state {
        "claimed" if remaining > 0 => reply(ForgetReply::Claimed {
            remaining: Duration::from_micros(remaining.unsigned_abs()),
            attempt: number(column(row, "attempt")?),
            fence: fence_of(column(row, "fence")?),
        }),
        "released" => reply(ForgetReply::Missing),
        _ => Ok(Look::Held),
    }
}

/// Converts to µs since the epoch.
fn since_epoch(time: SystemTime) -> i64 {
    micros(time.duration_since(UNIX_EPOCH).unwrap_or_default()).max(1)
}

/// The error for a claim that arrived after its own release.
fn late() -> Result<Look, Failure> {
    Err(Failure::Answered(StoreError::not_done(
        Reason::Refused,
        "the claim came too late: it was released before",
    )))
}

/// Interprets the reply to a change; `also` is the state after an earlier copy of the change.
fn owned(row: &Row, also: &str) -> Result<Look, Failure> {
    if column(row, "changed")? {
        return Ok(done());
    }
    let not_owner = Ok(Look::Answer(Answer::Owner(OwnerReply::NotOwner)));
    let Some(state) = column::<Option<String>>(row, "state")? else {
        return not_owner;
    };
    readable(row, &state)?;
    match column::<Option<bool>>(row, "mine")? {
        Some(true) if state == also => Ok(done()),
        Some(true) if state == "claimed" => Ok(Look::Held),
        _ => not_owner,
    }
}

fn read(row: &Row) -> Result<Look, Failure> {
    let state = |state| Ok(Look::Answer(Answer::State(state)));
    if !column::<Option<bool>>(row, "mine")?.unwrap_or(false) {
        return state(ClaimState::Lost);
    }
    let found: String = column(row, "state")?;
    readable(row, &found)?;
    if !column::<bool>(row, "settled")? {
        return Ok(Look::Held);
    }
    match &*found {
        "claimed" => state(ClaimState::Open),
        "completed" => state(ClaimState::Completed {
            response: column(row, "response")?,
        }),
        _ => state(ClaimState::Lost),
    }
}

fn done() -> Look {
    Look::Answer(Answer::Owner(OwnerReply::Done))
}

/// Fails if the record has another format.
fn readable(row: &Row, state: &str) -> Result<(), Failure> {
    let version: i32 = column(row, "version")?;
    let known = matches!(state, "claimed" | "completed" | "orphaned" | "released");
    if version == FORMAT && known {
        return Ok(());
    }
    let found = match version {
        FORMAT => format!("a record in the unknown state {state:?}"),
        _ => format!("a record of format {version}, this version of dlock knows format {FORMAT}"),
    };
    Err(unreadable(found))
}

fn unreadable(found: String) -> Failure {
    let message = format!("the table holds {found}");
    Failure::Answered(StoreError::not_done(Reason::KeyTaken(found), message))
}

fn column<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, Failure> {
    row.try_get(name)
        .map_err(|error| unreadable(format!("a record that cannot be read ({error})")))
}

fn number(attempt: i32) -> u32 {
    attempt.unsigned_abs()
}

fn fence_of(fence: i64) -> u64 {
    fence.unsigned_abs()
}
