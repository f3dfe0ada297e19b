//! Decodes rows of the table.

use dlock::store::{Holder, Kind};
use mysql_async::{FromRowError, Row, Value};

use crate::step::{KINDS, duration};

/// A row that [`Table::look`](crate::table::Table::look) returns.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) key: Vec<u8>,
    pub(crate) holder: String,
    kind: String,
    pub(crate) kept: bool,
    pub(crate) until: i64,
    pub(crate) fence: u64,
    pub(crate) now: i64,
}

impl Found {
    /// # Errors
    ///
    /// If a column cannot be decoded.
    pub(crate) fn of(row: Row) -> Result<Found, FromRowError> {
        type Columns = (Vec<u8>, String, String, i64, i64, i64, i64);
        let (key, holder, kind, kept, until, fence, now): Columns = mysql_async::from_row_opt(row)?;
        Ok(Found {
            key,
            holder,
            kind,
            kept: kept != 0,
            until,
            fence: fence.unsigned_abs(),
            now,
        })
    }

    /// Whether a grant holds or keeps the key.
    pub(crate) fn is_held(&self) -> bool {
        !self.holder.is_empty() && self.until > self.now
    }

    /// Describes the holder, for people and tools; `None` for a kind of a newer version.
    pub(crate) fn shown(self) -> Option<Holder> {
        let kind: Kind = KINDS.into_iter().find(|kind| kind.to_string() == self.kind)?;
        let remaining = Some(duration(self.until - self.now));
        Some(Holder::new(kind, self.holder, u64::from(!self.kept), remaining))
    }
}

/// Returns the number in a result with one row and one column.
pub(crate) fn number(rows: Vec<Row>) -> Option<i64> {
    let row = rows.into_iter().next()?;
    mysql_async::from_value_opt(row.as_ref(0)?.clone()).ok()
}

/// Returns the bytes in the first column.
pub(crate) fn bytes(row: &Row) -> Option<Vec<u8>> {
    match row.as_ref(0)? {
        Value::Bytes(bytes) => Some(bytes.clone()),
        _ => None,
    }
}
