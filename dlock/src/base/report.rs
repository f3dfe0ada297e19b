//! The report of a client (its identity, what it holds and what it waits for) and its text form.
//!
//! One line per fact, tab-separated, after a line with the version. Readers ignore unknown lines and fields, so that
//! processes of different versions can read each other.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::LockKey;
use crate::base::hold_state::Loss;
use crate::base::kind::Kind;

/// The version of the text format.
const VERSION: &str = "dlock 1";
/// The maximum length of the text, in bytes.
pub(crate) const MOST_BYTES: usize = 16 * 1024;
/// How many holds, and how many waits, a client publishes.
pub(crate) const PUBLISHED: usize = 32;
/// The maximum length of a note and of a service name, in characters.
const MOST_CHARS: usize = 200;

/// A client of a lock store: its identity, what it holds and what it waits for.
///
/// Created by [`LockClient::active`](crate::LockClient::active) for this client, and by
/// [`LockClient::clients`](crate::LockClient::clients) for others, as they published it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let _guard = client.lock("order:42").note("invoice 42").acquire().await?;
///
/// let report = client.active();
/// let hold = &report.holds[0];
/// assert_eq!(hold.note.as_deref(), Some("invoice 42"));
/// println!("{} holds {} since {:?}, at {}", report.service, hold.key, hold.held, hold.location);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientReport {
    /// The id of the client, see [`LockClient::id`](crate::LockClient::id).
    pub client: String,
    /// The name of its service.
    pub service: String,
    /// The name of its machine; empty if unknown.
    pub host: String,
    /// Its address as the store sees it, if known.
    pub address: Option<String>,
    /// The id of its process, in its container.
    pub process: u32,
    /// The version of dlock that it runs.
    pub version: String,
    /// When the client began.
    pub started: SystemTime,
    /// Whether it answers [requests](crate::LockClient::ask).
    pub answers: bool,
    /// What it holds, the oldest first. A published report has the oldest 32 of those that it has held for a second; of
    /// more than 4,096, the oldest of any 4,096.
    pub holds: Vec<HoldReport>,
    /// What it waits for, the longest wait first. A published report has the oldest 32 of those that have lasted a
    /// second; of more than 4,096, the oldest of any 4,096.
    pub waits: Vec<WaitReport>,
    /// How many holds it has in all.
    pub held: usize,
    /// How many calls wait in all.
    pub waiting: usize,
    /// How old the report is.
    pub age: Duration,
    /// How often the client publishes it, while it holds or waits for something.
    pub every: Duration,
    /// How long the published report is kept.
    pub(crate) kept: Duration,
    /// Identifies the machine and the process.
    pub(crate) process_identity: ProcessIdentity,
}

/// A hold of a [client](ClientReport).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("order:42").acquire().await?;
/// let report = client.active();
/// assert_eq!(report.holds[0].token, guard.fencing_token());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldReport {
    /// The name of the lock.
    pub key: LockKey,
    /// Its kind.
    pub kind: Kind,
    /// The id by which the store knows the hold.
    pub grant: String,
    /// The fencing token.
    pub token: u64,
    /// Since when it is held, as of the report.
    pub held: Duration,
    /// The remaining lease by the holder's clock, as of the report.
    pub lease_left: Duration,
    /// Whether the store has not confirmed it when due.
    pub suspect: bool,
    /// File and line of the acquire.
    pub location: String,
    /// File and line of the holds that re-entered it.
    pub reentered: Vec<String>,
    /// The note of the holder, see [`Lock::note`](crate::Lock::note).
    pub note: Option<String>,
    /// The task that acquired it, by its number in that process.
    pub task: Option<u64>,
}

