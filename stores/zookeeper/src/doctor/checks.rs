//! Evaluates the facts that the doctor collected, without I/O.

use std::collections::HashMap;
use std::time::Duration;

use dlock::store::doctor::{Failover, Finding};

/// A fact, or why it is not visible.
pub(super) type Seen<T> = Result<T, String>;

/// The replies of a server, by four-letter word.
pub(super) struct Told {
    pub(super) srvr: HashMap<String, String>,
    pub(super) conf: Seen<HashMap<String, String>>,
    pub(super) mntr: Seen<HashMap<String, String>>,
    /// The address of each connection.
    pub(super) cons: Seen<Vec<String>>,
}

/// What is known about the client.
pub(super) struct Context {
    /// The session timeout that the client requests.
    pub(super) session: Duration,
    pub(super) timeout: Duration,
}

/// Each server in the URL, with its replies.
type Servers = [(String, Seen<Told>)];

/// The number of waiting requests above which a server is overloaded.
const OUTSTANDING: u64 = 100;

fn hidden(check: &'static str, why: &str) -> Finding {
    let remedy = "4lw.commands.whitelist=srvr,conf,mntr,cons".to_owned();
    Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
}

/// The number of voting servers in the ensemble, as far as it is visible.
pub(super) fn members(servers: &Servers) -> usize {
    let votes = |(name, at): (&String, &String)| name.starts_with("server.") && !at.contains(":observer");
    let named = |conf: &HashMap<String, String>| conf.iter().filter(|server| votes(*server)).count();
    let told = servers
        .iter()
        .filter_map(|(_, told)| told.as_ref().ok()?.conf.as_ref().ok());
    let named = told.map(named).max().filter(|named| *named > 0);
    named.unwrap_or(servers.len())
}

/// Runs all checks; also estimates the time of a failover.
pub(super) fn all(servers: &Servers, context: &Context) -> (Vec<Finding>, Failover) {
    let failover = match members(servers) {
        1 => Failover::None,
        _ => Failover::Unknown(
            "an election takes less than a second as a rule, and begins syncLimit ticks after the leader fell silent".to_owned(),
        ),
    };
    let told: Vec<(String, Vec<Finding>)> = servers
        .iter()
        .filter_map(|(server, told)| Some((server.clone(), each(told.as_ref().ok()?, context))))
        .collect();
    let mut findings = vec![ensemble(servers), followers(servers)];
    findings.extend(Finding::combined(told));
    (findings, failover)
}

/// Runs the checks of one server.
fn each(told: &Told, context: &Context) -> Vec<Finding> {
    vec![
        of("session", &told.conf, |conf| session(conf, context)),
        versions(&told.srvr),
        stalls(told, context),
        connections(told),
        Finding::unknown(
            "persistence",
            "not visible: whether forceSync is off, with which a crash forgets the newest locks",
            Some("leave zookeeper.forceSync at yes".to_owned()),
        ),
    ]
}

fn of(
    check: &'static str,
    seen: &Seen<HashMap<String, String>>,
    decide: impl FnOnce(&HashMap<String, String>) -> Finding,
) -> Finding {
    match seen {
        Ok(seen) => decide(seen),
        Err(why) => hidden(check, why),
    }
}

fn number(pairs: &HashMap<String, String>, name: &str) -> Option<u64> {
    pairs.get(name)?.parse().ok()
}

fn ensemble(servers: &Servers) -> Finding {
    const CHECK: &str = "members";
    if let Some((_, Err(why))) = servers.iter().find(|(_, told)| told.is_err()) {
        return Finding::bad(
            CHECK,
            why.clone(),
            "start it again, or take it out of the URL and out of the ensemble",
        );
    }
    let count = members(servers);
    if count > servers.len() {
        return Finding::bad(
            CHECK,
            format!(
                "the URL names {} of {count} servers: where these fail, no lock can be acquired though the others serve",
                servers.len()
            ),
            "all servers in the URL",
        );
    }
    match count {
        1 => Finding::good(
            CHECK,
            "one: while it is down no lock can be acquired, and none is forgotten",
        ),
        count if count % 2 == 0 => Finding::bad(
            CHECK,
            format!("{count} servers: no more of them may fail than of {}", count - 1),
            "an odd number of servers",
        ),
        count => Finding::good(
            CHECK,
            format!("{count} servers serve, {} may fail", (count - 1) / 2),
        ),
    }
}

