//! Leader election by a paused clock: when the lead passes on, and when it does not.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use dlock::testing::TestStore;
use dlock::{Error, Held, Leader, LockClient, Loss};
use dlock_tests::faults::PATIENCE;
use dlock_tests::paused;
use parking_lot::Mutex;
use tokio::runtime;
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// The leaders and their times, as they reported them.
#[derive(Debug, Clone, Default)]
struct Diary {
    leading: Arc<AtomicUsize>,
    terms: Arc<Mutex<Vec<(usize, u64, Instant)>>>,
}

/// A term that goes on; dropped with the work.
struct Leading(Arc<AtomicUsize>);

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Diary {
    /// Work without end, of candidate `who`.
    fn keep(
        &self,
        who: usize,
    ) -> impl FnMut(Held) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + use<> {
        let diary = self.clone();
        move |held| {
            let diary = diary.clone();
            Box::pin(async move {
                assert_eq!(diary.leading.fetch_add(1, SeqCst), 0, "two lead at a time");
                let _leading = Leading(diary.leading.clone());
                diary
                    .terms
                    .lock()
                    .push((who, held.fencing_token(), Instant::now()));
                std::future::pending().await
            })
        }
    }

    fn terms(&self) -> Vec<(usize, u64, Instant)> {
        self.terms.lock().clone()
    }

    fn last(&self) -> (usize, u64, Instant) {
        *self.terms().last().expect("a candidate has led")
    }
}

#[test]
fn one_of_many_leads_and_terms_have_growing_tokens() {
    paused(async {
        let (store, diary) = (TestStore::new(), Diary::default());
        let mut candidates: Vec<_> = (0..5)
            .map(|who| {
                let work = diary.keep(who);
                let leader = store.client().leader("l");
                Some(tokio::spawn(async move { leader.lead(work).await }))
            })
            .collect();
        sleep(600 * SEC).await;
        assert_eq!(diary.terms().len(), 1, "a live leader leads on");
        // Each that leads goes away; another one follows at once.
        for round in 1..5 {
            let gone = candidates[diary.last().0].take().expect("it has led once");
            gone.abort();
            let before = Instant::now();
            assert!(gone.await.unwrap_err().is_cancelled());
            sleep(100 * MS).await;
            assert_eq!(diary.terms().len(), round + 1);
            assert!(
                diary.last().2 - before <= 50 * MS,
                "it took {:?}",
                diary.last().2 - before
            );
        }
        let tokens: Vec<u64> = diary.terms().iter().map(|term| term.1).collect();
        assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    });
}

#[test]
fn a_lost_lead_drops_the_work_and_is_stood_for_again() {
    paused(async {
        let (store, diary) = (TestStore::new(), Diary::default());
        let leader = store.client().leader("l");
        let candidate = tokio::spawn({
            let work = diary.keep(1);
            async move { leader.lead(work).await }
        });
        sleep(SEC).await;
        let usurper = store.busy("l");
        sleep(SEC).await;
        assert_eq!(
            (diary.terms().len(), diary.leading.load(SeqCst)),
            (1, 0),
            "the work goes on"
        );
        drop(usurper);
        sleep(SEC).await;
        let terms = diary.terms();
        assert_eq!((terms.len(), diary.leading.load(SeqCst)), (2, 1));
        assert!(terms[1].1 > terms[0].1);
        candidate.abort();
    });
}

#[test]
fn a_term_ends_when_it_has_lasted_as_long_as_it_may() {
    paused(async {
        let (store, diary) = (TestStore::new(), Diary::default());
        for who in 0..2 {
            let (leader, work) = (store.client().leader("l").max_term(60 * SEC), diary.keep(who));
            tokio::spawn(async move { leader.lead(work).await });
        }
        sleep(600 * SEC).await;
        let terms = diary.terms();
        assert!((9..=11).contains(&terms.len()), "{terms:?}");
        let longest = terms.windows(2).map(|two| two[1].2 - two[0].2).max().unwrap();
        assert!(longest <= 61 * SEC, "{longest:?}");
    });
}

