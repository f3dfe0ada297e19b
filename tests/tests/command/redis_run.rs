//! `dlock run`: the command, its status, its signals, and its turns. What happens when the lock is lost
//! stands in `redis_run_lost.rs`, the terminal in `redis_run_terminal.rs`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use dlock::LockClient;
use dlock_tests::faults::{SOON, patient, within};
use dlock_tests::{Ended, Flavor, Running, Server, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

/// No test waits for the end of this lease.
const LASTING: &str = "lease=300s&timeout=20s&retry_for=60s";

/// A server, and its URL for clients that a machine which stands still does not worry.
async fn server() -> (Server, String) {
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?{LASTING}", server.url());
    (server, url)
}

async fn run(url: &str, args: &[&str]) -> Ended {
    Running::start(url, args).all_ended().await
}

/// What `dlock` prints to standard output and standard error, one after the other.
fn look(url: &str, args: &[&str]) -> String {
    let mut command = child::command(dlock_tests::bins::dlock());
    command.args(["--url", url]).args(args);
    let output = dlock_tests::bins::output(command, 10 * SOON);
    [output.stdout, output.stderr]
        .map(|text| String::from_utf8(text).unwrap())
        .concat()
}

fn code(ended: &Ended) -> i32 {
    ended.status.code().unwrap_or_else(|| panic!("{ended:?}"))
}

async fn is_held(client: &LockClient, key: &str) -> bool {
    client.inspect(key).await.expect("the server is there").is_some()
}

#[tokio::test]
async fn the_command_has_the_lock_while_it_runs_and_its_token_in_the_environment() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    let script =
        "echo \"$DLOCK_FENCING_TOKEN $DLOCK_KEY $DLOCK_KIND\"; read line; echo \"read $line\"; echo told >&2";
    let mut tokens = Vec::new();
    for _ in 0..3 {
        let running = Running::script(&url, &["a job"], script);
        running.says("lock\n").await;
        assert!(is_held(&client, "a job").await);
        assert!(
            client
                .lock("a job")
                .try_acquire()
                .await
                .is_err_and(|error| error.is_busy())
        );
        running.write(b"it all\n");
        let ended = running.all_ended().await;
        assert_eq!((code(&ended), ended.stderr.as_str()), (0, "told\n"));
        let (token, rest) = ended.stdout.split_once(' ').expect("a line");
        assert_eq!(rest, "a job lock\nread it all\n");
        tokens.push(token.parse::<u64>().expect("a number"));
        assert!(!is_held(&client, "a job").await, "it is not released");
    }
    let guard = client.lock("a job").try_acquire().await.unwrap();
    tokens.push(guard.fencing_token());
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[tokio::test]
async fn a_job_is_seen_by_the_name_that_its_url_gives_it() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    for (option, name) in [("&name=nightly", "nightly"), ("", "dlock")] {
        let running = Running::script(
            &format!("{url}&presence=on{option}"),
            &["k"],
            "echo up; read line",
        );
        running.says("up\n").await;
        let is_named = || async {
            let clients = client.clients().await.expect("the server is there");
            clients.iter().any(|client| client.service == name)
        };
        eventually(name, is_named).await;
        running.write(b"end\n");
        assert_eq!(code(&running.all_ended().await), 0);
    }
}

#[tokio::test]
async fn its_exit_status_is_that_of_the_command() {
    let (server, url) = server().await;
    for (script, status) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 75", 75),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("kill -INT $$", 130),
        ("kill -35 $$", 163),
    ] {
        let ended = run(&url, &["k", "--", "sh", "-c", script]).await;
        assert_eq!((code(&ended), ended.stderr.as_str()), (status, ""), "{script}");
    }
    let nothing = server.data_dir().join("nothing");
    let script = server.data_dir().join("no interpreter");
    fs::write(&script, "#!/nowhere\n").unwrap();
    for (command, status, says) in [
        ("no-such-command-anywhere", 127, "No such file"),
        (nothing.to_str().unwrap(), 127, "No such file"),
        ("/etc/passwd", 126, "Permission denied"),
        ("/", 126, "Permission denied"),
        (script.to_str().unwrap(), 126, "Permission denied"),
        ("", 127, "No such file"),
    ] {
        let ended = run(&url, &["k", "--", command, "x"]).await;
        assert_eq!(code(&ended), status, "{command}: {ended:?}");
        assert!(
            ended.stderr.contains(says) && ended.stderr.lines().count() == 1,
            "{ended:?}"
        );
    }
    let client = patient(&server.url()).await;
    assert!(
        !is_held(&client, "k").await,
        "a command that does not start keeps the lock"
    );
}

