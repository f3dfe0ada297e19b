//! A server's facts about itself, as far as visible: `INFO`, `CONFIG GET`, `LATENCY`, `SLOWLOG`.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use redis::{Cmd, FromRedisValue, Value};
use tokio::time::Instant;

use super::super::hint::without_permissions;
use super::super::node::Node;
use crate::base::clock;
use crate::store::StoreError;
use crate::store::doctor::ClockReading;

/// The pause between two commands: at most a hundred a second.
const PACE: Duration = Duration::from_millis(10);

/// The configuration parameters to read, one by one: Redis 6.2 takes one name at a time.
const SETTINGS: [&str; 9] = [
    "save",
    "appendfsync",
    "stop-writes-on-bgsave-error",
    "client-output-buffer-limit",
    "cluster-require-full-coverage",
    "cluster-node-timeout",
    "slowlog-log-slower-than",
    "latency-monitor-threshold",
    "min-replicas-to-write",
];

/// A server that is asked at a limited rate.
pub(super) struct Patient<'a> {
    pub(super) node: &'a Node,
    last: Option<Instant>,
}

/// The message without the hint on permissions: a finding has its own remedy.
pub(super) fn why(error: &StoreError) -> &str {
    without_permissions(&error.message)
}

/// `Err` says why it is not visible.
pub(super) type Seen<T> = Result<T, String>;

impl<'a> Patient<'a> {
    pub(super) fn new(node: &'a Node) -> Patient<'a> {
        Patient { node, last: None }
    }

    /// Waits until the next command may be sent.
    pub(super) async fn pace(&mut self) {
        if let Some(last) = self.last {
            clock::sleep_until(last + PACE).await;
        }
        self.last = Some(clock::now());
    }

    pub(super) async fn ask(&mut self, cmd: Cmd) -> Result<Value, StoreError> {
        self.pace().await;
        self.node.plain(cmd).await
    }

    pub(super) async fn see<T: FromRedisValue>(&mut self, words: &[&str]) -> Seen<T> {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        let value = self.ask(cmd).await.map_err(|error| why(&error).to_owned())?;
        redis::from_redis_value(value).map_err(|error| error.to_string())
    }
}

/// The fields of `INFO`.
#[derive(Debug, Default, Clone)]
pub(super) struct Info(HashMap<String, String>);

impl Info {
    pub(super) fn parse(text: &str) -> Info {
        let pairs = text.lines().filter_map(|line| line.trim_end().split_once(':'));
        Info(
            pairs
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// The replicas: whether each is online, its offset, and seconds since its last contact.
    pub(super) fn replicas(&self) -> Vec<Replica> {
        (0..)
            .map_while(|at| self.text(&format!("slave{at}")))
            .map(|line| {
                let fields: HashMap<&str, &str> = line
                    .split(',')
                    .filter_map(|field| field.split_once('='))
                    .collect();
                let number = |name: &str| fields.get(name).and_then(|n| n.parse().ok());
                Replica {
                    is_online: fields.get("state") == Some(&"online"),
                    offset: number("offset").unwrap_or(0),
                    lag: number("lag").unwrap_or(0),
                }
            })
            .collect()
    }
}

/// A replica as its master sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Replica {
    pub(super) is_online: bool,
    pub(super) offset: u64,
    pub(super) lag: u64,
}

/// The facts of a server.
pub(super) struct Facts {
    pub(super) info: Seen<Info>,
    settings: BTreeMap<&'static str, Seen<String>>,
    /// The longest of each kind of latency event, in milliseconds.
    pub(super) latency: Seen<Vec<(String, u64)>>,
    /// Slow commands, without their arguments, in microseconds.
    pub(super) slow: Seen<Vec<(String, u64)>>,
    pub(super) cluster: Seen<Info>,
    pub(super) eval: Seen<i64>,
    pub(super) clock: Seen<ClockReading>,
}

impl Facts {
    pub(super) async fn of(patient: &mut Patient<'_>, in_cluster: bool) -> Facts {
        let clock = read_clock(patient).await;
        let info: Seen<String> = patient.see(&["INFO"]).await;
        let mut settings = BTreeMap::new();
        for name in SETTINGS {
            let found: Seen<HashMap<String, String>> = patient.see(&["CONFIG", "GET", name]).await;
            let hidden = || format!("the server does not tell {name}");
            let found = found.and_then(|mut found| found.remove(name).ok_or_else(hidden));
            let is_refused = found.is_err();
            settings.insert(name, found);
            // If one is forbidden, all are.
            if is_refused && name == SETTINGS[0] {
                break;
            }
        }
        let latency: Seen<Vec<Value>> = patient.see(&["LATENCY", "LATEST"]).await;
        let slow: Seen<Vec<Value>> = patient.see(&["SLOWLOG", "GET", "64"]).await;
        let cluster = match in_cluster {
            true => (patient.see(&["CLUSTER", "INFO"]).await).map(|text: String| Info::parse(&text)),
            false => Err("this is no Cluster".to_owned()),
        };
        let eval = patient.see(&["EVAL", "return 1", "0"]).await;
        Facts {
            info: info.map(|text| Info::parse(&text)),
            settings,
            latency: latency.map(|rows| rows.iter().filter_map(latency_event).collect()),
            slow: slow.map(|rows| rows.iter().filter_map(slow_command).collect()),
            cluster,
            eval,
            clock,
        }
    }

