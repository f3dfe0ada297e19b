//! The statements, written for one table.

/// The table's name where the user gives none.
pub(super) const DEFAULT: &str = "dlock_records";
/// The most that a name may have, so that what is derived from it fits into PostgreSQL's 63 bytes.
const MOST: usize = 50;

/// Where the records are: the names of the table and of what belongs to it, and every statement on them.
#[derive(Debug)]
pub(super) struct Table {
    /// The channel for news, and what the table is called in messages.
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
}

impl Sql {
    pub(super) const ALL: [Sql; 7] = [
        Sql::Claim,
        Sql::Extend,
        Sql::Complete,
        Sql::Release,
        Sql::Read,
        Sql::Sweep,
        Sql::Tell,
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
        }
    }
}

impl Table {
    /// The statements for this table.
    ///
    /// # Errors
    ///
    /// What is wrong with the name.
    pub(super) fn new(name: &str) -> Result<Table, String> {
        let parts: Vec<&str> = name.split('.').collect();
        let plain = |part: &&str| {
            part.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_')
                && part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        };
        if name.len() > MOST || parts.len() > 2 || !parts.iter().all(plain) {
            return Err(format!(
                "a table's name has letters, digits and _, up to {MOST} of them, and may say its schema before a dot"
            ));
        }
        let (schema, table) = name
            .split_once('.')
            .map_or(("", name), |(schema, table)| (schema, table));
        let before = match schema {
            "" => String::new(),
            schema => format!("\"{schema}\"."),
        };
        let quoted = format!("{before}\"{table}\"");
        let fence = format!("{before}\"{table}_fence\"");
        let write = |template: &str| {
            template
                .replace("{table}", &quoted)
                .replace("{index}", &format!("\"{table}_expires_at\""))
                .replace("{fence}", &fence)
                .replace("{fence_literal}", &format!("'{fence}'"))
        };
        Ok(Table {
            name: name.to_owned(),
            schema: write(include_str!("sql/schema.sql")),
            complete_in: write(include_str!("sql/complete_in.sql")),
            hold_in: write(include_str!("sql/hold_in.sql")),
            prepared: Sql::ALL.map(|sql| write(sql.template())),
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

    #[test]
    fn names_that_could_be_something_else_are_refused() {
        for name in [
            "",
            "a.b.c",
            "a.",
            ".a",
            "a b",
            "a\"b",
            "a;b",
            "1a",
            "ä",
            &"a".repeat(51),
        ] {
            assert!(Table::new(name).is_err(), "{name}");
        }
        for name in ["a", "_a1", "a.b", "A_b", &"a".repeat(50)] {
            assert!(Table::new(name).is_ok(), "{name}");
        }
    }
}