#[tokio::test]
async fn what_is_not_text_goes_through_unchanged() {
    let (_server, url) = server().await;
    let args: [&OsStr; 6] = ["k", "--", "printf", "%s", "--", "x"].map(OsStr::new);
    let mut args: Vec<OsString> = args.map(OsStr::to_owned).to_vec();
    args.truncate(4);
    args.push(OsStr::from_bytes(b"--\xff ' \n").to_owned());
    let ended = Running::start(&url, &args).all_ended().await;
    assert_eq!(ended.stdout, String::from_utf8_lossy(b"--\xff ' \n"));
    let copies = Running::start(&url, &["k", "--", "cat"]);
    let many = "0123456789abcde\n".repeat(10_000);
    copies.write(many.as_bytes());
    let ended = copies.all_ended().await;
    assert!(ended.stdout == many, "{} bytes", ended.stdout.len());
}

#[tokio::test]
async fn commands_of_one_key_exclude_each_other_and_those_of_others_do_not() {
    let (server, url) = server().await;
    let count = server.data_dir().join("count");
    fs::write(&count, "0").unwrap();
    // Reads, thinks, and writes: a write in between is not counted.
    let script = format!("n=$(cat {0}); sleep 0.02; echo $((n + 1)) > {0}", count.display());
    let runs: Vec<_> = (0..12).map(|_| Running::script(&url, &["k"], &script)).collect();
    for running in &runs {
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 0, "{ended:?}");
    }
    assert_eq!(fs::read_to_string(&count).unwrap().trim(), "12");

    let one = Running::script(&url, &["one"], "echo here; read line");
    one.says("here").await;
    assert_eq!(code(&run(&url, &["--try", "other", "--", "true"]).await), 0);
    assert_eq!(
        code(&one.all_ended().await),
        1,
        "of read, at the end of its input"
    );
}

#[tokio::test]
async fn unavailable_lock_is_75_or_the_given_code_and_the_command_does_not_run() {
    let (_server, url) = server().await;
    let holder = Running::script(&url, &["k"], "echo here; read line");
    holder.says("here").await;
    for args in [
        &["--try"][..],
        &["-n"],
        &["--wait", "0s"],
        &["--wait", "200ms"],
        &["-w", "200ms"],
    ] {
        let ended = run(&url, &[args, &["k", "--", "echo", "run"]].concat()).await;
        assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""), "{args:?}");
        assert!(ended.stderr.contains("lock \"k\" is held"), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    }
    let ended = run(&url, &["-n", "-E", "0", "--quiet", "k", "--", "echo", "run"]).await;
    assert_eq!(
        (code(&ended), ended.stdout.as_str(), ended.stderr.as_str()),
        (0, "", "")
    );
    let ended = run(&url, &["-n", "--conflict-exit-code=9", "k", "--", "echo", "run"]).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (9, ""));

    let waiter = Running::start(&url, &["--wait", "1h", "k", "--", "echo", "run"]);
    assert!(waiter.is_running());
    holder.close();
    let ended = within(SOON, "the wait", waiter.all_ended()).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (0, "run\n"));
}

#[tokio::test]
async fn a_store_that_cannot_be_reached_is_75_whatever_was_said_of_conflicts() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("redis://:hunter2@{closed}");
    for args in [&["-E", "0"][..], &["--try"], &["--wait", "1s"]] {
        let ended = run(&url, &[args, &["k", "--", "echo", "run"]].concat()).await;
        assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""), "{ended:?}");
        assert!(ended.stderr.contains("could not be reached"), "{ended:?}");
        assert!(ended.stderr.ends_with("[E0005]\n"), "{ended:?}");
        assert!(!ended.stderr.contains("hunter2"), "{ended:?}");
    }
}

