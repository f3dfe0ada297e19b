//! Evaluates the facts that the doctor collected, without I/O.

use std::collections::HashMap;

use dlock::store::doctor::{Durability, Failover, Finding};

/// A fact, or why it is not visible.
pub(super) type Seen<T> = Result<T, String>;

/// The facts that the doctor collected.
pub(super) struct Facts {
    pub(super) settings: HashMap<String, String>,
    pub(super) status: Seen<HashMap<String, String>>,
    /// How many replicas are connected.
    pub(super) linked: Seen<u64>,
    /// The age of the oldest transaction in seconds.
    pub(super) oldest: Seen<i64>,
    /// The tables of the locks, and their engines.
    pub(super) engines: Seen<Vec<(String, Option<String>)>>,
    /// The errors for rights that the user lacks.
    pub(super) missing: Seen<Vec<String>>,
}

/// The age in seconds above which a transaction is too old.
const LONG: i64 = 600;

pub(super) fn hidden(check: &'static str, why: &str, grant: &str) -> Finding {
    let remedy = format!("let the user of the doctor have the privilege {grant}");
    Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
}

/// Runs all checks; also estimates the time of a failover, and what a crash loses.
pub(super) fn all(facts: &Facts) -> (Vec<Finding>, Failover, Durability) {
    let settings = Settings(&facts.settings);
    let (persistence, durability) = persistence(&settings);
    let (replicas, failover) = replicas(&settings, &facts.status, &facts.linked);
    let findings = vec![
        persistence,
        writes(&settings),
        replicas,
        binlog(&settings),
        versions(&settings),
        timeouts(&settings),
        engines(&facts.engines),
        purge(&facts.oldest),
        connections(&settings, &facts.status),
        permissions(&facts.missing),
    ];
    (findings, failover, durability)
}

struct Settings<'a>(&'a HashMap<String, String>);

impl Settings<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        matches!(self.text(name), "ON" | "1")
    }
}

fn persistence(settings: &Settings<'_>) -> (Finding, Durability) {
    const CHECK: &str = "persistence";
    let bad = |why: String, remedy: &str| (Finding::bad(CHECK, why, remedy), Durability::LastSecond);
    match settings.text("innodb_flush_log_at_trx_commit") {
        "1" => {}
        other => {
            let why = format!(
                "innodb_flush_log_at_trx_commit is {other}: a crash forgets the newest locks, about a second of them, and \
                 others acquire them while their holders work"
            );
            return bad(why, "innodb_flush_log_at_trx_commit = 1");
        }
    }
    if settings.is_on("log_bin") && settings.text("sync_binlog") != "1" {
        let why =
            "sync_binlog is not 1: after a crash replicas have locks that this server forgot, or the reverse";
        return bad(why.to_owned(), "sync_binlog = 1");
    }
    if matches!(settings.text("innodb_doublewrite"), "OFF" | "0") {
        let why = "innodb_doublewrite is off: a crash of the machine may corrupt pages";
        return bad(
            why.to_owned(),
            "innodb_doublewrite = ON, unless the file system never tears a page",
        );
    }
    (
        Finding::good(CHECK, "what is answered is on disk"),
        Durability::All,
    )
}

fn writes(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "writes";
    match settings.text("read_only") {
        "OFF" | "0" => Finding::good(CHECK, "the server takes writes"),
        _ => Finding::bad(
            CHECK,
            "read_only is on: no lock can be acquired, unless this user is exempt",
            "the address of the primary, or a name that follows it",
        ),
    }
}

fn replicas(
    settings: &Settings<'_>,
    status: &Seen<HashMap<String, String>>,
    linked: &Seen<u64>,
) -> (Finding, Failover) {
    const CHECK: &str = "replicas";
    let none = |why: &str| {
        let why =
            format!("none{why}: a fail-over cannot forget a lock, and an outage lasts until it is back");
        (Finding::good(CHECK, why), Failover::None)
    };
    if !settings.is_on("log_bin") {
        return cluster(settings).unwrap_or_else(|| none(", since there is no binary log"));
    }
    let semi = SEMI
        .iter()
        .find(|semi| settings.is_on(&semi("enabled").to_lowercase()));
    let finding = match (semi, linked) {
        (Some(semi), _) => match status {
            Ok(status) => semi_synchronous(|name| status.get(&semi(name)).map(String::as_str)),
            Err(why) => hidden(CHECK, why, "REPLICATION CLIENT"),
        },
        (None, Ok(0)) => return cluster(settings).unwrap_or_else(|| none("")),
        (None, Ok(linked)) => Finding::bad(
            CHECK,
            format!(
                "{linked} replicas are asynchronous: one that takes over has not the newest locks, and others acquire \
                 them while their holders work; fencing tokens may repeat"
            ),
            "semi-synchronous replication with AFTER_SYNC, or locks on a server that no replica replaces",
        ),
        (None, Err(why)) => hidden(CHECK, why, "REPLICATION SLAVE"),
    };
    let takes_over = "when a replica takes over is up to others (orchestrator, a managed service?)";
    (finding, Failover::Unknown(takes_over.to_owned()))
}

