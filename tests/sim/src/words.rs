//! The wording of traces.

use std::time::Duration;

use dlock::LockKey;
use dlock::store::counter::CounterReply;
use dlock::store::member::Vote;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Kind, ReleaseReply, Renewal, StoreError,
};

use dlock::sim::Entry;

use crate::check::{self, Checks};
use crate::plan::{Call, Change, End, Habit, Lock, Millis, Trouble, Way};
use crate::store::{AT_FIRST, BEGINS, Reply, Request};

/// Durations as people write them: `35 ms`, `1.2 s`.
pub(crate) fn time(time: Duration) -> String {
    match time.as_millis() {
        0 if !time.is_zero() => "less than 1 ms".to_owned(),
        ms @ 0..1_000 => format!("{ms} ms"),
        _ => format!("{} s", time.as_millis() as f64 / 1_000.0),
    }
}

pub(crate) fn millis(ms: Millis) -> String {
    time(Duration::from_millis(ms))
}

/// A fencing token, counted from the first that a store could have given.
pub(crate) fn token(token: u64) -> String {
    let first = BEGINS + Duration::from_millis(AT_FIRST);
    let first = u64::try_from(first.as_micros()).unwrap_or_default();
    token.checked_sub(first).unwrap_or(token).to_string()
}

/// The same text, with fencing tokens as [`token`] has them.
pub(crate) fn with_short_tokens(text: &str) -> String {
    let mut short = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|letter: char| letter.is_ascii_digit()) {
        let (before, from) = rest.split_at(at);
        let end = from.find(|letter: char| !letter.is_ascii_digit());
        let (number, after) = from.split_at(end.unwrap_or(from.len()));
        short.push_str(before);
        match number.parse() {
            // Others keep their zeros.
            Ok(long) if number.len() > 12 => short.push_str(&token(long)),
            _ => short.push_str(number),
        }
        rest = after;
    }
    short + rest
}

pub(crate) fn kind(kind: Kind) -> String {
    match kind {
        Kind::Mutex | Kind::Latch => kind.to_string(),
        Kind::Permit | Kind::Unowned => format!("{kind}s").replace("unowneds", "unowned permits"),
        _ => format!("{kind} lock"),
    }
}

fn keys<'a>(all: impl Iterator<Item = &'a LockKey>) -> String {
    all.map(LockKey::as_str).collect::<Vec<_>>().join(", ")
}

fn busy_for(remaining: Option<Duration>) -> String {
    remaining.map_or_else(
        || "busy".to_owned(),
        |remaining| format!("busy for another {}", time(remaining)),
    )
}

/// How a user wants a lock.
pub(crate) fn wish(task: &Lock) -> String {
    let mut how = Vec::new();
    if !task.also.is_empty() {
        let also: Vec<_> = task.also.iter().map(|key| format!("k{key}")).collect();
        how.push(format!("together with {}", also.join(", ")));
    }
    if task.more_permits > 0 {
        how.push(format!("{} of them", task.more_permits + 1));
    }
    match task.call {
        Call::Acquire => {}
        Call::Run => how.push("by `run`".to_owned()),
        Call::Attribute => how.push("by a function with the attribute".to_owned()),
        Call::AttributeRunsOn => {
            how.push("by a function with the attribute and `on_lost = ignore`".to_owned())
        }
    }
    let mut with = |name: &str, ms: Option<Millis>| {
        if let Some(ms) = ms {
            how.push(format!("{name} {}", millis(ms)));
        }
    };
    with("waits up to", task.wait);
    with("fixed lease", task.fixed_lease);
    with("min_hold", task.min_hold);
    with("max_hold", task.max_hold);
    if task.once {
        how.push("asks once".to_owned());
    }
    if let Some(most) = task.max_waiters {
        how.push(format!("max_waiters {most}"));
    }
    if task.preferred {
        how.push("prefer_writers".to_owned());
    }
    how.extend(task.habit.map(|habit| match habit {
        Habit::DropsAfterPolls(polls) => format!("will drop its future after {polls} polls"),
        Habit::DropsAfter(ms) => format!("will drop its future after {}", millis(ms)),
        Habit::PollsNot { after, lasts } => {
            format!("will not poll for {} after {after} polls", millis(lasts))
        }
        Habit::Races => "asks twice side by side".to_owned(),
    }));
    how.iter().map(|how| format!(", {how}")).collect()
}

