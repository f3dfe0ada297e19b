//! URLs of lock stores.
//!
//! Parsed here and not by a general URL crate, because a URL may have several hosts. Errors never repeat the URL: it
//! may contain a password.

mod topology;

use std::time::Duration;

use percent_encoding::percent_decode_str;

pub(crate) use self::topology::{
    Address, ClusterUrl, Hidden, Login, QuorumUrl, RegisteredUrl, SentinelUrl, ServerUrl, Topology,
};
use crate::Error;
use crate::store::Scheme;

/// The default longest lease on a quorum.
pub const DEFAULT_MAX_LEASE: Duration = Duration::from_secs(60);

/// A parsed URL.
#[derive(Debug)]
pub(crate) struct StoreUrl {
    pub(crate) topology: Topology,
    pub(crate) options: UrlOptions,
}

/// The client options of the query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UrlOptions {
    pub(crate) lease: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry_for: Option<Duration>,
    pub(crate) prefix: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) min_replicas: Option<u32>,
    pub(crate) min_replicas_within: Option<Duration>,
    pub(crate) presence: Option<bool>,
    pub(crate) control: Option<bool>,
}

/// What a scheme selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BuiltIn {
    Memory,
    Tcp { tls: bool },
    Unix,
    Sentinel { tls: bool },
    Cluster { tls: bool },
    Quorum { tls: bool },
}

const SCHEMES: &[(&str, BuiltIn)] = &[
    ("memory", BuiltIn::Memory),
    ("redis", BuiltIn::Tcp { tls: false }),
    ("rediss", BuiltIn::Tcp { tls: true }),
    ("redis+unix", BuiltIn::Unix),
    ("valkey", BuiltIn::Tcp { tls: false }),
    ("valkeys", BuiltIn::Tcp { tls: true }),
    ("valkey+unix", BuiltIn::Unix),
    ("redis+sentinel", BuiltIn::Sentinel { tls: false }),
    ("rediss+sentinel", BuiltIn::Sentinel { tls: true }),
    ("valkey+sentinel", BuiltIn::Sentinel { tls: false }),
    ("valkeys+sentinel", BuiltIn::Sentinel { tls: true }),
    ("redis+cluster", BuiltIn::Cluster { tls: false }),
    ("rediss+cluster", BuiltIn::Cluster { tls: true }),
    ("valkey+cluster", BuiltIn::Cluster { tls: false }),
    ("valkeys+cluster", BuiltIn::Cluster { tls: true }),
    ("quorum+redis", BuiltIn::Quorum { tls: false }),
    ("quorum+rediss", BuiltIn::Quorum { tls: true }),
    ("quorum+valkey", BuiltIn::Quorum { tls: false }),
    ("quorum+valkeys", BuiltIn::Quorum { tls: true }),
];

const DEFAULT_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

fn invalid(reason: impl Into<String>) -> Error {
    Error::InvalidUrl {
        reason: reason.into(),
    }
}

impl StoreUrl {
    #[cfg(test)]
    pub(crate) fn parse(url: &str) -> Result<StoreUrl, Error> {
        StoreUrl::parse_with(url, &[])
    }

    /// Parses a URL of a built-in store, or of one of these schemes.
    pub(crate) fn parse_with(url: &str, registered: &[Scheme]) -> Result<StoreUrl, Error> {
        if url.chars().any(|c| c.is_control() || c == ' ') {
            return Err(invalid("it has spaces or control characters"));
        }
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(invalid(
                "it has no scheme, as in redis://localhost:6379 or memory://",
            ));
        };
        let name = scheme.to_ascii_lowercase();
        let found = find_scheme(&name, registered)?;
        if rest.contains('#') {
            return Err(invalid("it has a fragment (\"#\" in a password is written %23)"));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if rest.find('/').is_some_and(|slash| rest[slash..].contains('@')) || query.contains('@') {
            return Err(invalid(
                "an @ comes after a / or ? (in a password write : @ / ? as %3A %40 %2F %3F)",
            ));
        }
        let mut query = Query::parse(query)?;
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let topology = match found {
            Found::Registered(scheme) => {
                let options = query.options()?;
                return Ok(StoreUrl {
                    topology: Topology::Registered(RegisteredUrl {
                        scheme,
                        name,
                        address: Hidden(rest.to_owned()),
                        parameters: Hidden(query.0),
                    }),
                    options,
                });
            }
            Found::BuiltIn(scheme) => built_in(scheme, authority, path, &mut query)?,
        };
        let options = query.options()?;
        query.finish()?;
        Ok(StoreUrl { topology, options })
    }
}

