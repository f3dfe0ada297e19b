//! What a client tells its listeners, where the store is a server.

use std::collections::HashMap;
use std::time::Duration;

use dlock::operations::{HoldEnd, Intervention, LockEvent, LockEventKind, LockEvents, LossReason};
use dlock::{Error, LockClient, Loss};
use dlock_tests::faults::step;
use dlock_tests::{Flavor, Proxy, Server, Swallow, eventually};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);
const SEC: Duration = Duration::from_secs(1);

async fn server() -> (Server, LockClient) {
    let server = Server::start(Flavor::from_env()).await;
    let builder = LockClient::builder().url(format!("{}?lease=2s", server.url()));
    let client = builder
        .presence(true)
        .control(true)
        .build()
        .await
        .expect("a client");
    (server, client)
}

/// The next event that is one of these.
async fn next<T>(events: &mut LockEvents, wanted: impl Fn(&LockEvent) -> Option<T>) -> T {
    let looking = async {
        loop {
            let event = events.next().await.expect("the client is there");
            if let Some(found) = wanted(&event) {
                return found;
            }
        }
    };
    timeout(PATIENCE, looking).await.expect("the event comes")
}

/// What a listener is told of the request to stop.
async fn told(events: &mut LockEvents) -> (String, Intervention) {
    next(events, |event| match &event.what {
        LockEventKind::Revoked { intervention, .. } => Some((event.key.to_string(), intervention.clone())),
        _ => None,
    })
    .await
}

#[tokio::test]
async fn holder_that_is_asked_to_stop_is_told_by_whom_and_why() {
    let (_server, client) = server().await;
    let mut events = client.events();
    let guard = client.lock("k").acquire().await.unwrap();
    let id = client.inspect("k").await.unwrap().unwrap().id;
    let asked = client
        .revoke("k", &id, Intervention::new("a deploy").by("anna"))
        .await;
    assert!(asked.unwrap());
    let (key, why) = told(&mut events).await;
    assert_eq!(
        (key.as_str(), why.by.as_str(), why.reason.as_str()),
        ("k", "anna", "a deploy")
    );
    assert!(guard.is_held());
}

#[tokio::test]
async fn holder_is_told_although_the_reply_with_the_message_is_lost() {
    for swallow in [Swallow::Cut, Swallow::Hang] {
        let (server, beside) = server().await;
        let proxy = Proxy::start(server.addr());
        let builder = LockClient::builder().url(format!("{}?lease=3s", proxy.url()));
        let client = builder.presence(true).control(true).timeout(SEC).build().await;
        let guard = client.unwrap().lock("k").acquire().await.unwrap();
        let id = beside.inspect("k").await.unwrap().unwrap().id;
        let lost = proxy.swallow(1, swallow, step("mail"));
        let asked = beside.revoke("k", &id, Intervention::new("a deploy").by("anna"));
        assert!(asked.await.unwrap());
        let why = timeout(PATIENCE, guard.revoked()).await.unwrap().unwrap();
        assert_eq!((why.by.as_str(), lost.fired()), ("anna", true));
    }
}

#[tokio::test]
async fn holder_of_redisson_is_not_asked_to_stop() {
    let (server, client) = server().await;
    let id = "5c2b1a90-3f4e-4d5c-8b6a-7f8e9d0c1b2a:31";
    server.query::<usize>(&["HSET", "k", id, "1"]).await;
    server.query::<usize>(&["PEXPIRE", "k", "60000"]).await;
    let asked = client.revoke("k", id, Intervention::new("a deploy").by("anna"));
    let error = asked.await.unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert_eq!(server.query::<usize>(&["EXISTS", "dlock:audit"]).await, 0);
}

#[tokio::test]
async fn reader_of_redisson_is_not_broken_alone() {
    let (server, client) = server().await;
    let id = "5c2b1a90-3f4e-4d5c-8b6a-7f8e9d0c1b2a:31";
    server
        .query::<usize>(&["HSET", "k", "mode", "read", id, "2"])
        .await;
    server.query::<usize>(&["PEXPIRE", "k", "60000"]).await;
    for hold in ["1", "2"] {
        let timeout = format!("{{k}}:{id}:rwlock_timeout:{hold}");
        server
            .query::<String>(&["SET", &timeout, "1", "PX", "60000"])
            .await;
    }
    let broken = client.break_hold("k", id, Intervention::new("it hangs").by("anna"));
    let error = broken.await.unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert_eq!(server.query::<String>(&["HGET", "k", id]).await, "2");
    assert_eq!(server.query::<usize>(&["EXISTS", "dlock:audit"]).await, 0);
}

