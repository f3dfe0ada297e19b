//! The output of `dlock run` itself: on standard error only, since its standard output is the command's.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use dlock::LockClient;
use tokio::sync::oneshot;

use super::args::Plan;
use crate::look::clean;
use crate::output::print_error;
use crate::screen::StatusLine;

/// A shorter wait is not reported.
const SOON: Duration = Duration::from_millis(500);
/// How often the line is rewritten.
const EVERY: Duration = Duration::from_secs(1);

/// Prints messages, unless quiet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Say {
    quiet: bool,
}

impl Say {
    pub(super) fn new(quiet: bool) -> Say {
        Say { quiet }
    }

    /// Prints one line.
    pub(super) fn line(self, text: &str) {
        if !self.quiet {
            print_error(format_args!("dlock: {text}"));
        }
    }

    /// Prints one line without waiting for a reader that is slow. Completes when it is printed.
    pub(super) fn line_beside(self, text: String) -> oneshot::Receiver<()> {
        let (told, is_told) = oneshot::channel();
        std::thread::spawn(move || {
            self.line(&text);
            told.send(())
        });
        is_told
    }

    /// Waits, and shows at a terminal the awaited lock and its holder.
    pub(super) async fn while_waiting<T>(
        self,
        client: &LockClient,
        plan: &Plan,
        wait: impl Future<Output = T>,
    ) -> T {
        if self.quiet || !std::io::stderr().is_terminal() {
            return wait.await;
        }
        tokio::select! {
            biased;
            done = wait => done,
            never = keep_shown(client, plan) => match never {},
        }
    }
}

async fn keep_shown(client: &LockClient, plan: &Plan) -> std::convert::Infallible {
    let mut line = StatusLine::default();
    let since = Instant::now();
    let locks = plan.locks();
    tokio::time::sleep(SOON).await;
    loop {
        let mut by = String::new();
        let locks_held = plan.keys.iter().filter(|_| plan.once.is_none());
        for key in locks_held {
            if let Ok(Some(holder)) = client.inspect(key.clone()).await {
                let id = clean(&holder.id);
                by = match &plan.keys[..] {
                    [_] => format!(", held by {id}"),
                    _ => format!(", of which \"{}\" is held by {id}", clean(key.as_str())),
                };
                break;
            }
        }
        let so_far = since.elapsed().as_secs();
        line.show(&format!("dlock: waiting {so_far} s for {locks}{by}"));
        tokio::time::sleep(EVERY).await;
    }
}