impl StoreUrl {
    /// The longest lease that its store gives; `None` if unlimited.
    pub(crate) fn longest_lease(&self) -> Option<Duration> {
        match &self.topology {
            Topology::Quorum(quorum) => Some(quorum.max_lease.unwrap_or(DEFAULT_MAX_LEASE)),
            _ => None,
        }
    }
}

/// What a scheme was found to be.
enum Found {
    BuiltIn(BuiltIn),
    Registered(Scheme),
}

/// The topology of a built-in scheme.
fn built_in(scheme: BuiltIn, authority: &str, path: &str, query: &mut Query) -> Result<Topology, Error> {
    Ok(match scheme {
        BuiltIn::Memory => memory(authority, path)?,
        BuiltIn::Unix => Topology::Server(unix(authority, path, query)?),
        BuiltIn::Tcp { tls } => Topology::Server(tcp(authority, path, tls)?),
        BuiltIn::Sentinel { tls } => Topology::Sentinel(sentinel(authority, path, tls, query)?),
        BuiltIn::Cluster { tls } => Topology::Cluster(cluster(authority, path, tls)?),
        BuiltIn::Quorum { tls } => Topology::Quorum(quorum(authority, path, tls, query)?),
    })
}

/// The schemes of stores in companion crates, and how to register each.
const OF_OTHER_CRATES: &[(&str, &str)] = &[
    ("etcd", ADD_ETCD),
    ("etcds", ADD_ETCD),
    ("mysql", ADD_MYSQL),
    ("mariadb", ADD_MYSQL),
    ("postgres", ADD_POSTGRES),
    ("postgresql", ADD_POSTGRES),
    ("zookeeper", ADD_ZOOKEEPER),
];
const ADD_ETCD: &str = "add the crate dlock-etcd, and LockClientBuilder::scheme(dlock_etcd::scheme()); \
                        the command dlock has it with its feature \"etcd\"";
const ADD_MYSQL: &str = "add the crate dlock-mysql, and LockClientBuilder::scheme(dlock_mysql::scheme()); \
                         the command dlock has it with its feature \"mysql\"";
const ADD_POSTGRES: &str = "add the crate dlock-postgres, and LockClientBuilder::scheme(dlock_postgres::scheme()); \
                            the command dlock has it with its feature \"postgres\"";

const ADD_ZOOKEEPER: &str = "add the crate dlock-zookeeper, and LockClientBuilder::scheme(dlock_zookeeper::scheme()); \
                             the command dlock has it with its feature \"zookeeper\"";

fn find_scheme(scheme: &str, registered: &[Scheme]) -> Result<Found, Error> {
    if let Some(found) = registered.iter().find(|one| one.has(scheme)) {
        return Ok(Found::Registered(found.clone()));
    }
    if let Some((_, found)) = SCHEMES.iter().find(|(name, _)| *name == scheme) {
        return Ok(Found::BuiltIn(*found));
    }
    if let Some((_, add)) = OF_OTHER_CRATES.iter().find(|(name, _)| *name == scheme) {
        return Err(invalid(format!("scheme \"{scheme}\" is not registered: {add}")));
    }
    // Short enough to be nothing but a scheme.
    let shown: String = scheme.chars().take(24).collect();
    let registered = registered.iter().flat_map(Scheme::names).map(String::as_str);
    let known = SCHEMES.iter().map(|(name, _)| *name).chain(registered.clone());
    Err(invalid(match nearest(scheme, known) {
        Some(near) => format!("scheme \"{shown}\" is not known, did you mean \"{near}\"?"),
        None => {
            let others: String = registered.flat_map(|name| [", ", name]).collect();
            format!(
                "scheme \"{shown}\" is not known: use memory, redis, rediss, redis+unix, redis+sentinel, redis+cluster, \
                 quorum+redis or their valkey spellings{others}, or register the scheme of another store (LockClientBuilder::scheme)"
            )
        }
    }))
}

