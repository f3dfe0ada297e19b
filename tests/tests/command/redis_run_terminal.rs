//! `dlock run` in an interactive shell: Ctrl-C, Ctrl-Z, `fg` and `bg`, programs that read from the terminal, pipelines.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dlock_tests::faults::patient;
use dlock_tests::{Flavor, Server, bins, child, eventually};
use nix::errno::Errno;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;

const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
/// The terminal takes no output any more.
const CTRL_S: &str = "\x13";
const CTRL_Q: &str = "\x11";
const CTRL_Z: &str = "\x1a";
/// What the shell says when it waits for a command.
const PROMPT: &str = "next> ";

/// bash at a terminal, in which `$D` is `dlock run` on a server of its own.
struct Shell {
    keyboard: Mutex<File>,
    screen: Arc<Mutex<String>>,
    /// What of the screen was seen.
    seen: Mutex<usize>,
    child: Child,
    server: Server,
}

impl Shell {
    async fn start(options: &str) -> Shell {
        let server = Server::start(Flavor::from_env()).await;
        let pty = openpty(None, None).expect("a terminal");
        let mut command = child::command("setsid");
        command.args(["--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]);
        command
            .env("PS1", PROMPT)
            .env("D", format!("{} run", bins::dlock().display()))
            .env(
                "DLOCK_URL",
                format!("{}?timeout=20s&retry_for=60s&{options}", server.url()),
            )
            .env_remove("RUST_LOG");
        let side = |fd: &OwnedFd| fd.try_clone().expect("it is open");
        command
            .stdin(side(&pty.slave))
            .stdout(side(&pty.slave))
            .stderr(pty.slave);
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut from, to) = (File::from(side(&pty.master)), screen.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut bytes) {
                *to.lock() += &String::from_utf8_lossy(&bytes[..read]);
            }
        });
        let shell = Shell {
            keyboard: Mutex::new(pty.master.into()),
            screen,
            seen: Mutex::new(0),
            child,
            server,
        };
        shell.shows(PROMPT).await;
        shell
    }

    fn types(&self, text: &str) {
        self.keyboard
            .lock()
            .write_all(text.as_bytes())
            .expect("a terminal");
    }

    /// Waits until this is shown, after what was waited for before.
    async fn shows(&self, what: &str) {
        eventually(&format!("{what:?} is shown"), || async {
            let (screen, mut seen) = (self.screen.lock(), self.seen.lock());
            let found = screen[*seen..].find(what);
            if let Some(at) = found {
                *seen += at + what.len();
            }
            found.is_some()
        })
        .await;
    }

    /// Types a command, which shows this.
    async fn enters(&self, command: &str, shows: &str) {
        self.types(&format!("{command}\n"));
        // The echo is not what it shows.
        self.shows(&format!("{command}\r\n")).await;
        self.shows(shows).await;
    }

    /// Writes a script; where it is.
    fn script(&self, text: &str) -> String {
        let path = self.server.data_dir().join("script");
        fs::write(&path, text).expect("a directory of ours");
        path.display().to_string()
    }

    /// Waits until the lock is held, or free.
    async fn until_held(&self, is_held: bool) {
        let client = patient(&self.server.url()).await;
        eventually(
            if is_held {
                "the lock is held"
            } else {
                "the lock is free"
            },
            || async { client.inspect("k").await.expect("the server is there").is_some() == is_held },
        )
        .await;
    }

    /// What all has been shown; for the message of a failed test.
    fn screen(&self) -> String {
        self.screen.lock().clone()
    }

    /// The processes of this terminal; for the message of a failed test.
    fn processes(&self) -> String {
        let columns = "pid,ppid,pgid,tpgid,stat,blocked,pending,wchan:20,args";
        let session = self.child.id().to_string();
        let list = Command::new("ps").args(["-o", columns, "-s", &session]).output();
        list.map_or_else(
            |error| error.to_string(),
            |list| String::from_utf8_lossy(&list.stdout).into_owned(),
        )
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!(
                "the screen:\n{}\nthe processes:\n{}",
                self.screen(),
                self.processes()
            );
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_command_reads_from_the_terminal_is_stopped_goes_on_and_is_interrupted() {
    let shell = Shell::start("lease=300s").await;
    shell.types("$D k -- cat\n");
    shell.enters("one", "one").await;
    shell.types(CTRL_Z);
    shell.shows("Stopped").await;
    shell.shows(PROMPT).await;
    shell.until_held(true).await;
    shell.enters("fg", "k -- cat").await;
    shell.enters("two", "two").await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    shell.until_held(false).await;
    shell.enters("echo status $?", "status 130").await;
}

/// A stopped one would leave the shell on its screen, without a cursor and without echo.
#[tokio::test]
async fn ctrl_z_does_not_stop_the_full_screen() {
    let shell = Shell::start("lease=300s").await;
    shell.types("${D% run} watch\n");
    shell.shows("q: quit").await;
    shell.types(CTRL_Z);
    shell.types("q");
    shell.shows("\x1b[?1049l").await;
    shell.shows(PROMPT).await;
    shell.enters("echo status $?", "status 0").await;
}

#[tokio::test]
async fn a_command_finds_itself_in_the_foreground_from_the_beginning() {
    let shell = Shell::start("lease=300s").await;
    let script = "test $(ps -o tpgid= -p $$) = $(ps -o pgid= -p $$) && echo fore''ground";
    let script = shell.script(script);
    shell.enters(&format!("$D k -- sh {script}"), "foreground").await;
}

#[tokio::test]
async fn ctrl_c_ends_a_script_and_a_loop_as_it_does_without_dlock() {
    let shell = Shell::start("lease=300s").await;
    // Without `exec`, Ctrl-C is lost where it comes while dash is in vfork(2).
    let script = shell.script("$D k -- sh -c 'echo re''ady; exec sleep 600'\necho went on\n");
    for name in ["bash", "dash"] {
        shell.enters(&format!("{name} {script}"), "ready").await;
        shell.types(CTRL_C);
        shell.shows(PROMPT).await;
        shell.until_held(false).await;
    }
    shell
        .enters(
            "for i in 1 2 3; do $D k -- sh -c 'echo re''ady; exec sleep 600'; done",
            "ready",
        )
        .await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    shell.until_held(false).await;
    let screen = shell.screen();
    assert!(!screen.contains("went on"), "{screen}");
    assert_eq!(screen.matches("\r\nready").count(), 3, "{screen}");
}

#[tokio::test]
async fn what_comes_after_it_in_a_script_has_the_terminal_again() {
    let shell = Shell::start("lease=300s").await;
    shell.types("( $D k -- cat; read line; echo \"read $line\"; )\n");
    shell.enters("one", "one").await;
    shell.types(CTRL_D);
    shell.until_held(false).await;
    shell.enters("more", "read more").await;
}

#[tokio::test]
async fn a_command_in_the_background_that_wants_the_terminal_gets_it_by_fg() {
    let shell = Shell::start("lease=300s").await;
    shell.enters("$D k -- cat &", PROMPT).await;
    shell.until_held(true).await;
    // The shell tells of it before its next prompt.
    eventually("it is stopped", || async {
        shell.types("\n");
        tokio::time::sleep(Duration::from_millis(50)).await;
        shell.screen().contains("Stopped")
    })
    .await;
    shell.enters("fg", "k -- cat").await;
    shell.enters("one", "one").await;
    shell.types(CTRL_D);
    shell.shows(PROMPT).await;
    shell.enters("echo status $?", "status 0").await;
}

#[tokio::test]
async fn one_that_was_stopped_for_longer_than_its_lease_does_not_go_on() {
    let shell = Shell::start("lease=1s").await;
    shell
        .enters(
            "$D k -- sh -c 'trap \"\" TERM; echo re''ady; while read l; do echo $l; done'",
            "ready",
        )
        .await;
    shell.types(CTRL_Z);
    shell.shows("Stopped").await;
    shell.until_held(false).await;
    shell.enters("fg", PROMPT).await;
    shell.enters("echo status $?", "status 76").await;
}

#[tokio::test]
async fn a_pager_at_the_end_of_a_pipeline_has_the_terminal() {
    let shell = Shell::start("lease=300s").await;
    shell.types("$D k -- echo line | { cat; read answer </dev/tty; echo \"answer $answer\"; }\n");
    shell.shows("\r\nline").await;
    shell.enters("yes", "answer yes").await;
    // And a command that asks at the terminal gets it there too.
    shell.types("$D k -- bash -c 'read answer </dev/tty; echo \"answer $answer\"' | cat\n");
    shell.until_held(true).await;
    shell.enters("no", "answer no").await;
}

/// Without the terminal from the beginning, the command within would be stopped again after each `fg`.
#[tokio::test]
async fn command_within_one_that_reads_a_file_reads_from_the_terminal() {
    let shell = Shell::start("lease=300s").await;
    let script = shell.script("$D within -- bash -c 'read a </dev/tty; echo got $a'\n");
    shell.types(&format!("$D k -- bash {script} <{script}\n"));
    shell.until_held(true).await;
    shell.enters("yes", "got yes").await;
    shell.until_held(false).await;
}

/// bash starts what is in `$(…)` with SIGTTIN ignored, as it does not stop such processes.
#[tokio::test]
async fn command_whose_output_a_shell_takes_reads_from_the_terminal() {
    let shell = Shell::start("lease=300s").await;
    shell.types("x=$($D k -- bash -c 'read a </dev/tty; echo got $a'); echo \"$x\"\n");
    shell.until_held(true).await;
    shell.enters("yes", "got yes").await;
    shell.until_held(false).await;
    // But a program behind it keeps the terminal, as in any pipeline.
    shell.types("x=$($D k -- echo line | { cat; read a </dev/tty; echo \"and $a\"; }); echo \"$x\"\n");
    shell.enters("no", "and no").await;
}

/// The kernel stops the command, whose group has a parent in the session, but not dlock.
#[tokio::test]
async fn command_that_wants_the_terminal_after_its_shell_has_ended_gets_a_hang_up() {
    let shell = Shell::start("lease=300s").await;
    for script in ["read a </dev/tty", "trap \\\"\\\" HUP; read a </dev/tty"] {
        let line = format!("bash -c '$D k -- bash -c \"{script}\" &'");
        shell.enters(&line, "it gets SIGHUP").await;
        shell.until_held(false).await;
    }
}

#[tokio::test]
async fn a_pipeline_is_stopped_goes_on_in_the_background_and_is_interrupted_as_one() {
    let shell = Shell::start("lease=300s").await;
    // A shell that starts programs again and again hangs when it is stopped at a bad moment, as dash does in vfork(2).
    let script = "exec 3<> <(:); while :; do echo more; read -t 0.05 -u 3; done";
    shell
        .enters(&format!("$D k -- bash -c '{script}' | cat"), "more")
        .await;
    shell.types(CTRL_Z);
    shell.shows("Stopped").await;
    shell.shows(PROMPT).await;
    let from = shell.screen().len();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let screen = shell.screen();
    assert!(!screen[from..].contains("more"), "it was not stopped: {screen}");
    shell.enters("bg", "more").await;
    shell.enters("fg", "more").await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    shell.until_held(false).await;
}

#[tokio::test]
async fn waiter_at_a_terminal_sees_the_holder_and_can_stop_and_give_up() {
    let shell = Shell::start("lease=300s").await;
    let client = patient(&shell.server.url()).await;
    let guard = client.lock("k").acquire().await.unwrap();
    shell
        .enters(
            "$D k -- echo r''un",
            // A wide name does not wrap.
            "\x1b[?7ldlock: waiting 0 s for lock \"k\", held by ",
        )
        .await;
    shell.shows(&client.id()).await;
    shell.types(CTRL_Z);
    shell.shows("Stopped").await;
    shell.enters("fg", " s for lock").await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    shell.enters("echo status $?", "status 130").await;
    eventually("no client listens any more", || async {
        shell.server.pubsub_channels().await.is_empty()
    })
    .await;
    shell.enters("$D -q k -- echo r''un", "").await;
    eventually("it waits, and says nothing", async || {
        !shell.server.pubsub_channels().await.is_empty()
    })
    .await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    guard.release().await.unwrap();
    assert_eq!(client.lock("k").try_acquire().await.map(|_| ()).ok(), Some(()));
    let screen = shell.screen();
    assert!(!screen.contains("\nrun"), "{screen}");
}

/// A shell without jobs has such commands ignore Ctrl-C, and gives them an empty input.
#[tokio::test]
async fn script_keeps_the_terminal_beside_a_command_in_its_background() {
    let shell = Shell::start("lease=300s").await;
    let script = shell.script(
        "trap 'kill $!' EXIT\n\
         $D k -- sh -c 'echo ready; exec sleep 600' &\n\
         read line\n\
         echo \"got $line\"\n\
         wait\n\
         echo went on\n",
    );
    shell.enters(&format!("bash {script}"), "ready").await;
    shell.enters("yes", "got yes").await;
    shell.types(CTRL_C);
    shell.shows(PROMPT).await;
    shell.until_held(false).await;
    let screen = shell.screen();
    assert!(!screen.contains("went on"), "{screen}");
}

/// As the `suspend` of a shell does.
#[tokio::test]
async fn command_that_stops_itself_stops_its_job() {
    let shell = Shell::start("lease=300s").await;
    shell
        .enters(
            "$D k -- sh -c 'kill -STOP $$; echo we''nt on; read line'",
            "Stopped",
        )
        .await;
    shell.shows(PROMPT).await;
    shell.until_held(true).await;
    shell.enters("fg", "went on").await;
    shell.types("\n");
    shell.until_held(false).await;
}

/// It takes a second until the line is written again.
#[tokio::test]
async fn waiter_starts_its_command_at_a_terminal_that_takes_no_output() {
    let shell = Shell::start("lease=300s").await;
    let client = patient(&shell.server.url()).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let mark = shell.server.data_dir().join("mark");
    shell
        .enters(
            &format!("$D k -- touch {}", mark.display()),
            "dlock: waiting 0 s for lock",
        )
        .await;
    shell.types(CTRL_S);
    tokio::time::sleep(Duration::from_millis(1300)).await;
    guard.release().await.unwrap();
    eventually("the command has run", || async { mark.exists() }).await;
    shell.until_held(false).await;
    shell.types(CTRL_Q);
    shell.shows(PROMPT).await;
}

/// Each of them has to write once more before the signal: the line of the waiter does so after a second.
#[tokio::test]
async fn signal_ends_a_command_at_a_terminal_that_takes_no_output() {
    let shell = Shell::start("lease=300s").await;
    let client = patient(&shell.server.url()).await;
    let _guard = client.lock("k").acquire().await.unwrap();
    let file = shell.server.data_dir().join("pid");
    for (command, shows) in [
        ("$D k -- true", "dlock: waiting"),
        ("${D% run} watch --every 100ms", "q: quit"),
        (
            "${D% run} bench --workload sequential --threads 1 --warmup 0 --seconds 3600",
            "sequential: ",
        ),
    ] {
        let line = format!("sh -c 'echo $$ >{}; exec '\"{command}\"", file.display());
        shell.enters(&line, shows).await;
        let pid = fs::read_to_string(&file).expect("it was written");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number"));
        shell.types(CTRL_S);
        tokio::time::sleep(Duration::from_millis(1300)).await;
        kill(pid, Signal::SIGTERM).expect("it runs");
        eventually(&format!("{command} has ended"), || async {
            kill(pid, None) == Err(Errno::ESRCH)
        })
        .await;
        if command.contains("watch") {
            // Ctrl-S would keep the shell on this screen.
            shell.shows("\x1b[?1049l").await;
        }
        shell.types(CTRL_Q);
        shell.shows(PROMPT).await;
    }
}

/// Each refresh once gave up a read of the keyboard, which then swallowed a key, and kept the command from ending.
#[tokio::test]
async fn watch_is_left_by_a_key_or_ctrl_c_after_any_number_of_refreshes() {
    let shell = Shell::start("").await;
    for leave in ["q", CTRL_C] {
        // Names may be wider than their number of characters: lines do not wrap.
        shell.enters("${D% run} watch --every 100ms", "\x1b[?7l").await;
        shell.shows("q: quit").await;
        for _ in 0..5 {
            shell.shows("q: quit").await;
        }
        shell.types(leave);
        shell.shows("\x1b[?7h").await;
        shell.shows(PROMPT).await;
    }
}