/// Checks that the leader has all followers in sync.
fn followers(servers: &Servers) -> Finding {
    const CHECK: &str = "replicas";
    let count = members(servers) as u64;
    if count == 1 {
        return Finding::good(
            CHECK,
            "none: a fail-over cannot forget a lock, and an outage lasts until it is back",
        );
    }
    let told = servers.iter().filter_map(|(_, told)| told.as_ref().ok());
    let leader = told
        .clone()
        .find(|told| told.srvr.get("Mode").is_some_and(|mode| mode == "leader"));
    let Some(leader) = leader else {
        if told.clone().any(|told| !told.srvr.contains_key("Mode")) {
            return hidden(CHECK, "a server does not tell whether it leads");
        }
        return Finding::bad(
            CHECK,
            "no server of the URL says that it leads",
            "most of the servers have to be up, and all of them in the URL",
        );
    };
    of(CHECK, &leader.mntr, |mntr| {
        match number(mntr, "zk_synced_followers") {
            Some(synced) if synced + 1 >= count => {
                Finding::good(CHECK, format!("{synced} followers are in step"))
            }
            Some(synced) => Finding::bad(
                CHECK,
                format!(
                    "{synced} of {} followers are in step: fewer failures are left",
                    count - 1
                ),
                "the servers that are down, and the network between them",
            ),
            None => hidden(CHECK, "the leader does not tell zk_synced_followers"),
        }
    })
}

fn session(conf: &HashMap<String, String>, context: &Context) -> Finding {
    const CHECK: &str = "session";
    let limit = |name| number(conf, name).map(Duration::from_millis);
    let Some((least, most)) = limit("minSessionTimeout").zip(limit("maxSessionTimeout")) else {
        return hidden(CHECK, "the server does not tell the limits of sessions");
    };
    let asked = context.session;
    if asked > most {
        return Finding::bad(
            CHECK,
            format!(
                "sessions last {most:?} at most, and {asked:?} is asked for: locks are lost after {most:?} of silence"
            ),
            format!(
                "maxSessionTimeout={} for the servers, or ?session={}ms",
                asked.as_millis(),
                most.as_millis()
            ),
        );
    }
    match asked < least {
        true => Finding::bad(
            CHECK,
            format!(
                "sessions last {least:?} at least, and {asked:?} is asked for: after a crash others wait longer"
            ),
            format!(
                "minSessionTimeout={} for the servers, or a shorter tickTime",
                asked.as_millis()
            ),
        ),
        false => Finding::good(
            CHECK,
            format!("a session of {asked:?} is between {least:?} and {most:?}"),
        ),
    }
}

/// For each release line, the first version without CVE-2023-44981 and CVE-2024-23944.
const FIXED: [(u32, u32, u32); 2] = [(3, 8, 4), (3, 9, 2)];

fn versions(srvr: &HashMap<String, String>) -> Finding {
    const CHECK: &str = "versions";
    let text = srvr.get("Zookeeper version").map_or("", String::as_str);
    let text = text.split(['-', ',']).next().unwrap_or_default();
    let mut numbers = text.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let version = (next(), next(), next());
    if version == (0, 0, 0) {
        return hidden(CHECK, "the server does not tell its version");
    }
    let line = FIXED
        .iter()
        .find(|fixed| (fixed.0, fixed.1) == (version.0, version.1));
    let is_fixed = match line {
        Some(fixed) => version >= *fixed,
        None => version > FIXED[1],
    };
    match is_fixed {
        true => Finding::good(CHECK, format!("ZooKeeper {text}")),
        false => Finding::bad(
            CHECK,
            format!(
                "ZooKeeper {text}: clients may see names that they may not read (CVE-2024-23944), and more"
            ),
            "3.8.4, 3.9.2 or newer",
        ),
    }
}

fn stalls(told: &Told, context: &Context) -> Finding {
    const CHECK: &str = "stalls";
    let latency = told.srvr.iter().find(|(name, _)| name.starts_with("Latency"));
    let longest = latency.and_then(|(_, times)| times.rsplit('/').next()?.parse::<f64>().ok());
    let Some(longest) = longest else {
        return hidden(CHECK, "the server does not tell how long requests took");
    };
    let waiting = number(&told.srvr, "Outstanding").unwrap_or(0);
    if waiting > OUTSTANDING {
        return Finding::bad(
            CHECK,
            format!("{waiting} requests wait at the server"),
            "fewer clients, or a disk of its own for dataLogDir",
        );
    }
    match longest > context.timeout.as_secs_f64() * 1000.0 {
        true => Finding::bad(
            CHECK,
            format!(
                "a request took {longest} ms since the server started, more than the timeout of {:?}",
                context.timeout
            ),
            "a disk of its own for dataLogDir, a larger heap without long collections; `srst` forgets old ones",
        ),
        false => Finding::good(CHECK, format!("no request took longer than {longest} ms")),
    }
}

/// Checks the limit of connections, which the server applies to each address.
fn connections(told: &Told) -> Finding {
    const CHECK: &str = "connections";
    of(CHECK, &told.conf, |conf| {
        let Some(limit) = number(conf, "maxClientCnxns") else {
            return hidden(CHECK, "the server does not tell maxClientCnxns");
        };
        let all = number(&told.srvr, "Connections").unwrap_or(0);
        if limit == 0 {
            return Finding::good(CHECK, format!("{all} connections, and no limit for each address"));
        }
        let is_near = |used: u64| used.saturating_mul(5) > limit.saturating_mul(4);
        let most = match &told.cons {
            Ok(cons) => busiest(cons),
            Err(_) if !is_near(all) => {
                let why = format!("{all} connections, and each address may have {limit}");
                return Finding::good(CHECK, why);
            }
            Err(why) => return hidden(CHECK, why),
        };
        let (address, used) = most.unwrap_or(("no address", 0));
        let why =
            format!("{used} of {all} connections are from {address}, and each address may have {limit}");
        match is_near(used) {
            true => Finding::bad(
                CHECK,
                format!("{why}: the next deploy there finds none"),
                "maxClientCnxns; one client for each process",
            ),
            false => Finding::good(CHECK, why),
        }
    })
}