fn memory(authority: &str, path: &str) -> Result<Topology, Error> {
    if !matches!(path, "" | "/") {
        return Err(invalid("memory:// takes at most a name, as in memory://shop"));
    }
    let name = decode(authority)?;
    Ok(Topology::Memory {
        name: Some(name).filter(|name| !name.is_empty()),
    })
}

fn tcp(authority: &str, path: &str, tls: bool) -> Result<ServerUrl, Error> {
    let (user, host) = split_user(authority)?;
    if host.contains(',') {
        return Err(invalid(
            "it names several hosts: use redis+sentinel://, redis+cluster:// or quorum+redis://",
        ));
    }
    let address = parse_host(host, DEFAULT_PORT)?;
    let database = match path.strip_prefix('/').unwrap_or("") {
        "" => 0,
        text => parse_database(text)?,
    };
    let (user, password) = user;
    let login = Login {
        tls,
        user,
        password,
        database,
    };
    Ok(ServerUrl { address, login })
}

fn sentinel(authority: &str, path: &str, tls: bool, query: &mut Query) -> Result<SentinelUrl, Error> {
    let ((user, password), hosts) = split_user(authority)?;
    let sentinels = parse_hosts(hosts, SENTINEL_PORT)?;
    let path = path.strip_prefix('/').unwrap_or("");
    let (service, database) = path.split_once('/').unwrap_or((path, ""));
    if service.is_empty() {
        return Err(invalid(
            "it does not say by which name the sentinels know the master, as in redis+sentinel://a,b,c/mymaster",
        ));
    }
    let database = match database {
        "" => query.take("db").map_or(Ok(0), |text| parse_database(&text))?,
        text => parse_database(text)?,
    };
    Ok(SentinelUrl {
        sentinels,
        service: decode(service)?,
        login: Login {
            tls,
            user,
            password,
            database,
        },
        sentinel_login: Login {
            tls,
            user: query.take("sentinel_user"),
            password: query.take("sentinel_password"),
            database: 0,
        },
    })
}

fn cluster(authority: &str, path: &str, tls: bool) -> Result<ClusterUrl, Error> {
    if !matches!(path, "" | "/" | "/0") {
        return Err(invalid(
            "a cluster has no database but 0, so nothing stands behind its hosts",
        ));
    }
    let ((user, password), hosts) = split_user(authority)?;
    Ok(ClusterUrl {
        seeds: parse_hosts(hosts, DEFAULT_PORT)?,
        login: Login {
            tls,
            user,
            password,
            database: 0,
        },
    })
}

