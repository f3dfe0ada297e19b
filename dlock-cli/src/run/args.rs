//! The arguments of `dlock run`, and their checks.

use std::ffi::OsString;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use dlock::store::Kind;
use dlock::{Lease, LockKey, LockKind, LockOptions};

use super::once_args::{OnceArgs, OncePlan};
use crate::look::clean;

/// The most permits that a semaphore has, as in Redisson.
const MOST_PERMITS: u32 = i32::MAX.unsigned_abs();

/// The end of the help.
const MORE: &str = "\
Exit status:
  that of the command; 128 + N when signal N ended it
    2  the arguments make no sense
   75  the lock could not be acquired (see --conflict-exit-code), its store could not be reached or refused,
       or the slot is too far ahead, or the store's clock went back (the message says which)
   76  the lock was lost, and the command was ended
   77  the command failed or crashed before, and is not tried again (--on-failure, --attempts, --on-crash)
  126  the command could not be started
  127  the command was not found

In the command's environment:
  DLOCK_FENCING_TOKEN  grows with each acquisition; send it along with what is written, and have older ones refused
  DLOCK_KEY            the name of the lock
                       (of several locks both have a line for each, in the order in which they were named)
  DLOCK_KIND           the kind of lock; once with --once, --every and --slot, and then also:
  DLOCK_ATTEMPT        1; one more for each attempt before that ended without success
  DLOCK_SLOT           with --every and --slot: when the slot begins, as in 2026-11-22T03:05:00Z
  DLOCK_SKIPPED        with --every and --slot: how many slots were left out before this one (0 without --every)

Examples:
  dlock run nightly-report -- ./report.sh
      one at a time in the whole fleet, one after the other
  dlock run --every 1min minutely -- ./poll.sh
      for cron on every machine: once a minute, on one of them
  dlock run --once import-2026-11-22 -- ./import.sh
      once in the whole fleet: not again after it has succeeded
  dlock run --wait 30s --fixed-lease 10m migrate -- sh -c './migrate && ./check'
      waits for half a minute, and works for ten minutes at the most
  dlock run account:7 account:3 -- ./transfer.sh 7 3
      takes both, or waits with neither";

/// Runs a command under a lock: flock(1) for a fleet.
///
/// The lock is renewed while the command runs, and released when it has ended. Signals are passed on to the command.
/// When the lock is lost the command is ended: with SIGTERM, and with SIGKILL before the expired lease lets another
/// client acquire the lock. See docs/run.md.
#[derive(Debug, Args)]
#[command(after_long_help = MORE, after_help = "More, with exit status and examples: dlock run --help")]
pub(crate) struct RunArgs {
    /// Wait for the lock at most this long, as in 30s; without it, as long as it takes.
    #[arg(long, short, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "try")]
    wait: Option<Duration>,
    /// Ask once, and give up if another client holds the lock.
    #[arg(long, short = 'n')]
    r#try: bool,
    /// The lease of the lock, renewed every third of it for as long as the command runs [default: the URL's, 30s].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    lease: Option<Duration>,
    /// Hold the lock for this long and no longer: it is not renewed, and the command is ended when it expires.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "lease")]
    fixed_lease: Option<Duration>,
    /// lock, fair (in order of arrival), read (together with other readers), write (without any reader), fenced (with
    /// the tokens of Redisson's fenced lock), semaphore=N (one of N permits), multi (another word for lock, for several
    /// keys).
    #[arg(long, value_name = "KIND", default_value = "lock")]
    kind: Wanted,
    /// With --kind write: new readers yield while this waits, so that it does not starve where reads overlap without
    /// end.
    #[arg(long)]
    prefer_writers: bool,
    /// Keep the lock held for at least this long from its acquisition, however soon the command ends. With --try, and
    /// longer than the clocks of the machines differ, a scheduled job then runs on the first of them only; a machine
    /// that waits for the lock runs the job again afterwards. --every needs no such time.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    min_hold: Option<Duration>,
    /// The time between SIGTERM and SIGKILL when the lock is lost. It is part of the lease: a command whose lock cannot
    /// be renewed gets SIGTERM before the lease ends, so that it is gone when other clients can acquire the lock. It is
    /// at most half of the lease; with --fixed-lease, less than the lease [default: a sixth of the lease, at most 5s].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    grace: Option<Duration>,
    /// What happens to the command when the lock is lost.
    #[arg(long, value_enum, value_name = "WHAT", default_value = "end")]
    on_lost: OnLost,
    /// The exit status when another client holds the lock [default: 75]; with --once, --every and --slot also when the
    /// command was run before [default: 0 then].
    #[arg(long, short = 'E', value_name = "N")]
    conflict_exit_code: Option<u8>,
    /// Print nothing but errors in the arguments, and why the command could not be started.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    once: OnceArgs,
    /// The name of the lock, or of the work to run once. Of several locks, all are acquired or none.
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,
    /// The command and its arguments, after `--`.
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What happens to the command when its lock is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum OnLost {
    /// It is ended, with everything that it has started in its process group.
    End,
    /// It continues: the resource that it writes to checks DLOCK_FENCING_TOKEN.
    Ignore,
}

/// The kind of lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// A lock of this kind, or several.
    Lock(LockKind),
    /// One of this many permits, unless the total is set already.
    Permit(u32),
}

