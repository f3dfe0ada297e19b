//! The arguments of these commands.

use std::time::Duration;

use clap::{Args, Subcommand};
use http::Method;

/// The shortest time between two scans of a store.
const SHORTEST: Duration = Duration::from_millis(100);

/// How often to scan, as in 5s.
fn every(text: &str) -> Result<Duration, String> {
    let every = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if every < SHORTEST {
        let shortest = humantime::format_duration(SHORTEST);
        return Err(format!(
            "each refresh scans all keys of the store: {shortest} is the shortest"
        ));
    }
    Ok(every)
}

#[derive(Debug, Subcommand)]
pub(crate) enum Look {
    Show(ShowArgs),
    List(ListArgs),
    Why(WhyArgs),
    Watch(WatchArgs),
    /// End one hold, by the id of its holder as `show` and `list` print it.
    ///
    /// Ends the hold, if it still exists, and wakes the waiters. The holder is asked to check its lock; its work
    /// continues until it checks its guard, and until then only the fencing token protects what it writes. The action
    /// is first written to the audit log of the store (XADD on `dlock:audit`, after the prefix of the URL).
    ///
    /// Exit status: 0 done, 1 the hold is over, 2 failed: nothing was changed, except perhaps with E0006.
    Break(HoldArgs),
    /// Ask one holder to stop, by its id as `show` and `list` print it.
    ///
    /// The holder is notified, and keeps the lock until it releases it. The action is first written to the audit log of
    /// the store (XADD on `dlock:audit`, after the prefix of the URL).
    ///
    /// Exit status: 0 done, 1 the hold is over, 2 failed: nothing was changed, except perhaps with E0006.
    Revoke(HoldArgs),
    /// Show, or forget, the record of work that is done once, or of an HTTP request with an idempotency key.
    Record {
        /// What to do.
        #[command(subcommand)]
        command: RecordCommand,
    },
    /// End every hold of a lock, whichever clients have it: all holders of a semaphore or a read lock. Prefer `break`, which
    /// ends one specific hold.
    ///
    /// Exit status: 0 released, 1 it was free, 2 failed.
    ForceUnlock {
        /// The name of the lock.
        key: String,
    },
}

/// Show the holder of a lock: service, machine, since when, where in the code, and whether it is alive.
///
/// Then the calls that wait for it, for which the server is scanned in small steps; with --json before the holder. If that
/// fails, the standard error says so.
///
/// Exit status: 0 it is held, 1 it is free, 2 failed.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The name of the lock.
    pub(crate) key: String,
    /// One JSON object per holder, one per line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the locks that are held now, with their holders.
///
/// The server is scanned in small steps, which blocks no other client.
///
/// Exit status: 0 (also if none is held), 2 failed.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only names like this: a prefix, or a pattern in which * matches anything.
    #[arg(default_value = "")]
    pub(crate) pattern: String,
    /// Only those held for longer than this, as in 10m. Clients tell it if they publish (presence=on); of how many locks it is not
    /// known goes to the standard error.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) older_than: Option<Duration>,
    /// Only those near the end of their lease: with less than one and a half times the interval at which their client
    /// publishes, 7.5 s for leases of 30 s.
    #[arg(long)]
    pub(crate) expiring: bool,
    /// One JSON object per holder, one per line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Explain why a lock does not become available: its holder, the lock that the holder waits for, the holder of that
