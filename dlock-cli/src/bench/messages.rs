//! What the processes of a measurement tell each other: one JSON object a line, orders on a worker's standard input,
//! answers on its standard output.

use serde::{Deserialize, Serialize};

use super::args::Plan;
use super::tally::Sums;
use super::workloads::Handoff;
use super::workloads::held::Holding;

/// What a worker is told.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// What to do; the first line.
    Plan(Box<Plan>),
    /// Go on from where it said that it had arrived.
    Go,
    /// Come to an end now. So does the end of its standard input.
    Stop,
}

/// What a worker tells.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// It waits for the others.
    Arrived,
    /// It is done; the last line.
    Done(Box<Outcome>),
    /// It could not be done; the last line.
    Failed(String),
}

/// What one process has measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// How long the tasks were counted, in seconds.
    pub(super) counted: f64,
    /// What each task did in that time.
    pub(super) counts: Vec<u64>,
    pub(super) sums: Sums,
    /// How long it was measured what that costs, in seconds: the same time, but for `held`.
    pub(super) seconds: f64,
    /// CPU seconds in that time.
    pub(super) cpu_s: Option<f64>,
    /// Bytes in use at its end.
    pub(super) memory: Option<u64>,
    /// For wake-ups: which client had which key from when until when.
    pub(super) handoffs: Vec<Handoff>,
    /// For `held`.
    pub(super) holding: Option<Holding>,
}
