//! What the person on call finds out with the command, by incidents: a holder that is killed, stopped, hung or cut off;
//! services that wait for each other; a hold that has to be broken.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dlock::{LockClient, OnceReply};
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::{Direction, Flavor, Proxy, Running, Server, child, eventually, permissions};
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::sync::Barrier;

/// No incident waits for the end of this lease.
const LASTING: &str = "lease=300s&timeout=20s&retry_for=60s&presence=on";

async fn server() -> (Server, String) {
    built().await;
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?{LASTING}", server.url());
    (server, url)
}

/// While the command is built, nothing is held.
async fn built() {
    tokio::task::spawn_blocking(dlock_tests::bins::dlock)
        .await
        .unwrap();
}

async fn dlock(url: &str, args: &[&str]) -> Output {
    let mut command = child::command(dlock_tests::bins::dlock());
    command.args(["--url", url]).args(args);
    let output = tokio::task::spawn_blocking(move || dlock_tests::bins::output(command, 2 * PATIENCE));
    output.await.unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

/// The objects that a command prints, one a line.
async fn objects(url: &str, args: &[&str]) -> Vec<Value> {
    let output = dlock(url, args).await;
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let is_note = |line: &str| line.contains("it is not known for how long");
    assert!(said.lines().all(is_note), "{output:?}");
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Until the holder has written down what it does.
async fn is_known(url: &str, key: &str) -> Value {
    within(3 * PATIENCE, "the holder is known", async {
        loop {
            if let Some(lock) = objects(url, &["list", key, "--json"]).await.pop()
                && lock["holder"]["location"].is_string()
            {
                return lock;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    })
    .await
}

async fn diagnosis(url: &str, key: &str) -> (String, String) {
    let shown = objects(url, &["show", key, "--json"]).await.pop().unwrap();
    let word = |name: &str| shown["diagnosis"][name].as_str().unwrap().to_owned();
    (word("state"), word("because"))
}

/// Until the state of the holder is this one.
async fn state_becomes(url: &str, key: &str, state: &str) {
    // What must be told within 30 s on a machine at rest.
    within(6 * PATIENCE, state, async {
        while diagnosis(url, key).await.0 != state {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn url_of_services_that_answer_questions_is_one_to_look_on_with() {
    let (_server, url) = server().await;
    for control in ["", "&control=on", "&control=off"] {
        let url = format!("{url}{control}");
        let listed = dlock(&url, &["list"]).await;
        assert_eq!(code(&listed), 0, "{listed:?}");
        let examined = dlock(&url, &["doctor", "--read-only"]).await;
        assert!(examined.stderr.is_empty(), "{examined:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_has_one_object_for_each_holder_and_says_why_something_is_unknown() {
    let (server, url) = server().await;
    let client = LockClient::builder()
        .url(&url)
        .service_name("checkout")
        .build()
        .await
        .unwrap();
    let hidden = LockClient::builder()
        .url(&url)
        .presence(false)
        .build()
        .await
        .unwrap();
    let guard = client.lock("a").note("invoice\u{9b}42").acquire().await.unwrap();
    let other = hidden.lock("hidden").acquire().await.unwrap();
    let lock = is_known(&url, "a").await;
    assert_eq!((&lock["key"], &lock["kind"]), (&"a".into(), &"lock".into()));
    let holder = &lock["holder"];
    assert_eq!(holder["service"], "checkout");
    assert_eq!(holder["note"], "invoice\u{9b}42");
    assert_eq!(holder["address"], "127.0.0.1");
    assert!(
        holder["location"]
            .as_str()
            .unwrap()
            .contains("redis_operations.rs")
    );
    assert!(holder["id"].as_str().unwrap().starts_with(&client.id()) && holder["unknown"].is_null());
    assert!(lock["held_ms"].as_u64().unwrap() >= 1000 && lock["lease_left_ms"].as_u64().unwrap() > 1000);
    assert_eq!(lock["waiters"], 0);

    let unknown = objects(&url, &["list", "hidden", "--json"]).await.pop().unwrap();
    for name in ["service", "address", "location", "note"] {
        assert!(unknown["holder"][name].is_null());
        assert!(
            unknown["holder"]["unknown"][name]
                .as_str()
                .unwrap()
                .contains("published nothing")
        );
    }
    assert!(unknown["held_ms"].is_null() && unknown["holder"]["unknown"]["held_ms"].is_string());

    // Nothing from the store reaches the terminal raw: no client of ours makes such a name, but anybody may.
    let evil = "a\u{1b}[2Jb";
    let holder = "0192f3a4-0000-8000-8000-000000000001:1";
    server.command(&["HSET", evil, holder, "1"]).await;
    for args in [&["list"][..], &["watch", "--once"], &["list", "--json"]] {
        let output = dlock(&url, args).await;
        assert_eq!(code(&output), 0, "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.contains("[2Jb") && !text.contains(['\u{1b}', '\u{9b}']),
            "{text:?}"
        );
    }
    let old = objects(&url, &["list", "--older-than", "1h", "--json"]).await;
    assert_eq!(old, Vec::<Value>::new());
    assert_eq!(objects(&url, &["list", "h*n", "--json"]).await.len(), 1);
    drop((guard, other));
}

/// One client may have many of them, as readers: each look for it takes a second or more, and its servers list all clients.
#[tokio::test]
async fn client_of_many_holds_is_looked_for_once() {
    let (server, url) = server().await;
    let hidden = LockClient::builder().url(&url).presence(false);
    let hidden = hidden.build().await.unwrap();
    let mut held = Vec::new();
    for _ in 0..20 {
        let reader = tokio::spawn(hidden.rw_lock("k").read().acquire());
        held.push(reader.await.unwrap().unwrap());
    }
    let other = LockClient::builder().url(&url).presence(false);
    let other = other.build().await.unwrap();
    held.push(other.rw_lock("k").read().acquire().await.unwrap());
    for command in ["show", "why"] {
        server.forget_commands().await;
        let shown = objects(&url, &[command, "k", "--json"]).await;
        let holders = match command {
            "show" => shown,
            _ => shown[0]["chain"].as_array().unwrap().clone(),
        };
        assert_eq!(holders.len(), 21, "{holders:?}");
        let is_told = |holder: &Value| holder["diagnosis"]["because"].is_string();
        assert!(holders.iter().all(is_told), "{holders:?}");
        let stats: String = server.query(&["INFO", "commandstats"]).await;
        let lists = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_client|list:calls="));
        let lists = lists.and_then(|rest| rest.split(',').next());
        // Redis 6.2 counts all of CLIENT as one.
        let expected = (Flavor::from_env() != Flavor::Redis62).then_some("2");
        assert_eq!(lists, expected, "one for each client");
    }
    drop(held);
}

/// What another program wrote there is no reason to fail.
#[tokio::test]
async fn holder_whose_id_is_none_of_dlock_is_unknown() {
    let (server, url) = server().await;
    server.command(&["HSET", "k", "a-b-c-d-e:1", "1"]).await;
    assert_eq!(diagnosis(&url, "k").await.0, "unknown");
    assert_eq!(code(&dlock(&url, &["why", "k"]).await), 0);
}

/// Its connections do not name it, so that it seems to have none: it may well be alive.
#[tokio::test]
async fn holder_of_redisson_is_not_called_killed() {
    let (server, url) = server().await;
    let holder = "6f9619ff-8b86-4011-b42d-00c04fc964ff:1";
    server.command(&["HSET", "k", holder, "1"]).await;
    server.command(&["PEXPIRE", "k", "300000"]).await;
    let (state, because) = diagnosis(&url, "k").await;
    assert_eq!(state, "unknown", "{because}");
    assert!(because.contains("Redisson"), "{because}");
    let why = objects(&url, &["why", "k", "--json"]).await.pop().unwrap();
    let link = &why["chain"][0];
    assert_eq!(link["diagnosis"]["state"], "unknown", "{why}");
    let unknown = link["holder"]["unknown"]["service"].as_str();
    assert!(unknown.is_some_and(|why| why.contains("Redisson")), "{why}");
}

/// It works with no more, and its lease is renewed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_that_may_not_name_its_connection_is_not_called_killed() {
    let (server, url) = server().await;
    permissions::give(&server, "svc", &["Locks"]).await;
    let service = format!("{}?lease=300s&timeout=20s", server.url_as("svc", "password"));
    let client = LockClient::connect(&service).await.unwrap();
    let guard = client.lock("shop:k").acquire().await.unwrap();
    let is_unknown = async || {
        let (state, because) = diagnosis(&url, "shop:k").await;
        assert_eq!(state, "unknown", "{because}");
        assert!(because.contains("+client|setname"), "{because}");
    };
    is_unknown().await;
    // Its last commands are others now.
    client.lock("shop:other").run(async |_| ()).await.unwrap();
    is_unknown().await;
    guard.release().await.unwrap();
    client.shutdown(PATIENCE).await;
    drop(client);
    let holder = "0192f3a4-0000-8000-8000-000000000001:1";
    server.command(&["HSET", "shop:k", holder, "1"]).await;
    state_becomes(&url, "shop:k", "killed or cut off").await;
    let (_, because) = diagnosis(&url, "shop:k").await;
    assert!(because.contains("+client|setname"), "{because}");
}

/// The keys may be millions, and the store in trouble: that is why one asks.
#[tokio::test]
async fn holder_is_shown_where_the_scan_for_the_waiters_fails() {
    let (server, url) = server().await;
    let client = LockClient::connect(&url).await.unwrap();
    let _guard = client.lock("order:1").acquire().await.unwrap();
    server.forget_commands().await;
    let shown = objects(&url, &["show", "order:1", "--json"]).await.pop().unwrap();
    assert_eq!(shown["waiters"], 0, "{shown}");
    let stats: String = server.query(&["INFO", "commandstats"]).await;
    let scans = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_scan:calls="));
    let scans = scans.and_then(|rest| rest.split(',').next());
    assert_eq!(scans, Some("1"), "only the clients are looked for");

    let proxy = Proxy::start(server.addr());
    for k in 1..=50 {
        proxy.lose(k, |command| command.is("SCAN"));
    }
    let through = format!("{}?retry_for=1s", proxy.url());
    let shown = dlock(&through, &["show", "order:1"]).await;
    let text = String::from_utf8_lossy(&shown.stdout);
    let said = String::from_utf8_lossy(&shown.stderr);
    assert_eq!(code(&shown), 0, "{shown:?}");
    assert!(text.starts_with("order:1  held by "), "{shown:?}");
    assert!(said.contains("which calls wait for it is not known"), "{shown:?}");
    let shown = dlock(&through, &["show", "order:1", "--json"]).await;
    assert_eq!(code(&shown), 0, "{shown:?}");
    let object: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert!(object["waiters"].is_null(), "{object}");
    assert!(object["holder"]["unknown"]["waiters"].is_string(), "{object}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_that_was_killed_or_stopped_is_told_apart() {
    let (_server, url) = server().await;
    let running = Running::script(&url, &["k"], "echo begun; read line");
    running.says("begun\n").await;
    is_known(&url, "k").await;
    assert_eq!(diagnosis(&url, "k").await.0, "alive");
    running.signal(Signal::SIGSTOP);
    state_becomes(&url, "k", "stopped").await;
    running.signal(Signal::SIGCONT);
    state_becomes(&url, "k", "alive").await;
    running.signal(Signal::SIGKILL);
    running.is_gone().await;
    state_becomes(&url, "k", "killed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_that_is_cut_off_is_told_from_one_that_hangs() {
    let (server, url) = server().await;
    let proxy = Proxy::start(server.addr());
    let cut_off = format!("{}?{LASTING}&control=on", proxy.url());
    let running = Running::script(&cut_off, &["cut"], "echo begun; read line");
    running.says("begun\n").await;

    let hangs = format!("{url}&control=on&name=hangs");
    let (begin, begins) = std::sync::mpsc::channel();
    let (hang, hung) = std::sync::mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let client = LockClient::connect(&hangs).await.unwrap();
            let _guard = client.lock("hangs").note("for ever").acquire().await.unwrap();
            begin.send(()).unwrap();
            tokio::time::sleep(Duration::from_secs(3)).await;
            // What must not be done: the runtime can do nothing else.
            let _ = hung.recv();
        });
    });
    begins.recv().unwrap();
    is_known(&url, "cut").await;
    let hangs = is_known(&url, "hangs").await;
    proxy.refuse();
    proxy.cut();
    state_becomes(&url, "hangs", "hung").await;
    // Others ask it again and again, until its mailbox is full.
    let (id, _) = hangs["holder"]["id"].as_str().unwrap().split_once(':').unwrap();
    let asker = LockClient::connect(&url).await.unwrap();
    let asked = (0..80).map(|_| asker.ask(id));
    let asked = futures_util::future::join_all(asked).await;
    assert!(asked.iter().any(Result::is_err), "{asked:?}");
    state_becomes(&url, "hangs", "hung").await;
    let (state, because) = diagnosis(&url, "hangs").await;
    assert!(
        state == "hung" && because.contains("mailbox"),
        "{state}: {because}"
    );
    assert_eq!(code(&dlock(&url, &["why", "hangs"]).await), 0);
    state_becomes(&url, "cut", "cut off").await;
    drop(hang);
    thread.join().unwrap();
}

/// To the server it is connected as before, by a proxy on the same machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_behind_a_network_that_fell_silent_does_not_hang_but_is_cut_off() {
    let (server, url) = server().await;
    let proxy = Proxy::start(server.addr());
    let silent = format!("{}?{LASTING}&control=on", proxy.url());
    let running = Running::script(&silent, &["k"], "echo begun; read line");
    running.says("begun\n").await;
    is_known(&url, "k").await;
    proxy.mute_new();
    proxy.block(Direction::Both);
    state_becomes(&url, "k", "cut off").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_services_that_wait_for_each_other_are_named() {
    let (server, url) = server().await;
    let service = async |name: &'static str, first: &'static str, second: &'static str| {
        let client = LockClient::builder()
            .url(&url)
            .service_name(name)
            .build()
            .await
            .unwrap();
        let guard = client.lock(first).acquire().await.unwrap();
        (client.clone(), (guard, client.lock(second)))
    };
    let (one, (a, takes_b)) = service("checkout", "A", "B").await;
    let (two, (b, takes_a)) = service("billing", "B", "A").await;
    let hold = |guard: dlock::LockGuard, next: dlock::Lock| {
        tokio::spawn(async move {
            // A guard that is at hand, and one whose frame this is.
            let nested = guard.scope(next.acquire()).await.map(drop);
            drop(guard);
            nested
        })
    };
    let tasks = [hold(a, takes_b), hold(b, takes_a)];
    let found = within(6 * PATIENCE, "the circle", async {
        loop {
            let found = objects(&url, &["why", "A", "--json"]).await.pop().unwrap();
            if found["cycle"].is_array() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    })
    .await;
    assert_eq!(found["cycle"], serde_json::json!(["A", "B"]));
    let services: Vec<_> = found["chain"]
        .as_array()
        .unwrap()
        .iter()
        .map(|link| &link["holder"]["service"])
        .collect();
    assert_eq!(services, ["checkout", "billing"]);
    assert_eq!(found["chain"][0]["waits_for"]["key"], "B");
    let output = dlock(&url, &["why", "A"]).await;
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(code(&output), 3, "{output:?}");
    assert!(text.contains("deadlock: A -> B -> A"), "{text}");

    // One hold is broken, by its id, and the other one goes on.
    let holder = found["chain"][0]["holder"]["id"].as_str().unwrap();
    let broken = dlock(
        &url,
        &[
            "break",
            "A",
            "--holder",
            holder,
            "--reason",
            "a deadlock",
            "--by",
            "anna",
        ],
    )
    .await;
    assert_eq!(code(&broken), 0, "{broken:?}");
    let again = dlock(
        &url,
        &["break", "A", "--holder", holder, "--reason", "a deadlock"],
    )
    .await;
    assert_eq!(code(&again), 1, "{again:?}");
    for task in tasks {
        let _ = within(6 * PATIENCE, "the end of the circle", task).await.unwrap();
    }
    let audit = server
        .query::<Vec<redis::Value>>(&["XRANGE", "dlock:audit", "-", "+"])
        .await;
    let text = format!("{audit:?}");
    assert!(text.contains("a deadlock") && text.contains("anna"), "{text}");
    assert_eq!(code(&dlock(&url, &["why", "free"]).await), 1);
    drop((one, two));
}

/// The work beside the wait ends the hold.
#[tokio::test]
async fn task_that_waits_for_its_own_hold_is_no_deadlock() {
    let (_server, url) = server().await;
    let client = LockClient::builder().url(&url).build().await.unwrap();
    let task = tokio::spawn(async move {
        let guard = client.lock("k").acquire().await.unwrap();
        let work = async { tokio::time::sleep(6 * PATIENCE).await };
        let next = client.lock("k");
        tokio::join!(async { drop((work.await, guard)) }, async {
            drop(next.acquire().await)
        });
    });
    let found = within(6 * PATIENCE, "the wait", async {
        loop {
            let found = objects(&url, &["why", "k", "--json"]).await.pop();
            if let Some(found) = found.filter(|found| found["chain"][0]["waits_for"]["key"] == "k") {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    })
    .await;
    assert!(found["cycle"].is_null(), "{found}");
    assert_eq!(code(&dlock(&url, &["why", "k"]).await), 0);
    task.abort();
}

/// Each waits until the other one ends its read.
#[tokio::test]
async fn two_readers_that_want_to_write_are_a_deadlock() {
    let (_server, url) = server().await;
    let reading = Arc::new(Barrier::new(2));
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let client = LockClient::builder().url(&url).build().await.unwrap();
        let reading = reading.clone();
        tasks.push(tokio::spawn(async move {
            let guard = client.rw_lock("k").read().acquire().await.unwrap();
            reading.wait().await;
            drop((client.rw_lock("k").write().acquire().await, guard));
        }));
    }
    let found = deadlock_of(&url, "k").await;
    assert_eq!(found["cycle"], serde_json::json!(["k"]));
    let text = String::from_utf8(dlock(&url, &["why", "k"]).await.stdout).unwrap();
    assert!(text.contains("deadlock: k -> k (each"), "{text}");
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn deadlock_of(url: &str, key: &str) -> Value {
    within(6 * PATIENCE, "the circle", async {
        loop {
            let found = objects(url, &["why", key, "--json"]).await.pop().unwrap();
            if found["cycle"].is_array() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    })
    .await
}

/// Whichever reader comes first: one waits for nothing, one for a lock that is held by nobody who waits, one for the holder
/// that waits for all three.
#[tokio::test]
async fn deadlock_through_any_of_several_readers_is_found_and_names_each_lock_once() {
    let (_server, url) = server().await;
    let client = async || LockClient::builder().url(&url).build().await.unwrap();
    let (busy, readers) = (client().await, Arc::new(Barrier::new(5)));
    let _busy = busy.lock("C").acquire().await.unwrap();
    let mut tasks = Vec::new();
    for next in [None, Some("C"), Some("B"), Some("C")] {
        let (client, readers) = (client().await, readers.clone());
        tasks.push(tokio::spawn(async move {
            let guard = client.rw_lock("A").read().acquire().await.unwrap();
            readers.wait().await;
            match next {
                Some(next) => drop(client.lock(next).acquire().await),
                None => std::future::pending().await,
            }
            drop(guard);
        }));
    }
    let writer = client().await;
    tasks.push(tokio::spawn(async move {
        let guard = writer.lock("B").acquire().await.unwrap();
        readers.wait().await;
        drop((writer.rw_lock("A").write().acquire().await, guard));
    }));
    let found = deadlock_of(&url, "A").await;
    assert_eq!(found["cycle"], serde_json::json!(["A", "B"]), "{found}");
    let output = dlock(&url, &["why", "A"]).await;
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(code(&output), 3, "{output:?}");
    assert!(text.contains("deadlock: A -> B -> A (each"), "{text}");
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn holder_is_asked_to_stop_by_the_command() {
    let (_server, url) = server().await;
    let client = LockClient::builder()
        .url(&url)
        .control(true)
        .build()
        .await
        .unwrap();
    let guard = client.lock("k").acquire().await.unwrap();
    let id = client.inspect("k").await.unwrap().unwrap().id;
    let args = [
        "revoke", "k", "--holder", &id, "--reason", "a deploy", "--by", "anna", "--json",
    ];
    let told = objects(&url, &args).await;
    assert_eq!(told[0]["done"], true);
    let why = within(2 * PATIENCE, "the request", guard.revoked())
        .await
        .unwrap();
    assert_eq!((why.by.as_str(), why.reason.as_str()), ("anna", "a deploy"));
    let args = ["break", "k", "--holder", &id, "--reason", " "];
    let refused = dlock(&url, &args).await;
    assert_eq!(code(&refused), 2);
    assert!(
        String::from_utf8_lossy(&refused.stderr)
            .trim_end()
            .ends_with("[E0016]"),
        "{refused:?}"
    );
    guard.release().await.unwrap();
}

/// Whoever may publish to every channel, and touch no lock, can neither break one nor have its holder stop.
#[tokio::test]
async fn publisher_without_the_keys_can_do_nothing_to_a_lock() {
    let (server, url) = server().await;
    let acl = [
        "ACL",
        "SETUSER",
        "loud",
        "reset",
        "on",
        ">pw",
        "allchannels",
        "+publish",
        "+subscribe",
        "+spublish",
    ];
    // Redis 6.2 has no sharded channels.
    let words = if Flavor::from_env() == Flavor::Redis62 {
        &acl[..9]
    } else {
        &acl[..]
    };
    server.command(words).await;
    let client = LockClient::builder()
        .url(&url)
        .control(true)
        .build()
        .await
        .unwrap();
    let guard = client.lock("k").acquire().await.unwrap();
    let id = client.inspect("k").await.unwrap().unwrap().id;
    let ask = format!("dlock:ask:{}", client.id());
    let connect = redis::Client::open(server.url_as("loud", "pw")).unwrap();
    let mut loud = connect.get_multiplexed_async_connection().await.unwrap();
    for channel in [ask.as_str(), "redisson_lock__channel:{k}", "k", "dlock:reply:x"] {
        for message in [
            format!("dlock 1\tlook\t{id}"),
            "0".to_owned(),
            "2".to_owned(),
            "dlock 1\task\tx".to_owned(),
        ] {
            redis::cmd("PUBLISH")
                .arg(channel)
                .arg(message)
                .exec_async(&mut loud)
                .await
                .unwrap();
        }
    }
    for command in [
        &["HSET", ask.as_str(), "x", "y"][..],
        &["DEL", "k"],
        &["SET", "{k}:dlock:revoked:x", "y"],
    ] {
        let mut cmd = redis::cmd(command[0]);
        cmd.arg(&command[1..]);
        assert!(cmd.exec_async(&mut loud).await.is_err(), "{command:?}");
    }
    let stops = tokio::time::timeout(Duration::from_secs(1), guard.revoked()).await;
    assert!(stops.is_err() && guard.is_held());
    guard.ensure(Duration::from_secs(30)).await.unwrap();
    // Nor with the command.
    let output = dlock(
        &server.url_as("loud", "pw"),
        &["break", "k", "--holder", &id, "--reason", "why not"],
    )
    .await;
    assert_eq!(code(&output), 2, "{output:?}");
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn completions_manual_and_explanations_are_printed() {
    for args in [
        &["completions", "bash"][..],
        &["completions", "zsh"],
        &["man"],
        &["man", "list"],
        &["explain"],
    ] {
        let output = dlock("redis://nowhere", args).await;
        assert!(
            code(&output) == 0 && output.stdout.len() > 200,
            "{args:?}: {output:?}"
        );
    }
    // Each command that a page names has a page.
    for command in [&[][..], &["record"]] {
        let page = dlock("redis://nowhere", &[&["man"], command].concat()).await;
        let page = String::from_utf8(page.stdout).unwrap().replace("\\-", "-");
        let begin = [&["dlock"], command, &[""]].concat().join("-");
        let named = page
            .split_whitespace()
            .filter_map(|word| word.strip_suffix("(1)"));
        let named: Vec<_> = named.filter_map(|name| name.strip_prefix(&begin)).collect();
        assert!(named.len() > 2, "{page}");
        for name in named {
            let output = dlock("redis://nowhere", &[&["man"], command, &[name]].concat()).await;
            let title = format!(".TH {begin}{name} 1");
            let page = String::from_utf8_lossy(&output.stdout).replace("\\-", "-");
            assert!(page.contains(&title), "{title}: {output:?}");
        }
    }
    assert_eq!(code(&dlock("redis://nowhere", &["man", "record", "no"]).await), 2);
    let output = dlock("redis://nowhere", &["explain", "E0007"]).await;
    assert!(String::from_utf8_lossy(&output.stdout).contains("remedy"));
    let by_name = dlock("redis://nowhere", &["explain", "refused"]).await;
    assert_eq!(by_name.stdout, output.stdout);
    for unknown in ["E9999", "NotAcquire"] {
        let output = dlock("redis://nowhere", &["explain", unknown]).await;
        assert_eq!(code(&output), 2, "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains(unknown),
            "{output:?}"
        );
    }
}

#[tokio::test]
async fn variable_that_is_no_text_fails_only_commands_that_use_it() {
    for (args, status) in [
        (&["explain", "E0007"][..], 0),
        (&["--url", "memory://", "list"], 0),
        (&["list", "--url", "memory://"], 0),
        (&["list"], 2),
    ] {
        let mut command = child::command(dlock_tests::bins::dlock());
        command
            .args(args)
            .env("DLOCK_URL", OsStr::from_bytes(b"redis://\xff"));
        let output = dlock_tests::bins::output(command, 2 * PATIENCE);
        assert_eq!(code(&output), status, "{args:?}: {output:?}");
    }
}

#[tokio::test]
async fn too_few_files_are_told_without_a_panic() {
    for files in 4..8 {
        let mut command = child::command("sh");
        command.args(["-c", "ulimit -n $1; exec \"$0\" --url memory:// list"]);
        command.arg(dlock_tests::bins::dlock()).arg(files.to_string());
        let output = dlock_tests::bins::output(command, 2 * PATIENCE);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(code(&output) == 2 && said.contains("(os error 24)"), "{output:?}");
    }
}

#[tokio::test]
async fn reader_that_has_enough_ends_the_command_without_a_word() {
    for args in [
        &["completions", "bash"][..],
        &["man", "run"],
        &["explain"],
        &["show", "k"],
        &["doctor"],
    ] {
        let mut command = child::command(
            tokio::task::spawn_blocking(dlock_tests::bins::dlock)
                .await
                .unwrap(),
        );
        command.args(["--url", "memory://"]).args(args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer).stderr(Stdio::piped());
        let running = command.spawn().unwrap();
        let output = tokio::task::spawn_blocking(|| running.wait_with_output());
        let output = within(PATIENCE, "the command ends", output).await;
        let output = output.unwrap().unwrap();
        assert_eq!(code(&output), 141, "{args:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{args:?}: {output:?}");
    }
}

#[tokio::test]
async fn watch_prints_what_is_held_and_waited_for_once() {
    let (_server, url) = server().await;
    let client = LockClient::connect(&url).await.unwrap();
    let guard = client.lock("k").acquire().await.unwrap();
    let other = LockClient::connect(&url).await.unwrap();
    let waits = tokio::spawn(other.lock("k").acquire());
    eventually("the waiter is seen", || async {
        let seen = objects(&url, &["watch", "--once", "--json"]).await.pop().unwrap();
        seen["waits"].as_array().unwrap().len() == 1 && seen["locks"][0]["waiters"] == 1
    })
    .await;
    guard.release().await.unwrap();
    waits.await.unwrap().unwrap().release().await.unwrap();
}

/// The lines of docs/permissions.md suffice for a service that is seen and answers, and for the person on call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documented_permissions_suffice_for_both_sides() {
    built().await;
    let server = Server::start(Flavor::from_env()).await;
    permissions::give(&server, "svc", &["Locks", "Presence", "Records"]).await;
    permissions::give(&server, "oncall", &["Presence"]).await;
    let records = permissions::of("svc", "Records");
    server
        .command(&[&["ACL", "SETUSER", "oncall"], &records[..]].concat())
        .await;
    let url = format!("{}?{LASTING}&control=on", server.url_as("svc", "password"));
    let oncall = format!("{}?{LASTING}", server.url_as("oncall", "password"));
    let client = LockClient::connect(&url).await.unwrap();
    let guard = client.lock("shop:k").acquire().await.unwrap();
    let lock = is_known(&oncall, "shop:").await;
    assert_eq!(diagnosis(&oncall, "shop:k").await.0, "alive");
    let id = lock["holder"]["id"].as_str().unwrap();
    let revoked = dlock(
        &oncall,
        &["revoke", "shop:k", "--holder", id, "--reason", "a deploy"],
    )
    .await;
    assert_eq!(code(&revoked), 0, "{revoked:?}");
    let why = within(2 * PATIENCE, "the request", guard.revoked())
        .await
        .unwrap();
    assert_eq!(why.reason, "a deploy");
    let broken = dlock(
        &oncall,
        &["break", "shop:k", "--holder", id, "--reason", "it goes on"],
    )
    .await;
    assert_eq!(code(&broken), 0, "{broken:?}");
    within(2 * PATIENCE, "the loss", guard.lost()).await;
    let imported = client.once("shop:import").run(async |_| Ok::<_, Infallible>(7));
    assert!(matches!(imported.await.unwrap(), OnceReply::Ran(7)));
    let shown = dlock(&oncall, &["record", "show", "shop:import", "--result"]).await;
    assert_eq!(code(&shown), 0, "{shown:?}");
    let forgotten = dlock(
        &oncall,
        &["record", "forget", "shop:import", "--reason", "wrong month"],
    )
    .await;
    assert_eq!(code(&forgotten), 0, "{forgotten:?}");
    server
        .command(&["ACL", "SETUSER", "oncall", "-client|list"])
        .await;
    let silent = LockClient::connect(&server.url_as("svc", "password"))
        .await
        .unwrap();
    let _guard = silent.lock("shop:silent").acquire().await.unwrap();
    let (state, why) = diagnosis(&oncall, "shop:silent").await;
    assert!(
        state == "unknown" && why.contains("+client|list"),
        "{state}: {why}"
    );
}
