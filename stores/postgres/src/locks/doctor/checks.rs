//! Evaluates the facts that the doctor collected, without I/O.

use std::collections::HashMap;

use dlock::store::doctor::{Durability, Failover, Finding};
use tokio_postgres::Row;

/// A fact, or why it is not visible.
pub(super) type Seen<T> = Result<T, String>;

/// The facts that the doctor collected.
pub(super) struct Facts {
    /// Whether a transaction pooler is in between.
    pub(super) pooled: bool,
    pub(super) settings: HashMap<String, String>,
    pub(super) activity: Seen<Vec<Row>>,
    pub(super) standbys: Seen<Vec<Standby>>,
    /// The privileges that the user lacks.
    pub(super) missing: Seen<Vec<String>>,
}

/// A server that replicates this one. Fields that the user may not see are `None`.
pub(super) struct Standby {
    pub(super) name: String,
    pub(super) sync: Option<String>,
    /// How many bytes and seconds the standby is behind.
    pub(super) bytes: Option<i64>,
    pub(super) seconds: Option<f64>,
}

/// The activity of the server, as far as it is visible.
pub(super) struct Activity {
    pub(super) connections: i64,
    /// The age of the oldest transaction in seconds.
    pub(super) oldest: f64,
    /// Whether there are sessions that the user may not see.
    pub(super) hidden: bool,
}

/// The oldest major version that still receives fixes.
const OLDEST: u32 = 14;
/// The lag in bytes and seconds above which a standby counts as behind.
const LAG: (i64, f64) = (16 << 20, 10.0);
/// The age in seconds above which a transaction is too old; it keeps dead rows from being removed.
const LONG: f64 = 600.0;

pub(super) fn hidden(check: &'static str, why: &str) -> Finding {
    let remedy = "let the user of the doctor be a member of pg_monitor".to_owned();
    Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
}

/// Runs all checks; also estimates the time of a failover, and what a crash loses.
pub(super) fn all(facts: &Facts) -> (Vec<Finding>, Failover, Durability) {
    let settings = Settings(&facts.settings);
    let (persistence, durability) = persistence(&settings);
    let activity = facts
        .activity
        .as_ref()
        .map_err(Clone::clone)
        .and_then(|rows| activity(rows));
    let (replicas, failover) = match &facts.standbys {
        Ok(standbys) => replicas(&settings, standbys),
        Err(why) => (hidden("replicas", why), Failover::Unknown(why.clone())),
    };
    let of = |check, decide: fn(&Settings<'_>, &Activity) -> Finding| match &activity {
        Ok(activity) => decide(&settings, activity),
        Err(why) => hidden(check, why),
    };
    let findings = vec![
        persistence,
        replicas,
        versions(&settings),
        pooler(facts.pooled),
        timeouts(&settings),
        of("vacuum", vacuum),
        of("connections", connections),
        permissions(&facts.missing),
    ];
    (findings, failover, durability)
}

fn activity(rows: &[Row]) -> Seen<Activity> {
    let row = rows.first().ok_or("the server told nothing")?;
    let failed = |error: tokio_postgres::Error| error.to_string();
    let oldest: Option<f64> = row.try_get("oldest").map_err(failed)?;
    let prepared: Option<f64> = row.try_get("prepared").map_err(failed)?;
    Ok(Activity {
        connections: row.try_get("connections").map_err(failed)?,
        oldest: oldest.unwrap_or(0.0).max(prepared.unwrap_or(0.0)),
        hidden: row.try_get::<_, i64>("hidden").map_err(failed)? > 0,
    })
}

struct Settings<'a>(&'a HashMap<String, String>);

impl Settings<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> i64 {
        self.text(name).parse().unwrap_or(0)
    }
}

