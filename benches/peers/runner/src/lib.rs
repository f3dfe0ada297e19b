//! dlock beside the locks that people use now: measured by `benches/peers/run`, shown in `BENCHMARKS.md`.
//!
//! | module | for |
//! |---|---|
//! | [`workload`] | what is measured |
//! | [`peer`] | the libraries, and how each is started |
//! | [`entrant`] | the libraries that take part in each workload |
//! | [`measure`] | the rounds, on a server of their own |
//! | [`results`] | what was measured, as it is committed |
//! | [`report`], [`chart`] | the page and its pictures, made from that alone |

pub mod chart;
pub mod entrant;
mod figures;
pub mod measure;
pub mod peer;
mod process;
pub mod report;
pub mod results;
mod server;
pub mod workload;