/// The address with the most connections, and their number.
fn busiest(cons: &[String]) -> Option<(&str, u64)> {
    let mut counts = HashMap::new();
    for address in cons {
        *counts.entry(address.as_str()).or_insert(0) += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count)
}

#[cfg(test)]
mod tests {
    use dlock::store::doctor::Verdict;

    use super::*;

    fn pairs(all: &[(&str, &str)]) -> HashMap<String, String> {
        all.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn observers_have_no_vote_and_servers_that_may_not_speak_are_not_down() {
        let told = |mode: &[(&str, &str)]| Told {
            srvr: pairs(mode),
            conf: Ok(pairs(&[
                ("server.1", "a:2888:3888:participant;2181"),
                ("server.2", "b:2888:3888:participant;2181"),
                ("server.3", "c:2888:3888:participant;2181"),
                ("server.4", "d:2888:3888:observer;2181"),
            ])),
            mntr: Ok(pairs(&[("zk_synced_followers", "2")])),
            cons: Ok(Vec::new()),
        };
        let servers = |modes: [&[(&str, &str)]; 3]| {
            let names = ["a", "b", "c"].map(str::to_owned);
            let all = names.into_iter().zip(modes);
            all.map(|(name, mode)| (name, Ok(told(mode)))).collect::<Vec<_>>()
        };
        let verdicts = |modes| {
            let servers = servers(modes);
            (ensemble(&servers).verdict, followers(&servers).verdict)
        };
        let (leads, follows): (&[_], &[_]) = (&[("Mode", "leader")], &[("Mode", "follower")]);
        assert_eq!(
            verdicts([follows, leads, follows]),
            (Verdict::Good, Verdict::Good)
        );
        assert_eq!(
            verdicts([follows, &[], follows]),
            (Verdict::Good, Verdict::Unknown)
        );
        assert_eq!(
            verdicts([follows, follows, follows]),
            (Verdict::Good, Verdict::Bad)
        );
    }

    #[test]
    fn versions_are_judged_by_their_line() {
        let verdict = |text| versions(&pairs(&[("Zookeeper version", text)])).verdict;
        for (text, good) in [
            (
                "3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f, built on 2022",
                false,
            ),
            ("3.8.4-9316c2a7", true),
            ("3.9.1", false),
            ("3.9.2", true),
            ("3.10.0", true),
            ("3.7.2", false),
        ] {
            assert_eq!(verdict(text) == Verdict::Good, good, "{text}");
        }
        assert_eq!(verdict(""), Verdict::Unknown);
    }

    #[test]
    fn request_that_took_longer_than_the_timeout_is_a_stall() {
        let context = Context {
            session: Duration::from_secs(30),
            timeout: Duration::from_secs(1),
        };
        let verdict = |latency, waiting| {
            let told = Told {
                srvr: pairs(&[("Latency min/avg/max", latency), ("Outstanding", waiting)]),
                conf: Err(String::new()),
                mntr: Err(String::new()),
                cons: Err(String::new()),
            };
            stalls(&told, &context).verdict
        };
        assert_eq!(verdict("0/0.5/1000", "100"), Verdict::Good);
        assert_eq!(verdict("0/0.5/1001", "0"), Verdict::Bad);
        assert_eq!(verdict("0/0.5/3", "101"), Verdict::Bad);
        assert_eq!(verdict("?", "0"), Verdict::Unknown);
    }

    #[test]
    fn connections_count_for_each_address() {
        let verdict = |limit, all, cons: Seen<&[&str]>| {
            let told = Told {
                srvr: pairs(&[("Connections", all)]),
                conf: Ok(pairs(&[("maxClientCnxns", limit)])),
                mntr: Err(String::new()),
                cons: cons.map(|cons| cons.iter().map(|&address| address.to_owned()).collect()),
            };
            connections(&told).verdict
        };
        let hidden = || Err("denied".to_owned());
        assert_eq!(verdict("0", "1000", hidden()), Verdict::Good);
        assert_eq!(verdict("5", "4", hidden()), Verdict::Good);
        assert_eq!(verdict("5", "5", hidden()), Verdict::Unknown);
        assert_eq!(
            verdict("5", "6", Ok(&["a", "b", "a", "b", "a", "b"])),
            Verdict::Good
        );
        assert_eq!(
            verdict("5", "6", Ok(&["a", "a", "a", "b", "a", "a"])),
            Verdict::Bad
        );
    }
}