#[tokio::test]
async fn what_makes_no_sense_is_2_said_clearly_and_runs_nothing() {
    let (server, url) = server().await;
    for (args, says) in [
        (&["k"][..], "COMMAND"),
        (&["k", "--"], "COMMAND"),
        (&["--", "echo"], "KEY"),
        (&["k", "echo", "run"], "-- <COMMAND>"),
        (&["", "--", "echo"], "it is empty"),
        (&["a\nb", "--", "echo"], "control"),
        (
            &["--try", "--wait", "1s", "k", "--", "echo"],
            "cannot be used with",
        ),
        (&["--wait", "10", "k", "--", "echo"], "unit"),
        (&["--wait", "9000years", "k", "--", "echo"], "more than a year"),
        (&["--lease", "0s", "k", "--", "echo"], "lease"),
        (&["--lease", "1ms", "k", "--", "echo"], "lease"),
        (&["--fixed-lease", "0s", "k", "--", "echo"], "fixed_lease"),
        (
            &["--lease", "3s", "--fixed-lease", "3s", "k", "--", "echo"],
            "cannot be used with",
        ),
        (
            &["--fixed-lease", "1s", "--min-hold", "2s", "k", "--", "echo"],
            "min_hold",
        ),
        (
            &["--grace", "10s", "--fixed-lease", "5s", "k", "--", "echo"],
            "--grace cannot be 10s",
        ),
        (
            &["--grace", "200s", "k", "--", "echo"],
            "--grace cannot be 3m 20s",
        ),
        (
            &["--grace", "1s", "--on-lost", "ignore", "k", "--", "echo"],
            "--grace has no effect with --on-lost ignore",
        ),
        (
            &["--prefer-writers", "k", "--", "echo"],
            "--prefer-writers goes with --kind write",
        ),
        (
            &["--prefer-writers", "--kind", "read", "k", "--", "echo"],
            "--prefer-writers goes with --kind write",
        ),
        (&["--kind", "lokc", "k", "--", "echo"], "one of lock, fair"),
        (
            &["--kind", "semaphore=4294967296", "k", "--", "echo"],
            "a number from 1 to 2147483647",
        ),
        (
            &["--on-lost", "pray", "k", "--", "echo"],
            "possible values: end, ignore",
        ),
        (&["-E", "256", "k", "--", "echo"], "256"),
        (
            &["--url", "reids://:hunter2@localhost", "k", "--", "echo"],
            "did you mean",
        ),
    ] {
        let ended = run(&url, args).await;
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (2, ""),
            "{args:?}: {ended:?}"
        );
        assert!(ended.stderr.contains(says), "{args:?}: {ended:?}");
        assert!(
            !ended.stderr.contains("hunter2") && !ended.stderr.contains("panicked"),
            "{ended:?}"
        );
    }
    let _: () = server.query(&["SET", "data", "of another client"]).await;
    let ended = run(&url, &["data", "--", "echo", "run"]).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(ended.stderr.contains("not a lock"), "{ended:?}");
    assert!(ended.stderr.ends_with("[E0018]\n"), "{ended:?}");
    assert_eq!(server.keys().await, ["data"]);
}

#[tokio::test]
async fn the_help_says_what_a_script_has_to_know() {
    let help = run("redis://nobody", &["--help"]).await;
    assert_eq!(code(&help), 0);
    for part in [
        "75",
        "76",
        "126",
        "127",
        "128 + N",
        "DLOCK_FENCING_TOKEN",
        "DLOCK_KEY",
        "--min-hold",
        "--conflict-exit-code",
        "SIGTERM",
        "--grace",
        "--on-lost",
        "Examples:",
        "cron",
    ] {
        assert!(help.stdout.contains(part), "{part} is missing:\n{}", help.stdout);
    }
    for internal in ["run-start", "run-keeper", "tied"] {
        assert!(!help.stdout.contains(internal), "{internal}");
    }
}

#[tokio::test]
async fn on_memory_it_says_that_this_is_of_no_use_to_others() {
    for url in ["memory://", "MEMORY://"] {
        let ended = run(url, &["k", "--", "echo", "run"]).await;
        assert_eq!((code(&ended), ended.stdout.as_str()), (0, "run\n"));
        assert!(
            ended.stderr.contains("no other process will ever wait"),
            "{ended:?}"
        );
    }
    let ended = run("memory://", &["-q", "k", "--", "echo", "run"]).await;
    assert_eq!(ended.stderr, "");
}

