//! The checks of a server's facts: decisions only.

use std::time::Duration;

use super::super::hint::PERMISSIONS;
use super::facts::{Facts, Info, Seen};
use crate::store::doctor::{ClockReading, Durability, Finding};

/// What else is known about the server.
pub(super) struct Context {
    pub(super) timeout: Duration,
    pub(super) min_replicas: Option<u32>,
    /// Whether another server takes over if this one fails.
    pub(super) fails_over: bool,
    pub(super) in_cluster: bool,
}

fn hidden(check: &'static str, why: &str, grant: &str) -> Finding {
    Finding::unknown(
        check,
        format!("not visible: {why}"),
        Some(format!("let the user of the doctor: {grant}")),
    )
}

/// Like [`hidden`], for what the user of a service does not get: settings have passwords, the slow log data of others.
fn for_administrators(check: &'static str, why: &str, grant: &str) -> Finding {
    Finding::unknown(
        check,
        format!("not visible: {why}"),
        Some(format!(
            "run the doctor as an administrator with {grant}; this also shows what a service must not see ({PERMISSIONS})"
        )),
    )
}

/// All checks of a server's facts, and what is left after a restart.
pub(super) fn all(facts: &Facts, context: &Context) -> (Vec<Finding>, Durability) {
    let (persistence, durability) = persistence(facts);
    let mut findings = vec![
        of_info("eviction", facts, eviction),
        persistence,
        writes(facts),
        of_info("replicas", facts, |info| replicas(info, context)),
        stalls(facts, context.timeout),
        scripts(facts),
        output_buffer(facts),
        of_info("versions", facts, versions),
        of_info("connections", facts, connections),
    ];
    if context.in_cluster {
        findings.push(cluster(facts));
    }
    (findings, durability)
}

fn of_info(check: &'static str, facts: &Facts, decide: impl FnOnce(&Info) -> Finding) -> Finding {
    match &facts.info {
        Ok(info) => decide(info),
        Err(why) => hidden(check, why, "+info"),
    }
}

fn eviction(info: &Info) -> Finding {
    const CHECK: &str = "eviction";
    let evicted = info.number("evicted_keys").unwrap_or(0);
    let (limit, used) = (info.number("maxmemory"), info.number("used_memory").unwrap_or(0));
    let Some((limit, policy)) = limit.zip(info.text("maxmemory_policy")) else {
        return hidden(
            CHECK,
            "the server tells neither its limit of memory nor its policy",
            "+info",
        );
    };
    let remedy = "maxmemory-policy noeviction, or a server for locks alone";
    let full = match limit {
        0 => String::new(),
        limit => format!(
            ", and {} % of maxmemory are used",
            used.saturating_mul(100) / limit
        ),
    };
    if limit > 0 && policy != "noeviction" {
        return Finding::bad(
            CHECK,
            format!(
                "the policy is {policy}: a server that is full removes locks, which are keys with a TTL, while their \
                 holders work{full}; evicted so far: {evicted} keys"
            ),
            remedy,
        );
    }
    if evicted > 0 {
        let why =
            format!("{evicted} keys were evicted since the server started, locks may be among them{full}");
        return Finding::bad(CHECK, why, remedy);
    }
    match limit {
        0 => Finding::good(
            CHECK,
            format!("no limit of memory (policy {policy}), nothing evicted"),
        ),
        _ => Finding::good(CHECK, format!("the policy is noeviction, nothing evicted{full}")),
    }
}

