//! Rules of the library that a simulation can break, one at a time, to see how soon it detects the consequences.

use std::cell::Cell;

/// A rule that can be broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Its name, in kebab case.
    pub name: &'static str,
    /// What the library does as long as the rule is not broken.
    pub what: &'static str,
    /// The invariant that has to detect it, stated before the first run.
    pub found_by: &'static str,
}

const EXCLUSION: &str = "1 exclusion";
const LOSS: &str = "2 loss is told in time";
const FENCING: &str = "3 fencing tokens";
const WAITING: &str = "4 waiting";
const CLEANUP: &str = "5 cleanup";
const ORDER: &str = "6 order";
const BOUNDS: &str = "7 min_hold and max_hold";
const BUDGET: &str = "9 requests to the store";
const RECORDS: &str = "8 records";

macro_rules! rules {
    ($($rule:ident $name:literal $found_by:ident $what:literal)*) => {
        /// The rules, as the library refers to them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs, reason = "each is explained by its rule")]
        pub enum Broken {
            $($rule,)*
        }

        const ALL: &[Broken] = &[$(Broken::$rule,)*];

        /// All rules that can be broken.
        pub const RULES: &[Rule] = &[$(Rule {
            name: $name,
            what: $what,
            found_by: $found_by,
        },)*];
    };
}