impl Wanted {
    pub(super) fn kind(self) -> Kind {
        match self {
            Wanted::Lock(kind) => kind.into(),
            Wanted::Permit(_) => Kind::Permit,
        }
    }
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        if text == "multi" {
            return Ok(Wanted::Lock(LockKind::Mutex));
        }
        let mut kinds = LockKind::ALL.iter().copied();
        if let Some(kind) = kinds.find(|kind| kind.to_string() == text) {
            return Ok(Wanted::Lock(kind));
        }
        match text.strip_prefix("semaphore=").map(str::parse) {
            Some(Ok(0)) => Err("a semaphore has one permit at least, as in semaphore=3".to_owned()),
            Some(Ok(permits @ 1..=MOST_PERMITS)) => Ok(Wanted::Permit(permits)),
            Some(_) => Err(format!("in semaphore=N, N is a number from 1 to {MOST_PERMITS}")),
            None => {
                let kinds: Vec<_> = LockKind::ALL.iter().map(LockKind::to_string).collect();
                let kinds = kinds.join(", ");
                Err(format!("it is one of {kinds}, semaphore=N, multi"))
            }
        }
    }
}

/// The checked arguments.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// In the given order, each once.
    pub(super) keys: Vec<LockKey>,
    pub(super) kind: Wanted,
    pub(super) prefer_writers: bool,
    /// Whether to ask once, without waiting.
    pub(super) tries: bool,
    /// The work to run once, instead of a lock.
    pub(super) once: Option<OncePlan>,
    pub(super) options: LockOptions,
    pub(super) grace: Option<Duration>,
    pub(super) on_lost: OnLost,
    pub(super) conflict: Option<u8>,
    pub(super) quiet: bool,
    pub(super) command: Vec<OsString>,
}

impl RunArgs {
    pub(super) fn plan(self) -> Result<Plan, String> {
        self.check()?;
        let mut keys: Vec<LockKey> = Vec::new();
        for key in self.keys {
            // A command line is taken literally, including braces.
            let key = LockKey::raw(key);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let mut options = LockOptions::new();
        options.lease = match self.fixed_lease {
            Some(lease) => Some(Lease::Fixed(lease)),
            None => self.lease.map(Lease::Renewed),
        };
        options.min_hold = self.min_hold;
        options.wait = self.wait.filter(|wait| !wait.is_zero());
        let once = self.once.plan(&keys)?;
        Ok(Plan {
            keys,
            kind: self.kind,
            prefer_writers: self.prefer_writers,
            tries: self.r#try || self.wait == Some(Duration::ZERO),
            once,
            options,
            grace: self.grace,
            on_lost: self.on_lost,
            conflict: self.conflict_exit_code,
            quiet: self.quiet,
            command: self.command,
        })
    }

    /// Refuses options that would have no effect.
    fn check(&self) -> Result<(), String> {
        if self.prefer_writers && self.kind != Wanted::Lock(LockKind::Write) {
            return Err(
                "--prefer-writers goes with --kind write: readers yield to a waiting writer".to_owned(),
            );
        }
        if self.grace.is_some() && self.on_lost == OnLost::Ignore {
            return Err("--grace has no effect with --on-lost ignore: the command is not ended".to_owned());
        }
        Ok(())
    }
}

impl Plan {
    /// The one key of a semaphore.
    pub(super) fn only_key(&self) -> Result<&LockKey, String> {
        match &self.keys[..] {
            [only] => Ok(only),
            _ => Err("cannot acquire permits of several semaphores atomically: name one key".to_owned()),
        }
    }

    /// The locks, for messages.
    pub(super) fn locks(&self) -> String {
        let names: Vec<_> = self
            .keys
            .iter()
            .map(|key| format!("\"{}\"", clean(key.as_str())))
            .collect();
        let noun = match (self.kind, names.len()) {
            _ if self.once.is_some() => "work",
            (Wanted::Permit(_), _) => "semaphore",
            (_, 1) => "lock",
            _ => "locks",
        };
        format!("{noun} {}", names.join(", "))
    }