fn persistence(settings: &Settings<'_>) -> (Finding, Durability) {
    const CHECK: &str = "persistence";
    let bad = |why: &str, remedy: &str| (Finding::bad(CHECK, why, remedy), Durability::LastSecond);
    if settings.text("fsync") == "off" {
        return bad(
            "fsync is off: a crash of the machine may lose or corrupt all that is in the database",
            "fsync on",
        );
    }
    if settings.text("full_page_writes") == "off" {
        return bad(
            "full_page_writes is off: a crash of the machine may corrupt pages",
            "full_page_writes on, unless the file system never tears a page",
        );
    }
    match settings.text("synchronous_commit") {
        "off" => bad(
            "synchronous_commit is off: a crash forgets the newest locks, and others acquire them while their holders work",
            "synchronous_commit on for the user of the locks: ALTER ROLE … SET synchronous_commit = on",
        ),
        _ => (
            Finding::good(CHECK, "what is answered is on disk"),
            Durability::All,
        ),
    }
}

fn replicas(settings: &Settings<'_>, standbys: &[Standby]) -> (Finding, Failover) {
    const CHECK: &str = "replicas";
    let named = settings.text("synchronous_standby_names");
    let waits = !named.is_empty() && !matches!(settings.text("synchronous_commit"), "off" | "local");
    let takes_over = || {
        Failover::Unknown(
            "when a standby takes over is up to others (Patroni, a managed service?)".to_owned(),
        )
    };
    let wanted = wanted(named);
    let uncounted = || {
        let why = format!(
            "not visible: how many standbys synchronous_standby_names ({named}) has commits wait for"
        );
        let remedy = "compare it with the sync_state of pg_stat_replication".to_owned();
        Finding::unknown(CHECK, why, Some(remedy))
    };
    if standbys.is_empty() {
        return match (waits, wanted) {
            (true, None) => (uncounted(), takes_over()),
            (true, Some(_)) => (
                Finding::bad(
                    CHECK,
                    format!("commits wait for a standby of {named}, and none is linked: no step ends"),
                    "link the standby, or take it out of synchronous_standby_names",
                ),
                takes_over(),
            ),
            (false, _) => (
                Finding::good(
                    CHECK,
                    "none: a fail-over cannot forget a lock, and an outage lasts until it is back",
                ),
                Failover::None,
            ),
        };
    }
    let is_synchronous = |one: &&Standby| matches!(one.sync.as_deref(), Some("sync" | "quorum"));
    let linked = standbys.iter().filter(is_synchronous).count();
    let behind = |one: &&Standby| {
        one.bytes.is_some_and(|bytes| bytes > LAG.0) || one.seconds.is_some_and(|seconds| seconds > LAG.1)
    };
    let finding = if standbys.iter().any(|one| one.sync.is_none()) {
        hidden(CHECK, "whether standbys are synchronous")
    } else if let Some(late) = standbys.iter().find(behind) {
        Finding::bad(
            CHECK,
            format!(
                "the standby {} is {} bytes and {:.0} s behind",
                late.name,
                late.bytes.unwrap_or(0),
                late.seconds.unwrap_or(0.0)
            ),
            "the network and the disk of the standby; its long queries, which hold its replay up",
        )
    } else if waits {
        match wanted {
            None => uncounted(),
            Some(wanted) if linked >= wanted => Finding::good(
                CHECK,
                "a commit is on a synchronous standby before it is answered",
            ),
            Some(_) if linked == 0 => Finding::bad(
                CHECK,
                format!(
                    "commits wait for a standby of {named}, and no standby that is linked is one: no step ends"
                ),
                "the application_name of the standby, or synchronous_standby_names",
            ),
            Some(wanted) => Finding::bad(
                CHECK,
                format!(
                    "commits wait for {wanted} standbys of {named}, and no more than {linked} can acknowledge: no step \
                     ends"
                ),
                "link the missing standbys, or have synchronous_standby_names want fewer",
            ),
        }
    } else {
        Finding::bad(
            CHECK,
            "standbys are asynchronous: one that takes over has not the newest locks, and others acquire them while their \
             holders work; fencing tokens may repeat",
            "synchronous_standby_names, with a standby more than it names; hold_in protects writes to this database",
        )
    };
    (finding, takes_over())
}