#[tokio::test]
async fn a_min_hold_keeps_the_lock_after_a_short_command_whatever_became_of_it() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    for (key, script) in [("well", "exit 0"), ("badly", "exit 3"), ("killed", "kill -9 $$")] {
        run(
            &url,
            &["--try", "--min-hold", "200s", key, "--", "sh", "-c", script],
        )
        .await;
        let ended = run(&url, &["--try", key, "--", "echo", "run"]).await;
        assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""), "{key}");
        let left = client
            .inspect(key)
            .await
            .unwrap()
            .and_then(|holder| holder.remaining);
        // Not as long as the lease would have been.
        assert!(
            left.is_some_and(|left| left <= Duration::from_secs(200)),
            "{key}: {left:?}"
        );
    }
    let kept = look(&url, &["show", "well"]);
    assert!(
        kept.contains("released, kept for its min_hold") && !kept.contains("0 holds"),
        "{kept}"
    );
    assert!(
        kept.contains("released: the work is over") && !kept.contains("crashed"),
        "{kept}"
    );
    // Nobody holds them, so nobody holds them for a time that is not known.
    let old = look(&url, &["list", "--older-than", "1s"]);
    assert_eq!(old, "no lock is known to be held for longer than 1.0s\n");
    assert_eq!(
        code(&run(&url, &["--min-hold", "1s", "short", "--", "true"]).await),
        0
    );
    let after = run(&url, &["--wait", "1h", "short", "--", "true"]);
    assert_eq!(code(&within(Duration::from_secs(1), "the wait", after).await), 0);
}

/// A list says that it is empty, where people see it and scripts do not.
#[tokio::test]
async fn list_of_nothing_says_so() {
    let (_server, url) = server().await;
    assert_eq!(look(&url, &["list"]), "no lock is held\n");
    let said = look(&url, &["list", "shop:"]);
    assert_eq!(said, "no lock is held whose name begins with \"shop:\"\n");

    let client = LockClient::connect(&url).await.unwrap();
    let _guard = client.lock("shop:1").acquire().await.unwrap();
    let said = look(&url, &["list", "shop:", "--older-than", "1s"]);
    assert_eq!(
        said,
        "no lock is known to be held for longer than 1.0s whose name begins with \"shop:\"\n\
         of 1 more it is not known for how long: presence is off there, they are new, or their client has more than it \
         publishes\n"
    );
    // One that is not asked for is not counted.
    let said = look(&url, &["list", "shop:", "--older-than", "1s", "--expiring"]);
    assert!(!said.contains("not known for how long"), "{said}");
}

#[tokio::test]
async fn of_several_keys_all_are_acquired_or_none_and_each_has_its_token() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    // One of them has a greater token already.
    drop(client.lock("b").acquire().await.unwrap());
    let script = "echo \"$DLOCK_KEY\"; echo \"$DLOCK_FENCING_TOKEN\"; echo .; read line";
    let running = Running::script(&url, &["c", "a", "b", "a"], script);
    running.says(".\n").await;
    for key in ["a", "b", "c"] {
        assert!(is_held(&client, key).await, "{key}");
    }
    let ended = run(&url, &["--try", "x", "b", "--", "echo", "run"]).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""));
    assert!(ended.stderr.contains("lock \"b\" is held"), "{ended:?}");
    assert!(
        !is_held(&client, "x").await,
        "it waits while it holds one of them"
    );
    running.close();
    let ended = running.all_ended().await;
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines[..3], ["c", "a", "b"]);
    for (key, token) in lines[..3].iter().zip(&lines[3..6]) {
        let next = client.lock(*key).try_acquire().await.unwrap().fencing_token();
        assert!(
            token.parse::<u64>().is_ok_and(|token| token < next),
            "{key}: {token} and {next}"
        );
    }
    let multi = run(
        &url,
        &["--kind", "multi", "a", "b", "--", "sh", "-c", "echo $DLOCK_KIND"],
    )
    .await;
    assert_eq!((code(&multi), multi.stdout.as_str()), (0, "lock\n"));
}

#[tokio::test]
async fn readers_run_together_and_a_writer_alone() {
    let (_server, url) = server().await;
    let waits = "echo \"$DLOCK_KIND\"; read line";
    let readers = [(); 2].map(|()| Running::script(&url, &["--kind", "read", "k"], waits));
    for reader in &readers {
        reader.says("read\n").await;
    }
    let busy = run(&url, &["--kind", "write", "--try", "k", "--", "echo", "run"]).await;
    assert_eq!((code(&busy), busy.stdout.as_str()), (75, ""), "{busy:?}");
    let writer = Running::script(&url, &["--kind", "write", "k"], waits);
    for reader in &readers {
        reader.all_ended().await;
    }
    writer.says("write\n").await;
    for kind in ["read", "write"] {
        let busy = run(&url, &["--kind", kind, "-n", "k", "--", "echo", "run"]).await;
        assert_eq!((code(&busy), busy.stdout.as_str()), (75, ""), "{kind}: {busy:?}");
    }
    writer.all_ended().await;
}

