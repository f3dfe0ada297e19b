//! Executes several statements in one round trip.

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, Row};

/// The reply to one statement.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    /// How many rows matched, even if their values did not change.
    pub(crate) affected: u64,
    pub(crate) last_insert_id: u64,
    pub(crate) rows: Vec<Row>,
}

/// Sends the statements together; each is its own transaction. Statements that return rows must be last: when the
/// connection breaks, the rows of the previous statement are lost.
///
/// # Errors
///
/// The first failure. `done` contains the replies to the statements before it; if the server reported the failure, the
/// statements after it were not executed.
pub(crate) async fn run(conn: &mut Conn, statements: &[String], done: &mut Vec<Reply>) -> Result<(), Error> {
    if statements.is_empty() {
        return Ok(());
    }
    let mut results = conn.query_iter(statements.join(";\n")).await?;
    while done.len() < statements.len() {
        if results.columns_ref().is_empty() {
            let reply = Reply {
                affected: results.affected_rows(),
                last_insert_id: results.last_insert_id().unwrap_or(0),
                rows: Vec::new(),
            };
            // Reads only the header of the next result. An error in it is kept until the next call: till then the driver shows
            // the failed statement as one without rows.
            done.push(reply);
            if let Err(error) = results.next().await {
                if let Error::Server(_) = error {
                    done.pop();
                }
                return Err(error);
            }
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