    /// Of a server that tells this and nothing bad.
    #[cfg(test)]
    pub(super) fn of_tests(info: Info) -> Facts {
        Facts {
            info: Ok(info),
            settings: BTreeMap::new(),
            latency: Ok(Vec::new()),
            slow: Ok(Vec::new()),
            cluster: Err(String::new()),
            eval: Ok(1),
            clock: Err(String::new()),
        }
    }

    #[cfg(test)]
    pub(super) fn set(&mut self, name: &'static str, value: &str) {
        self.settings.insert(name, Ok(value.to_owned()));
    }

    pub(super) fn setting(&self, name: &str) -> Seen<&str> {
        match self.settings.get(name) {
            Some(Ok(value)) => Ok(value),
            Some(Err(why)) => Err(why.clone()),
            None => Err("the server does not let this user read its settings".to_owned()),
        }
    }
}

/// Reads the clock of the server.
pub(super) async fn read_clock(patient: &mut Patient<'_>) -> Seen<ClockReading> {
    patient.pace().await;
    ClockReading::of(async {
        let value = patient.node.plain(redis::cmd("TIME")).await;
        let value = value.map_err(|error| why(&error).to_owned())?;
        let (secs, micros): (i64, i64) = redis::from_redis_value(value).map_err(|error| error.to_string())?;
        Ok(secs * 1_000_000 + micros)
    })
    .await
}

fn latency_event(row: &Value) -> Option<(String, u64)> {
    let Value::Array(fields) = row else { return None };
    let name = redis::from_redis_value(fields.first()?.clone()).ok()?;
    let longest = redis::from_redis_value(fields.get(3)?.clone()).ok()?;
    Some((name, longest))
}

fn slow_command(row: &Value) -> Option<(String, u64)> {
    let Value::Array(fields) = row else { return None };
    let took = redis::from_redis_value(fields.get(2)?.clone()).ok()?;
    let Value::Array(words) = fields.get(3)? else {
        return None;
    };
    let name: String = redis::from_redis_value(words.first()?.clone()).ok()?;
    Some((name, took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read_by_its_names() {
        let info = Info::parse(
            "# Replication\r\nrole:master\r\nconnected_slaves:2\r\n\
             slave0:ip=10.0.0.1,port=6379,state=online,offset=120,lag=1\r\n\
             slave1:ip=10.0.0.2,port=6379,state=wait_bgsave,offset=0,lag=9\r\n",
        );
        assert_eq!(
            (info.text("role"), info.number("connected_slaves")),
            (Some("master"), Some(2))
        );
        let replica = |is_online, offset, lag| Replica {
            is_online,
            offset,
            lag,
        };
        assert_eq!(info.replicas(), [replica(true, 120, 1), replica(false, 0, 9)]);
        assert_eq!(info.number("role"), None);
    }
}
