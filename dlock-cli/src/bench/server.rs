//! The server's own statistics, over a separate plain connection.

use std::collections::HashMap;
use std::time::Duration;

use dlock::LockKind;
use percent_encoding::percent_decode_str;
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo};

use crate::look::clean;

/// How long the server may take to connect or to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Commands that only clients send; scripts cannot, or have no reason to.
const SENT_BY_CLIENTS: &[&str] = &[
    "eval",
    "eval_ro",
    "evalsha",
    "evalsha_ro",
    "fcall",
    "fcall_ro",
    "script",
    "ping",
    "subscribe",
    "unsubscribe",
    "psubscribe",
    "punsubscribe",
    "ssubscribe",
    "sunsubscribe",
    "client",
    "hello",
    "auth",
    "select",
];

/// Commands whose time is that of a script.
const SCRIPTS: &[&str] = &["eval", "evalsha", "fcall"];

/// Commands that release a lock without a script. Those that scripts send for such locks are counted, too.
const RELEASE: &[&str] = &["hdel", "publish"];
/// The commands that acquire and release a plain lock without a script.
const PLAIN: &[&str] = &["hdel", "publish", "multi", "restore", "incrby", "exec"];
/// Commands inside `EXEC`, whose time includes theirs.
const IN_EXEC: &[&str] = &["restore", "incrby"];

/// A connection to the one server of a URL, for `INFO`.
pub(super) struct Server {
    connection: MultiplexedConnection,
    /// The commands that locks of the measured kind need instead of a script.
    commands: &'static [&'static str],
}

/// The server's totals since its start.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counters {
    /// Commands of clients; a script counts as one, and so does each command that is sent instead.
    pub(super) sent: u64,
    /// All commands, including those inside scripts, except `INFO`.
    pub(super) all: u64,
    /// Seconds of CPU.
    pub(super) cpu_s: f64,
    /// Seconds in scripts, and in commands instead of them.
    pub(super) script_s: f64,
}

impl Counters {
    pub(super) fn since(self, before: Counters) -> Counters {
        Counters {
            sent: self.sent.saturating_sub(before.sent),
            all: self.all.saturating_sub(before.all),
            cpu_s: self.cpu_s - before.cpu_s,
            script_s: self.script_s - before.script_s,
        }
    }
}

impl Server {
    /// Connects, to count what locks of this kind need; `None` if the URL does not name a single server or the server
    /// refuses.
    pub(super) async fn connect(url: &str, kind: LockKind) -> Option<Server> {
        let (address, settings) = parse(url)?;
        let info = address.into_connection_info().ok()?.set_redis_settings(settings);
        let client = redis::Client::open(info).ok()?;
        let connection = tokio::time::timeout(PATIENCE, client.get_multiplexed_async_connection())
            .await
            .ok()?
            .ok()?;
        Some(Server {
            connection,
            commands: match kind {
                LockKind::Mutex => PLAIN,
                LockKind::Fenced => RELEASE,
                _ => &[],
            },
        })
    }

    async fn info(&mut self, sections: &[&str]) -> Option<HashMap<String, String>> {
        let mut all = HashMap::new();
        // One by one, since servers older than 7 accept only one.
        for section in sections {
            let command = redis::cmd("INFO").arg(section).to_owned();
            let answer = command.query_async::<String>(&mut self.connection);
            let text = tokio::time::timeout(PATIENCE, answer).await.ok()?.ok()?;
            all.extend(text.lines().filter_map(|line| {
                let (name, value) = line.trim_end().split_once(':')?;
                Some((name.to_owned(), value.to_owned()))
            }));
        }
        Some(all)
    }

    /// Returns the server's name, as in `Redis 7.0.15`.
    pub(super) async fn name(&mut self) -> Option<String> {
        let info = self.info(&["server"]).await?;
        let version = |name: &str| info.get(name).map(String::as_str);
        match version("valkey_version") {
            Some(version) => Some(format!("Valkey {}", clean(version))),
            None => Some(format!("Redis {}", clean(version("redis_version")?))),
        }
    }