fn quorum(authority: &str, path: &str, tls: bool, query: &mut Query) -> Result<QuorumUrl, Error> {
    let ((user, password), hosts) = split_user(authority)?;
    let members = parse_hosts(hosts, DEFAULT_PORT)?;
    if members.len() < 3 {
        return Err(invalid(
            "a quorum takes at least three servers, as in quorum+redis://a,b,c: of fewer none can be missing",
        ));
    }
    for (at, member) in members.iter().enumerate() {
        let is_same = |other: &&Address| other.as_one() == member.as_one();
        match members[..at].iter().find(is_same) {
            Some(same) if same == member => {
                return Err(invalid(format!(
                    "{member} stands in it twice, and would have two votes"
                )));
            }
            Some(same) => {
                return Err(invalid(format!(
                    "{same} and {member} are one server, which would have two votes"
                )));
            }
            None => {}
        }
    }
    let database = match path.strip_prefix('/').unwrap_or("") {
        "" => 0,
        text => parse_database(text)?,
    };
    let trust_fresh = query.take("trust_fresh_servers").map(|text| match text.as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(invalid("option trust_fresh_servers is neither true nor false")),
    });
    Ok(QuorumUrl {
        members,
        login: Login {
            tls,
            user,
            password,
            database,
        },
        max_lease: query.duration("max_lease")?,
        trust_fresh: trust_fresh.transpose()?,
    })
}

fn unix(authority: &str, path: &str, query: &mut Query) -> Result<ServerUrl, Error> {
    let ((user, password), host) = split_user(authority)?;
    if !host.is_empty() || path.len() < 2 {
        return Err(invalid(
            "a socket is given by its whole path, as in redis+unix:///run/redis.sock",
        ));
    }
    let database = query.take("db").map_or(Ok(0), |text| parse_database(&text))?;
    let login = Login {
        tls: false,
        user: query.take("user").or(user),
        // The redis crate calls it `pass`.
        password: query.take("password").or_else(|| query.take("pass")).or(password),
        database,
    };
    Ok(ServerUrl {
        address: Address::Unix(decode(path)?),
        login,
    })
}

type Credentials = (Option<String>, Option<String>);

/// `user:password@host`; a lone part before the `@` is the user, as in every URL.
fn split_user(authority: &str) -> Result<(Credentials, &str), Error> {
    let Some((user, host)) = authority.rsplit_once('@') else {
        return Ok(((None, None), authority));
    };
    let (user, password) = match user.split_once(':') {
        Some((user, password)) => (user, Some(decode(password)?)),
        None => (user, None),
    };
    Ok((
        (Some(decode(user)?).filter(|user| !user.is_empty()), password),
        host,
    ))
}

/// Several hosts, separated by commas.
fn parse_hosts(hosts: &str, default_port: u16) -> Result<Vec<Address>, Error> {
    hosts
        .split(',')
        .map(|host| parse_host(host, default_port))
        .collect()
}

fn parse_host(host: &str, default_port: u16) -> Result<Address, Error> {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            let address: std::net::Ipv6Addr = address
                .parse()
                .map_err(|_| invalid("what stands in brackets is no IPv6 address"))?;
            (
                address.to_string(),
                rest.strip_prefix(':').or(rest.is_empty().then_some("")),
            )
        }
        None => match host.split_once(':') {
            Some((name, port)) => (name.to_owned(), Some(port)),
            None => (host.to_owned(), Some("")),
        },
    };
    if name.is_empty() {
        return Err(invalid("it names no host, as in redis://localhost:6379"));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c) || !c.is_ascii();
    if !name.chars().all(allowed) {
        return Err(invalid(
            "its host has characters that no host name has (in a password write : @ / ? as %3A %40 %2F %3F)",
        ));
    }
    let port = match port {
        Some("") => default_port,
        Some(port) => port.parse().ok().filter(|port| *port > 0).ok_or_else(|| {
            invalid("its port is no number from 1 to 65535 (in a password write : @ / ? as %3A %40 %2F %3F)")
        })?,
        None => return Err(invalid("something stands between its host and its port")),
    };
    Ok(Address::Tcp { host: name, port })
}

fn parse_database(text: &str) -> Result<i64, Error> {
    text.parse::<u32>()
        .map(i64::from)
        .map_err(|_| invalid("its path is no database number, as in redis://localhost/2"))
}

fn decode(text: &str) -> Result<String, Error> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(String::from)
        .map_err(|_| invalid("its percent-encoding is not UTF-8"))
}

/// The options of the query that were not taken yet.
struct Query(Vec<(String, String)>);

