//! A Java process that locks with Apache Curator, for the tests in which Rust and Java share locks on ZooKeeper.
//!
//! The program is in `tests/curator`; it is built once, when first started, and told what to do line by line. Every `thread`
//! of a call is a Java thread of its own, as Curator's owners are. Dropping the future of a call does not stop what Java is
//! doing.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::child;

const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/curator");

type Answers = Arc<Mutex<HashMap<u64, oneshot::Sender<String>>>>;

/// One Java process with one Curator client. Dropping it kills the process and leaves its session to time.
pub struct Curator {
    child: Child,
    input: Mutex<ChildStdin>,
    answers: Answers,
    next: AtomicU64,
}

impl fmt::Debug for Curator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Curator")
            .field("pid", &self.child.id())
            .finish_non_exhaustive()
    }
}

impl Curator {
    /// A process on this server, with a session that lasts as long.
    ///
    /// # Panics
    ///
    /// When Java or Maven is missing, or it does not connect.
    pub async fn start(server: SocketAddr, session: Duration) -> Curator {
        let started = tokio::task::spawn_blocking(move || Curator::spawn(server, session)).await;
        started.expect("starting it does not panic")
    }

    fn spawn(server: SocketAddr, session: Duration) -> Curator {
        let built = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/java.sh"))
            .arg("curator")
            .stdin(Stdio::null())
            .status();
        assert!(
            built.is_ok_and(|built| built.success()),
            "no tests with Curator: its driver cannot be built (Java 17 and Maven are needed)"
        );
        let mut command = child::command("java");
        command.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx96m", "-cp"]);
        command.arg(format!("{PROJECT}/target/classes:{PROJECT}/target/lib/*"));
        command.args([
            "dlock.curator.Driver",
            &server.to_string(),
            &session.as_millis().to_string(),
        ]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let input = child.stdin.take().expect("it is piped");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let ready = lines.next().and_then(Result::ok);
        assert_eq!(ready.as_deref(), Some("ready"), "Curator does not connect");
        let answers = Answers::default();
        let waiting = answers.clone();
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let Some((id, value)) = line.split_once(' ') else {
                    continue;
                };
                let waits = id.parse().ok().and_then(|id: u64| waiting.lock().remove(&id));
                if let Some(waits) = waits {
                    // Its caller may be gone.
                    let _ = waits.send(value.to_owned());
                }
            }
            // The process has ended: no call gets an answer.
            waiting.lock().clear();
        });
        Curator {
            child,
            input: Mutex::new(input),
            answers,
            next: AtomicU64::new(0),
        }
    }

    /// What a command of this thread answers; an exception as `!` and the name of its class.
    ///
    /// # Panics
    ///
    /// When the process has ended.
    pub async fn call(&self, thread: u32, command: &str) -> String {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        self.answers.lock().insert(id, sender);
        writeln!(self.input.lock(), "{id} {thread} {command}").expect("the process of Curator runs");
        answer.await.expect("the process of Curator answers")
    }

    /// Acquires a lock of this kind (`mutex`, `read`, `write`), waiting up to `wait`; whether it did.
    ///
    /// # Panics
    ///
    /// When the process has ended, or throws.
    pub async fn acquire(&self, thread: u32, kind: &str, path: &str, wait: Duration) -> bool {
        let command = format!("acquire {kind} {path} {}", wait.as_millis());
        match self.call(thread, &command).await.as_str() {
            "true" => true,
            "false" => false,
            other => panic!("{command}: {other}"),
        }
    }

    /// Releases it.
    ///
    /// # Panics
    ///
    /// When the process has ended, or throws.
    pub async fn release(&self, thread: u32, kind: &str, path: &str) {
        let command = format!("release {kind} {path}");
        assert_eq!(self.call(thread, &command).await, "true", "{command}");
    }
}

impl Drop for Curator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