fn persistence(facts: &Facts) -> (Finding, Durability) {
    const CHECK: &str = "persistence";
    let info = match &facts.info {
        Ok(info) => info,
        Err(why) => return (hidden(CHECK, why, "+info"), Durability::Unknown),
    };
    let Some(aof) = info.text("aof_enabled") else {
        let why = "the server does not tell whether it has an append-only file";
        return (hidden(CHECK, why, "+info"), Durability::Unknown);
    };
    let remedy = "appendonly yes (appendfsync always loses nothing, everysec about a second)";
    if aof == "1" {
        return match facts.setting("appendfsync") {
            Ok("always") => (
                Finding::good(
                    CHECK,
                    "each write is in the append-only file before it is answered",
                ),
                Durability::All,
            ),
            Ok("no") => (
                Finding::bad(
                    CHECK,
                    "appendfsync is no: a crash of the machine loses what it has not written",
                    remedy,
                ),
                Durability::LastSecond,
            ),
            Ok(other) => (
                Finding::good(
                    CHECK,
                    format!("append-only file, appendfsync {other}: a crash loses about a second"),
                ),
                Durability::LastSecond,
            ),
            Err(why) => (
                for_administrators(CHECK, &why, "+config|get"),
                Durability::LastSecond,
            ),
        };
    }
    match facts.setting("save") {
        Ok("") => (
            Finding::bad(
                CHECK,
                "a restart empties it: no append-only file and no snapshots; each lock can be acquired a second time while \
                 its holder works (fencing tokens still grow)",
                remedy,
            ),
            Durability::Nothing,
        ),
        Ok(save) => (
            Finding::bad(
                CHECK,
                format!(
                    "a restart loses the locks since the last snapshot (save {save}), with {} changes now: each of them \
                     can be acquired a second time while its holder works",
                    info.number("rdb_changes_since_last_save").unwrap_or(0)
                ),
                remedy,
            ),
            Durability::Snapshot,
        ),
        Err(why) => (
            Finding::bad(
                CHECK,
                format!(
                    "no append-only file: a restart loses at least the locks since the last snapshot (whether there are \
                     snapshots is not visible: {why})"
                ),
                remedy,
            ),
            Durability::Snapshot,
        ),
    }
}

fn writes(facts: &Facts) -> Finding {
    const CHECK: &str = "writes";
    let info = match &facts.info {
        Ok(info) => info,
        Err(why) => return hidden(CHECK, why, "+info"),
    };
    if info.text("role") == Some("slave") {
        return Finding::bad(
            CHECK,
            "the server is a read-only replica",
            "connect to the master, or by redis+sentinel://",
        );
    }
    if info
        .text("aof_last_write_status")
        .is_some_and(|status| status != "ok")
    {
        let why = "the last write of the append-only file failed: the server refuses writes, so no lock can be acquired";
        return Finding::bad(CHECK, why, "look for a full disk, and at the server's log");
    }
    if let (Some(good), Some(wanted)) = (
        info.number("min_slaves_good_slaves"),
        min_replicas_to_write(facts),
    ) && good < wanted
    {
        let why = format!(
            "{good} replicas are connected, and min-replicas-to-write wants {wanted}: writes are refused"
        );
        return Finding::bad(CHECK, why, "bring the replicas back");
    }
    if let (Some(limit @ 1..), Some(used)) = (info.number("maxmemory"), info.number("used_memory"))
        && used >= limit
    {
        let why = format!(
            "{used} of {limit} bytes of maxmemory are used: new locks are refused, or others evicted"
        );
        return Finding::bad(CHECK, why, "more memory, or fewer other data");
    }
    if info
        .text("rdb_last_bgsave_status")
        .is_some_and(|status| status != "ok")
    {
        let remedy = "look for a full disk or too little memory for a fork, and at the server's log";
        return match facts.setting("stop-writes-on-bgsave-error") {
            Ok("yes") => Finding::bad(
                CHECK,
                "the last snapshot failed, and stop-writes-on-bgsave-error is yes: all writes are refused (MISCONF), so no \
                 lock can be acquired",
                remedy,
            ),
            Ok(_) => Finding::bad(
                CHECK,
                "the last snapshot failed: a restart loses what is newer",
                remedy,
            ),
            Err(why) => Finding::bad(
                CHECK,
                format!(
                    "the last snapshot failed; unless stop-writes-on-bgsave-error is no, which is not visible ({why}), all \
                     writes are refused"
                ),
                remedy,
            ),
        };
    }
    if let (Some(_), Err(why)) = (
        info.number("min_slaves_good_slaves"),
        facts.setting("min-replicas-to-write"),
    ) {
        return for_administrators(CHECK, &why, "+config|get");
    }
    Finding::good(
        CHECK,
        "the last snapshot and the last write to the append-only file went well",
    )
}