const OPTIONS: &[&str] = &[
    "lease",
    "timeout",
    "retry_for",
    "prefix",
    "name",
    "min_replicas",
    "min_replicas_within",
    "presence",
    "control",
    "db",
    "user",
    "password",
    "sentinel_user",
    "sentinel_password",
    "max_lease",
    "trust_fresh_servers",
];

impl Query {
    fn parse(query: &str) -> Result<Query, Error> {
        let mut options: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let Some((name, value)) = pair.split_once('=') else {
                return Err(invalid(
                    "its query has an option without a value, as in ?lease=10s",
                ));
            };
            let name = decode(name)?;
            if options.iter().any(|(other, _)| *other == name) {
                return Err(invalid(format!(
                    "its query gives option \"{}\" twice",
                    short(&name)
                )));
            }
            options.push((name, decode(value)?));
        }
        Ok(Query(options))
    }

    /// The options that every URL may have.
    fn options(&mut self) -> Result<UrlOptions, Error> {
        Ok(UrlOptions {
            lease: self.duration("lease")?,
            timeout: self.duration("timeout")?,
            retry_for: self.duration("retry_for")?,
            prefix: self.take("prefix"),
            name: self.take("name"),
            min_replicas: self.number("min_replicas")?,
            min_replicas_within: self.duration("min_replicas_within")?,
            presence: self.switch("presence")?,
            control: self.switch("control")?,
        })
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(other, _)| other == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// `on` or `off`.
    fn switch(&mut self, name: &str) -> Result<Option<bool>, Error> {
        match self.take(name).as_deref() {
            None => Ok(None),
            Some("on") => Ok(Some(true)),
            Some("off") => Ok(Some(false)),
            Some(_) => Err(invalid(format!("option {name} is neither on nor off"))),
        }
    }

    fn duration(&mut self, name: &str) -> Result<Option<Duration>, Error> {
        self.take(name)
            .map(|text| {
                humantime::parse_duration(&text).map_err(|_| {
                    invalid(format!(
                        "option {name} is no duration with a unit, as in {name}=10s"
                    ))
                })
            })
            .transpose()
    }

    fn number(&mut self, name: &str) -> Result<Option<u32>, Error> {
        self.take(name)
            .map(|text| {
                text.parse()
                    .map_err(|_| invalid(format!("option {name} is no number, as in {name}=1")))
            })
            .transpose()
    }

    fn finish(self) -> Result<(), Error> {
        let Some((name, _)) = self.0.first() else {
            return Ok(());
        };
        let hint = match nearest(name, OPTIONS.iter().copied()) {
            Some(near) if near == name => "it does not go with this scheme".to_owned(),
            Some(near) => format!("did you mean \"{near}\"?"),
            None => format!("there are {}", OPTIONS.join(", ")),
        };
        Err(invalid(format!(
            "its query has no option \"{}\": {hint}",
            short(name)
        )))
    }
}

fn short(text: &str) -> String {
    text.chars().take(24).collect()
}

/// The most similar word, if one is similar enough.
fn nearest<'a>(text: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    words
        .map(|word| (distance(text, word), word))
        .filter(|(d, _)| *d <= 2)
        .min()
        .map(|(_, word)| word)
}