/// Returns how many standbys a commit waits for by this `synchronous_standby_names`, in the grammar of PostgreSQL:
/// names, or a number and names in parentheses, behind `FIRST`, `ANY` or neither. `None` for any other text.
fn wanted(setting: &str) -> Option<usize> {
    let words = words(setting)?;
    let (number, listed) = match &words[..] {
        [
            Word::Name(method),
            Word::Number(number),
            Word::Mark('('),
            listed @ ..,
            Word::Mark(')'),
        ] if ["first", "any"].contains(&method.to_ascii_lowercase().as_str()) => (*number, listed),
        [
            Word::Number(number),
            Word::Mark('('),
            listed @ ..,
            Word::Mark(')'),
        ] => (*number, listed),
        listed => (1, listed),
    };
    let is_list = listed.len() % 2 == 1
        && listed.iter().enumerate().all(|(at, word)| match word {
            Word::Mark(mark) => at % 2 == 1 && *mark == ',',
            Word::Name(_) | Word::Quoted | Word::Number(_) => at % 2 == 0,
        });
    (is_list && number > 0).then_some(number)
}

#[derive(Debug)]
enum Word<'a> {
    /// Also the star, which is any name.
    Name(&'a str),
    /// A name in quotation marks, which is never a keyword.
    Quoted,
    Number(usize),
    Mark(char),
}

/// The words of `synchronous_standby_names`; `None` for a text that PostgreSQL does not accept.
fn words(setting: &str) -> Option<Vec<Word<'_>>> {
    const SPACE: [char; 6] = [' ', '\t', '\n', '\r', '\u{b}', '\u{c}'];
    let mut words = Vec::new();
    let mut rest = setting.trim_start_matches(SPACE);
    while let Some(first) = rest.chars().next() {
        let ends = |is_part: fn(char) -> bool| rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, length) = match first {
            '*' => (Word::Name("*"), 1),
            '(' | ')' | ',' => (Word::Mark(first), 1),
            '"' => {
                // A doubled quotation mark is part of the name.
                let mut end = 1 + rest[1..].find('"')? + 1;
                while rest[end..].starts_with('"') {
                    end += 1 + rest[end + 1..].find('"')? + 1;
                }
                (Word::Quoted, end)
            }
            '0'..='9' => {
                let end = ends(|c| c.is_ascii_digit());
                (Word::Number(rest[..end].parse().ok()?), end)
            }
            'A'..='Z' | 'a'..='z' | '_' | '\u{80}'.. => {
                let end = ends(|c| c.is_ascii_alphanumeric() || "_$".contains(c) || !c.is_ascii());
                (Word::Name(&rest[..end]), end)
            }
            _ => return None,
        };
        words.push(word);
        rest = rest[length..].trim_start_matches(SPACE);
    }
    Some(words)
}

fn versions(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "versions";
    let (text, number) = (
        settings.text("server_version"),
        settings.number("server_version_num"),
    );
    match u32::try_from(number / 10_000) {
        Ok(major) if major >= OLDEST => Finding::good(CHECK, format!("PostgreSQL {text}")),
        Ok(major) if major > 0 => Finding::bad(
            CHECK,
            format!("PostgreSQL {text}: defects of this version are not mended any more"),
            format!("PostgreSQL {OLDEST} or newer"),
        ),
        _ => hidden(CHECK, "the server does not tell its version"),
    }
}

fn pooler(pooled: bool) -> Finding {
    const CHECK: &str = "pooler";
    match pooled {
        true => Finding::bad(
            CHECK,
            "a transaction pooler is in between: waiters ask four times a second and are not woken, statements are planned \
             each time, and settings of sessions are those of the server",
            "for the locks the server's own address, or a pool in session mode",
        ),
        false => Finding::good(CHECK, "no transaction pooler is in between"),
    }
}

