//! `dlock run`: a command under a lock.
//!
//! | file | for |
//! |---|---|
//! | `args` | what is asked for |
//! | `hold` | taking the lock, and giving it back |
//! | `watch` | the command and its lock: which of them ends first, and what then |
//! | `command`, `start` | the processes of the command, and how the first of them comes to be |
//! | `signals`, `terminal` | what is passed on to it and lent to it |
//! | `keeper` | who ends it when dlock cannot |
//! | `say` | what is said on standard error |

mod args;
mod command;
mod hold;
mod keeper;
mod say;
mod signals;
mod start;
mod terminal;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use dlock::{Error, LockClient};
use nix::sys::signal::Signal;

use args::Plan;
pub(crate) use args::RunArgs;
use hold::Hold;
pub(crate) use keeper::keep;
use say::Say;
use signals::Signals;
pub(crate) use start::{StartArgs, start};
use terminal::Terminal;

/// The lock could not be had: the same that sendmail and flock's users take for "try again later" (`EX_TEMPFAIL`).
const NOT_HAD: u8 = 75;
/// It was lost.
const LOST: u8 = 76;
/// As shells have it.
const NOT_STARTED: u8 = 126;
const NOT_FOUND: u8 = 127;
const BY_SIGNAL: u8 = 128;

/// How it ends.
#[derive(Debug)]
enum End {
    With(u8),
    /// As the command did, so that the shell knows that Ctrl-C was pressed; the rest of the shell's job has been told or
    /// not.
    By {
        signal: Signal,
        told: bool,
    },
    /// The arguments make no sense.
    Misused(String),
}

impl End {
    /// For a command that a signal has ended, or for dlock while there is none.
    fn signalled(signal: Signal, from_terminal: bool, told: bool) -> End {
        match signal {
            Signal::SIGINT | Signal::SIGQUIT if from_terminal => End::By { signal, told },
            signal => End::With(BY_SIGNAL + signal as u8),
        }
    }
}

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
            "the locks of memory:// are inside of this process: nobody else will ever wait for this one",
        );
    }
    let client = LockClient::builder().url(url).service_name("dlock-cli");
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

fn not_had(error: &Error, plan: &Plan, say: Say) -> End {
    let status = match error {
        Error::NotAcquired { .. } => plan.conflict,
        error if error.is_unavailable() => NOT_HAD,
        error => return End::Misused(error.to_string()),
    };
    say.line(&error.to_string());
    End::With(status)
}
