//! dlock beside the locks that people use now: measured by `benches/peers/run`, shown in `BENCHMARKS.md`.
//!
//! | module | for |
//! |---|---|
//! | [`workload`] | what is measured |
//! | [`peer`] | who takes part, and how each is started |
//! | [`measure`] | the rounds, on a server of their own |
//! | [`results`] | what was measured, as it is committed |
//! | [`report`], [`chart`] | the page and its pictures, made from that alone |

pub mod chart;
pub mod measure;
pub mod peer;
mod process;
pub mod report;
pub mod results;
mod server;
pub mod workload;
