//! Notes and groups of everything that is acquired, and what its guards tell.

use std::time::Duration;

use dlock::operations::{Intervention, LockEventKind, LossReason};
use dlock::store::Bind;
use dlock::{Held, LockClient, OnceError};
use dlock_tests::paused;
use futures_util::future::join_all;
use metrics_exporter_prometheus::PrometheusBuilder;

const SEC: Duration = Duration::from_secs(1);

/// The notes of what this client holds, in the order of the names.
fn notes(client: &LockClient) -> Vec<String> {
    let mut holds = client.active().holds;
    holds.sort_by(|one, other| one.key.cmp(&other.key));
    holds.into_iter().filter_map(|hold| hold.note).collect()
}

#[test]
fn leaders_are_counted_by_their_group() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let shown = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        paused(async {
            let client = LockClient::memory();
            let term = client
                .leader("scheduler")
                .group("schedulers")
                .campaign()
                .await
                .unwrap();
            let text = shown.render();
            let is_held = |line: &str| line.starts_with("dlock_held{") && line.ends_with(" 1");
            let mut held = text.lines().filter(|line| is_held(line));
            assert!(held.all(|line| line.contains("group=\"schedulers\"")), "{text}");
            assert!(text.lines().any(is_held), "{text}");
            term.release().await.unwrap();
        });
    });
}

#[tokio::test]
async fn notes_are_those_of_the_call_until_the_guard_says_something_else() {
    let client = LockClient::memory();
    let permit = client
        .semaphore("a")
        .permits(2)
        .note("a permit")
        .acquire()
        .await
        .unwrap();
    let term = client.leader("b").note("a term").campaign().await.unwrap();
    let set = client.multi(["c", "d"]).note("a set").acquire().await.unwrap();
    let only = client.multi(["e"]).note("a set of one").acquire().await.unwrap();
    assert_eq!(
        notes(&client),
        ["a permit", "a term", "a set", "a set", "a set of one"]
    );
    permit.note("1");
    term.note("2");
    set.note("3");
    only.note("4");
    assert_eq!(notes(&client), ["1", "2", "3", "3", "4"]);
}

/// The person on call reads what the long work is for, not what a helper of it did for a moment.
#[tokio::test]
async fn what_enters_a_hold_leaves_it_its_note() {
    let client = LockClient::memory();
    let (outer, step) = (client.lock("a").note("export"), client.lock("a").note("step 2"));
    let with_more = client.multi(["a", "b"]).note("both");
    outer
        .run(async |_| {
            let inside = step.acquire().await.unwrap();
            assert_eq!(notes(&client), ["export"]);
            drop(inside);
            let inside = with_more.acquire().await.unwrap();
            assert_eq!(notes(&client)[0], "export");
            drop(inside);
        })
        .await
        .unwrap();
    // What keeps reading does so for the same reason.
    let write = client.rw_lock("d").write().note("edit").acquire().await.unwrap();
    let read = write.downgrade().await.unwrap();
    assert_eq!(notes(&client), ["edit"]);
    drop(read);
}

#[tokio::test]
async fn notes_of_waiting_calls_are_known() {
    let client = LockClient::memory();
    let _guards = client.multi(["a", "b", "c"]).acquire().await.unwrap();
    let (set, leader) = (
        client.multi(["a", "b"]).note("a set"),
        client.leader("c").note("a term"),
    );
    let waiting = [
        tokio::spawn(async move { set.acquire().await.map(drop) }),
        tokio::spawn(async move { leader.campaign().await.map(drop) }),
    ];
    let said = || {
        let waits = client.active().waits.into_iter();
        let mut said: Vec<_> = waits.filter_map(|wait| wait.note).collect();
        said.sort();
        said
    };
    while said() != ["a set", "a term"] {
        tokio::task::yield_now().await;
    }
    waiting.iter().for_each(|waiting| waiting.abort());
}

#[test]
fn permits_and_terms_tell_why_they_were_lost() {
    paused(async {
        let client = LockClient::memory();
        let permit = client
            .semaphore("s")
            .permits(1)
            .fixed_lease(SEC)
            .acquire()
            .await
            .unwrap();
        let term = client.leader("l").max_term(SEC).campaign().await.unwrap();
        assert_eq!((permit.why_lost().await, term.why_lost().await), (None, None));
        permit.lost().await;
        term.lost().await;
        assert_eq!(permit.why_lost().await, Some(LossReason::Expired));
        assert_eq!(term.why_lost().await, Some(LossReason::MaxHold));
    });
}