/// A call of a [client](ClientReport) that waits for a lock.
///
/// ```no_run
/// # async fn example(client: dlock::LockClient) {
/// for wait in client.active().waits {
///     println!("{} waits for {} since {:?}", wait.location, wait.key, wait.waited);
/// }
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitReport {
    /// The name of the lock.
    pub key: LockKey,
    /// Its kind.
    pub kind: Kind,
    /// Since when it waits, as of the report.
    pub waited: Duration,
    /// File and line of the acquire.
    pub location: String,
    /// The note of the caller, see [`Lock::note`](crate::Lock::note).
    pub note: Option<String>,
    /// The task that waits, by its number in that process.
    pub task: Option<u64>,
    /// The ids of the holds in whose frames it waits.
    pub inside: Vec<String>,
}

/// An action of an operator on a hold, with its reason: breaking it, or asking its holder to stop.
///
/// ```
/// use dlock::operations::Intervention;
///
/// let intervention = Intervention::new("its machine burns").by("anna");
/// assert_eq!(intervention.reason, "its machine burns");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Intervention {
    /// The name of the operator; the service and the machine of the client by default.
    pub by: String,
    /// Why.
    pub reason: String,
    /// When.
    pub at: SystemTime,
    /// Whether it is written to the audit log first; `true` by default.
    pub audited: bool,
}

impl Intervention {
    /// Creates an intervention with this reason, by this client, audited.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Intervention {
        Intervention {
            by: String::new(),
            reason: shortened(&reason.into()),
            at: SystemTime::now(),
            audited: true,
        }
    }

    /// Sets the name of the operator.
    #[must_use]
    pub fn by(mut self, by: impl Into<String>) -> Intervention {
        self.by = shortened(&by.into());
        self
    }

    /// Sets whether it is written to the audit log first.
    #[must_use]
    pub fn audited(mut self, audited: bool) -> Intervention {
        self.audited = audited;
        self
    }

    pub(crate) fn write(&self) -> String {
        let at = self.at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut text = format!("{VERSION}\n");
        line(
            &mut text,
            "intervention",
            &[&self.by, &self.reason, &at.as_millis().to_string()],
        );
        text
    }

    pub(crate) fn read(text: &[u8]) -> Option<Intervention> {
        let text = std::str::from_utf8(text).ok()?;
        let mut lines = text.lines();
        if lines.next()? != VERSION {
            return None;
        }
        let fields: Vec<_> = lines.next()?.split('\t').map(unescaped).collect();
        match fields.as_slice() {
            [what, by, reason, at, ..] if what == "intervention" => Some(Intervention {
                by: by.clone(),
                reason: reason.clone(),
                at: UNIX_EPOCH.checked_add(millis(at)?)?,
                audited: true,
            }),
            _ => None,
        }
    }
}

/// Why a hold was lost, as far as known, see [`LockGuard::why_lost`](crate::LockGuard::why_lost).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::operations::{Intervention, LossReason};
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("report").acquire().await?;
/// let holder = client.inspect("report").await?.expect("it is held").id;
/// client.break_hold("report", &holder, Intervention::new("it hangs").by("anna")).await?;
/// assert!(guard.ensure(std::time::Duration::from_secs(30)).await.is_err());
/// match guard.why_lost().await {
///     Some(LossReason::Broken(why)) => println!("{} broke it: {}", why.by, why.reason),
///     other => panic!("{other:?}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// A lease that is not renewed expired.
    Expired,
    /// The lease expired without a failed renewal: the process was stopped or suspended, or its runtime did not run.
    Stalled,
    /// The lease expired while the store did not answer the renewals; the last failure.
    Unanswered(String),
    /// The lease expired while the store refused the renewals; its reply.
    Refused(String),
    /// An operator broke the hold, see [`LockClient::break_hold`](crate::LockClient::break_hold).
    Broken(Intervention),
    /// The store has granted the lock to this holder since, and does not say why: it was forced open, or the store lost
    /// its data.
    Taken {
        /// Its id on the store.
        holder: String,
    },
    /// The store no longer has the hold and does not say why: it was forced open, its data was flushed or evicted, or a
    /// server took over that never had it.
    Gone,
    /// See [`Loss::MaxHold`].
    MaxHold,
    /// See [`Loss::Shutdown`].
    Shutdown,
    /// See [`Loss::RuntimeEnded`].
    RuntimeEnded,
    /// It was not lost but released.
    Released,
}