    /// Returns a key that the outer `dlock run` holds, so that this run would wait for it without end. The outer run has
    /// named its keys and their kind to its command: DLOCK_KEY and DLOCK_KIND.
    pub(super) fn waits_for_itself(&self, outer_keys: &str, outer_kind: &str) -> Option<&LockKey> {
        let is_bounded = self.tries || self.options.wait.is_some();
        let is_apart = match (self.kind.kind(), outer_kind) {
            _ if self.once.is_some() => outer_kind != "once",
            (Kind::Permit, _) | (Kind::Read, "read") => true,
            (_, outer) => ["permit", "once"].contains(&outer),
        };
        let has = |key: &&LockKey| {
            let key = key.to_string();
            outer_keys.lines().any(|outer| outer == key)
        };
        self.keys.iter().filter(|_| !is_bounded && !is_apart).find(has)
    }

    /// For the environment: a line for each lock.
    pub(super) fn lines<T: ToString>(&self, of: impl Fn(&LockKey) -> T) -> String {
        let lines: Vec<_> = self.keys.iter().map(|key| of(key).to_string()).collect();
        lines.join("\n")
    }

    /// The time between SIGTERM and SIGKILL, with a lease that is fixed or renewed; the client's is renewed. It fits into what
    /// is left of the lease, if that is known.
    pub(super) fn grace(&self, of_client: Duration, left: Option<Duration>) -> Result<Duration, String> {
        let (lease, is_fixed) = match self.options.lease {
            Some(Lease::Fixed(lease)) => (lease, true),
            lease => (lease.map_or(of_client, Lease::duration), false),
        };
        // A store may give a much shorter lease: that on ZooKeeper ends with the session.
        let lease = left.filter(|left| *left < lease / 2).unwrap_or(lease);
        let Some(grace) = self.grace else {
            return Ok((lease / 6).min(Duration::from_secs(5)));
        };
        // A renewed lease has two thirds left when its renewal is due; a later point does not indicate trouble.
        let (most, part) = match is_fixed {
            true => (lease, "less than the lease"),
            false => (lease / 2, "at most half of the lease"),
        };
        if grace < most || (!is_fixed && grace == most) {
            return Ok(grace);
        }
        let [grace, lease] = [grace, lease].map(humantime::format_duration);
        Err(format!(
            "--grace cannot be {grace}: it has to be {part}, which is {lease}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        run: RunArgs,
    }

    fn plan(args: &[&str]) -> Plan {
        let line = [&["run"], args].concat();
        Line::try_parse_from(line).unwrap().run.plan().unwrap()
    }

    #[test]
    fn what_stands_after_the_dashes_is_the_command_whatever_it_looks_like() {
        let plan = plan(&["-n", "-E", "0", "k", "--", "--try", "-x", "--", "y"]);
        assert_eq!((plan.tries, plan.conflict), (true, Some(0)));
        assert_eq!(plan.command, ["--try", "-x", "--", "y"]);
    }

    #[test]
    fn what_is_run_once_has_one_name_and_no_option_of_a_lock() {
        let parsed = |args: &[&str]| {
            let line = [&["run"], args, &["k", "--", "x"]].concat();
            Line::try_parse_from(line).map(|line| line.run.plan())
        };
        for args in [
            &["--once"][..],
            &["--every", "5min"],
            &["--slot", "2026-11-22T03:00:00+01:00"],
            &[
                "--every",
                "1h",
                "--slot",
                "@1763780400",
                "--keep",
                "3h",
                "--attempts",
                "3",
            ],
            &[
                "--once",
                "--on-failure",
                "keep",
                "--on-crash",
                "leave",
                "--lease",
                "1min",
            ],
        ] {
            let plan = parsed(args).unwrap().unwrap();
            assert!(plan.once.is_some(), "{args:?}");
            assert_eq!(plan.locks(), "work \"k\"");
        }
        for args in [
            &["--once", "--kind", "fair"][..],
            &["--every", "1h", "--min-hold", "1s"],
            &["--once", "--fixed-lease", "1h"],
            &["--slot", "tomorrow"],
            &["--every", "5"],
            &["--keep", "1h"],
            &["--attempts", "3"],
            &["--on-crash", "leave"],
            &["--once", "--attempts", "0"],
            &["--once", "--every", "1h"],
            &["--once", "--slot", "@1763780400"],
            &["--once", "--attempts", "3", "--on-failure", "keep"],
        ] {
            assert!(parsed(args).is_err(), "{args:?}");
        }
        assert!(parsed(&["--once", "other"]).unwrap().is_err());
    }

    #[test]
    fn keys_stay_in_their_order_each_once() {
        let plan = plan(&["b", "a", "b", "c{d}", "--", "x"]);
        assert_eq!(plan.lines(LockKey::to_string), "b\na\nc{d}");
        assert_eq!(plan.locks(), "locks \"b\", \"a\", \"c{d}\"");
    }

    #[test]
    fn a_semaphore_says_how_many() {
        assert_eq!("semaphore=3".parse(), Ok(Wanted::Permit(3)));
        for wrong in [
            "semaphore",
            "semaphore=",
            "semaphore=0",
            "semaphore=-1",
            "semaphore=x",
        ] {
            assert!(wrong.parse::<Wanted>().is_err(), "{wrong}");
        }
        let why = |text: &str| text.parse::<Wanted>().unwrap_err();
        assert!(why("semaphore=0").contains("one permit at least"));
        for many in ["2147483648", "4294967296", "99999999999999999999"] {
            let why = why(&format!("semaphore={many}"));
            assert!(why.contains("from 1 to 2147483647"), "{why}");
        }
        assert_eq!("semaphore=2147483647".parse(), Ok(Wanted::Permit(MOST_PERMITS)));
        let several = plan(&["--kind", "semaphore=2", "a", "b", "--", "x"]);
        assert!(several.only_key().is_err());
        assert_eq!(
            plan(&["--kind", "semaphore=2", "a", "--", "x"]).locks(),
            "semaphore \"a\""
        );
    }

    #[test]
    fn to_wait_for_no_time_is_to_try() {
        let wait = |args: &[&str]| {
            let plan = plan(&[args, &["k", "--", "x"]].concat());
            (plan.tries, plan.options.wait)
        };
        assert_eq!(wait(&["--wait", "0s"]), (true, None));
        assert_eq!(wait(&["-w", "3s"]), (false, Some(Duration::from_secs(3))));
        assert_eq!(wait(&[]), (false, None));
    }

    #[test]
    fn waits_for_itself_in_a_command_that_has_the_key() {
        let waits = |args: &[&str], keys: &str, kind: &str| {
            let plan = plan(&[args, &["--", "x"]].concat());
            plan.waits_for_itself(keys, kind).map(LockKey::to_string)
        };
        let k = || Some("k".to_owned());
        assert_eq!(waits(&["k"], "k", "lock"), k());
        assert_eq!(waits(&["a", "k"], "k\nb", "lock"), k());
        assert_eq!(waits(&["--kind", "write", "k"], "k", "read"), k());
        assert_eq!(waits(&["--once", "k"], "k", "once"), k());
        for (args, keys, kind) in [
            (&["k"][..], "", ""),
            (&["k"], "kk", "lock"),
            (&["--try", "k"], "k", "lock"),
            (&["--wait", "3s", "k"], "k", "lock"),
            (&["--kind", "read", "k"], "k", "read"),
            (&["--kind", "semaphore=2", "k"], "k", "permit"),
            (&["k"], "k", "permit"),
            (&["--once", "k"], "k", "lock"),
            (&["k"], "k", "once"),
        ] {
            assert_eq!(waits(args, keys, kind), None, "{args:?} in {keys:?}");
        }
    }

    #[test]
    fn the_grace_lies_inside_of_the_lease() {
        let grace = |args: &[&str], renewed| {
            plan(&[args, &["k", "--", "x"]].concat()).grace(Duration::from_secs(renewed), None)
        };
        let is = |seconds| Ok(Duration::from_secs(seconds));
        assert_eq!(grace(&[], 30), is(5));
        assert_eq!(grace(&[], 6), is(1));
        assert_eq!(grace(&[], 600), is(5));
        assert_eq!(grace(&["--lease", "12s"], 30), is(2));
        assert_eq!(grace(&["--fixed-lease", "12s"], 30), is(2));
        assert_eq!(grace(&["--grace", "15s"], 30), is(15));
        assert_eq!(grace(&["--grace", "0s"], 30), is(0));
        assert_eq!(grace(&["--fixed-lease", "10s", "--grace", "9s"], 3), is(9));
        for (args, says) in [
            (&["--grace", "16s"][..], "half of the lease, which is 30s"),
            (
                &["--grace", "10s", "--fixed-lease", "10s"],
                "less than the lease, which is 10s",
            ),
            (
                &["--grace", "6s", "--lease", "10s"],
                "half of the lease, which is 10s",
            ),
        ] {
            let error = grace(args, 30).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn the_grace_lies_inside_of_a_lease_that_is_shorter_than_requested() {
        let grace = |args: &[&str], left| {
            let plan = plan(&[args, &["k", "--", "x"]].concat());
            plan.grace(Duration::from_secs(30), Some(Duration::from_secs(left)))
        };
        assert_eq!(grace(&[], 29), Ok(Duration::from_secs(5)));
        assert_eq!(grace(&[], 6), Ok(Duration::from_secs(1)));
        assert_eq!(grace(&["--grace", "3s"], 6), Ok(Duration::from_secs(3)));
        let error = grace(&["--grace", "4s"], 6).unwrap_err();
        assert!(error.contains("half of the lease, which is 6s"), "{error}");
    }
}
