//! The SQL statements for one table.

use tokio_postgres::types::Type;

use crate::names::TableName;

/// The default name of the table.
pub(crate) const DEFAULT: &str = "dlock_locks";
/// The number of groups of keys; one advisory lock shows whether a group has waiters.
const BUCKETS: u32 = 256;

/// How long the position of a waiter is kept unless it asks again.
const KEPT_FOR: &str = "5 s";
/// Within how many µs a waiter for several permits asks again.
const HEARD_WITHIN: i64 = 1_500_000;
/// The planner's `random_page_cost`, with which it looks up keys in the index. In a table of a few pages, of which most of the
/// rows are dead, it would read all rows.
const INDEX_COST: &str = "0.01";
/// The end of the row of a semaphore or latch.
const NEVER: &str = "9999-01-01 00:00:00+00";

/// The endings of the functions that statements call, also from one another.
const FUNCTIONS: [&str; 14] = [
    "_acquire",
    "_acquire_many",
    "_release",
    "_release_many",
    "_leave",
    "_extend",
    "_first",
    "_fair",
    "_fair_release",
    "_permit",
    "_permit_release",
    "_count",
    "_keep",
    "_reap",
];

/// The table of the locks: its name, the names of related objects, and all statements.
#[derive(Debug)]
pub(crate) struct Table {
    /// The name of the table, for messages.
    pub(crate) name: String,
    pub(crate) schema: String,
    pub(crate) hold_in: String,
    pub(crate) lock_in: String,
    /// The statement of `hold_in` for permits.
    pub(crate) hold_permit: String,
    /// The tables, as named in statements, and the privileges that each needs.
    needed: [(String, &'static [&'static str]); 7],
    /// The names of the functions that statements call, without the schema.
    called: [String; FUNCTIONS.len()],
    /// The first number of the advisory locks of this table.
    pub(crate) class: i32,
    /// In the order of [`Sql`].
    statements: [String; Sql::ALL.len()],
}

/// A statement, in the order in which those of one moment are sent: acquires later, because they wait for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sql {
    Release,
    /// The release of one grant.
    LoneRelease,
    /// The release of a reader.
    Leave,
    /// The release of a fair lock, or of a waiter's position.
    FairRelease,
    /// The release of permits, or of a waiter's position.
    PermitRelease,
    Renew,
    /// The renewal of a reader.
    Extend,
    /// The renewal of permits.
    PermitRenew,
    /// The acquire of permits.
    Permit,
    /// The acquire of a fair lock.
    Fair,
    /// The acquire of any locks that are not fair, also of several together.
    Acquire,
    /// The acquire of locks that are neither read nor fair.
    Plain,
    /// The acquire of one of those.
    Lone,
    Insert,
    /// An operation on a semaphore or latch.
    Count,
    Inspect,
    /// The bounds of the next page of a list.
    Page,
    Force,
    Pins,
    Tell,
    /// The keys of rows that can be removed; this and those after it are sent by sweeps.
    Free,
    Sweep,
    /// The removal of rows of other tables.
    Leftovers,
    /// The end of semaphores without a total.
    Unused,
}

impl Sql {
    /// The statements that connections for operations prepare.
    pub(crate) const SERVING: &[Sql] = Sql::ALL.split_at(Sql::Free as usize).0;
    pub(crate) const ALL: [Sql; 24] = [
        Sql::Release,
        Sql::LoneRelease,
        Sql::Leave,
        Sql::FairRelease,
        Sql::PermitRelease,
        Sql::Renew,
        Sql::Extend,
        Sql::PermitRenew,
        Sql::Permit,
        Sql::Fair,
        Sql::Acquire,
        Sql::Plain,
        Sql::Lone,
        Sql::Insert,
        Sql::Count,
        Sql::Inspect,
        Sql::Page,
        Sql::Force,
        Sql::Pins,
        Sql::Tell,
        Sql::Free,
        Sql::Sweep,
        Sql::Leftovers,
        Sql::Unused,
    ];