impl LossReason {
    /// The reason as far as the loss alone tells it.
    pub(crate) fn of(loss: Loss) -> LossReason {
        match loss {
            Loss::Expired => LossReason::Expired,
            Loss::Gone => LossReason::Gone,
            Loss::MaxHold => LossReason::MaxHold,
            Loss::Shutdown => LossReason::Shutdown,
            Loss::RuntimeEnded => LossReason::RuntimeEnded,
            Loss::Released => LossReason::Released,
        }
    }
}

impl std::fmt::Display for LossReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LossReason::Expired => f.write_str("its lease expired, which was not renewed"),
            LossReason::Stalled => f.write_str(
                "its lease expired before a renewal was tried: the process or its runtime stood still",
            ),
            LossReason::Unanswered(failure) => {
                write!(
                    f,
                    "its lease expired, as the store did not answer renewals: {failure}"
                )
            }
            LossReason::Refused(reply) => {
                write!(f, "its lease expired, as the store refused renewals: {reply}")
            }
            LossReason::Broken(Intervention { by, reason, .. }) => {
                write!(f, "{by:?} broke it: {reason:?}")
            }
            LossReason::Taken { holder } => write!(f, "the store has given it to {holder:?}"),
            LossReason::Gone => Loss::Gone.fmt(f),
            LossReason::MaxHold => Loss::MaxHold.fmt(f),
            LossReason::Shutdown => Loss::Shutdown.fmt(f),
            LossReason::RuntimeEnded => Loss::RuntimeEnded.fmt(f),
            LossReason::Released => Loss::Released.fmt(f),
        }
    }
}

/// Distinguishes a process from other processes of the same machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProcessIdentity {
    /// The boot of the machine and the PID namespace.
    pub(crate) machine: String,
    /// When the process started, by the boot-time clock.
    pub(crate) began: String,
}

/// The state of a process as seen from this one, see [`ClientReport::process_state`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::operations::ProcessState;
///
/// let here = dlock::LockClient::memory().active();
/// if cfg!(target_os = "linux") {
///     assert_eq!(here.process_state(), ProcessState::Runs);
/// }
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessState {
    /// It runs on this machine.
    Runs,
    /// It is stopped on this machine: by SIGSTOP, by a debugger, or frozen.
    Stopped,
    /// It ran on this machine and is gone.
    Gone,
    /// It is on another machine or in another container, or this one hides the processes of other users.
    Elsewhere,
}

impl ClientReport {
    /// Returns the state of the process according to the operating system, if it is on this machine.
    #[must_use]
    pub fn process_state(&self) -> ProcessState {
        let here = ProcessIdentity::here();
        if self.process_identity.machine.is_empty() || self.process_identity.machine != here.machine {
            return ProcessState::Elsewhere;
        }
        self.state_by(stat)
    }

    /// Returns the state of the process as `stat` tells that of the processes of its machine.
    fn state_by(&self, stat: impl Fn(&str) -> Option<(char, String)>) -> ProcessState {
        match stat(&self.process.to_string()) {
            Some((_, began)) if began != self.process_identity.began => ProcessState::Gone,
            Some((state, _)) => match state {
                'T' | 't' => ProcessState::Stopped,
                'Z' | 'X' | 'x' => ProcessState::Gone,
                _ => ProcessState::Runs,
            },
            // There is always a first process: those of others are hidden (hidepid).
            None if stat("1").is_none() => ProcessState::Elsewhere,
            None => ProcessState::Gone,
        }
    }

