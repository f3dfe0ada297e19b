//! Whether the client of a holder is alive, and if not, what happened to it.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dlock::operations::{ClientReport, Connection, ProcessState};
use dlock::store::Holder;
use dlock::{Error, LockClient};
use serde_json::{Value, json};

use super::text::{clean, millis, time};

/// How long the threads of a process are watched.
const WATCHED: Duration = Duration::from_millis(1500);

/// The diagnoses of a command: each client is asked and watched once, however many holds it has.
pub(super) struct Diagnoses<'a> {
    client: &'a LockClient,
    by_client: HashMap<String, Diagnosis>,
}

/// What is known about the client of a holder.
#[derive(Clone)]
pub(super) struct Diagnosis {
    pub(super) state: State,
    /// The reason for this conclusion.
    pub(super) because: String,
    /// The client's answer, or its last published report.
    pub(super) report: Option<ClientReport>,
    address: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It answers, or published a report a moment ago.
    Alive,
    /// It has released the lock, which is kept for its `min_hold`.
    Released,
    /// Its process is gone.
    Killed,
    /// Its process is stopped: by a signal, a debugger or a freezer.
    Stopped,
    /// Its process runs and is connected, and does nothing.
    Hung,
    /// Its process runs and does not reach the store.
    CutOff,
    /// It is not connected, and its machine is another one.
    Gone,
    /// It is connected, does nothing, and its machine is another one.
    Stalled,
    Unknown,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Alive => "alive",
            State::Released => "released",
            State::Killed => "killed",
            State::Stopped => "stopped",
            State::Hung => "hung",
            State::CutOff => "cut off",
            State::Gone => "killed or cut off",
            State::Stalled => "stopped or hung",
            State::Unknown => "unknown",
        }
    }
}

impl Diagnoses<'_> {
    pub(super) fn new(client: &LockClient) -> Diagnoses<'_> {
        Diagnoses {
            client,
            by_client: HashMap::new(),
        }
    }

    /// Diagnoses the client of this holder. The client's answer is newer than what is known about the holder.
    pub(super) async fn of(&mut self, holder: Holder) -> Result<(Holder, Diagnosis), Error> {
        let diagnosis = self.made(&holder).await?;
        let holder = match &diagnosis.report {
            Some(report) => holder.known(Some(Arc::new(report.clone()))),
            None => holder,
        };
        Ok((holder, diagnosis))
    }

    async fn made(&mut self, holder: &Holder) -> Result<Diagnosis, Error> {
        if holder.holds == 0 {
            let because = "the work is over, and the min_hold of the lock is not";
            return Ok(Diagnosis::new(State::Released, because, None));
        }
        // Its connections have other names, so that it would seem to have none.
        if holder.is_of_redisson() {
            let because = "a holder of Redisson, whose connections do not name it: a lease that grows from one look to the \
                           next is renewed by a live one";
            return Ok(Diagnosis::new(State::Unknown, because, None));
        }
        let Some((id, _)) = holder.id.split_once(':') else {
            let because = holder.unknown().unwrap_or_default();
            return Ok(Diagnosis::new(State::Unknown, because, None));
        };
        if let Some(made) = self.by_client.get(id) {
            return Ok(made.clone());
        }
        let made = Diagnosis::of_client(self.client, id, holder).await?;
        self.by_client.insert(id.to_owned(), made.clone());
        Ok(made)
    }
}

impl Diagnosis {
    pub(super) fn json(&self) -> Value {
        json!({
            "state": self.state.name(),
            "because": self.because,
            "answers": self.report.as_ref().map(|report| report.answers),
            "last_heard_ms": self.report.as_ref().map(|report| millis(report.age)),
            "seen_at": self.address,
        })
    }

    pub(super) fn line(&self) -> String {
        format!("{}: {}", self.state.name(), self.because)
    }

    fn new(state: State, because: impl Into<String>, report: Option<ClientReport>) -> Diagnosis {
        Diagnosis {
            state,
            because: because.into(),
            report,
            address: None,
        }
    }

    /// Diagnoses the client with this id, within two to three seconds.
    async fn of_client(client: &LockClient, id: &str, holder: &Holder) -> Result<Diagnosis, Error> {
        let written = holder.client.as_deref().cloned();
        if let Some(report) = &written {
            match report.process_state() {
                ProcessState::Gone => {
                    let because = format!("process {} no longer exists on this machine", report.process);
                    return Ok(Diagnosis::new(State::Killed, because, written));
                }
                ProcessState::Stopped => {
                    let because = format!(
                        "process {} is stopped on this machine (SIGCONT resumes it)",
                        report.process
                    );
                    return Ok(Diagnosis::new(State::Stopped, because, written));
                }
                _ => {}
            }
        }
        let answers = written.as_ref().is_some_and(|report| report.answers);
        // The mailbox of a client that does not read it gets full.
        let (answer, unasked) = match answers {
            true => match client.ask(id).await {
                Err(Error::Refused { message, .. }) => (None, Some(message)),
                answer => (answer?, None),
            },
            false => (None, None),
        };
        if let Some(answer) = answer {
            return Ok(Diagnosis::new(State::Alive, "it answers", Some(answer)));
        }
        if let Some(report) = &written
            && !report.is_overdue()
            && (!answers || unasked.is_some())
        {
            let because = format!("it published a report {} ago", time(report.age));
            return Ok(Diagnosis::new(State::Alive, because, written));
        }
        // Only now: each server lists all of its clients for this.
        let (connections, hidden) = match client.connections(id).await {
            Err(Error::Unsupported { .. }) => (None, "this store keeps no entries of clients".to_owned()),
            // Another program has written it.
            Err(Error::InvalidOption { .. }) => (None, "it is not a client of dlock".to_owned()),
            Err(Error::Refused { message, .. }) => {
                (None, format!("connections are not visible: {}", clean(&message)))
            }
            connections => {
                let hidden = "the store does not tell which connections are its (on Redis and Valkey: some have no name, since \
                              their user may not give them one, +client|setname)";
                (connections?, hidden.to_owned())
            }
        };
        let address = connections
            .iter()
            .flatten()
            .map(|seen| seen.address.clone())
            .next();
        let mut diagnosis = silent(written, unasked.as_deref(), connections, &hidden).await;
        diagnosis.address = address;
        Ok(diagnosis)
    }
}

