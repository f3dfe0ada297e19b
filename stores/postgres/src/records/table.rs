//! The SQL statements for one table.

use crate::names::TableName;

/// The default name of the table.
pub(super) const DEFAULT: &str = "dlock_records";
/// The last time slot of a record, in µs since the epoch: the fingerprint of work with slots contains it.
const SLOT: &str = "CASE WHEN t.fingerprint LIKE 'slot ________________           ' \
                    THEN encode(substring(t.fingerprint FROM 6 FOR 16), 'escape')::int8 END";

/// The table of the records: its name, the names of related objects, and all statements.
#[derive(Debug)]
pub(super) struct Table {
    /// The channel for notifications, and the table's name in messages.
    pub(super) name: String,
    pub(super) schema: String,
    pub(super) complete_in: String,
    pub(super) hold_in: String,
    /// In the order of [`Sql`].
    prepared: [String; Sql::ALL.len()],
}

/// A statement that each connection prepares.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sql {
    Claim,
    Extend,
    Complete,
    Release,
    Read,
    Sweep,
    Tell,
    ClaimSlot,
    Inspect,
    Forget,
}

impl Sql {
    pub(super) const ALL: [Sql; 10] = [
        Sql::Claim,
        Sql::Extend,
        Sql::Complete,
        Sql::Release,
        Sql::Read,
        Sql::Sweep,
        Sql::Tell,
        Sql::ClaimSlot,
        Sql::Inspect,
        Sql::Forget,
    ];

    fn template(self) -> &'static str {
        match self {
            Sql::Claim => include_str!("sql/claim.sql"),
            Sql::Extend => include_str!("sql/extend.sql"),
            Sql::Complete => include_str!("sql/complete.sql"),
            Sql::Release => include_str!("sql/release.sql"),
            Sql::Read => include_str!("sql/read.sql"),
            Sql::Sweep => include_str!("sql/sweep.sql"),
            Sql::Tell => include_str!("sql/tell.sql"),
            Sql::ClaimSlot => include_str!("sql/claim_slot.sql"),
            Sql::Inspect => include_str!("sql/inspect.sql"),
            Sql::Forget => include_str!("sql/forget.sql"),
        }
    }
}

impl Table {
    /// Creates the statements for a table.
    ///
    /// # Errors
    ///
    /// The reason if the name is invalid.
    pub(super) fn new(name: &str) -> Result<Table, String> {
        let name = TableName::new(name)?;
        let fence = name.with("_fence");
        let write = |template: &str| {
            template
                .replace("{slot}", SLOT)
                .replace("{table}", &name.quoted())
                .replace("{index}", &name.alone("_expires_at"))
                .replace("{fence}", &fence)
                .replace("{fence_literal}", &format!("'{fence}'"))
        };
        Ok(Table {
            schema: write(include_str!("sql/schema.sql")),
            complete_in: write(include_str!("sql/complete_in.sql")),
            hold_in: write(include_str!("sql/hold_in.sql")),
            prepared: Sql::ALL.map(|sql| write(sql.template())),
            name: name.plain,
        })
    }

    pub(super) fn sql(&self, sql: Sql) -> &str {
        &self.prepared[sql as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_statement_names_the_table_and_leaves_no_gap() {
        let table = Table::new("App.Records").unwrap();
        let prepared = Sql::ALL.map(|sql| table.sql(sql));
        for text in prepared
            .into_iter()
            .chain([&*table.schema, &*table.complete_in, &*table.hold_in])
        {
            assert!(!text.contains('{'), "{text}");
        }
        assert!(
            table
                .schema
                .contains("CREATE TABLE IF NOT EXISTS \"App\".\"Records\"")
        );
        assert!(
            table
                .sql(Sql::Claim)
                .contains("nextval('\"App\".\"Records_fence\"')")
        );
    }
}
