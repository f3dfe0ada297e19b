//! What clients say of themselves, and what the person on call can do, on every store.

use std::time::{Duration, Instant};

use dlock::operations::{Intervention, LossReason, ProcessState};
use dlock::store::operations::{EntryName, MAILBOX};
use dlock::store::{Kind, Reason};
use dlock::{HoldState, LockClient, LockKey, Loss};
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::{eventually, on_every_store, on_quorums};

const MS: Duration = Duration::from_millis(1);

async fn visible(store: &dlock_tests::Store) -> LockClient {
    store.client_with(|builder| builder.presence(true)).await
}

async fn named(store: &dlock_tests::Store, name: &'static str) -> LockClient {
    store
        .client_with(|builder| builder.service_name(name).presence(true))
        .await
}

on_every_store! {
    async fn holder_is_known_by_service_place_in_the_code_and_note(store: &Store) {
        let (a, b) = (named(store, "checkout").await, visible(store).await);
        let guard = a.lock("k").note("invoice\t42").acquire().await.unwrap();
        let line = line!() - 1;
        // Only what is older than a second is written down.
        let young = b.inspect("k").await.unwrap().unwrap();
        assert!(young.id.starts_with(&a.id()) && young.hold.is_none(), "{young:?}");
        eventually("the hold is written down", || async {
            b.inspect("k").await.unwrap().unwrap().hold.is_some()
        })
        .await;
        let holder = b.inspect("k").await.unwrap().unwrap();
        let (client, hold) = (holder.client.unwrap(), holder.hold.unwrap());
        assert_eq!((client.service.as_str(), client.process), ("checkout", std::process::id()));
        assert_eq!(client.process_state(), ProcessState::Runs);
        assert_eq!(hold.note.as_deref(), Some("invoice\t42"));
        assert!(hold.location.contains(&format!("both_operations.rs:{line}:")), "{}", hold.location);
        assert_eq!((hold.token, hold.grant), (guard.fencing_token(), holder.id));
        assert!(hold.held >= Duration::from_secs(1));
        guard.note("paid");
        assert_eq!(a.active().holds[0].note.as_deref(), Some("paid"));
        guard.release().await.unwrap();
        // What is over is not written down any more, and its client leaves nothing.
        a.shutdown(Duration::ZERO).await;
        assert_eq!(b.clients().await.unwrap(), []);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn client_that_holds_nothing_for_long_writes_nothing(store: &Store) {
        let a = visible(store).await;
        for _ in 0..3 {
            a.lock("k").acquire().await.unwrap().release().await.unwrap();
            tokio::time::sleep(500 * MS).await;
        }
        assert_eq!(a.clients().await.unwrap(), []);
    }

    async fn client_that_became_idle_is_listed_no_longer(store: &Store) {
        let (a, b) = (visible(store).await, visible(store).await);
        let guard = a.lock("k").acquire().await.unwrap();
        let waited = b.lock("k").wait(4 * PATIENCE);
        let waiter = tokio::spawn(async move { waited.acquire().await.map(drop) });
        eventually("both are listed", || async { a.clients().await.unwrap().len() == 2 }).await;
        waiter.abort();
        guard.release().await.unwrap();
        let idle = Instant::now();
        eventually("none is listed", || async { a.clients().await.unwrap().is_empty() }).await;
        // Their entries alone would last for a minute.
        assert!(idle.elapsed() < Duration::from_secs(40), "{:?}", idle.elapsed());
        assert!(a.survey("k", false).await.locks.is_empty());
    }

    async fn client_that_is_not_to_be_seen_writes_nothing(store: &Store) {
        let hidden = store.client_with(|builder| builder.presence(false)).await;
        let (seen, b) = (visible(store).await, visible(store).await);
        let guards = (hidden.lock("h").acquire().await.unwrap(), seen.lock("s").acquire().await.unwrap());
        eventually("the other one is seen", || async { !b.clients().await.unwrap().is_empty() }).await;
        let clients = b.clients().await.unwrap();
        assert_eq!(clients.iter().map(|client| &client.client).collect::<Vec<_>>(), [&seen.id()]);
        assert!(b.inspect("h").await.unwrap().unwrap().client.is_none());
        drop(guards);
    }

    async fn waiter_is_known_and_learns_who_was_in_its_way(store: &Store) {
        let (a, b) = (named(store, "checkout").await, named(store, "billing").await);
        let guard = a.lock("k").acquire().await.unwrap();
        let inner = b.lock("k").wait(4 * PATIENCE);
        let waiter = tokio::spawn(async move { inner.acquire().await.map(drop) });
        eventually("the waiter is written down", || async {
            let clients = a.clients().await.unwrap();
            clients.iter().any(|client| client.service == "billing" && !client.waits.is_empty())
        })
        .await;
        let clients = a.clients().await.unwrap();
        let wait = &clients.iter().find(|client| client.service == "billing").unwrap().waits[0];
        assert_eq!((wait.key.as_str(), b.active().waits.len()), ("k", 1));
        assert!(wait.location.contains("both_operations.rs") && wait.task.is_some(), "{wait:?}");
        let survey = a.survey("k", false).await;
        let [lock] = &survey.locks[..] else { panic!("{survey:?}") };
        let (holder, waits) = (&lock.holders[0], &lock.waits);
        assert_eq!((holder.client.as_ref().unwrap().client.as_str(), waits.len()), (a.id().as_str(), 1));
        assert!(holder.unknown().is_none() && waits[0].0.service == "billing", "{survey:?}");
        assert!(survey.locks_unknown.is_none() && survey.clients_unknown.is_none(), "{survey:?}");
        assert!(a.survey("kk", false).await.locks.is_empty());
        guard.release().await.unwrap();
        waiter.await.unwrap().unwrap();
        assert_eq!(b.active().waits, []);

        // An error tells who it was, but only to those who ask.
        let guard = a.lock("k").note("secret").acquire().await.unwrap();
        let error = b.lock("k").try_acquire().await.unwrap_err();
        assert!(error.holder().is_none());
        let error = b.lock("k").wait(3500 * MS).acquire().await.unwrap_err();
        let holder = error.holder().expect("there was the time to look it up");
        assert_eq!(holder.client.as_ref().unwrap().service, "checkout");
        assert!(!error.to_string().contains("checkout") && !error.to_string().contains("secret"));
        guard.release().await.unwrap();
    }

    async fn client_answers_only_if_it_was_told_to(store: &Store) {
        let open = store.client_with(|builder| builder.presence(true).control(true).service_name("open")).await;
        let (closed, b) = (visible(store).await, visible(store).await);
        let guard = open.lock("k").note("now").acquire().await.unwrap();
        let answer = within(PATIENCE, "an answer", async {
            loop {
                // A loaded machine may take longer than a second.
                if let Some(answer) = b.ask(&open.id()).await.unwrap() {
                    return answer;
                }
            }
        })
        .await;
        assert_eq!((answer.service.as_str(), answer.answers), ("open", true));
        assert_eq!(answer.holds[0].note.as_deref(), Some("now"));
        assert_eq!(b.ask(&closed.id()).await.unwrap(), None);
        assert!(b.ask("nobody").await.is_err());
        guard.release().await.unwrap();
    }

    async fn hold_is_broken_by_its_id_alone_and_its_holder_is_told(store: &Store) {
        let a = store.client_with(|builder| builder.presence(true).control(true)).await;
        let b = visible(store).await;
        let guard = a.lock("k").acquire().await.unwrap();
        let id = b.inspect("k").await.unwrap().unwrap().id;
        let other = format!("{}:999999", a.id());
        let why = || Intervention::new("its machine burns").by("anna");
        assert!(!b.break_hold("k", &other, why()).await.unwrap());
        assert!(b.break_hold("k", &id, Intervention::new(" ")).await.is_err());
        assert!(guard.is_held());
        assert!(b.break_hold("k", &id, why()).await.unwrap());
        assert_eq!(within(2 * PATIENCE, "the loss", guard.lost()).await, Loss::Gone);
        match guard.why_lost().await {
            Some(LossReason::Broken(why)) => {
                assert_eq!((why.by.as_str(), why.reason.as_str()), ("anna", "its machine burns"));
            }
            other => panic!("{other:?}"),
        }
        let next = b.lock("k").try_acquire().await.unwrap();
        assert_eq!(next.why_lost().await, None);
        assert!(!b.break_hold("k", &id, why()).await.unwrap(), "that hold is over");
        assert_eq!(next.state(), HoldState::Held);
        next.release().await.unwrap();
    }

    async fn writer_that_also_reads_is_broken_by_its_id_and_its_reads_go_on(store: &Store) {
        let a = store.client_with(|builder| builder.presence(true).control(true)).await;
        let b = visible(store).await;
        let writing = a.rw_lock("k").write().acquire().await.unwrap();
        let reading = writing.scope(a.rw_lock("k").read().try_acquire()).await.unwrap();
        let holders = b.holders("k").await.unwrap();
        assert_eq!(holders.len(), 2, "{holders:?}");
        let writer = holders.iter().find(|holder| holder.kind == Kind::Write).unwrap();
        let why = || Intervention::new("it hangs").by("anna");
        assert!(b.break_hold("k", &writer.id, why()).await.unwrap());
        assert_eq!(within(2 * PATIENCE, "the loss", writing.lost()).await, Loss::Gone);
        assert!(matches!(writing.why_lost().await, Some(LossReason::Broken(_))));
        assert!(reading.is_held());
        let other = b.rw_lock("k").read().try_acquire().await.unwrap();
        assert!(b.rw_lock("k").write().try_acquire().await.unwrap_err().is_busy());
        assert!(!b.break_hold("k", &writer.id, why()).await.unwrap(), "that hold is over");
        reading.release().await.unwrap();
        other.release().await.unwrap();
        drop(writing);
        b.rw_lock("k").write().acquire().await.unwrap().release().await.unwrap();
    }

    async fn one_of_several_holders_is_not_ended_whichever_is_named(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let readers = [&a, &b].map(|client| client.rw_lock("k").read());
        let [one, other] = [readers[0].acquire().await.unwrap(), readers[1].acquire().await.unwrap()];
        let operations = store.store().await.operations().unwrap();
        let end = |id: String| operations.clone().end(LockKey::from("k"), id);
        let holders = a.holders("k").await.unwrap();
        assert_eq!(holders.len(), 2);
        for holder in holders {
            let error = end(holder.id).await.unwrap_err();
            assert_eq!(error.reason, Reason::Refused, "{error}");
        }
        assert!(!end(format!("{}:999999", a.id())).await.unwrap());
        assert!(one.is_held() && other.is_held());
        other.release().await.unwrap();
        let last = a.holders("k").await.unwrap().remove(0);
        assert!(end(last.id).await.unwrap());
        drop(one);
    }

    async fn message_replaces_that_of_its_id_in_a_full_mailbox_too(store: &Store) {
        let operations = store.store().await.operations().unwrap();
        let mailbox = EntryName::presence(7);
        let post = async |id: usize, message: &[u8]| {
            let posted = operations.clone();
            let (id, message) = (id.to_string(), message.to_vec());
            posted.post(mailbox.clone(), id, message, 2 * PATIENCE).await
        };
        for id in 0..MAILBOX {
            post(id, b"first").await.unwrap();
        }
        let error = post(MAILBOX, b"first").await.unwrap_err();
        assert_eq!(error.reason, Reason::Refused, "{error}");
        post(MAILBOX - 1, b"second").await.unwrap();
        let mail = operations.clone().mail(mailbox.clone()).await.unwrap();
        let seconds = mail.iter().filter(|message| **message == b"second");
        assert_eq!((mail.len(), seconds.count()), (MAILBOX, 1));
    }

    async fn holder_is_asked_to_stop_and_goes_on_holding(store: &Store) {
        let a = store.client_with(|builder| builder.control(true)).await;
        let b = visible(store).await;
        let guard = a.lock("k").acquire().await.unwrap();
        let id = b.inspect("k").await.unwrap().unwrap().id;
        let asked = b.revoke("k", &id, Intervention::new("a deploy").by("anna"));
        assert!(asked.await.unwrap());
        let why = within(2 * PATIENCE, "the request", guard.revoked()).await.unwrap();
        assert_eq!((why.by.as_str(), why.reason.as_str()), ("anna", "a deploy"));
        assert!(guard.is_held());
        guard.release().await.unwrap();
        let free = b.lock("k").acquire().await.unwrap();
        let revoked = free.revoked();
        free.release().await.unwrap();
        assert_eq!(revoked.await, None);
    }
}

on_quorums!(
    holder_is_known_by_service_place_in_the_code_and_note,
    client_answers_only_if_it_was_told_to,
    hold_is_broken_by_its_id_alone_and_its_holder_is_told,
    writer_that_also_reads_is_broken_by_its_id_and_its_reads_go_on,
    one_of_several_holders_is_not_ended_whichever_is_named,
    holder_is_asked_to_stop_and_goes_on_holding,
);
