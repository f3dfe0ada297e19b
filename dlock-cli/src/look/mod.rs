//! Inspecting holders, and acting on them: `list`, `show`, `why`, `watch`, `break`, `revoke`, `force-unlock` and
//! `record`.

mod args;
mod break_hold;
mod chain;
mod diagnosis;
mod list;
mod record;
mod show;
mod survey;
mod text;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use dlock::Error;

pub(crate) use self::args::Look;
pub(crate) use self::text::{clean, json_line, told};
use crate::{runtime, stores};

/// Exit code if there is no such lock, or no such hold.
const NOT_HELD: u8 = 1;

/// Runs the command on the store of this URL.
pub(crate) fn run(url: String, look: Look) -> Result<ExitCode, String> {
    runtime::block_on(carry_out(url, look))?.map_err(|error| told(&error))
}

async fn carry_out(url: String, look: Look) -> Result<ExitCode, Error> {
    let client = stores::onlooker(url).build().await?;
    let code = match look {
        Look::Show(args) => show::show(&client, &args).await,
        Look::List(args) => list::list(&client, &args).await,
        Look::Why(args) => chain::why(&client, &args).await,
        Look::Watch(args) => watch::watch(&client, &args).await,
        Look::Break(args) => break_hold::break_hold(&client, &args).await,
        Look::Revoke(args) => break_hold::revoke(&client, &args).await,
        Look::Record { command } => record::record(&client, &command).await,
        Look::ForceUnlock { key } => break_hold::force_unlock(&client, &key).await,
    };
    client.shutdown(Duration::ZERO).await;
    code
}