#[tokio::test]
async fn fair_ones_run_in_the_order_in_which_they_came_and_fenced_ones_have_a_token() {
    let (server, url) = server().await;
    let order = server.data_dir().join("order");
    let holder = Running::script(&url, &["--kind", "fair", "k"], "echo ready; read line");
    holder.says("ready").await;
    let mut waiters = Vec::new();
    for number in 0..4 {
        let script = format!("echo {number} >> {}", order.display());
        waiters.push(Running::script(&url, &["--kind", "fair", "k"], &script));
        eventually("it is in the queue", || async {
            let queue: i64 = server.query(&["LLEN", "redisson_lock_queue:{k}"]).await;
            queue == number + 1
        })
        .await;
    }
    holder.close();
    for waiter in &waiters {
        assert_eq!(code(&waiter.all_ended().await), 0);
    }
    assert_eq!(fs::read_to_string(&order).unwrap(), "0\n1\n2\n3\n");

    let mut tokens = Vec::new();
    for _ in 0..2 {
        let script = "echo \"$DLOCK_KIND $DLOCK_FENCING_TOKEN\"";
        let ended = Running::script(&url, &["--kind", "fenced", "f"], script)
            .all_ended()
            .await;
        let token = ended.stdout.strip_prefix("fenced ").expect("its kind");
        tokens.push(token.trim().parse::<u64>().expect("a number"));
    }
    assert!(tokens[0] < tokens[1], "{tokens:?}");
}

#[tokio::test]
async fn of_a_semaphore_so_many_run_at_a_time() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    let args = ["--kind", "semaphore=2", "k"];
    let runs = [(); 2].map(|()| Running::script(&url, &args, "echo \"$DLOCK_KIND\"; read line"));
    for running in &runs {
        running.says("permit\n").await;
    }
    let third = run(&url, &[&["--try"], &args[..], &["--", "echo", "run"]].concat()).await;
    assert_eq!((code(&third), third.stdout.as_str()), (75, ""), "{third:?}");
    runs[0].all_ended().await;
    let third = run(&url, &[&["--try"], &args[..], &["--", "echo", "run"]].concat()).await;
    assert_eq!((code(&third), third.stdout.as_str()), (0, "run\n"), "{third:?}");
    runs[1].all_ended().await;
    let status = client
        .semaphore("k")
        .status()
        .await
        .unwrap()
        .expect("its number is known");
    assert_eq!((status.total, status.held), (2, 0));
    let several = run(&url, &["--kind", "semaphore=2", "a", "b", "--", "echo", "run"]).await;
    assert_eq!((code(&several), several.stdout.as_str()), (2, ""), "{several:?}");
}

/// Says `ready` when it is in the middle of its work, and what signals have come when it ends.
fn trapping(signals: &[&str]) -> String {
    let traps: String = signals
        .iter()
        .map(|name| format!("trap 'echo got {name}; kill $!; exit 3' {name}; "))
        .collect();
    format!("{traps} sleep 600 & echo ready; while :; do wait; done")
}

#[tokio::test]
async fn signals_are_passed_on_and_what_the_command_makes_of_them_counts() {
    let (server, url) = server().await;
    for name in ["HUP", "INT", "QUIT", "TERM", "USR1", "USR2"] {
        let sent: Signal = format!("SIG{name}").parse().unwrap();
        let running = Running::script(&url, &["k"], &trapping(&[name]));
        running.says("ready").await;
        running.signal(sent);
        let ended = running.all_ended().await;
        let says = format!("ready\ngot {name}\n");
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (3, says.as_str()),
            "{name}: {ended:?}"
        );

        // Without a trap it ends the command, and all that belongs to it.
        let running = Running::script(&url, &["k"], "sleep 600 & sh -c 'sleep 600' & echo ready; wait");
        running.says("ready").await;
        running.signal(sent);
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 128 + sent as i32, "{name}: {ended:?}");
    }
    let client = patient(&server.url()).await;
    assert!(!is_held(&client, "k").await);
}

