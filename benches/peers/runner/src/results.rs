//! What was measured, as it is committed: one file for each server, one line for each measurement.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The measurements on one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// As in `Redis 7.0.15`.
    pub server: String,
    /// The day, as in `2026-01-31`.
    pub day: String,
    /// Cores of the machine, which the server, the clients and nothing else used.
    pub cores: usize,
    /// How often each was measured, in turns.
    pub rounds: u32,
    /// For how long rates were measured.
    pub seconds: f64,
    /// The libraries that were not measured, and why.
    pub left_out: Vec<LeftOut>,
    /// In the order in which they were measured.
    pub runs: Vec<Run>,
}

/// One that was not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// The library, as in [`crate::entrant::Entrant::name`].
    pub entrant: String,
    /// Of which workload, or of all.
    pub workload: Option<String>,
    /// What was missing.
    pub why: String,
}

/// One measurement. Times of waiting are from the call that acquires to its return.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The round, from 1.
    pub round: u32,
    /// As in [`crate::workload::Workload::name`].
    pub workload: String,
    /// As in [`crate::entrant::Entrant::name`].
    pub entrant: String,
    /// Acquisitions with their releases, of all tasks but a lone one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pairs_per_s: Option<f64>,
    /// Median wait, in µs. With several processes, that of the process with the longer wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99 of 100 waited no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// 999 of 1000 waited no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p999_us: Option<f64>,
    /// Of all acquisitions, those of the task with the fewest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_min: Option<f64>,
    /// Of all acquisitions, those of the task with the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_max: Option<f64>,
    /// Of all acquisitions, those of the process with the fewest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process_share_min: Option<f64>,
    /// Acquisitions and releases that failed.
    pub errors: u64,
    /// Of all processes of the one measured, while it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_cpu_s: Option<f64>,
    /// Of all processes of the one measured, at its end, in MB of 10⁶ bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rss_mb: Option<f64>,
    /// Scripts and other commands that clients sent, for locks that are held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_commands: Option<u64>,
    /// How long it was measured.
    pub seconds: f64,
    /// The library's version.
    pub version: String,
    /// What it ran on.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub runtime: String,
    /// The process that waited alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lone: Option<Lone>,
}

/// The result of the process that waited alone.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lone {
    /// Its acquisitions with their releases.
    pub pairs_per_s: f64,
    /// Half of its waits were no longer, in µs.
    pub p50_us: f64,
    /// 99 of 100 were no longer.
    pub p99_us: f64,
    /// Its acquisitions and releases that failed.
    pub errors: u64,
}

impl Results {
    /// Reads a file that [`Results::write`] has written.
    ///
    /// # Errors
    /// When it is not there, or not such a file.
    pub fn read(path: &Path) -> anyhow::Result<Results> {
        read(path)
    }

    /// Writes the file, one line for each measurement.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        fs::write(path, self.text()?).with_context(|| format!("{} cannot be written", path.display()))
    }

    fn text(&self) -> anyhow::Result<String> {
        let lines = |values: Vec<String>| match values.is_empty() {
            true => "[]".to_owned(),
            false => format!("[\n    {}\n  ]", values.join(",\n    ")),
        };
        let left_out: Result<_, _> = self.left_out.iter().map(serde_json::to_string).collect();
        let runs: Result<_, _> = self.runs.iter().map(serde_json::to_string).collect();
        Ok(format!(
            "{{\n  \"server\": {},\n  \"day\": {},\n  \"cores\": {},\n  \"rounds\": {},\n  \"seconds\": {},\n  \
             \"left_out\": {},\n  \"runs\": {}\n}}\n",
            serde_json::to_string(&self.server)?,
            serde_json::to_string(&self.day)?,
            self.cores,
            self.rounds,
            self.seconds,
            lines(left_out?),
            lines(runs?),
        ))
    }

    /// The measurements of one entrant in one workload.
    pub fn of<'a>(&'a self, workload: &'a str, entrant: &'a str) -> impl Iterator<Item = &'a Run> {
        self.runs
            .iter()
            .filter(move |run| run.workload == workload && run.entrant == entrant)
    }

    /// The median over the rounds, with the spread; `None` when it was not measured.
    pub fn median(
        &self,
        workload: &str,
        entrant: &str,
        value: impl Fn(&Run) -> Option<f64>,
    ) -> Option<Median> {
        Median::of(self.of(workload, entrant).filter_map(value).collect())
    }
}

/// A file of results.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a file of results", path.display()))
}

/// The middle of several measurements of the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Median {
    /// The middle, between the two middle ones when there are two.
    pub value: f64,
    /// The lowest.
    pub lowest: f64,
    /// The highest.
    pub highest: f64,
}

impl Median {
    /// `None` of nothing.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Median> {
        values.sort_by(f64::total_cmp);
        let (lowest, highest) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let value = match values.len() % 2 {
            1 => values[middle],
            _ => f64::midpoint(values[middle - 1], values[middle]),
        };
        Some(Median {
            value,
            lowest,
            highest,
        })
    }

    /// From the lowest to the highest, as a part of the middle.
    #[must_use]
    pub fn spread(self) -> f64 {
        match self.value {
            0.0 => 0.0,
            value => (self.highest - self.lowest) / value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_two_is_between_them() {
        let median = Median::of(vec![3.0, 1.0]).expect("there are two");
        assert_eq!((median.value, median.spread()), (2.0, 1.0));
        assert_eq!(
            Median::of(vec![9.0, 1.0, 2.0]).map(|median| median.value),
            Some(2.0)
        );
        assert_eq!(Median::of(Vec::new()), None);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let run = Run {
            round: 1,
            workload: "lone".to_owned(),
            entrant: "dlock+redisson".to_owned(),
            pairs_per_s: Some(1.5),
            lone: Some(Lone::default()),
            ..Run::default()
        };
        let results = Results {
            server: "Redis 7.0.15".to_owned(),
            day: "2026-01-31".to_owned(),
            cores: 2,
            rounds: 1,
            seconds: 0.5,
            left_out: vec![LeftOut {
                entrant: "redsync".to_owned(),
                workload: None,
                why: "no \"go\"".to_owned(),
            }],
            runs: vec![run.clone(), run],
        };
        let text = results.text().expect("it is plain data");
        assert_eq!(
            serde_json::from_str::<Results>(&text).expect("it is JSON"),
            results
        );
    }
}