fn timeouts(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "timeouts";
    let (idle, lock) = (
        settings.number("idle_session_timeout"),
        settings.number("lock_timeout"),
    );
    if idle > 0 {
        return Finding::bad(
            CHECK,
            format!(
                "idle_session_timeout ends connections without work after {idle} ms: holds become suspect each time"
            ),
            "ALTER ROLE … SET idle_session_timeout = 0 for the user of the locks",
        );
    }
    match lock {
        0 => Finding::good(
            CHECK,
            "no connection of locks is ended, and no step is given up by a setting of the server",
        ),
        _ => Finding::bad(
            CHECK,
            format!("lock_timeout is {lock} ms: a step that waits for the row of its lock fails after that"),
            "ALTER ROLE … SET lock_timeout = 0 for the user of the locks, whose statements have a limit of their own",
        ),
    }
}

fn vacuum(settings: &Settings<'_>, activity: &Activity) -> Finding {
    const CHECK: &str = "vacuum";
    if settings.text("autovacuum") == "off" {
        return Finding::bad(
            CHECK,
            "autovacuum is off: each step leaves a dead row, and the table of locks grows until each step is slow",
            "autovacuum on",
        );
    }
    if activity.oldest > LONG {
        return Finding::bad(
            CHECK,
            format!(
                "a transaction is open for {:.0} s: until it ends no dead row is removed, and each step leaves one",
                activity.oldest
            ),
            "end it (pg_stat_activity, pg_prepared_xacts); idle_in_transaction_session_timeout",
        );
    }
    match activity.hidden {
        true => hidden(CHECK, "for how long transactions of other users run"),
        false => Finding::good(CHECK, "autovacuum is on, and no transaction is old"),
    }
}

fn connections(settings: &Settings<'_>, activity: &Activity) -> Finding {
    const CHECK: &str = "connections";
    let most = settings.number("max_connections") - settings.number("superuser_reserved_connections");
    let free = most - activity.connections;
    let why = format!("{} of {most} connections are in use", activity.connections);
    match free * 5 < most {
        true => Finding::bad(
            CHECK,
            format!("{why}: the next deploy finds none"),
            "max_connections; fewer connections for each process (?connections=)",
        ),
        false => Finding::good(CHECK, why),
    }
}

fn permissions(missing: &Seen<Vec<String>>) -> Finding {
    const CHECK: &str = "permissions";
    let page = concat!(
        "GRANT what ",
        env!("CARGO_PKG_REPOSITORY"),
        "/blob/main/docs/postgres.md has under permissions, or create_table"
    );
    match missing {
        Ok(missing) if missing.is_empty() => Finding::good(CHECK, "the user may do what the locks need"),
        Ok(missing) => Finding::bad(CHECK, format!("the user lacks {}", missing.join(", ")), page),
        Err(why) => Finding::bad(
            CHECK,
            format!("the tables of the locks cannot be looked at: {why}"),
            page,
        ),
    }
}

#[cfg(test)]
mod tests {
    use dlock::store::doctor::Verdict;

    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn versions_whose_defects_are_mended_are_good() {
        let verdict = |number| versions(&Settings(&settings(&[("server_version_num", number)]))).verdict;
        assert_eq!(verdict("140000"), Verdict::Good);
        assert_eq!(verdict("130022"), Verdict::Bad);
        assert_eq!(verdict("90624"), Verdict::Bad);
        assert_eq!(verdict(""), Verdict::Unknown);
    }

    #[test]
    fn standby_that_is_behind_or_hidden_is_not_good() {
        let on = settings(&[("synchronous_commit", "on"), ("synchronous_standby_names", "*")]);
        let verdict = |sync: Option<&str>, bytes, seconds| {
            let standby = Standby {
                name: "b".to_owned(),
                sync: sync.map(str::to_owned),
                bytes: Some(bytes),
                seconds: Some(seconds),
            };
            replicas(&Settings(&on), &[standby]).0.verdict
        };
        assert_eq!(verdict(Some("sync"), 0, 0.0), Verdict::Good);
        assert_eq!(verdict(Some("quorum"), LAG.0, LAG.1), Verdict::Good);
        assert_eq!(verdict(Some("sync"), LAG.0 + 1, 0.0), Verdict::Bad);
        assert_eq!(verdict(Some("sync"), 0, LAG.1 + 1.0), Verdict::Bad);
        assert_eq!(verdict(Some("potential"), 0, 0.0), Verdict::Bad);
        assert_eq!(verdict(None, 0, 0.0), Verdict::Unknown);
    }