#[tokio::test]
async fn the_lock_is_kept_until_all_that_was_asked_to_end_has_ended() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    // The shell is gone at once; what it has started takes the time that it is given.
    let slow = "trap 'read line; echo tidied up; exit' TERM; echo ready; while :; do sleep 0.05; done";
    let running = Running::script(&url, &["k"], &format!("exec 3<&0; sh -c \"{slow}\" <&3 & wait"));
    running.says("ready").await;
    running.signal(Signal::SIGTERM);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(running.is_running() && is_held(&client, "k").await);
    running.write(b"now\n");
    let ended = running.all_ended().await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (143, "ready\ntidied up\n"));
    assert!(!is_held(&client, "k").await);

    // But not for ever.
    let deaf = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let args = ["--grace", "500ms", "k"];
    let running = Running::script(&url, &args, &format!("sh -c \"{deaf}\" & wait"));
    running.says("ready").await;
    running.signal(Signal::SIGTERM);
    assert_eq!(code(&within(SOON, "its end", running.all_ended()).await), 143);
}

#[tokio::test]
async fn what_a_command_leaves_in_the_background_when_it_ends_by_itself_is_left_alone() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    let running = Running::script(&url, &["k"], "sleep 600 >/dev/null 2>&1 & echo $!; exit 4");
    let ended = within(SOON, "its end", running.all_ended()).await;
    assert_eq!(code(&ended), 4);
    assert!(!is_held(&client, "k").await);
    let left = Pid::from_raw(ended.stdout.trim().parse().expect("a process id"));
    tokio::time::sleep(Duration::from_millis(200)).await;
    signal::kill(left, Signal::SIGKILL).expect("it goes on");
}

/// Waits for the end of the shell, which has said its process id.
async fn shell_has_ended(running: &Running) {
    let shell = Path::new("/proc").join(running.said().trim());
    eventually("the shell has ended", || async { !shell.exists() }).await;
}

/// As of a service manager that asks again while the command takes its time.
#[tokio::test]
async fn signals_that_arrive_before_the_release_do_not_prevent_it() {
    let (_server, url) = server().await;
    let deaf = "sh -c \"trap '' TERM; while :; do sleep 0.05; done\"";
    let script = format!("{deaf} & echo $$; wait");
    for options in [&["k"][..], &["--once", "work"]] {
        let args = [&["--grace", "1s"], options].concat();
        let running = Running::script(&url, &args, &script);
        running.says("\n").await;
        running.signal(Signal::SIGTERM);
        shell_has_ended(&running).await;
        for again in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            running.signal(again);
        }
        assert_eq!(code(&running.all_ended().await), 143);
        let next = run(&url, &[&["--try"], options, &["--", "echo", "run"]].concat()).await;
        assert_eq!((code(&next), next.stdout.as_str()), (0, "run\n"), "{next:?}");
    }
}

/// As of a service manager that asks all processes of a service to end, of which the command is the faster one.
#[tokio::test]
async fn command_that_ends_by_a_signal_that_dlock_gets_as_well_has_not_failed() {
    let (_server, url) = server().await;
    let args = ["--once", "--on-failure", "keep", "work"];
    let script = "trap 'exit 143' TERM; echo $$; while :; do sleep 0.01; done";
    let is = async |pid: Pid, state: &str| {
        eventually(&format!("{pid} is {state}"), || async {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.contains(&format!(") {state} "))
        })
        .await;
    };
    for round in 0..20 {
        let running = Running::script(&url, &args, script);
        running.says("\n").await;
        let command = Pid::from_raw(running.said().trim().parse().expect("a process id"));
        // Both wait for dlock when it continues: the signal, and the end of the command.
        running.signal(Signal::SIGSTOP);
        is(running.pid(), "T").await;
        running.signal(Signal::SIGTERM);
        signal::kill(command, Signal::SIGTERM).expect("it runs");
        is(command, "Z").await;
        running.signal(Signal::SIGCONT);
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 143, "round {round}: {ended:?}");
    }
    let next = run(&url, &[&args[..], &["--", "echo", "run"]].concat()).await;
    assert_eq!((code(&next), next.stdout.as_str()), (0, "run\n"), "{next:?}");
}