    /// Returns whether it is older than it should be: the client could not publish for a while.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.age > self.every * 2
    }

    /// Returns the report as text of at most [`MOST_BYTES`]: what does not fit is left out, the youngest first, and first
    /// what would not be published.
    pub(crate) fn write(&self) -> String {
        let began = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut text = format!("{VERSION}\n");
        line(
            &mut text,
            "client",
            &[
                &self.client,
                &self.service,
                &self.host,
                self.address.as_deref().unwrap_or_default(),
                &self.process.to_string(),
                &self.version,
                &began.as_millis().to_string(),
                if self.answers { "1" } else { "0" },
                &self.held.to_string(),
                &self.waiting.to_string(),
                &self.every.as_millis().to_string(),
                &self.process_identity.machine,
                &self.process_identity.began,
                &self.kept.as_millis().to_string(),
            ],
        );
        let (waits, more_waits) = self.waits.split_at(self.waits.len().min(PUBLISHED));
        let (holds, more_holds) = self.holds.split_at(self.holds.len().min(PUBLISHED));
        // Waits first: chains are made of them.
        for (waits, holds) in [(waits, holds), (more_waits, more_holds)] {
            waits.iter().for_each(|wait| wait.write(&mut text));
            holds.iter().for_each(|hold| hold.write(&mut text));
        }
        text
    }

    /// Parses the report from a text of this age; `None` if it is not a report.
    pub(crate) fn read(text: &[u8], age: Duration) -> Option<ClientReport> {
        let text = std::str::from_utf8(text).ok()?;
        let mut lines = text.lines();
        if lines.next()? != VERSION {
            return None;
        }
        let mut report = None;
        for line in lines {
            let mut fields = line.split('\t').map(unescaped);
            let what = fields.next()?;
            let fields: Vec<_> = fields.collect();
            match what.as_str() {
                "client" => report = Some(client_of(&fields, age)?),
                "wait" => report.as_mut()?.waits.extend(wait_of(&fields, age)),
                "hold" => report.as_mut()?.holds.extend(hold_of(&fields, age)),
                _ => {}
            }
        }
        report
    }
}

impl WaitReport {
    fn write(&self, text: &mut String) {
        let mut fields = vec![
            self.kind.to_string(),
            self.waited.as_millis().to_string(),
            task(self.task),
            self.key.as_str().to_owned(),
            self.location.clone(),
            self.note.clone().unwrap_or_default(),
        ];
        fields.extend(self.inside.iter().cloned());
        fits(text, "wait", &fields);
    }
}

impl HoldReport {
    fn write(&self, text: &mut String) {
        let mut fields = vec![
            self.kind.to_string(),
            self.held.as_millis().to_string(),
            task(self.task),
            self.key.as_str().to_owned(),
            self.location.clone(),
            self.note.clone().unwrap_or_default(),
            self.grant.clone(),
            self.token.to_string(),
            self.lease_left.as_millis().to_string(),
            String::from(if self.suspect { "1" } else { "0" }),
        ];
        fields.extend(self.reentered.iter().cloned());
        fits(text, "hold", &fields);
    }
}

fn client_of(fields: &[String], age: Duration) -> Option<ClientReport> {
    let [
        client,
        service,
        host,
        address,
        process,
        version,
        started,
        answers,
        rest @ ..,
    ] = fields
    else {
        return None;
    };
    let rest = |at: usize| rest.get(at).cloned().unwrap_or_default();
    Some(ClientReport {
        client: client.clone(),
        service: service.clone(),
        host: host.clone(),
        address: Some(address.clone()).filter(|address| !address.is_empty()),
        process: process.parse().ok()?,
        version: version.clone(),
        started: UNIX_EPOCH.checked_add(millis(started)?)?,
        answers: answers == "1",
        holds: Vec::new(),
        waits: Vec::new(),
        held: rest(0).parse().unwrap_or_default(),
        waiting: rest(1).parse().unwrap_or_default(),
        age,
        every: millis(&rest(2)).unwrap_or_default(),
        process_identity: ProcessIdentity {
            machine: rest(3),
            began: rest(4),
        },
        kept: millis(&rest(5)).unwrap_or_default(),
    })
}

fn wait_of(fields: &[String], age: Duration) -> Option<WaitReport> {
    let [kind, waited, task, key, location, note, inside @ ..] = fields else {
        return None;
    };
    Some(WaitReport {
        key: LockKey::raw(key.as_str()),
        kind: kind_of(kind)?,
        waited: millis(waited)?.saturating_add(age),
        location: location.clone(),
        note: Some(note.clone()).filter(|note| !note.is_empty()),
        task: task.parse().ok(),
        inside: inside.to_vec(),
    })
}