/// The server reports the number of good replicas only if it requires some: at least one, if the number is missing.
fn min_replicas_to_write(facts: &Facts) -> Option<u64> {
    match facts.setting("min-replicas-to-write") {
        Ok(wanted) => wanted.parse().ok(),
        Err(_) => Some(1),
    }
}

fn replicas(info: &Info, context: &Context) -> Finding {
    const CHECK: &str = "replicas";
    let all = info.replicas();
    let online = all.iter().filter(|replica| replica.is_online).count();
    let wanted = context.min_replicas.map(u64::from);
    if let Some(wanted) = wanted.filter(|wanted| (online as u64) < *wanted) {
        return Finding::bad(
            CHECK,
            format!(
                "{online} replicas are linked, and min_replicas wants {wanted}: each acquire fails (NotReplicated)"
            ),
            "bring the replicas back, or ask for fewer",
        );
    }
    if context.fails_over && online == 0 {
        let why = "no replica is linked: nothing can take over from this server";
        return Finding::bad(CHECK, why, "add a replica, or bring it back");
    }
    let offset = info.number("master_repl_offset").unwrap_or(0);
    let bytes = (all.iter())
        .map(|replica| offset.saturating_sub(replica.offset))
        .max();
    let secs = all.iter().map(|replica| replica.lag).max();
    match (bytes, secs) {
        (Some(bytes), Some(secs)) => {
            let lag = format!(
                "{online} of {} replicas are linked, at most {bytes} bytes and {secs} s behind",
                all.len()
            );
            match online < all.len() || bytes > 1 << 20 || secs > 10 {
                true => Finding::bad(
                    CHECK,
                    format!("{lag}: a fail-over loses the locks that the replica has not received"),
                    "look at the replicas and the network between; min_replicas=1 has each lock acknowledged",
                ),
                false => Finding::good(CHECK, lag),
            }
        }
        _ => Finding::good(CHECK, "there are none, and none are asked for"),
    }
}

fn stalls(facts: &Facts, timeout: Duration) -> Finding {
    const CHECK: &str = "stalls";
    /// The longest latency event in milliseconds, and the longest command in microseconds, that are not bad.
    const EVENT: u64 = 200;
    const COMMAND: u64 = 10_000;
    let mut bad = Vec::new();
    let mut unseen = Vec::new();
    match &facts.info {
        Ok(info) => {
            let fork = Duration::from_micros(info.number("latest_fork_usec").unwrap_or(0));
            if fork > timeout {
                bad.push(format!(
                    "the last fork stopped the server for {fork:?}, longer than the timeout of {timeout:?}"
                ));
            } else if fork > Duration::from_millis(200) {
                bad.push(format!("the last fork stopped the server for {fork:?}"));
            }
        }
        Err(why) => unseen.push(why.clone()),
    }
    match &facts.latency {
        Ok(events) => {
            let long = events.iter().filter(|(_, longest)| *longest > EVENT);
            bad.extend(
                long.map(|(name, longest)| format!("the server stood still for {longest} ms ({name})")),
            );
        }
        Err(why) => unseen.push(why.clone()),
    }
    match &facts.slow {
        Ok(commands) => {
            let slow = commands.iter().filter(|(_, took)| *took > COMMAND);
            if let Some((name, took)) = slow.max_by_key(|(_, took)| *took) {
                let took = Duration::from_micros(*took);
                bad.push(format!(
                    "a command {} took {took:?}, and all others waited for it",
                    name.to_uppercase()
                ));
            }
        }
        Err(why) => unseen.push(why.clone()),
    }
    let remedy = "no KEYS or large ranges on this server, transparent huge pages off, less memory for each fork; or a \
                  server for locks alone";
    if !bad.is_empty() {
        return Finding::bad(CHECK, bad.join("; "), remedy);
    }
    // The server records only what reaches its thresholds, and nothing where they are off.
    let mut records = |name, off, most: u64| match facts.setting(name).map(str::parse::<i64>) {
        Ok(least) => least.is_ok_and(|least| least > off && least.unsigned_abs() <= most),
        Err(why) => {
            if !unseen.contains(&why) {
                unseen.push(why);
            }
            false
        }
    };
    let events = records("latency-monitor-threshold", 0, EVENT);
    let commands = records("slowlog-log-slower-than", -1, COMMAND);
    if !unseen.is_empty() {
        let grant = "+info +latency|latest +slowlog|get +config|get";
        return for_administrators(CHECK, &unseen.join("; "), grant);
    }
    if !commands {
        let why = "not visible: the server records no commands of 10 ms";
        return Finding::unknown(CHECK, why, Some("slowlog-log-slower-than 10000".to_owned()));
    }
    if !events {
        return Finding::good(
            CHECK,
            "no long fork, no slow command; latency events of 200 ms are not recorded there (latency-monitor-threshold)",
        );
    }
    Finding::good(CHECK, "no long fork, no latency event, no slow command")
}