    /// Returns the totals until now.
    pub(super) async fn counters(&mut self) -> Option<Counters> {
        let info = self.info(&["commandstats", "cpu"]).await?;
        let calls =
            |line: &String| -> Option<u64> { line.strip_prefix("calls=")?.split(',').next()?.parse().ok() };
        let (mut sent, mut all) = (0, 0);
        for (name, line) in &info {
            // As in `cmdstat_client|setname`.
            let command = name
                .strip_prefix("cmdstat_")
                .and_then(|name| name.split('|').next());
            let (Some(command), Some(calls)) = (command, calls(line)) else {
                continue;
            };
            if SENT_BY_CLIENTS.contains(&command) || self.commands.contains(&command) {
                sent += calls;
            }
            if command != "info" {
                all += calls;
            }
        }
        let micros = |name: &&str| -> Option<f64> {
            let line = info.get(&format!("cmdstat_{name}"))?;
            line.split(',')
                .find_map(|part| part.strip_prefix("usec="))?
                .parse()
                .ok()
        };
        let commands = self.commands.iter().filter(|name| !IN_EXEC.contains(name));
        let in_scripts: f64 = SCRIPTS.iter().chain(commands).filter_map(micros).sum();
        let number = |name: &str| info.get(name)?.parse::<f64>().ok();
        Some(Counters {
            sent,
            all,
            cpu_s: number("used_cpu_user")? + number("used_cpu_sys")?,
            script_s: in_scripts / 1e6,
        })
    }
}

/// Converts the URL of a single server for the redis crate. The URL is known to be well-formed, since dlock has
/// connected to it; other stores have no single server to ask.
fn parse(url: &str) -> Option<(ConnectionAddr, RedisConnectionInfo)> {
    let (scheme, rest) = url.split_once("://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (mut user, mut password) = match user.split_once(':') {
        Some((user, password)) => (decode(user), Some(decode(password))),
        None => (decode(user), None),
    };
    let mut database = path.trim_start_matches('/').to_owned();
    let scheme = scheme.to_ascii_lowercase().replace("valkey", "redis");
    let address = match &*scheme {
        "redis" | "rediss" => {
            let (name, port) = match host.rsplit_once(':') {
                Some((name, port)) if !port.contains(']') => (name, port),
                _ => (host, ""),
            };
            let host = name.trim_start_matches('[').trim_end_matches(']').to_owned();
            let port = if port.is_empty() { 6379 } else { port.parse().ok()? };
            match &*scheme {
                "redis" => ConnectionAddr::Tcp(host, port),
                _ => encrypted(host, port)?,
            }
        }
        "redis+unix" => {
            database.clear();
            for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
                match name {
                    "db" => database = decode(value),
                    "user" => user = decode(value),
                    "password" | "pass" => password = Some(decode(value)),
                    _ => {}
                }
            }
            ConnectionAddr::Unix(decode(path).into())
        }
        _ => return None,
    };
    let database = if database.is_empty() {
        0
    } else {
        database.parse().ok()?
    };
    let mut settings = RedisConnectionInfo::default().set_db(database);
    if !user.is_empty() {
        settings = settings.set_username(user);
    }
    if let Some(password) = password {
        settings = settings.set_password(password);
    }
    Some((address, settings))
}

#[cfg(feature = "tls")]
fn encrypted(host: String, port: u16) -> Option<ConnectionAddr> {
    Some(ConnectionAddr::TcpTls {
        host,
        port,
        insecure: false,
        tls_params: None,
    })
}

#[cfg(not(feature = "tls"))]
fn encrypted(_: String, _: u16) -> Option<ConnectionAddr> {
    None
}

fn decode(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> (String, i64, Option<String>, Option<String>) {
        let (address, settings) = parse(url).expect("one server");
        (
            address.to_string(),
            settings.db(),
            settings.username().map(str::to_owned),
            settings.password().map(str::to_owned),
        )
    }

    #[test]
    fn urls_of_one_server_are_understood_as_dlock_understands_them() {
        assert_eq!(
            parsed("redis://localhost"),
            ("localhost:6379".into(), 0, None, None)
        );
        assert_eq!(
            parsed("VALKEY://svc:p%40ss@[::1]:7000/3?lease=10s"),
            ("::1:7000".into(), 3, Some("svc".into()), Some("p@ss".into()))
        );
        assert_eq!(
            parsed("redis+unix:///run/r.sock?db=2&pass=x"),
            ("/run/r.sock".into(), 2, None, Some("x".into()))
        );
    }

    #[test]
    fn of_other_stores_nothing_is_asked() {
        assert!(parse("memory://").is_none());
        assert!(parse("redis+cluster://a,b").is_none());
    }
}
