//! Handoff inside the process among many callers, in two processes: one holder at a time, tokens
//! that only grow, and nothing left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use dlock::{LockClient, LockGuard};
use dlock_tests::{on_every_store, on_quorums};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// What the lock protects: one holder at a time, and none with an old token.
#[derive(Default)]
struct Register {
    taken: AtomicBool,
    token: AtomicU64,
    visits: AtomicU64,
}

impl Register {
    async fn visit(&self, guard: &LockGuard) {
        assert!(!self.taken.swap(true, SeqCst), "two are inside");
        let before = self.token.swap(guard.fencing_token(), SeqCst);
        assert!(before < guard.fencing_token(), "a token that does not grow");
        self.visits.fetch_add(1, SeqCst);
        match fastrand::u32(0..8) {
            0 => tokio::time::sleep(fastrand::u32(1..3) * MS).await,
            1 | 2 => tokio::task::yield_now().await,
            _ => {}
        }
        assert!(guard.is_held());
        assert!(self.taken.swap(false, SeqCst), "somebody else came out");
    }
}

async fn comes_and_goes(client: LockClient, register: Arc<Register>) {
    let lock = client.lock("k");
    for _ in 0..60 {
        let guard = match fastrand::u32(0..6) {
            0 => lock.try_acquire().await.ok(),
            1 => lock.clone().wait(fastrand::u32(1..6) * MS).acquire().await.ok(),
            2 => {
                let some = fastrand::u64(0..3000);
                let acquire = lock.acquire();
                tokio::time::timeout(Duration::from_micros(some), acquire)
                    .await
                    .map(Result::unwrap)
                    .ok()
            }
            3 => Some(lock.clone().fixed_lease(20 * SEC).acquire().await.unwrap()),
            _ => Some(lock.acquire().await.unwrap()),
        };
        let Some(guard) = guard else { continue };
        register.visit(&guard).await;
        match fastrand::u32(0..3) {
            0 => drop(guard),
            1 => guard.release().await.unwrap(),
            _ => {
                let second = guard.reenter().unwrap();
                drop(guard);
                second.release().await.unwrap();
            }
        }
    }
}

on_every_store! {
    async fn a_coming_and_going(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let register = Arc::<Register>::default();
        let tasks: Vec<_> = (0..24)
            .map(|i| tokio::spawn(comes_and_goes(clients[i % 2].clone(), register.clone())))
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert!(register.visits.load(SeqCst) > 24 * 20);
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn both_processes_get_their_turns(store: &Store) {
        let clients = [store.client().await, store.client().await];
        let (count, done) = (Arc::new([AtomicU64::new(0), AtomicU64::new(0)]), Arc::new(AtomicBool::new(false)));
        let tasks: Vec<_> = (0..8)
            .map(|i| {
                let (lock, count, done) = (clients[i % 2].lock("k"), count.clone(), done.clone());
                tokio::spawn(async move {
                    while !done.load(SeqCst) {
                        let guard = lock.acquire().await.unwrap();
                        let mine = count[i % 2].fetch_add(1, SeqCst);
                        guard.release().await.unwrap();
                        // Until both were served often, however fast either of them is.
                        if mine > 300 && count[1 - i % 2].load(SeqCst) > 300 {
                            done.store(true, SeqCst);
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        store.assert_clean(&[&clients[0], &clients[1]]).await;
    }

    async fn several_processes_that_want_it_all_the_time_take_turns(store: &Store) {
        const ALL: u64 = 180;
        let clients = [store.client().await, store.client().await, store.client().await];
        let count = Arc::new([AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)]);
        let all = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..3)
            .map(|i| {
                let (lock, count, all) = (clients[i].lock("k"), count.clone(), all.clone());
                tokio::spawn(async move {
                    while all.load(SeqCst) < ALL {
                        let guard = lock.acquire().await.unwrap();
                        count[i].fetch_add(1, SeqCst);
                        all.fetch_add(1, SeqCst);
                        tokio::time::sleep(3 * MS).await;
                        guard.release().await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let count = count.each_ref().map(|count| count.load(SeqCst));
        assert!(count.iter().all(|count| *count >= ALL / 6), "{count:?}");
        store.assert_clean(&[&clients[0], &clients[1], &clients[2]]).await;
    }
}

on_quorums! {
    a_coming_and_going,
    both_processes_get_their_turns,
}