/// Checks whether other members of a cluster take over, which are not linked as replicas.
fn cluster(settings: &Settings<'_>) -> Option<(Finding, Failover)> {
    let (name, remedy) = if !settings.text("group_replication_group_name").is_empty() {
        (
            "a group (Group Replication)",
            "compare performance_schema.replication_group_members, and let one member take writes",
        )
    } else if settings.is_on("wsrep_on") {
        (
            "a Galera cluster",
            "compare wsrep_cluster_status and wsrep_cluster_size, and send the steps of all processes to one node",
        )
    } else {
        return None;
    };
    let why =
        format!("not visible: which locks the other members of {name} have when one of them takes over");
    let takes_over = format!("when another member takes over is up to {name}");
    let finding = Finding::unknown("replicas", why, Some(remedy.to_owned()));
    Some((finding, Failover::Unknown(takes_over)))
}

/// The names in MariaDB and in MySQL before 8.0.26, and those in later versions of MySQL.
const SEMI: [fn(&str) -> String; 2] = [
    |name| format!("Rpl_semi_sync_master_{name}"),
    |name| format!("Rpl_semi_sync_source_{name}"),
];

/// Checks semi-synchronous replication, which is enabled.
fn semi_synchronous<'a>(told: impl Fn(&str) -> Option<&'a str>) -> Finding {
    const CHECK: &str = "replicas";
    match (told("clients"), told("status")) {
        (Some("0"), _) => Finding::bad(
            CHECK,
            "semi-synchronous replication is on, and no such replica is linked: after its time-out commits do not wait",
            "link the replica",
        ),
        (Some(_), Some("ON")) => Finding::good(
            CHECK,
            "a commit is on a semi-synchronous replica before it is answered, for as long as one acknowledges in time",
        ),
        (Some(_), Some(_)) => Finding::bad(
            CHECK,
            "semi-synchronous replication fell back to asynchronous, since no replica acknowledged in time: one that takes \
             over has not the newest locks, and others acquire them while their holders work",
            "the replica and the network between; a longer rpl_semi_sync_…_timeout",
        ),
        _ => hidden(CHECK, "whether replicas acknowledge", "REPLICATION CLIENT"),
    }
}

fn binlog(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "binlog";
    match (settings.is_on("log_bin"), settings.text("binlog_format")) {
        (true, "STATEMENT") => Finding::bad(
            CHECK,
            "binlog_format is STATEMENT: steps read the clock, so the server refuses them or replicas have other leases",
            "binlog_format = ROW",
        ),
        (true, "") => hidden(CHECK, "the server does not tell binlog_format", "SELECT"),
        (true, format) => Finding::good(CHECK, format!("binlog_format is {format}")),
        (false, _) => Finding::good(CHECK, "there is no binary log"),
    }
}

fn versions(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "versions";
    let text = settings.text("version");
    let mut numbers = text
        .split(['.', '-'])
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (name, oldest) = match text.contains("MariaDB") {
        true => ("MariaDB", (10, 6)),
        false => ("MySQL", (8, 0)),
    };
    if version == (0, 0) {
        return hidden(CHECK, "the server does not tell its version", "SELECT");
    }
    match version < oldest {
        true => Finding::bad(
            CHECK,
            format!("{name} {text}: what locks need came later"),
            format!("{name} {}.{} or newer", oldest.0, oldest.1),
        ),
        false => Finding::good(CHECK, format!("{name} {text}")),
    }
}

fn timeouts(settings: &Settings<'_>) -> Finding {
    const CHECK: &str = "timeouts";
    // In seconds on MariaDB. MySQL has no such setting; its `max_execution_time` applies only to SELECT.
    let limit = settings.text("max_statement_time").parse::<f64>().unwrap_or(0.0);
    match limit > 0.0 {
        true => Finding::bad(
            CHECK,
            format!(
                "max_statement_time is {limit} s: a step that waits for the row of its lock is ended after that"
            ),
            "max_statement_time = 0 for the user of the locks",
        ),
        false => Finding::good(CHECK, "no step is ended by a setting of the server"),
    }
}

fn engines(engines: &Seen<Vec<(String, Option<String>)>>) -> Finding {
    const CHECK: &str = "engine";
    let engines = match engines {
        Ok(engines) => engines,
        Err(why) => return hidden(CHECK, why, "SELECT"),
    };
    if engines.len() < 2 {
        return Finding::bad(
            CHECK,
            "the tables of the locks are not there",
            "create_table, or a migration with schema()",
        );
    }
    let other = engines
        .iter()
        .find(|(_, engine)| engine.as_deref() != Some("InnoDB"));
    match other {
        Some((table, engine)) => Finding::bad(
            CHECK,
            format!(
                "{table} is kept by {}: its steps are no transactions, and a crash leaves half of them",
                engine.as_deref().unwrap_or("no engine")
            ),
            "ALTER TABLE … ENGINE = InnoDB",
        ),
        None => Finding::good(CHECK, "the tables are of InnoDB"),
    }
}

