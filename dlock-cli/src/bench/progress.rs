//! Says what is going on while it is measured, to people at a terminal only.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::args::Plan;
use super::tally::Tally;

const EVERY: Duration = Duration::from_millis(250);

/// A line on the terminal that is written anew again and again.
pub(super) struct Progress(Option<JoinHandle<()>>);

impl Progress {
    pub(super) fn start(plan: &Plan, tally: &Arc<Tally>) -> Progress {
        if plan.process != 0 || !std::io::stderr().is_terminal() {
            return Progress(None);
        }
        let (name, of) = (plan.workload.name(), plan.measure);
        let here = if plan.processes > 1 {
            " in this process"
        } else {
            ""
        };
        let tally = tally.clone();
        Progress(Some(tokio::spawn(async move {
            let mut since = None;
            while !tally.is_over() {
                let text = if tally.is_measuring() {
                    let since = *since.get_or_insert_with(Instant::now);
                    let done: u64 = tally.counts().iter().sum();
                    let (spent, of) = (since.elapsed().as_secs_f64(), of.as_secs_f64());
                    format!("{name}: {spent:.1} of {of:.0} s, {done} done{here}")
                } else {
                    format!("{name}: warming up")
                };
                line(&text);
                tokio::time::sleep(EVERY).await;
            }
        })))
    }

    pub(super) fn end(self) {
        if let Some(task) = self.0 {
            task.abort();
            line("");
        }
    }
}

/// Instead of what stood there.
fn line(text: &str) {
    let mut err = std::io::stderr().lock();
    let _ = write!(err, "\r\x1b[K{text}").and_then(|()| err.flush());
}