    fn template(self) -> &'static str {
        match self {
            Sql::Acquire => include_str!("sql/acquire.sql"),
            Sql::Plain => include_str!("sql/plain.sql"),
            Sql::Lone => include_str!("sql/lone.sql"),
            Sql::Fair => include_str!("sql/fair.sql"),
            Sql::Insert => include_str!("sql/insert.sql"),
            Sql::Release => include_str!("sql/release.sql"),
            Sql::LoneRelease => include_str!("sql/lone_release.sql"),
            Sql::FairRelease => include_str!("sql/fair_release.sql"),
            Sql::Renew => include_str!("sql/renew.sql"),
            Sql::Leave => include_str!("sql/leave.sql"),
            Sql::Extend => include_str!("sql/extend.sql"),
            Sql::Inspect => include_str!("sql/inspect.sql"),
            Sql::Force => include_str!("sql/force.sql"),
            Sql::Pins => include_str!("sql/pins.sql"),
            Sql::Tell => include_str!("sql/tell.sql"),
            Sql::Page => include_str!("sql/page.sql"),
            Sql::Free => include_str!("sql/free.sql"),
            Sql::Sweep => include_str!("sql/sweep.sql"),
            Sql::Leftovers => include_str!("sql/leftovers.sql"),
            Sql::Unused => include_str!("sql/unused.sql"),
            Sql::Permit => include_str!("sql/permit.sql"),
            Sql::PermitRelease => include_str!("sql/permit_release.sql"),
            Sql::PermitRenew => include_str!("sql/permit_renew.sql"),
            Sql::Count => include_str!("sql/count.sql"),
        }
    }

    /// The types of the parameters, for connections without prepared statements.
    pub(crate) fn types(self) -> Vec<Type> {
        let (texts, longs, ints) = (Type::TEXT_ARRAY, Type::INT8_ARRAY, Type::INT4_ARRAY);
        match self {
            Sql::Plain => vec![texts.clone(), texts.clone(), texts, longs, ints, Type::INT8],
            Sql::Acquire | Sql::Lone => {
                let all = [
                    texts.clone(),
                    texts.clone(),
                    texts.clone(),
                    longs.clone(),
                    ints,
                    longs,
                ];
                let sets = [Type::INT8, texts].into_iter().filter(|_| self == Sql::Acquire);
                all.into_iter().chain(sets).collect()
            }
            Sql::Fair => {
                let bools = Type::BOOL_ARRAY;
                vec![
                    texts.clone(),
                    texts,
                    longs.clone(),
                    ints,
                    longs,
                    bools.clone(),
                    bools,
                ]
            }
            Sql::Insert | Sql::Pins | Sql::Sweep => vec![texts],
            Sql::Release | Sql::LoneRelease | Sql::FairRelease | Sql::PermitRelease | Sql::Leave => {
                vec![texts.clone(), texts, longs, ints, Type::BOOL]
            }
            Sql::Renew | Sql::Extend | Sql::PermitRenew => vec![texts.clone(), texts, longs],
            Sql::Inspect => vec![Type::TEXT, Type::TEXT, Type::TEXT],
            Sql::Page => vec![Type::TEXT, Type::TEXT, Type::INT8],
            Sql::Force | Sql::Tell => vec![Type::TEXT],
            Sql::Free | Sql::Leftovers | Sql::Unused => vec![Type::INT8],
            Sql::Permit => {
                let first = [texts.clone(), texts.clone(), Type::BOOL_ARRAY, longs.clone()];
                let amounts = [ints.clone(), longs.clone(), ints.clone(), longs.clone(), longs];
                first
                    .into_iter()
                    .chain(amounts)
                    .chain([texts, ints, Type::BOOL])
                    .collect()
            }
            Sql::Count => {
                let texts = [Type::TEXT, Type::TEXT, Type::TEXT, Type::TEXT];
                let values = [Type::INT8, Type::BOOL, Type::INT8, Type::INT8];
                texts
                    .into_iter()
                    .chain(values)
                    .chain([Type::INT4, Type::BOOL])
                    .collect()
            }
        }
    }
}

