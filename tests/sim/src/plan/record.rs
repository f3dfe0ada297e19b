//! Users of records: direct ones, and those of a service behind an idempotency layer.

use serde::{Deserialize, Serialize};

use super::{Habit, Millis, is_default};

/// What all users of records have in common.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Records {
    /// Of a claim.
    pub(crate) lease: Millis,
    pub(crate) retention: Millis,
    /// Orphans are not taken over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) leaves_orphans: bool,
    /// For how long a request waits for an equal one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait: Option<Millis>,
    /// After a 502 or a panic the next request with the key is carried out.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) retries_ambiguous: bool,
    /// Handlers are dropped with their clients.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) cancels: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<LockAt>,
    /// Between two slots of time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) period: Millis,
}

/// Claims a record, works, and stores the result.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) key: u32,
    /// What is asked: another one under the same key is refused.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) variant: u8,
    /// How often it asks again where it was not served.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) retries: u32,
    /// For how long it waits for an equal one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) habit: Option<Habit>,
    pub(crate) work: Millis,
    /// The claim is not extended while it works.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) careless: bool,
    pub(crate) end: RecordEnd,
}

/// How a user leaves its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RecordEnd {
    Complete,
    /// Stores a second result after the first.
    CompleteTwice,
    /// Stores the result when the claim has long run out.
    CompleteLate,
    /// Does not work, and releases the claim.
    Release,
    /// Says that the outcome is unknown.
    Abandon,
    /// Leaves without a release.
    Leave,
    Panic,
}

/// Does work that is done once, by `LockClient::once`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Once {
    pub(crate) key: u32,
    /// Once in each slot of time, and for which slots it asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slots: Option<Slots>,
    /// How often it asks again where it has no answer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) retries: u32,
    /// For how long it waits for the result of another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) habit: Option<Habit>,
    pub(crate) work: Millis,
    pub(crate) end: OnceEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Slots {
    /// So many, by the loop of the library.
    Next(u32),
    /// The nearest one.
    Nearest,
    /// The slot that begins this many periods from now.
    Named(i64),
}

/// How the work ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnceEnd {
    Returns,
    Fails,
    Panics,
}

/// Sends a request with an idempotency key to the service of its process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ask {
    pub(crate) key: u32,
    /// What it locks, where the service has locks.
    pub(crate) account: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) variant: u8,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) retries: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) habit: Option<Habit>,
    /// For how long the handler works.
    pub(crate) work: Millis,
    /// How much longer the response is than it has to be, in bytes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) size: usize,
    pub(crate) answer: Answer,
}

/// How a handler ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    Done,
    /// With a body that comes in pieces.
    Streams,
    /// By a 409 of its own, which is a result.
    Refuses,
    /// By a 502: how far it got is unknown.
    Fails,
    Panics,
    /// By an error of the service.
    Breaks,
    /// It says that it has not begun.
    NotStarted,
}

/// Where the lock layer of a service stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LockAt {
    /// Around the idempotency layer.
    Outside,
    Inside,
}