#[test]
fn shutdown_drops_the_work_of_lead_at_once_and_ends_a_term_at_its_deadline() {
    paused(async {
        let (store, diary) = (TestStore::new(), Diary::default());
        let client = store.client();
        let (leader, work) = (client.leader("l"), diary.keep(1));
        let leading = tokio::spawn(async move { leader.lead(work).await });
        let waiting = tokio::spawn({
            let leader = store.client().leader("l");
            async move { leader.campaign().await }
        });
        sleep(SEC).await;
        let before = Instant::now();
        let report = client.shutdown(60 * SEC).await;
        assert_eq!((report.lost, report.unconfirmed), (0, 0));
        assert!(before.elapsed() < SEC, "the work does not end by itself");
        assert!(matches!(leading.await.unwrap(), Err(Error::ClientClosed)));
        assert_eq!(diary.leading.load(SeqCst), 0);

        let term = waiting.await.unwrap().unwrap();
        assert!(matches!(
            client.leader("l").campaign().await,
            Err(Error::ClientClosed)
        ));
        drop(term);
        let other = store.client();
        let term = other.leader("l").campaign().await.unwrap();
        let before = Instant::now();
        assert_eq!(other.shutdown(5 * SEC).await.lost, 1);
        assert_eq!((before.elapsed(), term.lost().await), (5 * SEC, Loss::Shutdown));
        assert_eq!(store.held(), 0);
    });
}

#[test]
fn term_is_known_beside_the_work_for_as_long_as_this_client_leads() {
    paused(async {
        let store = TestStore::new();
        let (client, other) = (store.client(), store.client());
        let (leader, candidate) = (client.leader("l"), other.leader("l"));
        let token = |leader: &Leader| leader.term().map(|held| held.fencing_token());
        // A hold on another name is no term, nor is the wait for one.
        let _beside = client.lock("m").acquire().await.unwrap();
        assert_eq!(token(&leader), None);
        let term = leader.campaign().await.unwrap();
        let next = tokio::spawn({
            let candidate = candidate.clone();
            async move { candidate.campaign().await.unwrap() }
        });
        sleep(SEC).await;
        assert_eq!(token(&leader), Some(term.fencing_token()));
        assert_eq!(token(&client.clone().leader("l")), Some(term.fencing_token()));
        assert_eq!(token(&candidate), None);
        let held = leader.term().unwrap();
        term.release().await.unwrap();
        assert!(token(&leader).is_none() && !held.is_held());
        let next = next.await.unwrap();
        assert_eq!(token(&candidate), Some(next.fencing_token()));

        // Cut off from the store, it leads until its lease may be over, and no longer.
        let _cut = store.busy("l");
        next.lost().await;
        assert_eq!(token(&candidate), None);
        drop(next);
        assert_eq!(token(&candidate), None);
    });
}

#[test]
fn what_waiting_does_not_help_against_is_told() {
    paused(async {
        let client = LockClient::memory();
        let work = |_: Held| std::future::pending::<()>();
        assert!(matches!(
            client.leader("a{b").lead(work).await,
            Err(Error::InvalidKey { .. })
        ));
        let error = client
            .leader("l")
            .lease(Duration::ZERO)
            .lead(work)
            .await
            .unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error}");
        // By the name that it has here.
        let endless = client.leader("l").max_term(Duration::ZERO);
        for refused in [
            endless.check().err(),
            endless.try_campaign().await.err(),
            endless.lead(async |_| ()).await.err(),
        ] {
            let is_named = matches!(
                refused,
                Some(Error::InvalidOption {
                    option: "max_term",
                    ..
                })
            );
            assert!(is_named, "{refused:?}");
        }
        assert!(client.leader("l").check().is_ok());
    });
}

/// A stopped process, or one whose threads are busy: no timer has run yet.
#[test]
fn term_whose_end_was_not_noticed_yet_is_over_and_nobody_is_told_under_a_mutex() {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let client = LockClient::memory();
            let asked = client.clone();
            // It would wait for the mutex that the look at the holds has.
            let events = client.events_where(move |_, _| asked.held() < 9);
            let leader = client.leader("l").lease(SEC);
            let term = leader.campaign().await.unwrap();
            assert!(leader.term().is_some());
            std::thread::sleep(SEC + 100 * MS);
            assert!(leader.term().is_none());
            drop((term, events));
        });
        done.send(()).unwrap();
    });
    ended.recv_timeout(PATIENCE).unwrap();
}
