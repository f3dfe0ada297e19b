//! The SQL statements for one table.
//!
//! Keys are hexadecimal literals: they mean the same in every `sql_mode` and character set, and their content cannot
//! end a literal.

use dlock::store::GrantId;

use crate::step::Ask;

/// The default name of the table.
pub(crate) const DEFAULT: &str = "dlock_locks";
/// The longest name, so that names derived from it fit into 64 characters.
const MOST: usize = 50;
/// How many rows a page of a list has. It takes some milliseconds, for which the other operations of its round trip wait.
pub(crate) const PAGE: usize = 1000;

/// The server's time in µs since 1970 when a row is evaluated, which is after the statement waited for the row. `NOW`
/// is the start of the statement; the difference to it is the same in every time zone.
const NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6)) \
                   + TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)))";

/// The table of the locks, and its statements.
#[derive(Debug)]
pub(crate) struct Table {
    /// The name of the table, for messages.
    pub(crate) name: String,
    /// The quoted name, for statements.
    quoted: String,
    floor: String,
    pub(crate) schema: String,
}

impl Table {
    /// Creates the statements for a table. Its name has letters, digits and `_`, optionally after a database and a dot.
    ///
    /// # Errors
    ///
    /// The reason if the name is invalid.
    pub(crate) fn new(name: &str) -> Result<Table, String> {
        let plain = |part: &str| {
            part.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_')
                && part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        };
        let parts: Vec<&str> = name.split('.').collect();
        if name.len() > MOST || parts.len() > 2 || !parts.iter().all(|part| plain(part)) {
            return Err(format!(
                "a table's name has letters, digits and _, up to {MOST} of them, and may say its database before a dot"
            ));
        }
        let quoted = format!("`{}`", parts.join("`.`"));
        let floor = format!("`{}_floor`", parts.join("`.`"));
        let schema = include_str!("schema.sql")
            .replace("{table}", &quoted)
            .replace("{floor}", &floor);
        Ok(Table {
            name: name.to_owned(),
            quoted,
            floor,
            schema,
        })
    }

    /// Acquires a lock that is available or whose lease has expired, unless the server's time is past `refuse_after`.
    /// The reply has one affected row if it was acquired, and the first token as `last_insert_id`, unless the table has a
    /// trigger. `fence` is assigned
    /// first, because it is computed from the previous values of the row.
    pub(crate) fn acquire(&self, ask: &Ask, refuse_after: i64) -> String {
        let Ask {
            key,
            grant,
            kind,
            lease,
            tokens,
        } = ask;
        format!(
            "UPDATE {} SET fence = LAST_INSERT_ID(GREATEST(fence + tokens, {NOW})), tokens = {tokens}, holder = {}, \
             kind = '{kind}', kept = 0, until_us = {NOW} + {lease} \
             WHERE k = {} AND (holder = '' OR until_us <= {NOW}) AND {NOW} <= {refuse_after}",
            self.quoted,
            id(*grant),
            hex(&**key),
        )
    }

    /// Creates the row of an available lock, with a token that is not smaller than those of removed rows.
    pub(crate) fn insert(&self, key: &str) -> String {
        format!(
            "INSERT INTO {} (k, fence) SELECT {}, COALESCE(MAX(f.fence), 0) FROM {} f LOCK IN SHARE MODE \
             ON DUPLICATE KEY UPDATE tokens = tokens",
            self.quoted,
            hex(key),
            self.floor
        )
    }

    /// Ends a grant, or keeps its key unavailable for a while.
    pub(crate) fn release(&self, key: &str, grant: GrantId, keep: i64) -> String {
        let change = match keep {
            0 => format!("holder = '', kind = '', kept = 0, until_us = {NOW}"),
            _ => format!("kept = 1, until_us = LEAST(until_us, {NOW} + {keep})"),
        };
        format!(
            "UPDATE {} SET {change} WHERE k = {} AND holder = {} AND until_us > {NOW}",
            self.quoted,
            hex(key),
            id(grant),
        )
    }