/// The same that reports, events and the store say, also of two readers of one client.
#[tokio::test]
async fn guards_have_the_ids_of_their_holds() {
    let client = LockClient::memory();
    let mut events = client.events();
    let prices = client.rw_lock("prices").read();
    let (one, two) = (prices.acquire().await.unwrap(), prices.acquire().await.unwrap());
    let set = client.multi(["a", "b"]).acquire().await.unwrap();
    let term = client.leader("l").campaign().await.unwrap();
    let permit = client.semaphore("s").limit(2).acquire_many(2).await.unwrap();
    assert_eq!(one.reenter().unwrap().id(), one.id());
    assert_eq!(one.held().id(), one.id());
    assert_eq!(set.held().id(), set.ids().next().unwrap().1);

    let mut of: Vec<_> = [("prices", one.id()), ("prices", two.id())].map(named).into();
    of.extend(set.ids().map(|(key, id)| (key.to_string(), id)));
    of.extend([("l", term.id())].map(named));
    let stored = ["prices", "a", "b", "l"].map(async |key| {
        let holders = client.holders(key).await.unwrap().into_iter();
        holders
            .map(|holder| (key.to_owned(), holder.id))
            .collect::<Vec<_>>()
    });
    let mut stored = join_all(stored).await.concat();
    of.sort();
    stored.sort();
    assert_eq!(of, stored);
    assert_eq!(of.len(), 5);

    // Each permit has an id of its own at the store.
    of.extend([("s", permit.id())].map(named));
    of.sort();
    let holds = client.active().holds.into_iter();
    let mut reported: Vec<_> = holds.map(|hold| (hold.key.to_string(), hold.grant)).collect();
    reported.sort();
    assert_eq!(of, reported);
    let mut told = Vec::new();
    while told.len() < of.len() {
        let event = events.next().await.expect("the client lives");
        if matches!(event.what, LockEventKind::Granted { .. }) {
            told.push((event.key.to_string(), event.grant.unwrap()));
        }
    }
    told.sort();
    assert_eq!(of, told);
}

fn named((key, id): (&str, String)) -> (String, String) {
    (key.to_owned(), id)
}

#[tokio::test]
async fn work_under_several_locks_knows_the_token_of_each() {
    let client = LockClient::memory();
    let set = client.multi(["a", "b"]);
    let tokens = |held: &Held| -> Vec<(String, u64)> {
        let tokens = held.fencing_tokens();
        tokens.map(|(key, token)| (key.to_string(), token)).collect()
    };
    let known = set.run(async |held| (tokens(&held), held)).await.unwrap();
    let (all, held) = known;
    assert_eq!(all.len(), 2);
    for (key, token) in &all {
        assert_eq!(held.fencing_token_of(key), Some(*token));
    }
    assert_eq!(all[0], ("a".to_owned(), held.fencing_token()));
}

/// For stores that do more with a hold than renew and release it.
#[tokio::test]
async fn permits_and_terms_are_bound_as_their_guards_are() {
    let client = LockClient::memory();
    let permit = client.semaphore("s").limit(1).acquire().await.unwrap();
    let term = client.leader("l").campaign().await.unwrap();
    for (bound, key, id, token) in [
        (permit.bind(), "s", permit.id(), permit.fencing_token()),
        (term.bind(), "l", term.id(), term.fencing_token()),
    ] {
        let bound = bound.unwrap().remove(0);
        assert_eq!((&*bound.grant.to_string(), bound.token), (&*id, token));
        assert_eq!(bound.key, key);
        assert!(client.force_release(key).await.unwrap());
        assert!(bound.confirm().await.unwrap_err().is_lost());
    }
    assert!(permit.bind().unwrap_err().is_lost() && term.bind().unwrap_err().is_lost());
}

#[tokio::test]
async fn term_is_asked_to_stop() {
    let client = LockClient::builder()
        .url("memory://revoked")
        .control(true)
        .build()
        .await
        .unwrap();
    let term = client.leader("l").campaign().await.unwrap();
    let id = client.inspect("l").await.unwrap().unwrap().id;
    let why = || Intervention::new("a deploy").by("anna");
    assert!(client.revoke("l", &id, why()).await.unwrap());
    assert_eq!(
        term.revoked().await.map(|why| why.reason),
        Some("a deploy".to_owned())
    );
    assert!(term.is_held());
}

#[tokio::test]
async fn error_of_failed_work_is_taken_with_its_causes() {
    let client = LockClient::memory();
    let work = |_| async { Err::<u64, _>(anyhow::anyhow!("no such file").context("the import failed")) };
    let error = client.once("import").run(work).await.unwrap_err();
    assert_eq!(
        error.work().map(ToString::to_string).as_deref(),
        Some("the import failed")
    );
    let error = error.into_work().expect("the work failed");
    assert_eq!(format!("{error:#}"), "the import failed: no such file");
    assert_eq!(
        OnceError::<anyhow::Error>::ResultUnavailable
            .into_work()
            .map(drop),
        None
    );
}