#[tokio::test]
async fn signals_during_the_release_leave_it_a_moment_only() {
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?lease=300s&timeout=20s&retry_for=300s", server.url());
    for options in [&["k"][..], &["--once", "work"]] {
        let running = Running::script(&url, options, "echo $$; read line; exit 5");
        running.says("\n").await;
        server.stop();
        running.write(b"\n");
        shell_has_ended(&running).await;
        let asked_to_end = async {
            while running.is_running() {
                running.signal(Signal::SIGTERM);
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        };
        within(6 * SOON, "its end", asked_to_end).await;
        server.cont();
        assert_eq!(code(&running.all_ended().await), 5);
    }
}

#[tokio::test]
async fn a_signal_ends_the_wait_for_the_lock_and_leaves_nothing() {
    let (server, url) = server().await;
    let client = patient(&server.url()).await;
    let guard = client.lock("k").acquire().await.unwrap();
    for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        let waiter = Running::start(&url, &["k", "--", "echo", "run"]);
        eventually("it waits", || async { server.pubsub_channels().await.len() == 1 }).await;
        // No process yet handles this signal.
        waiter.signal(Signal::SIGUSR1);
        waiter.signal(sent);
        let ended = waiter.all_ended().await;
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (128 + sent as i32, ""),
            "{sent}"
        );
        eventually("no client waits", || async {
            server.pubsub_channels().await.is_empty()
        })
        .await;
    }
    guard.release().await.unwrap();
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