/// Edits between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(url: &str) -> ServerUrl {
        match StoreUrl::parse(url).unwrap().topology {
            Topology::Server(server) => server,
            other => panic!("{other:?}"),
        }
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp {
            host: host.to_owned(),
            port,
        }
    }

    fn refused(url: &str) -> String {
        StoreUrl::parse(url).unwrap_err().to_string()
    }

    #[test]
    fn servers() {
        let url = server("redis://me:p%40ss@cache.example:7000/3?lease=10s");
        assert_eq!(url.address, tcp("cache.example", 7000));
        assert_eq!(
            (url.login.user.as_deref(), url.login.password.as_deref()),
            (Some("me"), Some("p@ss"))
        );
        assert_eq!((url.login.database, url.login.tls), (3, false));
        assert_eq!(server("redis://localhost").address.to_string(), "localhost:6379");
        assert_eq!(server("valkey://[::1]:7").address.to_string(), "[::1]:7");
        assert!(server("valkeys://h").login.tls && server("rediss://h").login.tls);
        assert_eq!(
            server("redis://:secret@h").login.password.as_deref(),
            Some("secret")
        );
        assert_eq!(server("redis://:secret@h").login.user, None);
        let socket = server("redis+unix:///run/my%20redis.sock?db=2&password=x");
        assert_eq!(socket.address, Address::Unix("/run/my redis.sock".into()));
        assert_eq!(
            (socket.login.database, socket.login.password.as_deref()),
            (2, Some("x"))
        );
    }

    #[test]
    fn registered_schemes_go_before_and_are_named_where_none_fits() {
        let scheme = Scheme::new(["toy", "redis"], |_| std::future::pending());
        let parse = |url| StoreUrl::parse_with(url, std::slice::from_ref(&scheme));
        let url = parse("TOY://me:hunter2@h/1?lease=10s&table=x%20y").unwrap();
        assert_eq!(url.options.lease, Some(Duration::from_secs(10)));
        assert!(!format!("{url:?}").contains("hunter2"));
        let Topology::Registered(url) = url.topology else {
            panic!("{:?}", url.topology)
        };
        assert_eq!(
            (url.name.as_str(), url.address.0.as_str()),
            ("toy", "me:hunter2@h/1")
        );
        assert_eq!(url.parameters.0, [("table".to_owned(), "x y".to_owned())]);
        assert!(matches!(
            parse("redis://h").unwrap().topology,
            Topology::Registered(_)
        ));
        assert!(matches!(
            parse("memory://").unwrap().topology,
            Topology::Memory { .. }
        ));
        let refused = |url| parse(url).unwrap_err().to_string();
        assert!(refused("toi://h").contains("did you mean \"toy\""));
        assert!(refused("http://h").contains("spellings, toy, redis, or register"));
    }

    #[test]
    fn options_stand_in_the_query() {
        let url =
            StoreUrl::parse("redis://h?lease=10s&timeout=250ms&retry_for=1m&prefix=a%3Ab&name=shop").unwrap();
        let options = url.options;
        assert_eq!(options.lease, Some(Duration::from_secs(10)));
        assert_eq!(options.timeout, Some(Duration::from_millis(250)));
        assert_eq!(options.retry_for, Some(Duration::from_secs(60)));
        assert_eq!(options.prefix.as_deref(), Some("a:b"));
        assert_eq!(options.name.as_deref(), Some("shop"));
    }

    #[test]
    fn sentinels_name_a_master() {
        let url = "rediss+sentinel://me:pw@a,b:1,[::1]/main/2?sentinel_user=s&sentinel_password=t%26";
        let Topology::Sentinel(url) = StoreUrl::parse(url).unwrap().topology else {
            panic!("these are sentinels")
        };
        assert_eq!(url.sentinels, [tcp("a", 26379), tcp("b", 1), tcp("::1", 26379)]);
        assert_eq!(url.service, "main");
        let (login, sentinels) = (url.login, url.sentinel_login);
        assert_eq!(
            (login.user.as_deref(), login.password.as_deref()),
            (Some("me"), Some("pw"))
        );
        assert_eq!((login.database, login.tls), (2, true));
        // They never receive the password of the servers.
        assert_eq!(
            (sentinels.user.as_deref(), sentinels.password.as_deref()),
            (Some("s"), Some("t&"))
        );
        assert_eq!((sentinels.database, sentinels.tls), (0, true));
    }

    #[test]
    fn a_cluster_is_named_by_some_of_its_servers() {
        let Topology::Cluster(url) = StoreUrl::parse("valkey+cluster://:pw@a,b:7001").unwrap().topology
        else {
            panic!("this is a cluster")
        };
        assert_eq!(url.seeds, [tcp("a", 6379), tcp("b", 7001)]);
        assert_eq!(
            (url.login.user, url.login.password.as_deref()),
            (None, Some("pw"))
        );
    }

    #[test]
    fn quorums() {
        let parsed =
            StoreUrl::parse("quorum+redis://:pw@a,b:7,c,d,e/2?max_lease=20s&trust_fresh_servers=true");
        let parsed = parsed.unwrap();
        assert_eq!(parsed.longest_lease(), Some(Duration::from_secs(20)));
        let Topology::Quorum(url) = parsed.topology else {
            panic!("{:?}", parsed.topology)
        };
        assert_eq!((url.members.len(), &url.members[1]), (5, &tcp("b", 7)));
        assert_eq!(
            (url.login.password.as_deref(), url.login.database),
            (Some("pw"), 2)
        );
        assert_eq!(url.trust_fresh, Some(true));
        let default = StoreUrl::parse("quorum+valkeys://a,b,c").unwrap();
        assert_eq!(default.longest_lease(), Some(Duration::from_secs(60)));
        assert!(refused("quorum+redis://a,b").contains("at least three"));
        assert!(refused("quorum+redis://a,b,a:6379").contains("twice"));
        for (hosts, pair) in [
            ("a,b,A.", "a:6379 and A.:6379"),
            ("127.0.0.1:1,localhost:1,b", "127.0.0.1:1 and localhost:1"),
            ("b,[::1],localhost", "[::1]:6379 and localhost:6379"),
        ] {
            let said = refused(&format!("quorum+redis://{hosts}"));
            assert!(said.contains(&format!("{pair} are one server")), "{said}");
        }
        assert!(StoreUrl::parse("quorum+redis://localhost:1,127.0.0.2:1,[::1]:3").is_ok());
        assert!(
            refused("quorum+redis://a,b,c?trust_fresh_servers=perhaps").contains("neither true nor false")
        );
        assert!(refused("redis://a?max_lease=20s").contains("does not go with this scheme"));
    }

    #[test]
    fn what_is_wrong_is_named_and_no_password_repeated() {
        for (url, says) in [
            ("localhost:6379", "no scheme"),
            ("reids://:hunter2@h", "did you mean \"redis\""),
            ("http://h", "not known"),
            ("redis://", "no host"),
            ("redis://:hunter2@", "no host"),
            ("redis://h:99999", "port"),
            ("redis://h:0", "port"),
            ("redis://h:x", "port"),
            ("redis://:hunter2/x@h", "%2F"),
            ("redis://:hunter2?x@h", "%3F"),
            ("redis://:hun#ter2@h", "fragment"),
            ("redis://h/x", "database"),
            ("redis://h/-1", "database"),
            ("redis://h?laese=1s", "did you mean \"lease\""),
            ("redis://h?lease=10", "unit"),
            ("redis://h?lease", "without a value"),
            ("redis://h?lease=1s&lease=2s", "twice"),
            ("redis://h?db=1", "does not go with this scheme"),
            ("redis://a,b", "several hosts"),
            ("redis+unix://", "whole path"),
            ("redis://[::x]", "IPv6"),
            ("redis://h h", "spaces"),
            ("redis+sentinel://a,,b/main", "no host"),
            ("redis+sentinel://:hunter2@a,b", "which name"),
            ("redis+sentinel://a,b/main/x", "database"),
            ("redis+cluster://:hunter2@a,b/1", "no database but 0"),
            (
                "redis+cluster://a,b?sentinel_user=x",
                "does not go with this scheme",
            ),
            ("memory://a/b", "at most a name"),
        ] {
            let error = refused(url);
            assert!(error.contains(says), "{url}: {error}");
            assert!(!error.contains("hunter2"), "{url}: {error}");
        }
        assert!(!format!("{:?}", server("redis://:hunter2@h")).contains("hunter2"));
    }
}
