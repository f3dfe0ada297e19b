//! The commands that a server received, as the server itself reports them.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::resp::{Command, unquote};
use crate::server::Server;

/// One line of `MONITOR`.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The command.
    pub command: Command,
    /// The sender: `127.0.0.1:40312`, `unix:…`, or `lua` for what a script did.
    pub source: String,
}

impl Seen {
    /// Whether a script issued it, rather than a client.
    pub fn by_script(&self) -> bool {
        self.source == "lua"
    }
}

/// Collects the commands that a server executes, from its creation until it is dropped.
///
/// The connections of the harness itself are left out. `AUTH` and the like are not shown by servers.
#[derive(Debug)]
pub struct Monitor<'a> {
    server: &'a Server,
    own: Arc<Mutex<HashSet<String>>>,
    lines: Arc<Mutex<Vec<Seen>>>,
    task: JoinHandle<()>,
}

impl<'a> Monitor<'a> {
    pub(crate) async fn start(server: &'a Server, own: Arc<Mutex<HashSet<String>>>) -> anyhow::Result<Self> {
        let stream = server
            .client()?
            .get_async_monitor()
            .await?
            .into_on_message::<String>();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = lines.clone();
        let task = tokio::spawn(async move {
            let mut stream = std::pin::pin!(stream);
            while let Some(line) = stream.next().await {
                sink.lock().extend(parse(&line));
            }
        });
        Ok(Self {
            server,
            own,
            lines,
            task,
        })
    }

    /// Everything that was executed before this call, the steps of scripts included.
    ///
    /// # Panics
    /// When the server does not answer, or the monitoring connection is gone.
    pub async fn all(&self) -> Vec<Seen> {
        // what a server shows lags behind what it answers, so wait for a mark of our own to come by
        let mark = uuid();
        self.server.command(&["ECHO", &mark]).await;
        crate::eventually("the monitor shows our mark", || {
            assert!(!self.task.is_finished(), "the monitoring connection ended");
            let arrived = self.lines.lock().iter().any(|seen| seen.command.arg(1) == mark);
            std::future::ready(arrived)
        })
        .await;
        let own = self.own.lock();
        let lines = self.lines.lock();
        lines
            .iter()
            .filter(|seen| !own.contains(&seen.source))
            .cloned()
            .collect()
    }

    /// The commands that clients sent before this call, without the steps of scripts.
    ///
    /// # Panics
    /// As [`all`](Self::all).
    pub async fn commands(&self) -> Vec<Command> {
        self.all()
            .await
            .into_iter()
            .filter(|seen| !seen.by_script())
            .map(|seen| seen.command)
            .collect()
    }

    /// Forgets what was collected so far.
    pub fn forget(&self) {
        self.lines.lock().clear();
    }
}

impl Drop for Monitor<'_> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn uuid() -> String {
    format!("dlock-tests-{:032x}", fastrand::u128(..))
}

/// `1339518083.107412 [0 127.0.0.1:60866] "keys" "*"`
fn parse(line: &str) -> Option<Seen> {
    let (head, args) = line.split_once("] ")?;
    let (_, source) = head.split_once('[')?.1.split_once(' ')?;
    Some(Seen {
        command: Command::new(unquote(args.as_bytes())),
        source: source.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_clients_and_scripts_are_told_apart() {
        let seen = parse(r#"1339518083.107412 [0 127.0.0.1:60866] "keys" "[a] *""#).unwrap();
        assert_eq!(
            (seen.source.as_str(), seen.by_script()),
            ("127.0.0.1:60866", false)
        );
        assert_eq!(seen.command, Command::new(["keys", "[a] *"]));
        assert!(
            parse(r#"1339518083.107412 [0 lua] "get" "a""#)
                .unwrap()
                .by_script()
        );
        assert!(parse("OK").is_none());
    }
}