#[tokio::test]
async fn the_command_starts_with_the_signals_that_dlock_was_started_with() {
    let (server, url) = server().await;
    let status = "grep -E 'SigBlk|SigIgn|SigCgt' /proc/self/status";
    let plain = std::process::Command::new("sh")
        .args(["-c", &format!("exec {status}")])
        .output()
        .unwrap();
    let run = Running::script(&url, &["k"], &format!("exec {status}"));
    assert_eq!(run.all_ended().await.stdout.as_bytes(), plain.stdout);

    // Under nohup(1) neither of them minds a hang-up, not even while it waits.
    let client = patient(&server.url()).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let dlock = dlock_tests::bins::dlock();
    let script = format!(
        "trap '' HUP; exec {} run k -- sh -c 'echo ready; read line; echo end'",
        dlock.display()
    );
    let outer = Running::script(&url, &["outer"], &script);
    eventually("it waits", || async { server.pubsub_channels().await.len() == 1 }).await;
    let inner = client.inspect("outer").await.unwrap();
    assert!(inner.is_some());
    outer.signal(Signal::SIGHUP);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(outer.is_running());
    guard.release().await.unwrap();
    outer.says("ready").await;
    outer.signal(Signal::SIGHUP);
    tokio::time::sleep(Duration::from_millis(200)).await;
    outer.write(b"\n");
    let ended = outer.all_ended().await;
    assert_eq!(
        (code(&ended), ended.stdout.as_str()),
        (0, "ready\nend\n"),
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_command_that_ends_while_the_server_is_away_keeps_its_status() {
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?lease=300s&retry_for=300ms", server.url());
    let running = Running::script(&url, &["k"], "echo ready; read line; exit 5");
    running.says("ready").await;
    server.kill();
    running.write(b"\n");
    let ended = within(SOON, "its end", running.all_ended()).await;
    assert_eq!(code(&ended), 5, "{ended:?}");
    assert!(ended.stderr.contains("release of lock \"k\""), "{ended:?}");
    assert!(ended.stderr.contains(" [E00"), "{ended:?}");
}

#[tokio::test]
async fn command_that_waits_for_the_lock_that_it_runs_under_is_warned() {
    let (_server, url) = server().await;
    let script = |options: &str| {
        let dlock = dlock_tests::bins::dlock();
        format!("exec {} run {options} k -- echo run", dlock.display())
    };
    let running = Running::script(&url, &["a", "k"], &script(""));
    let warning = "runs under \"k\" already";
    eventually(warning, || async { running.complained().contains(warning) }).await;
    running.signal(Signal::SIGTERM);
    assert_eq!(code(&running.all_ended().await), 143);
    for options in ["--try", "--wait 1ms", "--try --quiet", "--try other"] {
        let ended = Running::script(&url, &["k"], &script(options)).all_ended().await;
        assert_eq!(code(&ended), 75, "{ended:?}");
        assert!(!ended.stderr.contains("already"), "{ended:?}");
    }
}

/// Names may come from a list that others write.
#[tokio::test]
async fn a_name_that_disguises_a_text_is_escaped_in_an_error() {
    let (server, url) = server().await;
    let key = "a\u{202e}b";
    let guard = patient(&server.url()).await.lock(key).acquire().await.unwrap();
    let ended = run(&url, &["--try", key, "--", "echo", "run"]).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""), "{ended:?}");
    assert!(ended.stderr.contains("a\\u{202e}b"), "{ended:?}");
    assert!(ended.stderr.ends_with("[E0001]\n"), "{ended:?}");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn readers_stand_back_for_a_writer_that_says_so() {
    let (server, url) = server().await;
    let reader = Running::script(&url, &["--kind", "read", "k"], "echo ready; read line");
    reader.says("ready").await;
    let writes = ["--kind", "write", "--prefer-writers", "k"];
    let writer = Running::script(&url, &writes, "echo writes");
    eventually("it waits", || async {
        server.query::<usize>(&["ZCARD", "{k}:dlock:writers"]).await == 1
    })
    .await;
    let busy = run(&url, &["--kind", "read", "--try", "k", "--", "echo", "run"]).await;
    assert_eq!((code(&busy), busy.stdout.as_str()), (75, ""), "{busy:?}");
    reader.all_ended().await;
    writer.says("writes").await;
    writer.all_ended().await;
    for wrong in ["lock", "semaphore=2"] {
        let ended = run(&url, &["--kind", wrong, "--prefer-writers", "k", "--", "true"]).await;
        assert_eq!(code(&ended), 2, "{ended:?}");
        assert!(ended.stderr.contains("prefer"), "{ended:?}");
    }
}

#[tokio::test]
async fn orphans_of_the_command_do_not_stay_as_zombies_while_it_runs() {
    let (_server, url) = server().await;
    let running = Running::script(&url, &["k"], "(sleep 0.1 & echo $!); read line");
    running.says("\n").await;
    let orphan = fs::canonicalize("/proc").unwrap().join(running.said().trim());
    eventually("the orphan is gone", || async { !orphan.exists() }).await;
    running.write(b"\n");
    assert_eq!(code(&running.all_ended().await), 0);
}

#[tokio::test]
async fn orphan_that_a_real_time_signal_ends_does_not_end_the_command() {
    let (_server, url) = server().await;
    let script = "(sleep 100 & kill -35 $!); echo ready; read line; exit 5";
    let running = Running::script(&url, &["k"], script);
    running.says("ready").await;
    let busy = run(&url, &["--try", "k", "--", "true"]).await;
    assert_eq!(code(&busy), 75, "{busy:?}");
    running.write(b"\n");
    assert_eq!(code(&running.all_ended().await), 5);
}

/// As under a supervisor whose log has ended.
#[tokio::test]
async fn status_is_the_same_where_standard_error_has_no_reader() {
    let (server, url) = server().await;
    let script = server.data_dir().join("no-interpreter");
    let script = script.to_str().unwrap();
    // By another process: no child that this one starts meanwhile has it open for writing.
    let write = format!("printf '#!/nowhere\n' > {script}; chmod 755 {script}");
    let written = child::command("sh").args(["-c", &write]).status().unwrap();
    assert!(written.success());
    for (args, status) in [
        (&["run", "k", "--", "no-such-command-anywhere"][..], 127),
        (&["run", "k", "--", "/etc/passwd"], 126),
        (&["run", "k", "--", script], 127),
        (&["run", "--try", "k", "--", "sh", "-c", "exit 5"], 5),
        (&["run", "--once", "a", "b", "--", "true"], 2),
        (&["explain", "E9999"], 2),
        (&["list"], 0),
    ] {
        // Away from the terminal that the tests may have been started from.
        let mut command = child::command("setsid");
        let (_, writer) = std::io::pipe().unwrap();
        command.arg(dlock_tests::bins::dlock()).args(["--url", &url]);
        command.args(args).stderr(writer);
        let running = tokio::task::spawn_blocking(move || command.status());
        let ended = within(10 * SOON, "the command ends", running).await;
        assert_eq!(ended.unwrap().unwrap().code(), Some(status), "{args:?}");
    }
}

/// As some supervisors start their programs.
#[tokio::test]
async fn status_of_the_command_is_known_where_the_ends_of_children_are_ignored() {
    let (_server, url) = server().await;
    let mut command = child::command("sh");
    command.args(["-c", "trap '' CHLD; exec \"$0\" \"$@\""]);
    command.arg(dlock_tests::bins::dlock()).args(["--url", &url]);
    command.args(["run", "k", "--", "sh", "-c", "exit 5"]);
    let output = dlock_tests::bins::output(command, 10 * SOON);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
}
