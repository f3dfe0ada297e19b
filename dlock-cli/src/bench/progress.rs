//! Shows the progress of a measurement, at a terminal only.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::args::{Plan, Workload};
use super::tally::Tally;
use crate::screen::StatusLine;

const EVERY: Duration = Duration::from_millis(250);

/// A line on the terminal that is rewritten again and again.
pub(super) struct Progress(Option<JoinHandle<()>>);

impl Progress {
    pub(super) fn start(plan: &Plan, tally: &Arc<Tally>) -> Progress {
        if plan.process != 0 || !std::io::stderr().is_terminal() {
            return Progress(None);
        }
        let (plan, tally) = (plan.clone(), tally.clone());
        Progress(Some(tokio::spawn(async move {
            let mut line = StatusLine::default();
            let mut since = None;
            loop {
                line.show(&text(&plan, &tally, &mut since));
                tokio::time::sleep(EVERY).await;
            }
        })))
    }

    pub(super) async fn end(self) {
        if let Some(task) = self.0 {
            task.abort();
            // With it the line is gone.
            let _ = task.await;
        }
    }
}

fn text(plan: &Plan, tally: &Tally, since: &mut Option<Instant>) -> String {
    let name = plan.workload.name();
    let here = if plan.processes > 1 {
        " in this process"
    } else {
        ""
    };
    let done: u64 = tally.counts().iter().sum();
    // The relevant time: while tasks are counted, or, when locks are held, from then on.
    let timed = match plan.workload {
        Workload::Held if tally.is_measuring() => return format!("{name}: {done} taken{here}"),
        Workload::Held => tally.is_over(),
        _ => tally.is_measuring(),
    };
    if !timed {
        return match tally.is_over() {
            true => format!("{name}: coming to an end"),
            false => format!("{name}: warming up"),
        };
    }
    let spent = since.get_or_insert_with(Instant::now).elapsed().as_secs_f64();
    format!(
        "{name}: {spent:.1} of {:.1} s, {done} done{here}",
        plan.measure.as_secs_f64()
    )
}
