//! Leader election on memory and on a server, seen through the public API.

use std::time::Duration;

use dlock::{Error, Loss};
use dlock_tests::faults::{SOON, within};
use dlock_tests::{eventually, on_every_store, on_quorums};

/// No test waits for the end of this one: what passes on before it does so for another reason.
const LEASE: Duration = Duration::from_secs(300);

on_every_store! {
    async fn who_leads_can_be_seen_by_all(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let (seen_by_a, seen_by_b) = (a.leader("l").lease(LEASE), b.leader("l").lease(LEASE));
        assert_eq!(seen_by_b.current().await.unwrap(), None);
        let term = seen_by_a.campaign().await.unwrap();
        let holder = seen_by_b.current().await.unwrap().expect("there is a leader");
        assert!(holder.id.starts_with(&format!("{}:", a.id())), "{holder:?}");
        assert!(!holder.id.starts_with(&b.id()));
        assert!(holder.remaining.is_some_and(|left| left <= LEASE && left > LEASE / 2), "{holder:?}");
        let refused = seen_by_b.try_campaign().await;
        assert!(matches!(refused, Err(Error::NotAcquired { .. })), "{refused:?}");
        term.release().await.unwrap();
        assert_eq!(seen_by_b.current().await.unwrap(), None);
        seen_by_b.try_campaign().await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn who_resigns_or_drops_the_term_is_followed_at_once_by_one_with_a_greater_token(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let mut term = clients[0].leader("l").lease(LEASE).campaign().await.unwrap();
        for round in 1..7 {
            let next = clients[round % 2].leader("l").lease(LEASE);
            let next = tokio::spawn(async move { next.campaign().await });
            eventually("the other one stands", || async { clients[round % 2].waited_for() == 1 }).await;
            let (token, lost) = (term.fencing_token(), term.lost());
            match round % 3 {
                0 => term.release().await.unwrap(),
                1 => drop(term),
                // The future that resigns need not be waited for.
                _ => drop(tokio::spawn(term.release())),
            }
            term = within(SOON, "the next term", next).await.unwrap().unwrap();
            assert!(term.fencing_token() > token);
            assert_eq!(lost.await, Loss::Released);
        }
        term.release().await.unwrap();
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn work_that_is_done_ends_lead_with_its_result_and_a_panic_resigns_too(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let leader = a.leader("l").lease(LEASE);
        let (once, inner) = (leader.clone(), a.clone());
        let token = once.lead(|term| {
            let inner = inner.clone();
            async move {
                assert!(term.is_held() && term.is_renewed());
                // The work is in the term's frame.
                let again = inner.lock("l").try_acquire().await.unwrap();
                assert_eq!(again.fencing_token(), term.fencing_token());
                assert_eq!(dlock::current().map(|held| held.fencing_token()), Some(term.fencing_token()));
                term.fencing_token()
            }
        });
        assert!(token.await.unwrap() > 0);
        let panics = tokio::spawn(async move { leader.lead(|_| async { panic!("on purpose") }).await });
        assert!(panics.await.unwrap_err().is_panic());
        within(SOON, "the next term", b.leader("l").campaign()).await.unwrap().release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn a_term_that_was_taken_away_is_lost_and_its_work_dropped(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let term = a.leader("l").lease(Duration::from_secs(3)).campaign().await.unwrap();
        let work = tokio::spawn(term.run(std::future::pending::<()>()));
        assert!(b.force_release("l").await.unwrap());
        let lost = within(SOON, "the notification", work).await.unwrap();
        assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
        assert!(!term.is_held() && term.remaining().is_zero());
        let late = term.release().await;
        assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
        store.assert_clean(&[&a, &b]).await;
    }
}

on_quorums! {
    who_leads_can_be_seen_by_all,
    who_resigns_or_drops_the_term_is_followed_at_once_by_one_with_a_greater_token,
    work_that_is_done_ends_lead_with_its_result_and_a_panic_resigns_too,
    a_term_that_was_taken_away_is_lost_and_its_work_dropped,
}