fn hold_of(fields: &[String], age: Duration) -> Option<HoldReport> {
    let [
        kind,
        held,
        task,
        key,
        location,
        note,
        grant,
        token,
        left,
        suspect,
        reentered @ ..,
    ] = fields
    else {
        return None;
    };
    Some(HoldReport {
        key: LockKey::raw(key.as_str()),
        kind: kind_of(kind)?,
        grant: grant.clone(),
        token: token.parse().ok()?,
        held: millis(held)?.saturating_add(age),
        lease_left: millis(left)?.saturating_sub(age),
        suspect: suspect == "1",
        location: location.clone(),
        reentered: reentered.to_vec(),
        note: Some(note.clone()).filter(|note| !note.is_empty()),
        task: task.parse().ok(),
    })
}

fn kind_of(name: &str) -> Option<Kind> {
    Kind::ALL.iter().copied().find(|kind| kind.to_string() == name)
}

fn millis(text: &str) -> Option<Duration> {
    text.parse().ok().map(Duration::from_millis)
}

fn task(task: Option<u64>) -> String {
    task.map(|task| task.to_string()).unwrap_or_default()
}

fn line(text: &mut String, what: &str, fields: &[&str]) {
    text.push_str(what);
    for field in fields {
        text.push('\t');
        escape(text, field);
    }
    text.push('\n');
}

/// Adds a line, unless the text would get too long.
fn fits(text: &mut String, what: &str, fields: &[String]) {
    let before = text.len();
    let fields: Vec<_> = fields.iter().map(String::as_str).collect();
    line(text, what, &fields);
    if text.len() > MOST_BYTES {
        text.truncate(before);
    }
}

fn escape(text: &mut String, field: &str) {
    for c in field.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '\t' => text.push_str("\\t"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            c => text.push(c),
        }
    }
}

fn unescaped(field: &str) -> String {
    let mut text = String::with_capacity(field.len());
    let mut chars = field.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('t') => text.push('\t'),
                Some('n') => text.push('\n'),
                Some('r') => text.push('\r'),
                Some(c) => text.push(c),
                None => {}
            },
            c => text.push(c),
        }
    }
    text
}

/// Shortens a user's text to what is shown.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(MOST_CHARS).collect()
}

impl ProcessIdentity {
    /// The identity of this process; empty if the system does not tell.
    pub(crate) fn here() -> ProcessIdentity {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let space = std::fs::read_link("/proc/self/ns/pid").ok();
        let machine = read("/proc/sys/kernel/random/boot_id")
            .zip(space)
            .map(|(boot, space)| format!("{} {}", boot.trim(), space.display()));
        ProcessIdentity {
            machine: machine.unwrap_or_default(),
            began: stat("self").map(|(_, began)| began).unwrap_or_default(),
        }
    }
}

/// The state of a process, and when it began.
fn stat(process: &str) -> Option<(char, String)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before it may contain spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 22 of the file.
    Some((state, fields.nth(18)?.to_owned()))
}

