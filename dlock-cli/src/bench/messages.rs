//! The messages between the processes of a measurement: one JSON object a line, orders on a worker's standard input,
//! answers on its standard output.

use serde::{Deserialize, Serialize};

use super::args::Plan;
use super::tally::Sums;
use super::workloads::Handoff;
use super::workloads::held::Holding;

/// An order to a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// The plan; the first line.
    Plan(Box<Plan>),
    /// Continue from where it reported its arrival.
    Go,
    /// Stop now. The end of its standard input means the same.
    Stop,
}

/// An answer of a worker.
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

/// The results of one process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// How long the tasks were counted, in seconds.
    pub(super) counted: f64,
    /// The count of each task in that time.
    pub(super) counts: Vec<u64>,
    pub(super) sums: Sums,
    /// How long the costs were measured, in seconds: the same time, except for `held`.
    pub(super) seconds: f64,
    /// CPU seconds in that time.
    pub(super) cpu_s: Option<f64>,
    /// Bytes in use at its end.
    pub(super) memory: Option<u64>,
    /// For wake-ups: which client held which key from when until when.
    pub(super) handoffs: Vec<Handoff>,
    /// For `held`.
    pub(super) holding: Option<Holding>,
}