impl Table {
    /// Creates the statements for a table.
    ///
    /// # Errors
    ///
    /// The reason if the name is invalid.
    pub(crate) fn new(name: &str) -> Result<Table, String> {
        let name = TableName::new(name)?;
        let class = hash(&name.plain) as i32;
        // The advisory locks of transactions differ from those of waiters.
        let pinned = class.wrapping_add(1);
        let write = |template: &str| {
            template
                .replace("{table}", &name.quoted())
                .replace("{readers}", &name.with("_readers"))
                .replace("{waiters}", &name.with("_waiters"))
                .replace("{permits}", &name.with("_permits"))
                .replace("{replies}", &name.with("_replies"))
                .replace("{permits_end}", &name.alone("_permits_end"))
                .replace("{permit}", &name.with("_permit"))
                .replace("{permit_release}", &name.with("_permit_release"))
                .replace("{count}", &name.with("_count"))
                .replace("{keep}", &name.with("_keep"))
                .replace("{reap}", &name.with("_reap"))
                .replace("{never}", NEVER)
                .replace("{heard_within}", &HEARD_WITHIN.to_string())
                .replace("{most}", &i32::MAX.to_string())
                .replace("{first}", &name.with("_first"))
                .replace("{fair}", &name.with("_fair"))
                .replace("{fair_release}", &name.with("_fair_release"))
                .replace("{kept_for}", KEPT_FOR)
                .replace("{index_cost}", INDEX_COST)
                .replace("{acquire}", &name.with("_acquire"))
                .replace("{acquire_many}", &name.with("_acquire_many"))
                .replace("{release_many}", &name.with("_release_many"))
                .replace("{release}", &name.with("_release"))
                .replace("{leave}", &name.with("_leave"))
                .replace("{extend}", &name.with("_extend"))
                .replace("{floor}", &name.with("_floor"))
                .replace("{channel}", &format!("'{}'", name.plain))
                .replace("{class}", &class.to_string())
                .replace("{pinned}", &pinned.to_string())
                .replace("{pinned_oid}", &(pinned as u32).to_string())
                .replace("{pins}", &name.with("_pins"))
                .replace("{hold_in}", &name.with("_hold_in"))
                .replace("{lock_in}", &name.with("_lock_in"))
                .replace("{make}", &name.with("_make"))
        };
        const ALL: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];
        Ok(Table {
            needed: [
                (name.quoted(), ALL),
                (name.with("_readers"), ALL),
                (name.with("_waiters"), ALL),
                (name.with("_permits"), ALL),
                (name.with("_replies"), ALL),
                (name.with("_floor"), &["SELECT", "UPDATE"]),
                (name.with("_pins"), &["SELECT"]),
            ],
            called: FUNCTIONS.map(|ending| name.bare(ending)),
            schema: write(include_str!("sql/schema.sql")),
            class,
            hold_in: write(include_str!("sql/hold_in.sql")),
            lock_in: write(include_str!("sql/lock_in.sql")),
            hold_permit: write(include_str!("sql/hold_permit.sql")),
            statements: Sql::ALL.map(|sql| write(sql.template())),
            name: name.plain,
        })
    }

    /// A query for the privileges that the user lacks, each as text.
    pub(crate) fn privileges(&self) -> String {
        let each = |(table, privileges): &(String, &'static [&'static str])| {
            let one = |privilege: &&str| format!("('{}', '{privilege}')", table.replace('\'', "''"));
            privileges.iter().map(one).collect::<Vec<_>>().join(", ")
        };
        let all: Vec<String> = self.needed.iter().map(each).collect();
        let functions = self.called.join("', '");
        format!(
            "SELECT CASE WHEN to_regclass(t) IS NULL THEN 'the table' ELSE p END || ' ON ' || t FROM (VALUES {}) AS n (t, p) \
             WHERE CASE WHEN to_regclass(t) IS NULL THEN true ELSE NOT has_table_privilege(to_regclass(t), p) END \
             UNION ALL SELECT 'EXECUTE ON ' || f.oid::regprocedure FROM pg_proc f \
             JOIN pg_class c ON c.relnamespace = f.pronamespace WHERE c.oid = to_regclass('{}') \
             AND f.proname IN ('{functions}') AND NOT has_function_privilege(f.oid, 'EXECUTE')",
            all.join(", "),
            self.needed[0].0
        )
    }

    /// Removes the row of a scratch lock, and rows that other doctors left at least a minute ago.
    pub(crate) fn forget(&self) -> String {
        format!(
            "DELETE FROM {} WHERE key = $1 OR key ^@ $2 AND until < clock_timestamp() - interval '1 minute'",
            self.needed[0].0
        )
    }

    pub(crate) fn sql(&self, sql: Sql) -> &str {
        &self.statements[sql as usize]
    }
}

/// The second number of the advisory lock for the waiters of a key.
pub(crate) fn bucket(key: &str) -> i32 {
    (hash(key) % BUCKETS) as i32
}

/// FNV-1a: the same in every process and version.
fn hash(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_statement_names_the_table_and_leaves_no_gap() {
        let table = Table::new("App.Locks").unwrap();
        let statements = Sql::ALL.map(|sql| table.sql(sql));
        for text in statements.into_iter().chain([
            &*table.schema,
            &*table.hold_in,
            &*table.lock_in,
            &*table.hold_permit,
        ]) {
            assert!(!text.contains('{'), "{text}");
        }
        assert!(
            table
                .schema
                .contains("CREATE TABLE IF NOT EXISTS \"App\".\"Locks\" (")
        );
        assert!(
            table
                .sql(Sql::Tell)
                .contains("pg_notify('App.Locks', $1::text || ")
        );
    }

    #[test]
    fn every_parameter_has_a_type() {
        let table = Table::new(DEFAULT).unwrap();
        for sql in Sql::ALL {
            let highest = (1..20).rev().find(|n| table.sql(sql).contains(&format!("${n}")));
            assert_eq!(highest, Some(sql.types().len()), "{sql:?}");
        }
    }

    /// Processes of all versions must agree on them.
    #[test]
    fn numbers_of_advisory_locks_stay() {
        assert_eq!(bucket("order:42"), (hash("order:42") % 256) as i32);
        assert_eq!(
            (hash(""), hash("a"), hash("foobar")),
            (0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968)
        );
    }
}
