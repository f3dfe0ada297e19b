//! The operations that have a statement each.

use dlock::MAX_AT_ONCE;
use dlock::store::{Holder, Kind};

use super::{Broken, LOOKS, Performing, duration};
use crate::failure::Failure;
use crate::locks::job::{Answer, Job, Page, Step, kind_of};
use crate::locks::statements::{column, one};
use crate::locks::table::Sql;
use crate::locks::transaction::pinned;

/// How many keys a page of a list has. It takes some milliseconds, for which the other steps of its connection wait.
const PAGE: i64 = 2000;

impl Performing<'_> {
    /// Executes an operation that has its own statement.
    pub(super) async fn other(&self, job: Job) -> Broken {
        let answer = match &job.step {
            Step::AcquireAll(_) => return self.acquire_all(job).await,
            Step::Count(_) => return self.count(job).await,
            Step::Inspect(key) => self.holders(key, key, "").await.map(Answer::Holders),
            Step::List(prefix, after) => self.page(prefix, after).await.map(Answer::Page),
            Step::Force(key) => match self.force(key).await {
                Ok(Forcing::Locked(_)) if job.looks < LOOKS => {
                    self.look_again(job);
                    return Ok(());
                }
                Ok(Forcing::Locked(pids)) => Err(Failure::Answered(pinned(key, pids.as_deref()))),
                Ok(Forcing::Done(held)) => Ok(Answer::Forced(held)),
                Ok(Forcing::Counts) => return self.count(job).await,
                Err(failure) => Err(failure),
            },
            Step::Make(key) => self
                .ask(Sql::Insert, &[&vec![&**key]])
                .await
                .map(|_| Answer::Made),
            _ => return Ok(()),
        };
        match answer {
            Ok(answer) => self.answer(job, answer),
            Err(failure) => self.failed(vec![job], failure, None)?,
        }
        Ok(())
    }

    /// Reads the next locks with a prefix. All that are held have a row.
    async fn page(&self, prefix: &str, after: &str) -> Result<Page, Failure> {
        let rows = self.ask(Sql::Page, &[&prefix, &after, &PAGE]).await?;
        let row = one(&rows)?;
        let keys: i64 = column(row, "keys")?;
        let (Some(first), Some(last)): (Option<&str>, Option<&str>) =
            (column(row, "first")?, column(row, "last")?)
        else {
            return Ok(Page {
                holders: Vec::new(),
                last: None,
            });
        };
        Ok(Page {
            holders: self.holders(first, last, prefix).await?,
            last: (keys == PAGE).then(|| last.to_owned()),
        })
    }

    /// Reads the holders of the keys from `first` to `last` that have the prefix.
    async fn holders(&self, first: &str, last: &str, prefix: &str) -> Result<Vec<(String, Holder)>, Failure> {
        let rows = self.ask(Sql::Inspect, &[&first, &last, &prefix]).await?;
        let mut holders = Vec::with_capacity(rows.len());
        for row in &rows {
            let (kind, holder) = (column::<&str>(row, "kind")?, column(row, "holder")?);
            let holds = u64::from(!column::<bool>(row, "kept")?);
            let holder = match (column(row, "remaining")?, kind_of(kind)) {
                (None, _) => Holder::new(Kind::Mutex, holder, holds, None).ending_with("its transaction"),
                (Some(remaining), Some(kind)) => Holder::new(kind, holder, holds, Some(duration(remaining))),
                // Of a newer version, which has more kinds.
                (Some(_), None) => continue,
            };
            let key: String = column(row, "key")?;
            // Another program may have written the row.
            let amount = usize::try_from(column::<i32>(row, "amount")?).unwrap_or(0);
            let amount = amount.min(MAX_AT_ONCE);
            holders.extend(std::iter::repeat_n((key, holder), amount));
        }
        Ok(holders)
    }

    async fn force(&self, key: &str) -> Result<Forcing, Failure> {
        let rows = self.ask(Sql::Force, &[&key]).await?;
        let row = one(&rows)?;
        if column(row, "counts")? {
            return Ok(Forcing::Counts);
        }
        if column(row, "locked")? {
            return Ok(Forcing::Locked(column(row, "pids")?));
        }
        // Not in the same transaction, which waits for the disk: commits with notifications are serialized.
        if self.tell && self.ask(Sql::Tell, &[&key]).await.is_err() {
            tracing::debug!(key, "the waiters of this lock were not notified");
        }
        Ok(Forcing::Done(column(row, "ended")?))
    }
}

/// The result of a forced release.
enum Forcing {
    Done(bool),
    /// A transaction of one of these processes has locked the row.
    Locked(Option<String>),
    /// It is the row of a semaphore or latch.
    Counts,
}