/// lock, and so on; names a deadlock.
///
/// Exit status: 0 it is held, 1 it is free, 2 failed, 3 the holders wait for each other.
#[derive(Debug, Args)]
pub(crate) struct WhyArgs {
    /// The name of the lock.
    pub(crate) key: String,
    /// One JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Watch the locks that are held and waited for, full-screen: waits first, then near misses, then the rest.
///
/// Ends with q or Ctrl-C, and shows the error while the store cannot be read. With --once or --json, or without a
/// terminal, it prints instead, and ends with the first error.
///
/// Exit status: 0; 2 if the store cannot be reached at first, or read while it prints; 128 + N when signal N ended it; 141
/// when the reader of what it prints is gone.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    /// Only names like this: a prefix, or a pattern in which * matches anything.
    #[arg(default_value = "")]
    pub(crate) pattern: String,
    /// How often to refresh, 100ms at the shortest: each refresh scans all keys of the store.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = every)]
    pub(crate) every: Duration,
    /// Print one snapshot, and exit.
    #[arg(long)]
    pub(crate) once: bool,
    /// One JSON object per snapshot, one per line: {"locks": [...], "waits": [...]}. Without the full screen.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A hold, and the reason for the action.
#[derive(Debug, Args)]
pub(crate) struct HoldArgs {
    /// The name of the lock.
    pub(crate) key: String,
    /// The id of the holder.
    #[arg(long, value_name = "ID")]
    pub(crate) holder: String,
    #[command(flatten)]
    pub(crate) why: InterventionArgs,
    /// One JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The reason for an action, and its operator.
#[derive(Debug, Args)]
pub(crate) struct InterventionArgs {
    /// The reason, for the audit log, and for the holder if there is one.
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
    /// The name of the operator [default: $USER, or `dlock-cli on HOST` where that is not set].
    #[arg(long, value_name = "NAME")]
    pub(crate) by: Option<String>,
    /// Do not write it to the audit log.
    #[arg(long)]
    pub(crate) no_audit: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RecordCommand {
    /// Show the state of the work: in progress, ended or not done, since which attempt, and how long that is kept.
    /// `--result` tells whether it ended in a failure.
    ///
    /// Exit status: 0 there is a record, 1 there is none, 2 failed.
    Show {
        #[command(flatten)]
        name: RecordName,
        /// Also show the result, or the response to the request: it may be meant for its caller only.
        #[arg(long)]
        result: bool,
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Forget it, so that the next request does the work again. Not while an attempt is in progress.
    ///
    /// The action is first written to the audit log of the store (XADD on `dlock:audit`, after the prefix of the URL).
    ///
    /// Exit status: 0 forgotten, 1 there is none, 2 failed, 3 an attempt is in progress: nothing was changed.
    Forget {
        #[command(flatten)]
        name: RecordName,
        #[command(flatten)]
        why: InterventionArgs,
        /// One JSON object.
        #[arg(long)]
        json: bool,
    },
}

/// The name of the record.
#[derive(Debug, Args)]
pub(crate) struct RecordName {
    /// The name of the work (`once`, `dlock run --once`); with --path the idempotency key, as the client sent it; with
    /// --raw the name of the record as it appears in logs.
    pub(crate) key: String,
    /// The path that the request was sent to, without its query, as in /orders.
    #[arg(long, value_name = "PATH", group = "place")]
    pub(crate) path: Option<String>,
    /// Instead of the path: the result of the layer's `route` for the request.
    #[arg(long, value_name = "TEXT", group = "place")]
    pub(crate) route: Option<String>,
    /// The method of the request.
    #[arg(long, value_name = "METHOD", default_value = "POST", requires = "place")]
    pub(crate) method: Method,
    /// The caller that sent it, as the layer identifies callers; without it, any caller (`caller::public()`).
    #[arg(long, value_name = "ID", requires = "place")]
    pub(crate) caller: Option<String>,
    /// The layer's `namespace`.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "",
        hide_default_value = true,
        requires = "place"
    )]
    pub(crate) namespace: String,
    /// The host to which the request was sent, if the layer is `per_host`.
    #[arg(long, value_name = "HOST", requires = "place")]
    pub(crate) host: Option<String>,
    /// KEY is the name of the record itself.
    #[arg(long, conflicts_with = "place")]
    pub(crate) raw: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_is_not_scanned_without_a_pause() {
        for refused in ["0s", "99ms"] {
            let why = every(refused).unwrap_err();
            assert!(why.contains("100ms is the shortest"), "{why}");
        }
        assert_eq!(every("100ms"), Ok(SHORTEST));
        assert!(every("soon").is_err());
    }
}
