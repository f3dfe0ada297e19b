//! Progress messages of a run, and periodic work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::faults::Fiend;

/// Between two lines.
const LINES: Duration = Duration::from_secs(10);

/// Says how far it is, on standard error, for ever.
pub(crate) async fn show(fiend: Arc<Fiend>) {
    let begun = Instant::now();
    let mut next = LINES;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The traffic is not needed.
        for link in &fiend.deployment.links {
            link.way.forget();
        }
        fiend.team.look_for_failures();
        if begun.elapsed() >= next {
            next += LINES;
            let (seconds, acquired) = (begun.elapsed().as_secs(), fiend.team.acquired());
            eprintln!(
                "chaos: {seconds} s, {acquired} acquisitions, {} faults",
                fiend.faults()
            );
        }
    }
}
