//! `dlock run`: a command under a lock, or once in a fleet.
//!
//! | file | for |
//! |---|---|
//! | `args` | what is asked for |
//! | `hold` | acquiring the lock, and releasing it |
//! | `once` | claiming what is run once, and settling it |
//! | `once_args`, `when` | what is asked for then |
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
mod once;
mod once_args;
mod say;
mod signals;
mod start;
mod terminal;
mod watch;
mod when;

use std::process::ExitCode;
use std::time::Duration;

use dlock::LockClient;

use crate::look::clean;
use crate::{runtime, stores};

use args::Plan;
pub(crate) use args::RunArgs;
use end::{BY_SIGNAL, End};
use hold::{Hold, not_acquired};
pub(crate) use keeper::keep;
use say::Say;
use signals::Signals;
pub(crate) use signals::is_ignored;
pub(crate) use start::{StartArgs, start};
use terminal::Terminal;

/// `dlock run`.
pub(crate) fn run(url: &str, args: RunArgs) -> Result<ExitCode, String> {
    let plan = args.plan()?;
    let signals = Signals::catch().map_err(|error| format!("signals cannot be waited for: {error}"))?;
    match runtime::block_on(carried_out(url, &plan, signals))? {
        End::With(status) => Ok(ExitCode::from(status)),
        End::By { signal, told } => {
            if !told {
                // What the terminal would have told all of them, had the command been in their group.
                signals::tell_group(signal);
            }
            signals::take(signal);
            Ok(ExitCode::from(BY_SIGNAL + signal as u8))
        }
        End::Misused(why) => Err(why),
    }
}

async fn carried_out(url: &str, plan: &Plan, mut signals: Signals) -> End {
    let say = Say::new(plan.quiet);
    let terminal = Terminal::controlling();
    let given_up = |signal| End::given_up(signal, terminal.as_ref());
    if stores::is_memory(url) {
        say.line(
            "the locks of memory:// are inside of this process: no other process will ever wait for this one",
        );
    }
    let of_outer_run = |name| std::env::var(name).unwrap_or_default();
    if let Some(key) = plan.waits_for_itself(&of_outer_run("DLOCK_KEY"), &of_outer_run("DLOCK_KIND")) {
        let key = clean(key.as_str());
        say.line(&format!(
            "DLOCK_KEY says that this runs under \"{key}\" already: if it still does, it waits for itself (--wait and --try limit that)"
        ));
    }
    // By the name that the URL gives it: a job is a service like any other.
    let client = tokio::select! {
        biased;
        signal = signals.end() => return given_up(signal),
        client = stores::client(url).build() => match client {
            Ok(client) => client,
            Err(error) => return not_acquired(&error, plan, say),
        },
    };
    let end = match &plan.once {
        Some(once) => once::run(&client, plan, once, terminal, &mut signals, say).await,
        None => locked(&client, plan, terminal, &mut signals, say).await,
    };
    let _ = signals.let_finish(client.shutdown(Duration::ZERO)).await;
    end
}

async fn locked(
    client: &LockClient,
    plan: &Plan,
    terminal: Option<Terminal>,
    signals: &mut Signals,
    say: Say,
) -> End {
    let had = tokio::select! {
        biased;
        signal = signals.end() => return End::given_up(signal, terminal.as_ref()),
        had = Hold::take(client, plan, say) => had,
    };
    let (hold, grace) = match had {
        Ok(had) => had,
        Err(end) => return end,
    };
    let ended = watch::run(plan, hold.view(), grace, terminal, signals, say).await;
    signals.command_has_ended();
    let _ = signals.let_finish(hold.end(say)).await;
    ended.end
}
