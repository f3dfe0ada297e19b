//! `dlock run`: a command under a lock.
//!
//! | file | for |
//! |---|---|
//! | `args` | what is asked for |
//! | `hold` | acquiring the lock, and releasing it |
//! | `watch` | the command and its lock: which of them ends first, and what then |
//! | `command`, `start` | the processes of the command, and how the first of them comes to be |
//! | `signals`, `terminal` | what is passed on to it and lent to it |
//! | `keeper` | ends it when dlock cannot |
//! | `end` | the exit codes |
//! | `say` | what is said on standard error |

mod args;
mod command;
mod end;
mod hold;
mod keeper;
mod say;
mod signals;
mod start;
mod terminal;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use crate::stores;

use args::Plan;
pub(crate) use args::RunArgs;
use end::{BY_SIGNAL, End};
use hold::{Hold, not_had};
pub(crate) use keeper::keep;
use say::Say;
use signals::Signals;
pub(crate) use start::{StartArgs, start};
use terminal::Terminal;

/// `dlock run`.
pub(crate) fn run(url: &str, args: RunArgs) -> Result<ExitCode, String> {
    let plan = args.plan();
    let signals = Signals::catch().map_err(|error| format!("signals cannot be waited for: {error}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("the runtime does not start: {error}"))?;
    let end = runtime.block_on(under_lock(url, &plan, signals));
    // A name that is still looked up is not waited for.
    runtime.shutdown_background();
    match end {
        End::With(status) => Ok(ExitCode::from(status)),
        End::By { signal, told } => {
            if !told {
                // What the terminal would have told all of them, had the command been one of them.
                signals::tell_group(signal);
            }
            signals::take(signal);
            Ok(ExitCode::from(BY_SIGNAL + signal as u8))
        }
        End::Misused(why) => Err(why),
    }
}

async fn under_lock(url: &str, plan: &Plan, mut signals: Signals) -> End {
    let say = Say::new(plan.quiet);
    let terminal = Terminal::controlling();
    let given_up = |signal| End::signalled(signal, terminal.as_ref().is_some_and(Terminal::is_ours), true);
    if url.starts_with("memory:") {
        say.line(
            "the locks of memory:// are inside of this process: no other process will ever wait for this one",
        );
    }
    let client = stores::client(url).service_name("dlock-cli");
    let client = tokio::select! {
        biased;
        signal = signals.end() => return given_up(signal),
        client = client.build() => match client {
            Ok(client) => client,
            Err(error) => return not_had(&error, plan, say),
        },
    };
    let had = tokio::select! {
        biased;
        signal = signals.end() => Err(given_up(signal)),
        had = Hold::take(&client, plan, say) => had,
    };
    let end = match had {
        Ok((hold, grace)) => {
            let end = watch::run(plan, hold.held(), grace, terminal, &mut signals, say).await;
            tokio::select! {
                biased;
                _ = signals.end() => {}
                () = hold.give_back(say) => {}
            }
            end
        }
        Err(end) => end,
    };
    tokio::select! {
        biased;
        _ = signals.end() => {}
        _ = client.shutdown(Duration::ZERO) => {}
    }
    end
}