    /// Extends grants to this lease from now on. An id belongs to one key only, so keys and ids need no pairing.
    pub(crate) fn renew<'a>(
        &self,
        grants: impl Iterator<Item = (&'a str, GrantId)> + Clone,
        lease: i64,
    ) -> String {
        let keys = listed(grants.clone().map(|(key, _)| hex(key)));
        let ids = listed(grants.map(|(_, grant)| id(grant)));
        format!(
            "UPDATE {} FORCE INDEX (PRIMARY) SET until_us = {NOW} + {lease} \
             WHERE k IN ({keys}) AND holder IN ({ids}) AND kept = 0 AND until_us > {NOW}",
            self.quoted,
        )
    }

    /// Selects those of these rows that are not locked by a transaction: their keys.
    pub(crate) fn lockable<'a>(&self, keys: impl Iterator<Item = &'a str>) -> String {
        format!(
            "SELECT k FROM {} FORCE INDEX (PRIMARY) WHERE k IN ({}) FOR UPDATE SKIP LOCKED",
            self.quoted,
            listed(keys.map(hex)),
        )
    }

    /// Reads the rows of these keys: key, holder, kind, whether it is kept, the end of the lease, the first token, and
    /// the server's time.
    pub(crate) fn look<'a>(&self, keys: impl Iterator<Item = &'a str>) -> String {
        format!("{} WHERE k IN ({})", self.select(), listed(keys.map(hex)))
    }

    /// Reads the next rows with this prefix, held or not, with the same columns: after a key, or from the first one on if that is
    /// empty. A range of the index, so that a page takes as long in a large table as in a small one.
    pub(crate) fn list(&self, prefix: &str, after: &[u8]) -> String {
        let from = match after {
            [] => format!("k >= {}", hex(prefix)),
            after => format!("k > {}", hex(after)),
        };
        let to = match end_of(prefix) {
            Some(end) => format!(" AND k < {}", hex(end)),
            None => String::new(),
        };
        format!(
            "{} FORCE INDEX (PRIMARY) WHERE {from}{to} ORDER BY k LIMIT {PAGE}",
            self.select()
        )
    }

    fn select(&self) -> String {
        format!(
            "SELECT k, holder, kind, kept, until_us, fence, {NOW} FROM {}",
            self.quoted
        )
    }

    /// Ends the grant of a key, of any holder.
    pub(crate) fn force(&self, key: &str) -> String {
        format!(
            "UPDATE {} SET holder = '', kind = '', kept = 0, until_us = {NOW} \
             WHERE k = {} AND holder <> '' AND until_us > {NOW}",
            self.quoted,
            hex(key),
        )
    }

    /// Finds the keys of rows that have been available for a minute.
    pub(crate) fn free(&self, most: usize) -> String {
        format!(
            "SELECT k FROM {} WHERE until_us < {NOW} - 60000000 LIMIT {most}",
            self.quoted
        )
    }

    /// Selects those of these rows that are still available and not locked by a transaction: their keys, and the next
    /// tokens.
    pub(crate) fn unlocked(&self, keys: &[Vec<u8>]) -> String {
        format!(
            "SELECT k, fence + tokens FROM {} WHERE k IN ({}) AND until_us < {NOW} - 60000000 FOR UPDATE SKIP LOCKED",
            self.quoted,
            listed(keys.iter().map(hex)),
        )
    }

    /// Records a token before its rows are removed.
    pub(crate) fn raise_floor(&self, token: i64) -> String {
        format!(
            "INSERT INTO {} (one, fence) VALUES (1, {token}) ON DUPLICATE KEY UPDATE fence = GREATEST(fence, {token})",
            self.floor
        )
    }

    /// Removes those of these rows that are still available and whose tokens are recorded.
    pub(crate) fn remove(&self, keys: &[Vec<u8>]) -> String {
        let keys = listed(keys.iter().map(hex));
        format!(
            "DELETE FROM {} WHERE k IN ({keys}) AND until_us < {NOW} - 60000000 \
             AND fence + tokens <= (SELECT MAX(f.fence) FROM {} f)",
            self.quoted, self.floor
        )
    }
}

/// Statements for the doctor.
impl Table {
    /// Reads the tables and their engines.
    pub(crate) fn engines(&self) -> String {
        let (database, table) = match self.name.split_once('.') {
            Some((database, table)) => (format!("'{database}'"), table),
            None => ("DATABASE()".to_owned(), &*self.name),
        };
        format!(
            "SELECT table_name, engine FROM information_schema.tables \
             WHERE table_schema = {database} AND table_name IN ('{table}', '{table}_floor')"
        )
    }

