//! `dlock run`: what becomes of the command when the lock is lost, or when dlock itself is gone.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use dlock_tests::faults::{PATIENCE, SOON, in_rounds, patient, within};
use dlock_tests::{Ended, Flavor, Proxy, Running, Server, bins, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

/// Ends only by SIGKILL, with all that belongs to it.
const DEAF: &str = "trap '' TERM INT HUP; sh -c \"trap '' TERM; while :; do sleep 1; done\" & echo ready; while :; do wait; done";
/// Says that it was asked to end, and does so.
const POLITE: &str =
    "trap 'echo asked; kill $!; exit 0' TERM; sleep 600 & echo ready; while :; do wait; done";

async fn server() -> Server {
    Server::start(Flavor::from_env()).await
}

fn with(server: &Server, options: &str) -> String {
    format!("{}?{options}&timeout=20s&retry_for=20s", server.url())
}

fn code(ended: &Ended) -> i32 {
    ended.status.code().unwrap_or_else(|| panic!("{ended:?}"))
}

/// The process that watches over a `dlock run`.
async fn keeper(of: &Running) -> Pid {
    eventually("it has a keeper", || async { find_keeper(of).is_some() }).await;
    find_keeper(of).expect("it was there just now")
}

fn find_keeper(of: &Running) -> Option<Pid> {
    let parent = of.pid().to_string();
    let processes = fs::read_dir("/proc").expect("Linux").filter_map(Result::ok);
    let mut stats = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    // The number, the name in brackets, the state, the parent.
    stats.find_map(|stat| {
        let (id, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let is_it = name == "dlock-keeper" && rest.split(' ').nth(1) == Some(&parent);
        is_it.then(|| Pid::from_raw(id.parse().expect("a number")))
    })
}

#[tokio::test]
async fn a_lock_that_is_forced_open_ends_the_command_politely_and_then_for_sure() {
    let server = server().await;
    let client = patient(&server.url()).await;
    let url = with(&server, "lease=3s");
    for (script, grace, said) in [
        (POLITE, "1s", "ready\nasked\n"),
        (DEAF, "100ms", "ready\n"),
        (POLITE, "0s", "ready\n"),
    ] {
        let running = Running::script(&url, &["--grace", grace, "k"], script);
        running.says("ready").await;
        // dlock does it itself.
        signal::kill(keeper(&running).await, Signal::SIGKILL).unwrap();
        let guard = loop {
            client.force_release("k").await.unwrap();
            if let Ok(guard) = client.lock("k").try_acquire().await {
                break guard;
            }
        };
        let ended = within(SOON, "its end", running.all_ended()).await;
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (76, said),
            "{grace}: {ended:?}"
        );
        assert!(ended.stderr.contains("lock \"k\": lost"), "{ended:?}");
        assert!(
            guard.is_held(),
            "the command that ended took the lock of another client along"
        );
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_fixed_lease_ends_the_command_while_it_still_lasts() {
    let server = server().await;
    let client = patient(&server.url()).await;
    // Asked half of the lease before it is over: a machine that stands still for less does not matter.
    let url = with(&server, "lease=300s");
    let args = ["--fixed-lease", "24s", "--grace", "23s", "k"];
    let slow =
        "trap 'echo asked; read line; kill $!; exit 0' TERM; sleep 600 & echo ready; while :; do wait; done";
    let running = Running::script(&url, &args, slow);
    running.says("asked").await;
    assert!(
        client.inspect("k").await.unwrap().is_some(),
        "it is asked only when all is over"
    );
    running.write(b"\n");
    assert_eq!(code(&running.all_ended().await), 76);

    let running = Running::script(&url, &["--fixed-lease", "1s", "deaf"], DEAF);
    running.says("ready").await;
    let ended = within(SOON, "its end", running.all_ended()).await;
    assert_eq!(
        (code(&ended), ended.stdout.as_str()),
        (76, "ready\n"),
        "{ended:?}"
    );

    let running = Running::start(&url, &["--fixed-lease", "20s", "short", "--", "true"]);
    assert_eq!(code(&within(SOON, "its end", running.all_ended()).await), 0);
}

#[tokio::test]
async fn a_server_that_hangs_or_is_cut_off_or_dies_ends_the_command_while_the_lease_lasts() {
    for fault in ["hangs", "is cut off", "dies"] {
        let server = server().await;
        let proxy = Proxy::start(server.addr());
        // Renewed every 8 s; asked to end when 12 s are left, and others may have it when none are.
        let url = format!("{}?lease=24s&timeout=500ms", proxy.url());
        let running = Running::script(&url, &["--grace", "12s", "k"], POLITE);
        running.says("ready").await;
        match fault {
            "hangs" => server.stop(),
            "is cut off" => {
                proxy.refuse();
                proxy.cut();
            }
            _ => server.kill(),
        }
        running.says("asked").await;
        if fault == "is cut off" {
            let beside = patient(&server.url()).await;
            assert!(
                beside.inspect("k").await.unwrap().is_some(),
                "it is asked only when all is over"
            );
        }
        let ended = within(PATIENCE, "its end", running.all_ended()).await;
        assert_eq!(code(&ended), 76, "{fault}: {ended:?}");
        if fault == "hangs" {
            server.cont();
        }
    }
}

#[tokio::test]
async fn a_server_that_is_away_for_a_while_ends_nothing() {
    let server = Server::builder(Flavor::from_env())
        .persistence(true)
        .start()
        .await;
    let url = with(&server, "lease=60s");
    let running = Running::script(&url, &["k"], "echo ready; read line; exit 3");
    running.says("ready").await;
    server.kill();
    server.restart().await;
    let client = patient(&server.url()).await;
    assert!(
        client
            .lock("k")
            .try_acquire()
            .await
            .is_err_and(|error| error.is_busy())
    );
    running.write(b"\n");
    assert_eq!(code(&running.all_ended().await), 3);
}

#[tokio::test]
async fn with_on_lost_ignore_the_command_goes_on_and_its_status_counts() {
    let server = server().await;
    let client = patient(&server.url()).await;
    let url = with(&server, "lease=1s");
    let running = Running::script(
        &url,
        &["--on-lost", "ignore", "k"],
        "echo ready; read line; echo went on; exit 4",
    );
    running.says("ready").await;
    client.force_release("k").await.unwrap();
    let _guard = client.lock("k").acquire().await.unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    running.write(b"\n");
    let ended = running.all_ended().await;
    assert_eq!(
        (code(&ended), ended.stdout.as_str()),
        (4, "ready\nwent on\n"),
        "{ended:?}"
    );
    assert!(ended.stderr.contains("goes on without"), "{ended:?}");
}

#[tokio::test]
async fn killed_dlock_ends_the_whole_command_and_the_lock_ends_with_the_lease() {
    let server = server().await;
    let url = with(&server, "lease=2s");
    let running = Running::script(&url, &["k"], DEAF);
    running.says("ready").await;
    keeper(&running).await;
    running.signal(Signal::SIGKILL);
    within(SOON, "its end", running.is_gone()).await;
    let next = Running::start(&url, &["--wait", "1h", "k", "--", "echo", "run"]);
    let ended = within(SOON, "the lease", next.all_ended()).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (0, "run\n"));
}

#[tokio::test]
async fn when_dlock_is_killed_together_with_its_keeper_the_command_still_goes_with_it() {
    let server = server().await;
    let running = Running::start(&with(&server, "lease=300s"), &["k", "--", "cat"]);
    running.write(b"ready\n");
    running.says("ready").await;
    signal::kill(keeper(&running).await, Signal::SIGKILL).unwrap();
    running.signal(Signal::SIGKILL);
    within(SOON, "its end", running.is_gone()).await;
}

#[tokio::test]
async fn when_only_the_keeper_is_killed_nothing_happens() {
    let server = server().await;
    let running = Running::start(&with(&server, "lease=2s"), &["k", "--", "cat"]);
    running.write(b"ready\n");
    running.says("ready").await;
    signal::kill(keeper(&running).await, Signal::SIGKILL).unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    running.write(b"still there\n");
    let ended = running.all_ended().await;
    // A machine that stood still for the whole lease is all that ends it.
    assert!(
        code(&ended) == 0 && ended.stdout == "ready\nstill there\n" || code(&ended) == 76,
        "{ended:?}"
    );
}

#[tokio::test]
async fn keeper_outlives_a_kill_of_all_processes_of_dlock() {
    let server = server().await;
    let running = Running::script(&with(&server, "lease=300s"), &["k"], DEAF);
    running.says("ready").await;
    let keeper = keeper(&running).await;
    for sent in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGALRM,
    ] {
        signal::kill(keeper, sent).unwrap();
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    running.signal(Signal::SIGKILL);
    within(SOON, "its end", running.is_gone()).await;
}

#[tokio::test]
async fn a_dlock_that_is_stopped_for_longer_than_the_lease_finds_its_command_ended() {
    let server = server().await;
    let url = with(&server, "lease=2s");
    let running = Running::script(&url, &["k"], "trap '' TERM; echo $$; while :; do sleep 0.1; done");
    running.says("\n").await;
    let command = running.said().trim().to_owned();
    keeper(&running).await;
    running.signal(Signal::SIGSTOP);
    // dlock does not do it, and cannot take notice of it either.
    eventually("the command is ended", || async { has_ended(&command) }).await;
    let next = Running::start(&url, &["--wait", "1h", "k", "--", "echo", "next"]);
    assert_eq!(code(&next.all_ended().await), 0);
    running.signal(Signal::SIGCONT);
    assert_eq!(code(&running.all_ended().await), 76);
}

/// Whether a process is not there any more, or only until its parent has taken notice.
fn has_ended(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

#[tokio::test]
async fn nothing_is_left_running_when_it_has_ended() {
    let server = server().await;
    let running = Running::start(&with(&server, "lease=300s"), &["k", "--", "cat"]);
    let keeper = keeper(&running).await;
    assert_eq!(code(&running.all_ended().await), 0);
    eventually("the keeper is gone", || async { has_ended(&keeper.to_string()) }).await;
    assert_eq!(server.keys().await, ["dlock:fence"]);
}

/// As those that ask a command for its progress.
#[tokio::test]
async fn signals_that_keep_coming_do_not_end_a_command_whose_lock_is_held() {
    let server = server().await;
    let script = "trap : USR1; echo ready; for _ in $(seq 40); do sleep 0.1; done";
    in_rounds("the machine stands still for no lease", async || {
        let running = Running::script(&with(&server, "lease=2s"), &["k"], script);
        running.says("ready").await;
        let pid = running.pid();
        let mut ended = std::pin::pin!(running.all_ended());
        let ended = loop {
            tokio::select! {
                ended = &mut ended => break ended,
                () = tokio::time::sleep(Duration::from_millis(20)) => drop(signal::kill(pid, Signal::SIGUSR1)),
            }
        };
        match code(&ended) {
            0 => Ok(()),
            76 => Err("it was lost"),
            _ => panic!("{ended:?}"),
        }
    })
    .await;
}

/// As under sudo(8), which only root can signal: dlock runs as another user than its command.
#[tokio::test]
async fn command_that_runs_as_another_user_is_said_to_be_out_of_reach_and_ended_when_it_no_longer_is() {
    let is_root = fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if !is_root {
        eprintln!("only root can make a program that changes the user");
        return;
    }
    let server = server().await;
    let client = patient(&server.url()).await;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let sudo = dir.path().join("sudo");
    let setpriv = std::env::split_paths(&std::env::var_os("PATH").unwrap())
        .map(|path| path.join("setpriv"))
        .find(|path| path.exists());
    fs::copy(setpriv.unwrap(), &sudo).unwrap();
    fs::set_permissions(&sudo, Permissions::from_mode(0o4755)).unwrap();
    for grace in ["0s", "100ms"] {
        let script = format!(
            "exec setpriv --reuid=65534 --clear-groups {} run --grace {grace} k -- {} --reuid=0 --clear-groups \
             sh -c 'echo ready; read line; exec setpriv --reuid=65534 sleep 600'",
            bins::dlock().display(),
            sudo.display()
        );
        let running = Running::script(&with(&server, "lease=6s"), &["outer"], &script);
        let complains = async |what: &str| {
            eventually(what, || async { running.complained().contains(what) }).await;
        };
        running.says("ready").await;
        running.signal(Signal::SIGTERM);
        complains("SIGTERM cannot be passed on: the command runs as another user").await;
        client.force_release("k").await.unwrap();
        complains("lock \"k\": lost, ").await;
        complains("; the command cannot be ended: it runs as another user").await;
        assert!(running.is_running());
        running.write(b"now\n");
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 76, "{ended:?}");
        assert_eq!(ended.stderr.matches("cannot be ended").count(), 1, "{ended:?}");
    }
}

/// As that of a pager which shows its first page.
#[tokio::test]
async fn reader_of_the_messages_that_stands_still_does_not_delay_the_end_of_the_command() {
    let server = server().await;
    let path = |name| server.data_dir().join(name).display().to_string();
    let mut command = child::command("sh");
    // As many bytes as a pipe has room for.
    let script = r#"
        mkfifo "$FULL"; exec 3<>"$FULL"; head -c 65536 /dev/zero >&3
        exec "$DLOCK" run --grace 1s k -- sh -c 'exec 2>/dev/null; trap "echo ended >\"$SAID\"; exit" TERM; echo begun >"$SAID"; while :; do sleep 0.1; done' 2>&3
    "#;
    command
        .args(["-c", script])
        .env("FULL", path("full"))
        .env("SAID", path("said"))
        .env("DLOCK", bins::dlock())
        .env("DLOCK_URL", with(&server, "lease=3s"));
    let mut child = child::spawn(command).expect("setpriv (package util-linux) can be started");
    let said = async |what: &str| {
        eventually(what, || async {
            fs::read_to_string(path("said")).is_ok_and(|said| said.trim() == what)
        })
        .await;
    };
    said("begun").await;
    let client = patient(&server.url()).await;
    client.force_release("k").await.unwrap();
    said("ended").await;
    child.kill().unwrap();
    child.wait().unwrap();
}