#[tokio::test]
async fn set_of_locks_is_asked_to_stop_by_one_of_them() {
    let (_server, client) = server().await;
    let mut events = client.events();
    let set = client.multi(["a", "b"]).acquire().await.unwrap();
    assert_eq!(set.why_lost().await, None);
    let id = client.inspect("b").await.unwrap().unwrap().id;
    let asked = client
        .revoke("b", &id, Intervention::new("a migration").by("anna"))
        .await;
    assert!(asked.unwrap());
    assert_eq!(told(&mut events).await.0, "b");
    let revoked = timeout(PATIENCE, set.revoked())
        .await
        .unwrap()
        .expect("it is asked to stop");
    assert_eq!(revoked.reason, "a migration");
    assert!(set.is_held());
    set.release().await.unwrap();
}

#[tokio::test]
async fn set_of_locks_says_why_the_first_of_them_was_lost() {
    let (server, client) = server().await;
    let set = client.multi(["a", "b"]).acquire().await.unwrap();
    let id = client.inspect("b").await.unwrap().unwrap().id;
    let broken = client
        .break_hold("b", &id, Intervention::new("it hangs").by("anna"))
        .await;
    assert!(broken.unwrap());
    assert_eq!(timeout(PATIENCE, set.lost()).await.unwrap(), Loss::Gone);
    let why = set.why_lost().await.expect("it is lost");
    assert!(
        matches!(&why, LossReason::Broken(by) if by.by == "anna" && by.reason == "it hangs"),
        "{why:?}"
    );
    drop(set);
    eventually("the other lock is released", async || {
        server.keys().await.iter().all(|key| key != "a")
    })
    .await;
}

/// Of the holds of one grant, which handoffs pass on.
#[derive(Debug, Default)]
struct Grant {
    begun: usize,
    handed_off: usize,
    ended: bool,
}

/// Under threads, each hold begins, and ends once, and none begins under a grant that has ended. The end of a hold may be told
/// after the begin of the next one of its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn events_of_many_threads_are_whole_and_in_order() {
    const TASKS: usize = 8;
    const TURNS: usize = 25;
    let (_server, client) = server().await;
    let mut events = client.events();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for turn in 0..TURNS {
                    let guard = client
                        .lock(format!("k{}", (task + turn) % 3))
                        .acquire()
                        .await
                        .unwrap();
                    tokio::task::yield_now().await;
                    match turn % 2 {
                        0 => drop(guard),
                        _ => guard.release().await.unwrap(),
                    }
                }
            })
        })
        .collect();
    let (mut acquired, mut ended) = (0, 0);
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut grants: HashMap<String, Grant> = HashMap::new();
    // Of each key, how many a call has had and that were not told to have ended.
    let mut open: HashMap<String, usize> = HashMap::new();
    while ended < TASKS * TURNS {
        let event = timeout(PATIENCE, events.next()).await.expect("it comes").unwrap();
        match event.what {
            LockEventKind::Granted {
                token, handed_off, ..
            } => {
                let grant = grants.entry(event.grant.clone().expect("of a hold")).or_default();
                assert_eq!(handed_off, grant.begun > 0, "{event:?}: {grant:?}");
                assert_eq!(grant.handed_off, grant.begun, "{event:?}: {grant:?}");
                assert!(!grant.ended, "{event:?}: {grant:?}");
                grant.begun += 1;
                let before = last.insert(event.key.to_string(), token);
                assert!(
                    before.is_none_or(|before| before < token),
                    "{event:?} after {before:?}"
                );
            }
            LockEventKind::Acquired { .. } => {
                *open.entry(event.key.to_string()).or_default() += 1;
                acquired += 1;
            }
            LockEventKind::Ended { how, .. } => {
                let open = open.get_mut(event.key.as_str()).filter(|open| **open > 0);
                *open.expect("a call had it before it ended") -= 1;
                let grant = grants.get_mut(&event.grant.clone().expect("of a hold"));
                let grant = grant.expect("it has begun");
                match how {
                    HoldEnd::HandedOff => grant.handed_off += 1,
                    HoldEnd::Released | HoldEnd::Dropped => {
                        assert!(!grant.ended, "it ends once: {event:?}");
                        grant.ended = true;
                    }
                    _ => panic!("{event:?}"),
                }
                ended += 1;
            }
            LockEventKind::NotAcquired { .. }
            | LockEventKind::Cancelled { .. }
            | LockEventKind::Lost { .. } => {
                panic!("{event:?}")
            }
            _ => {}
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!((acquired, events.dropped()), (TASKS * TURNS, 0));
    let whole = |grant: &Grant| grant.ended && grant.begun == grant.handed_off + 1;
    assert!(grants.values().all(whole), "{grants:?}");
    assert!(open.values().all(|open| *open == 0), "{open:?}");
}
