//! Several statements in one round trip.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row};

/// What one statement brought.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    /// How many rows it found, whether or not it had to change them.
    pub(crate) affected: u64,
    pub(crate) last_insert_id: u64,
    pub(crate) rows: Vec<Row>,
}

/// Sends the statements together; each is a transaction of its own. Those with rows come last: when a statement fails, the
/// rows of the one before it are lost.
///
/// # Errors
///
/// The first failure. `done` has the replies of the statements before; where the server reported it, those behind were not
/// executed.
pub(crate) async fn run(conn: &mut Conn, statements: &[String], done: &mut Vec<Reply>) -> Result<(), Error> {
    if statements.is_empty() {
        return Ok(());
    }
    let mut results = conn.query_iter(statements.join(";\n")).await?;
    while done.len() < statements.len() {
        if results.columns_ref().is_empty() {
            done.push(Reply {
                affected: results.affected_rows(),
                last_insert_id: results.last_insert_id().unwrap_or(0),
                rows: Vec::new(),
            });
            // Nothing but the head of the next result.
            results.next().await?;
        } else {
            let mut rows = Vec::new();
            while let Some(row) = results.next().await? {
                rows.push(row);
            }
            done.push(Reply {
                rows,
                ..Reply::default()
            });
        }
    }
    Ok(())
}