/// Diagnoses a client that neither answers nor publishes; `unasked` says why it could not be asked, `hidden` why its
/// connections are not visible, if so.
async fn silent(
    report: Option<ClientReport>,
    unasked: Option<&str>,
    connections: Option<Vec<Connection>>,
    hidden: &str,
) -> Diagnosis {
    let heard = match &report {
        Some(report) => {
            let asked = match unasked {
                Some(why) => format!("it cannot be asked ({}); ", clean(why)),
                None if report.answers => "it does not answer; ".to_owned(),
                None => String::new(),
            };
            format!("{asked}its last report came {} ago", time(report.age))
        }
        None => "it published nothing".to_owned(),
    };
    let here = report
        .as_ref()
        .filter(|report| report.process_state() == ProcessState::Runs);
    if let Some(here) = here {
        let process = here.process;
        let is_connected = connections.as_ref().map(|connections| !connections.is_empty());
        let stands = connections
            .iter()
            .flatten()
            .any(|seen| stands(process, &seen.address));
        let (state, why) = match (is_connected, are_threads_awake(process).await) {
            (Some(false), _) => (State::CutOff, "is not connected to the store"),
            (Some(true), _) if stands => (
                State::Hung,
                "has an open connection to the store and does not use it",
            ),
            // A process that does not reach the store keeps retrying.
            (_, Some(true)) => (State::CutOff, "is at work and does not reach the store"),
            (Some(true), _) => (State::Hung, "is connected and none of its threads does anything"),
            (None, Some(false)) => (State::Hung, "does nothing: none of its threads was woken"),
            (None, None) => (
                State::Unknown,
                "runs; its threads and connections are not visible here",
            ),
        };
        let because = format!("process {process} runs on this machine and {why}; {heard}");
        return Diagnosis::new(state, because, report);
    }
    let place = report.as_ref().map(|report| {
        let (process, host) = (report.process, clean(&report.host));
        format!("; look at process {process} on {host}")
    });
    let place = place.unwrap_or_default();
    match connections {
        Some(all) if all.is_empty() && report.is_none() => Diagnosis::new(
            State::Gone,
            format!(
                "it is not connected here: crashed, cut off, reconnecting, behind a proxy, on a shared store, or without the \
                 right to name its connection (+client|setname); {heard}"
            ),
            None,
        ),
        Some(all) if all.is_empty() => {
            let because = format!(
                "it is not connected, or may not name its connection (+client|setname); {heard}{place}"
            );
            Diagnosis::new(State::Gone, because, report)
        }
        Some(all) if report.is_none() => {
            let service = all.first().map(|seen| clean(&seen.service)).unwrap_or_default();
            let idle = all.iter().map(|seen| seen.idle).min().unwrap_or_default();
            let because = format!(
                "a client of {service} is connected, and sent something {} ago; {heard}: it began a moment ago, may not \
                 write, or is of an older version",
                time(idle)
            );
            Diagnosis::new(State::Unknown, because, None)
        }
        Some(_) => {
            let because = format!("it is connected; {heard}{place}");
            Diagnosis::new(State::Stalled, because, report)
        }
        None => {
            let because = format!("{heard}; {hidden}{place}");
            Diagnosis::new(State::Unknown, because, report)
        }
    }
}

/// Whether a connection that the server sees exists at this end, in this process. It does not if the client has given
/// it up, or behind a proxy, also one on this machine.
fn stands(process: u32, address: &str) -> bool {
    /// The state of a socket in the tables of Linux.
    const ESTABLISHED: &str = "01";
    let Ok(address) = address.parse::<SocketAddr>() else {
        return false;
    };
    let port = format!(":{:04X}", address.port());
    let sockets = sockets(process);
    let is_it = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, local, _, state, _, _, _, _, _, inode, ..] = fields[..] else {
            return false;
        };
        let is_its = |sockets: &HashSet<String>| sockets.contains(inode);
        local.ends_with(&port) && state == ESTABLISHED && sockets.as_ref().is_none_or(is_its)
    };
    ["tcp", "tcp6"].iter().any(|table| {
        let table = std::fs::read_to_string(format!("/proc/{process}/net/{table}"));
        table.is_ok_and(|table| table.lines().any(is_it))
    })
}

/// The sockets of this process, by their inodes; `None` if not visible.
fn sockets(process: u32) -> Option<HashSet<String>> {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?;
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    let inode = |link: PathBuf| {
        let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some(inode.to_owned())
    };
    Some(links.filter_map(inode).collect())
}

/// Whether a thread of this process was woken within a while; `None` if not visible.
async fn are_threads_awake(process: u32) -> Option<bool> {
    let before = wakeups(process)?;
    tokio::time::sleep(WATCHED).await;
    Some(wakeups(process)? != before)
}

/// How often threads of this process went to sleep voluntarily.
fn wakeups(process: u32) -> Option<u64> {
    let mut sum = 0;
    for thread in std::fs::read_dir(format!("/proc/{process}/task")).ok()?.flatten() {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        sum += line.trim().parse::<u64>().ok()?;
    }
    Some(sum)
}
