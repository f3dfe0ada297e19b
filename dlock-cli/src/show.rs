//! `dlock show`, `list` and `force-unlock`: a look at the locks of a store.

use std::process::ExitCode;
use std::time::Duration;

use dlock::store::Holder;
use dlock::store::Kind;
use dlock::{Error, LockClient, LockKey};

/// Exit code where no such lock is held.
const NOT_HELD: u8 = 1;

/// All holders of this lock.
pub(crate) async fn show(client: &LockClient, key: &str) -> Result<ExitCode, Error> {
    // A command line means what it says, braces included.
    let holders = client.holders(LockKey::raw(key)).await?;
    for holder in &holders {
        println!("{}", line(key, holder));
    }
    Ok(if holders.is_empty() {
        println!("{key}  free");
        ExitCode::from(NOT_HELD)
    } else {
        ExitCode::SUCCESS
    })
}

/// All that are held.
pub(crate) async fn list(client: &LockClient, prefix: &str) -> Result<ExitCode, Error> {
    let locks = client.list(prefix).await?;
    for (key, holder) in &locks {
        println!("{}", line(key.as_str(), holder));
    }
    if locks.is_empty() {
        // Not on standard output, which has a line for each lock.
        match prefix {
            "" => eprintln!("no lock is held"),
            prefix => eprintln!("no lock is held whose name begins with {prefix:?}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes it away from its holder.
pub(crate) async fn force_unlock(client: &LockClient, key: &str) -> Result<ExitCode, Error> {
    Ok(if client.force_release(LockKey::raw(key)).await? {
        println!("{key}  released");
        ExitCode::SUCCESS
    } else {
        println!("{key}  was free");
        ExitCode::from(NOT_HELD)
    })
}

fn line(key: &str, holder: &Holder) -> String {
    let left = holder.remaining.map_or("no end".to_owned(), |left| {
        format!(
            "{} left",
            humantime::format_duration(Duration::from_millis(left.as_millis() as u64))
        )
    });
    let holds = match holder.holds {
        0 | 1 => String::new(),
        holds => format!("  {holds} holds"),
    };
    let held = match holder.kind {
        _ if holder.holds == 0 => "released, kept for its min_hold",
        Kind::Read => "held to read",
        Kind::Write => "held to write",
        _ => "held",
    };
    format!("{key}  {held} by {}  {left}{holds}", holder.id)
}
