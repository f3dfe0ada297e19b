//! Rows of the table, as they are read.

use dlock::store::{Holder, Kind};
use mysql_async::{FromRowError, Row, Value};

use crate::step::{KINDS, duration};

/// A row of [`Table::look`](crate::table::Table::look).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) key: Vec<u8>,
    pub(crate) holder: String,
    kind: String,
    pub(crate) kept: bool,
    pub(crate) until: i64,
    pub(crate) now: i64,
}

impl Found {
    /// # Errors
    ///
    /// What cannot be read.
    pub(crate) fn of(row: Row) -> Result<Found, FromRowError> {
        type Columns = (Vec<u8>, String, String, i64, i64, i64);
        let (key, holder, kind, kept, until, now): Columns = mysql_async::from_row_opt(row)?;
        Ok(Found {
            key,
            holder,
            kind,
            kept: kept != 0,
            until,
            now,
        })
    }

    /// Whether a grant is there, or keeps the key.
    pub(crate) fn is_held(&self) -> bool {
        !self.holder.is_empty() && self.until > self.now
    }

    /// The holder, for people and tools; `None` where a newer version has it.
    pub(crate) fn shown(self) -> Option<Holder> {
        let kind: Kind = KINDS.into_iter().find(|kind| kind.to_string() == self.kind)?;
        let remaining = Some(duration(self.until - self.now));
        Some(Holder::new(kind, self.holder, u64::from(!self.kept), remaining))
    }
}

/// The only number of the only row.
pub(crate) fn number(rows: Vec<Row>) -> Option<i64> {
    let row = rows.into_iter().next()?;
    mysql_async::from_value_opt(row.as_ref(0)?.clone()).ok()
}

/// The bytes of the first column.
pub(crate) fn bytes(row: &Row) -> Option<Vec<u8>> {
    match row.as_ref(0)? {
        Value::Bytes(bytes) => Some(bytes.clone()),
        _ => None,
    }
}
