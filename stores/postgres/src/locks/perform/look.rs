//! What an acquire found.

use std::time::Duration;

use dlock::store::{GrantId, Granted, Kind};
use tokio::time::Instant;
use tokio_postgres::Row;

use super::permits::{self, Short};
use super::{duration, wrong_number};
use crate::failure::Failure;
use crate::locks::job::{Ask, is_permit, other_lock};
use crate::locks::statements::{column, in_order, list, positions};

/// The state that a request found.
pub(super) enum Look {
    Granted(Granted),
    Held(Duration),
    /// There are too few permits.
    Short(Short),
    /// The key holds this other sort of lock.
    Other(&'static str),
    /// The row does not exist.
    Missing,
    /// The request arrived too late and was refused.
    Late,
    /// The lock is available but was not acquired, because another lock of the set is not available.
    Open,
    /// The lock is available or its lease has expired, but another transaction has locked the row.
    Locked,
    /// Another step has locked the row of the semaphore.
    Contended,
}

impl Look {
    /// Interprets the row for one acquire.
    pub(super) fn of(row: &Row, ask: &Ask) -> Result<Look, Failure> {
        if is_permit(ask.kind) {
            return permits::look(row, ask);
        }
        Ok(if let Some(fence) = column::<Option<i64>>(row, "fence")? {
            let granted = granted_from(fence, column(row, "tokens")?);
            Look::Granted(match ask.kind {
                Kind::Fair => granted.behind(behind(row, ask.grant)?),
                _ => granted,
            })
        } else if !column::<bool>(row, "there")? {
            Look::Missing
        } else if column(row, "held")? {
            Look::held(ask.kind, column(row, "held_as")?, column(row, "remaining")?)
        } else if column(row, "astray")? {
            Look::Held(duration(column(row, "remaining")?))
        } else if column(row, "late")? {
            Look::Late
        } else if column(row, "open")? {
            Look::Open
        } else {
            Look::Locked
        })
    }

    /// Interprets the reply to all acquires of a statement.
    pub(super) fn of_many(row: &Row, asks: &[(&Ask, Instant)]) -> Result<Vec<Look>, Failure> {
        let late: bool = column(row, "late")?;
        let ask = |at: usize| asks.get(at).map(|(ask, _)| *ask).ok_or_else(wrong_number);
        let mut looks = Vec::with_capacity(asks.len());
        let fences = list::<i64>(row, "fences")?;
        for (at, fence) in positions(row, "granted")?.into_iter().zip(fences) {
            looks.push((at, Look::Granted(granted_from(fence, ask(at)?.tokens))));
        }
        let others = positions(row, "others")?.into_iter();
        let held_as = list::<Option<&str>>(row, "held_as")?;
        let remaining = list::<Option<i64>>(row, "remaining")?;
        for (at, (held_as, remaining)) in others.zip(held_as.into_iter().zip(remaining)) {
            let look = match (held_as, remaining) {
                (None, _) => Look::Missing,
                (Some(held_as), Some(1..)) => Look::held(ask(at)?.kind, held_as, remaining),
                _ if late => Look::Late,
                _ => Look::Locked,
            };
            looks.push((at, look));
        }
        in_order(looks, asks.len())
    }

    /// That another grant has the key; a semaphore or latch, which is another lock, has no end.
    fn held(asked: Kind, held_as: &str, remaining: Option<i64>) -> Look {
        match other_lock(asked, held_as) {
            Some(held) => Look::Other(held),
            None => Look::Held(duration(remaining.unwrap_or(0))),
        }
    }
}

/// A grant whose tokens begin with `fence`.
pub(super) fn granted_from(fence: i64, tokens: i32) -> Granted {
    let first = fence.unsigned_abs();
    Granted::with_tokens(first, first + u64::from(tokens.unsigned_abs().max(1)) - 1)
}

/// The next waiters of the same client.
fn behind(row: &Row, grant: GrantId) -> Result<Vec<GrantId>, Failure> {
    let ids = column::<Vec<&str>>(row, "behind")?;
    let numbers = ids.iter().filter_map(|id| id.rsplit(':').next()?.parse().ok());
    Ok(numbers.map(|number| grant.with_number(number)).collect())
}