rules! {
    NoSafetyMargin "no-safety-margin" LOSS
        "a lease is shortened by a safety margin on the client's side"
    AcquireDeadlineFromReply "acquire-deadline-from-reply" LOSS
        "the lease of an acquire counts from before it was sent, not from its reply"
    RenewalDeadlineFromReply "renewal-deadline-from-reply" LOSS
        "a renewed lease counts from before the renewal was sent, not from its reply"
    DeadlineNeverJudged "deadline-never-judged" LOSS
        "a hold checks its deadline by the clock whenever it is asked, and does not rely on a timer"
    RenewsAtTheLastMoment "renews-at-the-last-moment" LOSS
        "a lease is renewed long before it ends"
    RenewalRevivesLostHold "renewal-revives-lost-hold" LOSS
        "a hold that was lost stays lost, whatever a renewal brings later"
    TokenReusedAfterHandoff "token-reused-after-handoff" FENCING
        "each holder of a lock that is handed off has a fencing token of its own"
    HandoffOfSuspectGrant "handoff-of-suspect-grant" FENCING
        "a grant that the store has not confirmed is not handed off"
    UnknownAcquireNotUndone "unknown-acquire-not-undone" CLEANUP
        "an acquire whose outcome is unknown is undone by a release"
    LateAcquireKeepsGrant "late-acquire-keeps-grant" CLEANUP
        "an acquire that is dropped before its reply is undone by a release"
    ReleaseNotRepeated "release-not-repeated" CLEANUP
        "a release that has failed is repeated"
    ShutdownForgetsPartialSet "shutdown-forgets-partial-set" CLEANUP
        "a shutdown releases the locks of sets that are not complete"
    WaiterForgottenWhenHeadCancelled "waiter-forgotten-when-head-cancelled" WAITING
        "the next waiter becomes the queue head when the head is cancelled"
    NotificationLostBeforeSleep "notification-lost-before-sleep" WAITING
        "a notification that comes between the request and the sleep ends the sleep"
    NotificationToldOnce "notification-told-once" WAITING
        "subscribers of a name are notified each time that it becomes available"
    SubscriptionDroppedWithHead "subscription-dropped-with-head" WAITING
        "the subscription of the queue head is the next head's, and goes on"
    HandoffToUnpolledWaiter "handoff-to-unpolled-waiter" WAITING
        "a waiter that is not polled loses the lock that was handed to it"
    FairPositionKeptByDeadWaiter "fair-position-kept-by-dead-waiter" WAITING
        "a waiter that sends no more requests loses its queue position"
    SliceNeverEnds "slice-never-ends" ORDER
        "a lock is handed off inside a process only for the time of a slice"
    ReaderOvertakesPreferredWriter "reader-overtakes-preferred-writer" ORDER
        "a new reader waits behind a preferred writer that waits"
    YieldNeverMade "yield-never-made" ORDER
        "a process that releases a lock lets waiters of other processes go first"
    NewestServedFirst "newest-served-first" ORDER
        "the first in the queue of a fair lock is served first"
    WaiterAsksAgainAtOnce "waiter-asks-again-at-once" BUDGET
        "a waiter that finds the lock busy asks again only for a reason"
    RenewsTooOften "renews-too-often" BUDGET
        "a lease is renewed every third of it"
    MinHoldEndsEarly "min-hold-ends-early" BOUNDS
        "a lock that is released before its min_hold stays taken until then"
    MaxHoldIgnored "max-hold-ignored" BOUNDS
        "no renewal goes beyond max_hold"
    FrameCarriedIntoSpawnedTask "frame-carried-into-spawned-task" EXCLUSION
        "the frames of a task end with its poll, before the thread polls another task"
    ReleaseEndsForeignGrant "release-ends-foreign-grant" EXCLUSION
        "a release ends its own grant only"
    PermitsCountedOnce "permits-counted-once" EXCLUSION
        "a grant of several permits counts each of them"
    WriterEntersBesideReaders "writer-enters-beside-readers" EXCLUSION
        "a writer waits until the last reader has left"
    ReaderEntersBesideWriter "reader-enters-beside-writer" EXCLUSION
        "a reader waits until the writer has left"
    QuorumOfAMinority "quorum-of-a-minority" EXCLUSION
        "a quorum is more than half of the members"
    QuorumMemberVotesWithoutData "quorum-member-votes-without-data" EXCLUSION
        "a member that may have lost its data does not vote for the longest lease"
    QuorumForgetsTokens "quorum-forgets-tokens" FENCING
        "the fencing token of a quorum is written to a majority"
    RecordCompletedUnderForeignClaim "record-completed-under-foreign-claim" RECORDS
        "a record is completed by its own claim only"
    RecordReplaysOtherResult "record-replays-other-result" RECORDS
        "what is replayed is the result of that very record"
    OnceGoesOnWithoutClaim "once-goes-on-without-claim" RECORDS
        "work that is done once is dropped when its claim may have run out"
    OnceNotRenewed "once-not-renewed" RECORDS
        "the claim of work that is done once is renewed for as long as it lasts"
    SlotForgottenByRelease "slot-forgotten-by-release" RECORDS
        "a released claim of a slot leaves its record, so that no earlier slot is done again"
    EarlierSlotDone "earlier-slot-done" RECORDS
        "no slot is done after a later one was claimed"
    NoAnswerIsBusy "no-answer-is-busy" WAITING
        "a store that does not answer is not reported as a busy lock"
    ShutdownIgnoresPartialSet "shutdown-ignores-partial-set" CLEANUP
        "a shutdown knows what calls have acquired before they are complete"
    ReleaseInDoubtIsLoss "release-in-doubt-is-loss" LOSS
        "a release that finds nothing, after a copy that may have been carried out, is no loss"
    ReleasedFrameIsLost "released-frame-is-lost" WAITING
        "an acquire inside a frame whose guard is released meanwhile goes on, and reports no loss"
    ScopeCarriesAllFrames "scope-carries-all-frames" EXCLUSION
        "the scope of a guard carries the frame of that guard alone into another task"
    RenewalStretchesMinHold "renewal-stretches-min-hold" BOUNDS
        "a renewal does not stretch what a released lock is kept for"
    HandoffsNotCounted "handoffs-not-counted" FENCING
        "a lock is handed off as often as tokens are reserved for that, and no more"
    SleepsPastTheLease "sleeps-past-the-lease" WAITING
        "a waiter asks again when the lease that keeps it out is over"
    PositionForgottenWhenRefused "position-forgotten-when-refused" CLEANUP
        "a waiter that leaves gives up its queue position at the store, also after a request that was refused"
    LateReleaseIsDone "late-release-is-done" LOSS
        "a release whose reply is that nothing is held, after the lease is over, is reported as unknown"
    LeftWaiterIsServed "left-waiter-is-served" WAITING
        "a waiter that has left is not served"
    MaxWaitersIgnored "max-waiters-ignored" WAITING
        "a call behind as many waiters as it accepts fails at once"
    GivesUpAtTheFirstFailure "gives-up-at-the-first-failure" WAITING
        "a call repeats a request that fails for as long as it was told to"
    PutBackBehind "put-back-behind" ORDER
        "a waiter that is put back comes before those that came later"
    HandedOffWithinMinHold "handed-off-within-min-hold" BOUNDS
        "a lock is not handed off before its min_hold is over"
    AskedForEver "asked-for-ever" LOSS
        "a grant whose renewal was answered is renewed again"
    UnpolledWaiterBlocks "unpolled-waiter-blocks" WAITING
        "a waiter that was woken and is not polled blocks no other waiter"
}

thread_local! {
    static BROKEN: Cell<Option<Broken>> = const { Cell::new(None) };
}

/// Breaks this rule on this thread, or none.
///
/// # Panics
///
/// If there is no rule of that name.
pub fn set(name: Option<&'static str>) {
    BROKEN.set(name.map(|name| {
        let at = RULES.iter().position(|rule| rule.name == name);
        ALL[at.unwrap_or_else(|| panic!("no rule is named {name}"))]
    }));
}

/// Returns whether this rule is broken.
#[must_use]
pub fn is_broken(rule: Broken) -> bool {
    BROKEN.get() == Some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rule_is_broken_at_a_time_by_its_name() {
        for (rule, broken) in RULES.iter().zip(ALL) {
            set(Some(rule.name));
            let all = ALL.iter().filter(|rule| is_broken(**rule));
            assert_eq!(all.collect::<Vec<_>>(), [broken]);
        }
        set(None);
        assert!(!ALL.iter().any(|rule| is_broken(*rule)));
    }
}