    /// One statement of each kind that the store uses; they are only explained, so they change nothing.
    pub(crate) fn needed(&self) -> [String; 7] {
        let (table, floor) = (&self.quoted, &self.floor);
        [
            format!("SELECT k FROM {table} WHERE k = ''"),
            format!("INSERT INTO {table} (k) VALUES ('')"),
            format!("UPDATE {table} SET kept = 0 WHERE k = ''"),
            format!("DELETE FROM {table} WHERE k = ''"),
            format!("SELECT fence FROM {floor}"),
            format!("INSERT INTO {floor} (one) VALUES (1)"),
            format!("UPDATE {floor} SET fence = 0 WHERE one = 2"),
        ]
    }

    /// Removes the row of a scratch lock, and rows that other doctors left at least a minute ago; all keys of scratch
    /// locks begin with `scratch`.
    pub(crate) fn forget(&self, key: &str, scratch: &str) -> String {
        format!(
            "DELETE FROM {} WHERE k = {} OR k BETWEEN {} AND {} AND until_us < {NOW} - 60000000",
            self.quoted,
            hex(key),
            hex(scratch),
            hex([scratch.as_bytes(), &[0xff]].concat()),
        )
    }
}

/// The first bytes after all those that begin with this text; `None` if it is empty. UTF-8 has no byte 0xff.
fn end_of(prefix: &str) -> Option<Vec<u8>> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut()? += 1;
    Some(end)
}

/// Reads the server's clock.
pub(crate) fn clock() -> String {
    format!("SELECT {NOW}")
}

fn hex(text: impl AsRef<[u8]>) -> String {
    let digits: String = text.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("x'{digits}'")
}

/// Ids contain only digits, letters, `-` and `:`.
fn id(grant: GrantId) -> String {
    format!("'{grant}'")
}

fn listed(all: impl Iterator<Item = String>) -> String {
    all.collect::<Vec<String>>().join(", ")
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
            "a`b",
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

    #[test]
    fn names_are_quoted_part_by_part() {
        let table = Table::new("app.locks").unwrap();
        assert!(
            table
                .schema
                .contains("CREATE TABLE IF NOT EXISTS `app`.`locks` (")
        );
        assert!(table.schema.contains("INSERT IGNORE INTO `app`.`locks_floor` "));
        assert!(!table.schema.contains('{'), "{}", table.schema);
        // Without it, a schema that was half created would be taken for a whole one.
        let last = table.schema.rsplit_once("CREATE TABLE IF NOT EXISTS ");
        assert!(last.is_some_and(|(_, last)| last.starts_with("`app`.`locks` (")));
    }

    #[test]
    fn pages_of_a_list_are_ranges_of_keys() {
        let table = Table::new(DEFAULT).unwrap();
        let range = |prefix: &str, after: &[u8]| {
            let list = table.list(prefix, after);
            let (_, range) = list.split_once("WHERE ").unwrap();
            range.strip_suffix(" ORDER BY k LIMIT 1000").unwrap().to_owned()
        };
        assert_eq!(range("", b""), "k >= x''");
        assert_eq!(range("", b"a"), "k > x'61'");
        assert_eq!(range("ab", b""), "k >= x'6162' AND k < x'6163'");
        assert_eq!(range("ab", b"abc"), "k > x'616263' AND k < x'6163'");
        for last in ['\u{0}', '\u{7f}', '\u{7ff}', '\u{ffff}', '\u{10ffff}'] {
            let prefix = format!("a{last}");
            let end = end_of(&prefix).unwrap();
            assert!(*format!("{prefix}\u{10ffff}\u{10ffff}").as_bytes() < *end);
            assert_eq!(end.len(), prefix.len());
        }
    }

    #[test]
    fn keys_cannot_end_their_literal() {
        let table = Table::new(DEFAULT).unwrap();
        let look = table.look(["a'b\\", "ö"].into_iter());
        assert!(look.ends_with("WHERE k IN (x'6127625c', x'c3b6')"), "{look}");
    }
}