/// How a user leaves a lock.
pub(crate) fn end(key: &LockKey, end: End) -> String {
    match end {
        End::Release => format!("releases {key}"),
        End::ReleaseUnawaited => format!("releases {key}, and drops that future after one poll"),
        End::Drop => format!("drops its guard of {key}"),
        End::Panic => format!("panics inside {key}"),
        End::ReleaseTwice => format!("releases {key}, and then a second guard of it"),
        End::Elsewhere(after) => {
            format!(
                "moves its guard of {key} to another task, which drops it after {}",
                millis(after)
            )
        }
        End::GivenAway => {
            format!("lets another thread drop its guard of {key}, and acquires it again in that frame")
        }
        End::Downgrade => format!("turns its write lock of {key} into a read lock"),
    }
}

/// How the number of permits of a semaphore is changed.
pub(crate) fn change(key: &LockKey, change: Change) -> String {
    match change {
        Change::Set(total) => format!("sets the permits of {key} to {total}"),
        Change::Add(permits) => format!("adds {permits} permits to {key}"),
        Change::Remove(permits) => format!("takes {permits} permits away from {key}"),
    }
}

impl Request {
    /// As a process sends it.
    pub(crate) fn told(&self, checks: &Checks) -> String {
        let about = self.about(checks);
        match self {
            Request::Acquire(request, _) => {
                let AcquireRequest { kind, lease, .. } = request;
                format!("asks for {about}: {}, lease {}", self::kind(*kind), time(*lease))
            }
            Request::AcquireAll(_) => format!("asks for all of {about}"),
            Request::Release(request) => match request.keep_for {
                Duration::ZERO => format!("releases {about}"),
                keep_for => format!("releases {about}, to be kept for another {}", time(keep_for)),
            },
            Request::Renew(_) => format!("renews {about}"),
            Request::Inspect(_) => format!("asks for the holders of {about}"),
            Request::List(_) => format!("asks for all locks of {about}"),
            Request::ForceRelease(_) => format!("forces the release of {about}"),
            Request::Count(request) => format!("sends {:?} for {about}", request.step),
            Request::RaiseFence(_, _, _, at_least) => {
                format!("raises the fence of {about} to {}", token(*at_least))
            }
            Request::Record(request) => format!("{} {about}", request.verb()),
        }
    }

    /// What it is about: keys, and the grants by which the store knows their holders.
    pub(crate) fn about(&self, checks: &Checks) -> String {
        let grant = |key: &LockKey, id: GrantId| format!("{key} ({})", checks.name_of(id));
        match self {
            Request::Acquire(request, _) => grant(&request.key, request.grant),
            Request::AcquireAll(all) => keys(all.iter().map(|request| &request.key)),
            Request::Release(request) => grant(&request.key, request.grant),
            Request::Renew(all) => {
                let each = all.iter().map(|request| grant(&request.key, request.grant));
                each.collect::<Vec<_>>().join(", ")
            }
            Request::Inspect(key) | Request::ForceRelease(key) => key.to_string(),
            Request::List(prefix) => format!("{prefix}*"),
            Request::Count(request) => request.key.to_string(),
            Request::RaiseFence(_, key, id, _) => grant(key, *id),
            Request::Record(request) => request.about(checks),
        }
    }
}

/// What a store does with a request; who holds the key of an acquire then.
pub(crate) fn carried_out(
    request: &Request,
    result: &Result<Reply, StoreError>,
    holders: &[Entry],
    checks: &Checks,
) -> String {
    let about = request.about(checks);
    match result {
        Ok(reply) => match outcome(reply, &about) {
            Outcome::Granted(tokens) => format!("grants {about}, {tokens}"),
            Outcome::Busy(why) if holders.is_empty() => format!("does not grant {about}: {why}"),
            Outcome::Busy(why) => {
                let names: Vec<_> = holders.iter().map(|entry| checks.name_of(entry.grant)).collect();
                format!("does not grant {about}: {why}, by {}", names.join(", "))
            }
            Outcome::Other(what) => what,
        },
        Err(error) => format!("refuses {about}: {error}"),
    }
}

/// What the line of a reply begins with that a story leaves out: the store's own line has said it.
pub(crate) const AS_EXPECTED: &str = "learns: ";

/// What a process learns from a reply.
pub(crate) fn learned(about: &str, reply: &Reply) -> String {
    match outcome(reply, about) {
        Outcome::Granted(tokens) => format!("learns that it has {about}, {tokens}"),
        Outcome::Busy(why) => format!("learns that it does not get {about}: {why}"),
        Outcome::Other(what) => format!("{AS_EXPECTED}{what}"),
    }
}

/// What a reply says.
enum Outcome {
    Granted(String),
    Busy(String),
    Other(String),
}