fn scripts(facts: &Facts) -> Finding {
    const CHECK: &str = "scripts";
    if let Err(why) = &facts.eval {
        let why = format!("EVAL is refused: {why}; each lock is a script");
        let remedy = format!("+eval +evalsha for the user ({PERMISSIONS})");
        return Finding::bad(CHECK, why, remedy);
    }
    let evicted = facts
        .info
        .as_ref()
        .ok()
        .and_then(|info| info.number("evicted_scripts"));
    match evicted {
        Some(evicted @ 1..) => Finding::bad(
            CHECK,
            format!(
                "{evicted} scripts were evicted: other clients send ever new ones by EVAL, and each eviction costs a \
                     round trip"
            ),
            "have them pass values as arguments and not in the text of a script",
        ),
        _ => Finding::good(CHECK, "EVAL is allowed"),
    }
}

/// Returns the pub/sub part of `client-output-buffer-limit`: hard and soft limit.
fn pubsub_limits(setting: &str) -> Option<(u64, u64)> {
    let words: Vec<&str> = setting.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "pubsub")?;
    Some((words.get(at + 1)?.parse().ok()?, words.get(at + 2)?.parse().ok()?))
}

fn output_buffer(facts: &Facts) -> Finding {
    const CHECK: &str = "output-buffer";
    const LEAST: u64 = 1 << 20;
    match facts.setting("client-output-buffer-limit").map(pubsub_limits) {
        Err(why) => for_administrators(CHECK, &why, "+config|get"),
        Ok(None) => hidden(
            CHECK,
            "the server tells it in words that are not known",
            "+config|get",
        ),
        Ok(Some((hard, soft))) if (1..LEAST).contains(&hard) || (1..LEAST / 4).contains(&soft) => {
            Finding::bad(
                CHECK,
                format!(
                    "the limit for subscribers is {hard} bytes (soft: {soft}): many releases at once close the subscription, \
                 and waiters poll until there is a new one"
                ),
                "client-output-buffer-limit pubsub 32mb 8mb 60",
            )
        }
        Ok(Some((hard, soft))) => {
            Finding::good(CHECK, format!("{hard} bytes for subscribers (soft: {soft})"))
        }
    }
}

/// The first release of each line with the fix of CVE-2025-49844, a use after free by a Lua script.
const REDIS: [(u64, u64, u64); 5] = [(6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)];
const VALKEY: [(u64, u64, u64); 3] = [(7, 2, 11), (8, 0, 6), (8, 1, 4)];

fn is_fixed(version: (u64, u64, u64), fixes: &[(u64, u64, u64)]) -> bool {
    let line = fixes.iter().find(|fix| (fix.0, fix.1) == (version.0, version.1));
    match line {
        Some(fix) => version >= *fix,
        // Older lines have no fix, later ones have it from the start.
        None => fixes.last().is_some_and(|last| version > *last),
    }
}

fn parsed(version: &str) -> Option<(u64, u64, u64)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