    #[test]
    fn commits_that_wait_for_more_standbys_than_are_linked_do_not_end() {
        let verdict = |names: &str, linked: &[&str]| {
            let on = settings(&[("synchronous_commit", "on"), ("synchronous_standby_names", names)]);
            let standby = |sync: &&str| Standby {
                name: "a".to_owned(),
                sync: Some((*sync).to_owned()),
                bytes: Some(0),
                seconds: Some(0.0),
            };
            let standbys: Vec<_> = linked.iter().map(standby).collect();
            replicas(&Settings(&on), &standbys).0.verdict
        };
        assert_eq!(verdict("FIRST 2 (a, b)", &["sync"]), Verdict::Bad);
        assert_eq!(verdict("FIRST 2 (a, b)", &["sync", "sync"]), Verdict::Good);
        assert_eq!(verdict("FIRST 1 (a, b)", &["sync", "potential"]), Verdict::Good);
        assert_eq!(verdict("2 (*)", &["sync", "potential"]), Verdict::Bad);
        assert_eq!(verdict("ANY 1 (a, b)", &["quorum"]), Verdict::Good);
        assert_eq!(verdict("ANY 2 (a, b, c)", &["quorum", "async"]), Verdict::Bad);
        assert_eq!(verdict("ANY 2 (a, b, c)", &["quorum", "quorum"]), Verdict::Good);
        for strange in ["ALL 2 (a, b)", "FIRST (a, b)", "a; b"] {
            assert_eq!(verdict(strange, &["sync"]), Verdict::Unknown, "{strange}");
            assert_eq!(verdict(strange, &[]), Verdict::Unknown, "{strange}");
        }
    }

    #[test]
    fn synchronous_standby_names_are_read_as_the_server_reads_them() {
        for (names, number) in [
            ("*", 1),
            ("a", 1),
            ("a, b", 1),
            ("\"a\",b , c", 1),
            ("\"any 3 (x\"\", y)\"", 1),
            ("7", 1),
            ("2 (a, b)", 2),
            ("2(*)", 2),
            (" FIRST 2 (a,\"b\") ", 2),
            ("first 3 (a, b, c, d)", 3),
            ("aNy 2 ( * )", 2),
            ("Any\n2\t(größe, b_$1, 3)", 2),
        ] {
            assert_eq!(wanted(names), Some(number), "{names}");
        }
        for names in [
            "",
            " ",
            ",",
            "a,",
            "a b",
            "()",
            "2 ()",
            "2 (a",
            "2 (a,)",
            "0 (a)",
            "-1 (a)",
            "ANY (a)",
            "\"ANY\" 2 (a)",
            "ANY 2 a",
            "ANY 2 (a) b",
            "LAST 2 (a)",
            "2 (a), b",
            "\"a",
            "a.b",
            "99999999999999999999999 (a)",
        ] {
            assert_eq!(wanted(names), None, "{names}");
        }
    }

    #[test]
    fn transaction_of_ten_minutes_is_too_old_and_one_that_is_hidden_unknown() {
        let on = settings(&[("autovacuum", "on")]);
        let verdict = |oldest, hidden| {
            let activity = Activity {
                connections: 1,
                oldest,
                hidden,
            };
            vacuum(&Settings(&on), &activity).verdict
        };
        assert_eq!(verdict(LONG, false), Verdict::Good);
        assert_eq!(verdict(LONG, true), Verdict::Unknown);
        assert_eq!(verdict(LONG + 1.0, true), Verdict::Bad);
    }
}