fn outcome(reply: &Reply, about: &str) -> Outcome {
    let tokens = |first: u64, last: u64| match first == last {
        true => format!("token {}", token(first)),
        false => format!("tokens {} to {}", token(first), token(last)),
    };
    let other = match reply {
        Reply::Acquire(_, vote) => match vote {
            Vote::Cast(AcquireReply::Acquired(granted)) => {
                let tokens = tokens(granted.first_token, granted.last_token);
                return Outcome::Granted(match granted.behind.len() {
                    0 => tokens,
                    behind => format!("{tokens}, for itself and {behind} behind it"),
                });
            }
            Vote::Cast(AcquireReply::Busy(busy)) => return Outcome::Busy(busy_for(busy.remaining)),
            Vote::Cast(AcquireReply::TooFewPermits) => {
                return Outcome::Busy("the semaphore has fewer permits in all".to_owned());
            }
            Vote::Abstained { votes_in } => {
                return Outcome::Busy(format!("it votes in {} again", time(*votes_in)));
            }
            other => format!("{other:?}"),
        },
        Reply::AcquireAll(keys, reply) => match reply {
            AcquireAllReply::Acquired { grants } => {
                let each = grants
                    .iter()
                    .map(|granted| tokens(granted.first_token, granted.last_token));
                return Outcome::Granted(each.collect::<Vec<_>>().join(", "));
            }
            AcquireAllReply::Busy { at, remaining } => {
                let key = keys.get(*at).map_or("?", LockKey::as_str);
                return Outcome::Busy(format!("{key} is {}", busy_for(*remaining)));
            }
            AcquireAllReply::Failed { at, error } => {
                let key = keys.get(*at).map_or("?", LockKey::as_str);
                return Outcome::Busy(format!("{key}: {error}"));
            }
            other => format!("{other:?}"),
        },
        Reply::Release(reply) => match reply {
            ReleaseReply::Released { receivers: Some(1..) } => {
                format!("{about} is released, and waiters are told")
            }
            ReleaseReply::Released { .. } => format!("{about} is released"),
            ReleaseReply::NotHeld { repeated: true } => format!("{about} was released before"),
            ReleaseReply::NotHeld { .. } => format!("{about} is not held: there is nothing to release"),
            other => format!("{other:?}"),
        },
        Reply::Renew(all) => {
            let is_well = |renewal: &Result<Renewal, _>| matches!(renewal, Ok(Renewal::Renewed));
            match all.iter().position(|renewal| !is_well(renewal)) {
                None => format!("{about} renewed"),
                Some(_) if all.len() == 1 => format!("{about} is not renewed: it is not held any more"),
                Some(_) => {
                    let each = all
                        .iter()
                        .map(|renewal| if is_well(renewal) { "renewed" } else { "gone" });
                    format!("{about}: {}", each.collect::<Vec<_>>().join(", "))
                }
            }
        }
        Reply::Inspect(holders) => match holders.len() {
            0 => format!("{about} is free"),
            1 => format!("{about} has a holder"),
            many => format!("{about} has {many} holders"),
        },
        Reply::List(all) => format!("{about} are {} locks", all.len()),
        Reply::ForceRelease(true) => format!("{about} is taken from its holder"),
        Reply::ForceRelease(false) => format!("{about} was free"),
        Reply::Count(reply) => match reply {
            CounterReply::Permits { free, held } => {
                let free = free.map_or_else(|| "an unknown number of".to_owned(), |free| free.to_string());
                format!("{about} has {free} free permits, and {held} are held")
            }
            CounterReply::Done(true) => format!("{about} is changed"),
            CounterReply::Done(false) => format!("{about} stays as it is"),
            CounterReply::Number(number) => format!("{about} is at {number}"),
            CounterReply::TooFew { is } => format!("{about} stays as it is: it is at {is}"),
            other => format!("{about}: {other:?}"),
        },
        Reply::RaiseFence(true) => format!("the fence of {about} is raised"),
        Reply::Record(reply) => format!("{about}: {}", reply.told()),
        Reply::RaiseFence(false) => format!("the fence of {about} is not raised: it is not held"),
    };
    Outcome::Other(other)
}