fn versions(info: &Info) -> Finding {
    const CHECK: &str = "versions";
    let (name, version, fixes): (_, _, &[_]) = match info.text("valkey_version") {
        Some(version) => ("Valkey", version, &VALKEY),
        None => match info.text("redis_version") {
            Some(version) => ("Redis", version, &REDIS),
            None => return hidden(CHECK, "the server tells no version", "+info"),
        },
    };
    match parsed(version) {
        None => hidden(
            CHECK,
            &format!("{name} {version:?} is no version that is known"),
            "+info",
        ),
        Some(found) if !is_fixed(found, fixes) => {
            let of_line = fixes
                .iter()
                .find(|fix| (fix.0, fix.1) == (found.0, found.1))
                .or(fixes.last());
            let remedy = of_line.map_or_else(String::new, |(a, b, c)| format!("{name} {a}.{b}.{c} or later"));
            Finding::bad(
                CHECK,
                format!(
                    "{name} {version} lacks the fix of CVE-2025-49844: any user that may run scripts, as each user of locks may, \
                     can take the server over"
                ),
                remedy,
            )
        }
        Some(_) => Finding::good(CHECK, format!("{name} {version}")),
    }
}

fn connections(info: &Info) -> Finding {
    const CHECK: &str = "connections";
    let Some((most, now)) = info.number("maxclients").zip(info.number("connected_clients")) else {
        return hidden(
            CHECK,
            "the server does not tell how many connections it takes",
            "+info",
        );
    };
    let rejected = info.number("rejected_connections").unwrap_or(0);
    let remedy = "a greater maxclients, fewer processes, or a client for each process and not for each task";
    if rejected > 0 {
        let why = format!("{rejected} connections were rejected since it started; {now} of {most} are open");
        return Finding::bad(CHECK, why, remedy);
    }
    match most.saturating_sub(now) * 5 < most {
        true => Finding::bad(
            CHECK,
            format!("{now} of {most} connections are open: less than a fifth is free"),
            remedy,
        ),
        false => Finding::good(CHECK, format!("{now} of {most} connections are open")),
    }
}

fn cluster(facts: &Facts) -> Finding {
    const CHECK: &str = "cluster";
    if let Ok(info) = &facts.cluster
        && info.text("cluster_state").is_some_and(|state| state != "ok")
    {
        let why = "cluster_state is not ok: slots are without a server";
        return Finding::bad(CHECK, why, "bring their servers back, or let replicas take over");
    }
    match facts.setting("cluster-require-full-coverage") {
        Ok("yes") => Finding::bad(
            CHECK,
            "cluster-require-full-coverage is yes: while one shard is down, no lock of any shard can be acquired",
            "cluster-require-full-coverage no",
        ),
        Ok(_) => Finding::good(CHECK, "a shard that is down does not stop the others"),
        Err(why) => for_administrators(CHECK, &why, "+config|get"),
    }
}

