//! Diagnoses the servers: sends each one four-letter words, and tries operations on a scratch key.

mod checks;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::doctor::{
    Diagnose, Durability, Examination, Finding, LeaseEnd, ServerFacts, StoreReport, not_tried, request_times,
    scratch_key,
};
use dlock::store::{Reason, Store, StoreError, StoreFuture};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use self::checks::{Context, Seen, Told};
use crate::session::refused;
use crate::store::ZookeeperLocks;
use crate::wire::{Code, Request};

/// The longest reply that is read: enough for tens of thousands of connections.
const LONGEST: u64 = 8 << 20;

impl Diagnose for ZookeeperLocks {
    fn examine(self: Arc<Self>, examination: Examination) -> StoreFuture<StoreReport> {
        Box::pin(self.examined(examination))
    }
}

impl ZookeeperLocks {
    async fn examined(self: Arc<Self>, examination: Examination) -> Result<StoreReport, StoreError> {
        let config = self.0.core.session.config();
        let told = join_all(config.hosts.iter().map(|host| told(host, config.timeout))).await;
        if let Some(Err(why)) = told.iter().find(|one| one.is_ok()).or(told.first()) {
            return Err(StoreError::not_done(Reason::Unreachable, why.clone()));
        }
        let context = Context {
            session: config.session,
            timeout: config.timeout,
        };
        let servers: Vec<_> = config.hosts.iter().cloned().zip(told).collect();
        let mut report = StoreReport::new();
        (report.findings, report.failover) = checks::all(&servers, &context);
        // Each server writes a change to its disk before it replies, unless forceSync is off.
        report.durability = Durability::All;
        report.by_majority = checks::members(&servers) > 1;
        let lasts = self.0.core.session.lasts();
        report.lease_end = LeaseEnd::session(lasts, lasts - config.tick.unwrap_or(lasts / 2));
        report.servers = config.hosts.iter().map(ServerFacts::new).collect();
        if examination.probes {
            let key = scratch_key();
            let times = request_times(self.clone() as Arc<dyn Store>, &key, &examination).await;
            report.findings.push(times);
            if let Err(error) = self.forgets(self.name(&key)).await {
                let why = format!("the node of the lock {key} that was tried may stay for a while: {error}");
                report
                    .findings
                    .push(Finding::bad("scratch", why, "the right to delete nodes"));
            }
        } else {
            report.findings.extend(not_tried(&["request-times"]));
        }
        Ok(report)
    }

    /// Removes the node of the scratch key at once; the servers would do so later.
    async fn forgets(&self, lock: Arc<str>) -> Result<(), StoreError> {
        let core = &self.0.core;
        let path = core.path(&lock);
        core.made.forget(&lock);
        let answer = core.session.ask(Request::Delete { path }).answer().await?;
        match answer.reply {
            Ok(_) | Err(Code::NO_NODE) => Ok(()),
            Err(code) => Err(refused(code, "the removal of a scratch node")),
        }
    }
}

/// Reads what a server reports about itself.
async fn told(host: &str, limit: Duration) -> Seen<Told> {
    let answer = word(host, "srvr", limit).await?;
    let srvr = allowed(Ok(answer.clone()));
    if srvr.is_ok() && !answer.contains("version") {
        return Err(format!("{host} does not serve: {}", answer.trim()));
    }
    Ok(Told {
        // A server that does not allow this word still serves.
        srvr: pairs(&srvr.unwrap_or_default(), ": "),
        conf: allowed(word(host, "conf", limit).await).map(|text| pairs(&text, "=")),
        mntr: allowed(word(host, "mntr", limit).await).map(|text| pairs(&text, "\t")),
        cons: allowed(word(host, "cons", limit).await).map(|text| addresses(&text)),
    })
}

/// Sends one four-letter word on its own connection.
async fn word(host: &str, word: &str, limit: Duration) -> Seen<String> {
    let asking = async {
        let mut stream = TcpStream::connect(host).await?;
        stream.write_all(word.as_bytes()).await?;
        let mut text = Vec::new();
        stream.take(LONGEST).read_to_end(&mut text).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    match timeout(limit, asking).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => {
            let error: std::io::Error = error;
            Err(format!("{host}: {error}"))
        }
        Err(_) => Err(format!("{host} did not answer within {limit:?}")),
    }
}

/// Turns the reply to a word that is not in the whitelist into an error.
fn allowed(answer: Seen<String>) -> Seen<String> {
    match answer {
        Ok(text) if text.contains("not in the whitelist") => Err(text.trim().to_owned()),
        answer => answer,
    }
}

fn pairs(text: &str, between: &str) -> HashMap<String, String> {
    text.lines()
        .filter_map(|line| line.split_once(between))
        .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
        .collect()
}

/// The address of each connection without its port, as in ` /10.0.0.7:41234[1](queued=0,…)`.
fn addresses(cons: &str) -> Vec<String> {
    let of = |line: &str| {
        Some(
            line.trim()
                .strip_prefix('/')?
                .split_once('[')?
                .0
                .rsplit_once(':')?
                .0
                .to_owned(),
        )
    };
    cons.lines().filter_map(of).collect()
}