/// What goes wrong from now on, for so long.
pub(crate) fn trouble(what: Trouble, lasts: Millis) -> String {
    let lasts = millis(lasts);
    let all = |it: Option<usize>, name: &str, all: &str| {
        it.map_or_else(|| all.to_owned(), |number| format!("{name}{number}"))
    };
    match what {
        Trouble::Storm {
            lost,
            late,
            doubled,
            broken,
            by,
        } => {
            let late_by = format!("late by up to {}", millis(by));
            let of = [
                (lost, "lost"),
                (late, &late_by),
                (doubled, "doubled"),
                (broken, "the last of their connection"),
            ];
            let of = of.iter().filter(|(chance, _)| *chance > 0);
            let of: Vec<_> = of.map(|(chance, what)| format!("{chance} {what}")).collect();
            match of.is_empty() {
                true => format!("a storm without wind for {lasts}"),
                false => format!("a storm for {lasts}: of 1000 messages {}", of.join(", ")),
            }
        }
        Trouble::Cut { process, store, way } => format!(
            "the network between {} and {} is cut for {lasts}{}",
            all(process, "p", "all processes"),
            all(store, "store ", "all stores"),
            match way {
                Way::Both => "",
                Way::ToStore => ", towards the store",
                Way::ToProcess => ", away from the store",
            }
        ),
        Trouble::StoreStops { store, loses_data } => format!(
            "store {store} is down for {lasts}{}",
            if loses_data { ", and loses its data" } else { "" }
        ),
        Trouble::StoreLosesData { store } => format!("store {store} is emptied"),
        Trouble::StoreRefuses { store, full: true } => {
            format!("store {store} is full for {lasts}, and grants nothing")
        }
        Trouble::StoreRefuses { store, full: false } => {
            format!("store {store} refuses all changes for {lasts}")
        }
        Trouble::StoreIsSlow { store, each } => format!(
            "store {store} is slow for {lasts}: {} for each request",
            millis(each)
        ),
        Trouble::StoreClockSteps { store, by } => {
            let step = millis(by.unsigned_abs());
            let way = if by < 0 { "back" } else { "forward" };
            format!("the clock of store {store} steps {way} by {step}")
        }
        Trouble::StoreFailsOver { store, lag: 0 } => {
            format!("store {store} is down for {lasts}, and a replica with all its data takes over")
        }
        Trouble::StoreFailsOver { store, lag } => format!(
            "store {store} is down for {lasts}, and a replica takes over that knows nothing of the last {}",
            millis(lag)
        ),
        Trouble::ForcedOpen { key } => format!("an operator forces k{key} open"),
        Trouble::ProcessStops { process } => {
            format!("p{process} stands still for {lasts}, as in a long pause")
        }
        Trouble::ProcessSuspended { process } => {
            format!("the machine of p{process} is suspended for {lasts}")
        }
        Trouble::ProcessCrashes { process } => format!("p{process} crashes, and is back after {lasts}"),
        Trouble::ProcessEnds { process } => format!("p{process} is shut down, and is back after {lasts}"),
    }
}

/// The end of what went wrong.
pub(crate) fn relief(what: Trouble) -> String {
    match what {
        Trouble::Storm { .. } => "the storm is over".to_owned(),
        Trouble::Cut { .. } => "the network is whole again".to_owned(),
        Trouble::StoreStops { store, .. } | Trouble::StoreFailsOver { store, .. } => {
            format!("store {store} is up again")
        }
        Trouble::StoreLosesData { .. } | Trouble::StoreClockSteps { .. } | Trouble::ForcedOpen { .. } => {
            "that is over".to_owned()
        }
        Trouble::StoreIsSlow { store, .. } => format!("store {store} is fast again"),
        Trouble::StoreRefuses { store, .. } => format!("store {store} is well again"),
        Trouble::ProcessStops { process } => format!("p{process} may go on"),
        Trouble::ProcessSuspended { process } => format!("the machine of p{process} wakes up"),
        Trouble::ProcessCrashes { process } | Trouble::ProcessEnds { process } => {
            format!("p{process} is started again")
        }
    }
}

/// The harm to a user if this invariant is violated.
pub(crate) fn suffered(of: &str) -> &'static str {
    match of {
        check::EXCLUSION => {
            "two holders work on the same thing at the same time, and each believes to be alone"
        }
        check::LOSS => "a holder goes on as if it had the lock, while the store may give that to others",
        check::FENCING => "a resource takes the write of an old holder, or refuses that of the present one",
        check::WAITING => {
            "a task waits for a lock that it could have, or is told something about it that is wrong"
        }
        check::CLEANUP => "something stays behind: a key is busy although nobody holds it, or memory grows",
        check::HOLD_TIMES => "a lock is given on before its min_hold is over, or kept beyond its max_hold",
        check::ORDER => "a task is overtaken by others, again and again if it has bad luck",
        check::record::RECORDS => "work is done twice, or a client is told of a result that is not its own",
        check::BUDGET => {
            "the store is loaded by requests that bring nothing, and has less time for those that do"
        }
        check::PANIC => "the task that called ends with a panic",
        _ => "",
    }
}