/// Judges two readings of a clock.
pub(super) fn clock(first: &Seen<ClockReading>, second: &Seen<ClockReading>) -> Finding {
    const CHECK: &str = "clock";
    let (first, second) = match (first, second) {
        (Ok(first), Ok(second)) => (first, second),
        (Err(why), _) | (_, Err(why)) => return hidden(CHECK, why, "+time"),
    };
    first.judged(second)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::doctor::Verdict;

    #[test]
    fn versions_are_judged_by_their_line() {
        for (version, fixed) in [
            ((6, 2, 19), false),
            ((6, 2, 20), true),
            ((7, 0, 15), false),
            ((7, 2, 11), true),
            ((7, 4, 5), false),
            ((8, 0, 4), true),
            ((8, 2, 1), false),
            ((8, 4, 0), true),
            ((5, 0, 14), false),
        ] {
            assert_eq!(is_fixed(version, &REDIS), fixed, "{version:?}");
        }
        assert!(is_fixed((8, 1, 4), &VALKEY) && is_fixed((9, 0, 0), &VALKEY));
        assert!(!is_fixed((8, 1, 3), &VALKEY));
        let none = versions(&Info::parse("redis_version:unknown\r\n"));
        assert_eq!(none.verdict, Verdict::Unknown);
    }

    #[test]
    fn stalls_of_the_server_are_told_with_the_names_of_commands_only() {
        let mut facts = Facts::default_for_tests();
        facts.set("latency-monitor-threshold", "100");
        facts.set("slowlog-log-slower-than", "10000");
        assert_eq!(stalls(&facts, Duration::from_secs(1)).verdict, Verdict::Good);
        facts.info = Ok(Info::parse("latest_fork_usec:450000\r\n"));
        let suspicious = stalls(&facts, Duration::from_secs(1));
        assert_eq!(suspicious.verdict, Verdict::Bad);
        assert!(
            stalls(&facts, Duration::from_millis(300))
                .why
                .contains("longer than the timeout")
        );
        facts.info = Ok(Info::default());
        facts.latency = Ok(vec![("fork".to_owned(), 300)]);
        assert!(
            stalls(&facts, Duration::from_secs(1))
                .why
                .contains("300 ms (fork)")
        );
        facts.latency = Err("NOPERM".to_owned());
        assert_eq!(stalls(&facts, Duration::from_secs(1)).verdict, Verdict::Unknown);
    }

    #[test]
    fn stalls_that_the_server_does_not_record_are_not_called_good() {
        for (latency, slow, verdict, told, untold) in [
            ("200", "0", Verdict::Good, "no latency event", "not recorded"),
            ("0", "10000", Verdict::Good, "not recorded", "no latency event"),
            ("201", "10000", Verdict::Good, "not recorded", "no latency event"),
            ("?", "10000", Verdict::Good, "not recorded", "no latency event"),
            ("100", "-1", Verdict::Unknown, "no commands", "no slow command"),
            ("100", "10001", Verdict::Unknown, "no commands", "no slow command"),
            ("0", "-1", Verdict::Unknown, "no commands", "no slow command"),
        ] {
            let mut facts = Facts::default_for_tests();
            facts.set("latency-monitor-threshold", latency);
            facts.set("slowlog-log-slower-than", slow);
            let finding = stalls(&facts, Duration::from_secs(1));
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(
                finding.why.contains(told) && !finding.why.contains(untold),
                "{finding:?}"
            );
        }
        let unread = stalls(&Facts::default_for_tests(), Duration::from_secs(1));
        assert_eq!(unread.verdict, Verdict::Unknown);
        assert_eq!(unread.why.matches("its settings").count(), 1, "{unread:?}");
    }

    #[test]
    fn append_only_file_whose_fsync_is_hidden_is_not_called_good() {
        let verdict = |appendfsync: Option<&str>| {
            let mut facts = Facts::of_tests(Info::parse("aof_enabled:1\r\n"));
            if let Some(appendfsync) = appendfsync {
                facts.set("appendfsync", appendfsync);
            }
            persistence(&facts).0.verdict
        };
        assert_eq!(verdict(Some("everysec")), Verdict::Good);
        assert_eq!(verdict(Some("no")), Verdict::Bad);
        assert_eq!(verdict(None), Verdict::Unknown);
    }

    #[test]
    fn replicas_are_judged_by_number_and_lag() {
        let context = |min_replicas, fails_over| Context {
            timeout: Duration::from_secs(1),
            min_replicas,
            fails_over,
            in_cluster: false,
        };
        let info = |text: &str| Info::parse(text);
        let verdict = |text: &str, context: &Context| replicas(&info(text), context).verdict;
        let one = "master_repl_offset:100\r\nslave0:ip=a,port=1,state=online,offset=90,lag=0\r\n";
        let late = "master_repl_offset:9000000\r\nslave0:ip=a,port=1,state=online,offset=90,lag=0\r\n";
        assert_eq!(verdict("", &context(None, false)), Verdict::Good);
        assert_eq!(verdict("", &context(None, true)), Verdict::Bad);
        assert_eq!(verdict("", &context(Some(1), false)), Verdict::Bad);
        assert_eq!(verdict(one, &context(Some(1), true)), Verdict::Good);
        assert_eq!(verdict(one, &context(Some(2), true)), Verdict::Bad);
        assert_eq!(verdict(late, &context(None, true)), Verdict::Bad);
    }

    impl Facts {
        fn default_for_tests() -> Facts {
            Facts::of_tests(Info::default())
        }
    }
}