/// The name of this machine; empty if the system does not tell.
pub(crate) fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok());
    name.or_else(|| std::env::var("COMPUTERNAME").ok())
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn report() -> ClientReport {
        ClientReport {
            client: "0192f3a4-0000-8000-8000-000000000001".to_owned(),
            service: "check\tout".to_owned(),
            host: "web-3".to_owned(),
            address: Some("10.0.3.7".to_owned()),
            process: 7,
            version: "0.1.0".to_owned(),
            started: UNIX_EPOCH + SECOND * 1_700_000_000,
            answers: true,
            holds: vec![HoldReport {
                key: LockKey::raw("order:\\42\n"),
                kind: Kind::Fair,
                grant: "0192f3a4-0000-8000-8000-000000000001:9".to_owned(),
                token: 1_763_856_000_000_000,
                held: SECOND * 41,
                lease_left: SECOND * 20,
                suspect: true,
                location: "src/pay.rs:12".to_owned(),
                reentered: vec!["src/bill.rs:7".to_owned()],
                note: Some("invoice 42".to_owned()),
                task: Some(3),
            }],
            waits: vec![WaitReport {
                key: LockKey::raw("stock"),
                kind: Kind::Mutex,
                waited: SECOND * 3,
                location: "src/pay.rs:14".to_owned(),
                note: None,
                task: None,
                inside: vec!["0192f3a4-0000-8000-8000-000000000001:9".to_owned()],
            }],
            held: 1,
            waiting: 1,
            age: Duration::ZERO,
            every: SECOND * 5,
            kept: SECOND * 60,
            process_identity: ProcessIdentity::here(),
        }
    }

    #[test]
    fn report_reads_as_it_was_written() {
        let report = report();
        assert_eq!(
            ClientReport::read(report.write().as_bytes(), Duration::ZERO),
            Some(report)
        );
    }

    #[test]
    fn report_counts_on_by_its_age() {
        let read = ClientReport::read(report().write().as_bytes(), SECOND * 5).unwrap();
        assert_eq!(
            (read.age, read.holds[0].held, read.holds[0].lease_left),
            (SECOND * 5, SECOND * 46, SECOND * 15)
        );
        assert_eq!(read.waits[0].waited, SECOND * 8);
        assert!(!read.is_overdue());
    }

    #[test]
    fn lines_of_later_versions_are_passed_over_and_other_texts_are_no_reports() {
        let text = format!("{}\nmood\tgood\n", report().write());
        assert!(ClientReport::read(text.as_bytes(), Duration::ZERO).is_some());
        for other in [
            "",
            "hello",
            "dlock 1\nhold\tfair",
            "dlock 1\nclient\ta",
            "dlock 2\n",
        ] {
            assert_eq!(
                ClientReport::read(other.as_bytes(), Duration::ZERO),
                None,
                "{other}"
            );
        }
        assert_eq!(ClientReport::read(b"\xff\xfe", Duration::ZERO), None);
    }

    #[test]
    fn report_is_never_longer_than_the_limit() {
        let mut report = report();
        report.holds = vec![report.holds[0].clone(); 1000];
        let text = report.write();
        assert!(text.len() <= MOST_BYTES);
        let read = ClientReport::read(text.as_bytes(), Duration::ZERO).unwrap();
        assert!(read.holds.len() > 50 && read.waits.len() == 1);
    }

    #[test]
    fn many_waits_leave_room_for_the_holds_and_many_holds_for_the_waits() {
        let mut report = report();
        let numbered = |number: u64| WaitReport {
            task: Some(number),
            ..report.waits[0].clone()
        };
        report.waits = (0..1000).map(numbered).collect();
        report.holds = vec![report.holds[0].clone(); 1000];
        let text = report.write();
        assert!(text.len() <= MOST_BYTES);
        let read = ClientReport::read(text.as_bytes(), Duration::ZERO).unwrap();
        assert!(read.holds.len() >= PUBLISHED && read.waits.len() > PUBLISHED);
        // The oldest ones, in their order.
        assert_eq!(read.waits[..], report.waits[..read.waits.len()]);
    }

    #[test]
    fn process_that_is_hidden_is_not_said_to_be_gone() {
        let report = report();
        let init = || Some(('S', "1".to_owned()));
        let only_init = |process: &str| (process == "1").then(init).flatten();
        assert_eq!(report.state_by(only_init), ProcessState::Gone);
        assert_eq!(report.state_by(|_| None), ProcessState::Elsewhere);
        let other = |_: &str| Some(('S', format!("{}9", report.process_identity.began)));
        assert_eq!(report.state_by(other), ProcessState::Gone);
        for (state, is) in [
            ('R', ProcessState::Runs),
            ('T', ProcessState::Stopped),
            ('Z', ProcessState::Gone),
        ] {
            let found = report.state_by(|_| Some((state, report.process_identity.began.clone())));
            assert_eq!(found, is, "{state}");
        }
    }
}