fn purge(oldest: &Seen<i64>) -> Finding {
    const CHECK: &str = "purge";
    match oldest {
        Ok(oldest) if *oldest > LONG => Finding::bad(
            CHECK,
            format!(
                "a transaction is open for {oldest} s: until it ends old versions of rows stay, and each step leaves one"
            ),
            "end it (information_schema.innodb_trx)",
        ),
        Ok(_) => Finding::good(CHECK, "no transaction is old"),
        Err(why) => hidden(CHECK, why, "PROCESS"),
    }
}

fn connections(settings: &Settings<'_>, status: &Seen<HashMap<String, String>>) -> Finding {
    const CHECK: &str = "connections";
    let used = match status {
        Ok(status) => status
            .get("Threads_connected")
            .and_then(|used| used.parse::<u64>().ok()),
        Err(why) => return hidden(CHECK, why, "SELECT"),
    };
    let Some((used, most)) = used.zip(settings.text("max_connections").parse::<u64>().ok()) else {
        return hidden(
            CHECK,
            "the server tells neither its limit nor how many there are",
            "SELECT",
        );
    };
    let why = format!("{used} of {most} connections are in use");
    match most.saturating_sub(used) * 5 < most {
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
        "/blob/main/docs/mysql.md has under permissions, or create_table"
    );
    match missing {
        Ok(missing) if missing.is_empty() => Finding::good(CHECK, "the user may do what the locks need"),
        Ok(missing) => Finding::bad(CHECK, missing.join("; "), page),
        Err(why) => hidden(CHECK, why, "SELECT"),
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
    fn versions_are_those_of_their_own_line() {
        let verdict = |text| versions(&Settings(&settings(&[("version", text)]))).verdict;
        assert_eq!(verdict("10.11.6-MariaDB-1"), Verdict::Good);
        assert_eq!(verdict("10.5.29-MariaDB"), Verdict::Bad);
        assert_eq!(verdict("8.0.43"), Verdict::Good);
        assert_eq!(verdict("5.7.44-log"), Verdict::Bad);
        assert_eq!(verdict("?"), Verdict::Unknown);
    }

    #[test]
    fn semi_synchronous_replication_needs_a_replica_that_acknowledges() {
        for side in ["master", "source"] {
            let enabled = format!("rpl_semi_sync_{side}_enabled");
            let on = settings(&[("log_bin", "ON"), (&enabled, "ON")]);
            let verdict = |told: &[(&str, &str)]| {
                let told = told.iter();
                let status =
                    told.map(|(name, value)| (format!("Rpl_semi_sync_{side}_{name}"), (*value).to_owned()));
                replicas(&Settings(&on), &Ok(status.collect()), &Ok(1)).0.verdict
            };
            assert_eq!(verdict(&[("clients", "1"), ("status", "ON")]), Verdict::Good);
            assert_eq!(verdict(&[("clients", "1"), ("status", "OFF")]), Verdict::Bad);
            assert_eq!(verdict(&[("clients", "0"), ("status", "ON")]), Verdict::Bad);
            assert_eq!(verdict(&[("clients", "1")]), Verdict::Unknown);
        }
    }

    #[test]
    fn replicas_that_are_linked_are_asynchronous_unless_the_server_says_otherwise() {
        let plain = settings(&[("log_bin", "ON")]);
        let verdict = |linked| {
            replicas(&Settings(&plain), &Ok(HashMap::new()), &linked)
                .0
                .verdict
        };
        assert_eq!(verdict(Ok(0)), Verdict::Good);
        assert_eq!(verdict(Ok(1)), Verdict::Bad);
        assert_eq!(verdict(Err("denied".to_owned())), Verdict::Unknown);
    }

    #[test]
    fn members_of_a_cluster_take_over_without_being_linked() {
        for own in [
            (
                "group_replication_group_name",
                "8a94f357-aab4-11df-86ab-c80aa9429562",
            ),
            ("wsrep_on", "ON"),
        ] {
            for log in ["ON", "OFF"] {
                let member = settings(&[("log_bin", log), own]);
                let (finding, failover) = replicas(&Settings(&member), &Ok(HashMap::new()), &Ok(0));
                assert_eq!(finding.verdict, Verdict::Unknown, "{own:?} {log}");
                assert!(matches!(failover, Failover::Unknown(_)), "{own:?} {log}");
            }
        }
        let none = settings(&[("group_replication_group_name", ""), ("wsrep_on", "OFF")]);
        let (finding, failover) = replicas(&Settings(&none), &Ok(HashMap::new()), &Ok(0));
        assert_eq!(finding.verdict, Verdict::Good);
        assert!(matches!(failover, Failover::None));
    }

    #[test]
    fn transaction_of_ten_minutes_is_too_old() {
        let verdict = |oldest| purge(&oldest).verdict;
        assert_eq!(verdict(Ok(LONG)), Verdict::Good);
        assert_eq!(verdict(Ok(LONG + 1)), Verdict::Bad);
        assert_eq!(verdict(Err("denied".to_owned())), Verdict::Unknown);
    }
}
