//! dlock beside the locks that people use now: measured by `benches/peers/run`, shown in `BENCHMARKS.md`.
//!
//! | module | for |
//! |---|---|
//! | [`workload`] | what is measured |
//! | [`peer`] | the libraries, and how each is started |
//! | [`entrant`] | the libraries that take part in each workload |
//! | [`measure`] | the rounds, on a server of their own |
//! | [`curve`], [`curve_chart`] | how the rate grows with the tasks, and its picture |
//! | [`stores`] | the same on etcd, ZooKeeper and PostgreSQL |
//! | [`results`] | what was measured, as it is committed |
//! | [`report`], [`chart`] | the page and its pictures, made from that alone |

pub mod chart;
pub mod curve;
pub mod curve_chart;
mod curve_report;
pub mod entrant;
mod figures;
mod markdown;
pub mod measure;
pub mod peer;
mod process;
pub mod report;
pub mod results;
mod server;
pub mod stores;
pub mod workload;
