//! The names of tables, as used in statements.

/// The longest name, so that names derived from it fit into PostgreSQL's 63 bytes.
const MOST: usize = 50;

/// The name of a table, with its schema, if any.
#[derive(Debug, Clone)]
pub(crate) struct TableName {
    /// The name as given: the channel for notifications, and the table's name in messages.
    pub(crate) plain: String,
    /// The quoted schema with a dot; empty without a schema.
    schema: String,
    table: String,
}

impl TableName {
    /// Checks a name: letters, digits and `_`, optionally after a schema and a dot.
    ///
    /// # Errors
    ///
    /// The reason if the name is invalid.
    pub(crate) fn new(name: &str) -> Result<TableName, String> {
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
        let (schema, table) = match name.split_once('.') {
            Some((schema, table)) => (format!("\"{schema}\"."), table),
            None => (String::new(), name),
        };
        Ok(TableName {
            plain: name.to_owned(),
            schema,
            table: table.to_owned(),
        })
    }

    /// The quoted name, for a statement.
    pub(crate) fn quoted(&self) -> String {
        self.with("")
    }

    /// The quoted name of a related object, with the schema, for a statement.
    pub(crate) fn with(&self, ending: &str) -> String {
        format!("{}{}", self.schema, self.alone(ending))
    }

    /// The quoted name of a related object, without the schema.
    pub(crate) fn alone(&self, ending: &str) -> String {
        format!("\"{}\"", self.bare(ending))
    }

    /// The name of a related object as the catalogs of the server have it.
    pub(crate) fn bare(&self, ending: &str) -> String {
        format!("{}{ending}", self.table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(TableName::new(name).is_err(), "{name}");
        }
        for name in ["a", "_a1", "a.b", "A_b", &"a".repeat(50)] {
            assert!(TableName::new(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn names_are_quoted_part_by_part() {
        let name = TableName::new("App.Locks").unwrap();
        assert_eq!(name.quoted(), "\"App\".\"Locks\"");
        assert_eq!(name.with("_floor"), "\"App\".\"Locks_floor\"");
        assert_eq!(name.alone("_expires_at"), "\"Locks_expires_at\"");
    }
}
