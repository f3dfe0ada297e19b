//! Work that is done once in each slot of time, by a paused clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::stores::memory::MemoryStore;
use dlock::testing::TestStore;
use dlock::{Error, LockClient, OnceError, SlotReply};
use dlock_tests::paused_for;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

type Reply<T> = Result<SlotReply<T>, OnceError<String>>;

fn paused(test: impl Future<Output = ()>) {
    paused_for(10 * DAY, test);
}

async fn clients(count: usize) -> Vec<LockClient> {
    let store = MemoryStore::new();
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(LockClient::builder().store(store.clone()).build().await.unwrap());
    }
    all
}

fn micros(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH).unwrap().as_micros()
}

/// Until a moment so long after the beginning of a slot of the store.
async fn until(client: &LockClient, period: Duration, after: Duration) {
    let key = client.once("no such record").record_key().unwrap();
    let now = client.records().unwrap().inspect(&key, false).await.unwrap().now;
    let into = micros(now) % period.as_micros();
    let wait = (period.as_micros() + after.as_micros() - into) % period.as_micros();
    sleep(Duration::from_micros(wait as u64)).await;
}

#[test]
fn slots_are_done_once_by_processes_that_loop() {
    paused(async {
        let clients = clients(5).await;
        let done = Arc::new(Mutex::new(BTreeMap::<SystemTime, usize>::new()));
        let loops = clients.iter().enumerate().map(|(n, client)| {
            let (done, every) = (done.clone(), client.once("w").every(SEC));
            async move {
                sleep(n as u32 * 137 * MS).await;
                let mut slots = every.slots();
                for _ in 0..100 {
                    let reply: Reply<()> = slots
                        .next(async |claim| {
                            sleep(50 * MS).await;
                            *done.lock().entry(claim.slot().unwrap()).or_default() += 1;
                            Ok(())
                        })
                        .await;
                    assert!(!matches!(reply.unwrap(), SlotReply::Missed { .. }));
                }
            }
        });
        join_all(loops).await;
        let done = done.lock();
        let slots: Vec<_> = done.keys().map(|slot| micros(*slot)).collect();
        assert!(done.values().all(|times| *times == 1), "{done:?}");
        assert!(slots.len() >= 100 && slots.iter().all(|slot| slot % 1_000_000 == 0));
        assert!(
            slots.windows(2).all(|pair| pair[1] - pair[0] == 1_000_000),
            "{slots:?}"
        );
    });
}

/// No sooner, and no later than a request takes.
#[test]
fn loop_begins_each_slot_when_the_store_does() {
    paused(async {
        let clients = clients(1).await;
        for period in [100 * MS, SEC, 3600 * SEC] {
            let name = format!("w:{period:?}");
            let mut slots = clients[0].once(&*name).every(period).slots();
            let records = clients[0].records().unwrap();
            let other = clients[0].once("other").record_key().unwrap();
            for _ in 0..20 {
                let reply: Reply<bool> = slots
                    .next(async |claim| {
                        let now = records.inspect(&other, false).await.unwrap().now;
                        let late = now.duration_since(claim.slot().unwrap());
                        Ok(late.is_ok_and(|late| late < 5 * MS))
                    })
                    .await;
                assert!(matches!(reply.unwrap(), SlotReply::Ran(true)));
            }
        }
    });
}

/// As in the loop of a program that also waits for something else, whose handling takes until after the beginning.
#[test]
fn loop_that_waited_for_a_slot_and_was_away_when_it_began_does_not_leave_it_out() {
    paused(async {
        let clients = clients(1).await;
        until(&clients[0], 10 * SEC, SEC).await;
        let mut slots = clients[0].once("w").every(10 * SEC).slots();
        let mut next = async |within: Duration| {
            let reply = slots.next(async |claim| Ok::<_, String>((claim.slot(), claim.skipped())));
            timeout(within, reply)
                .await
                .ok()
                .map(|reply| match reply.unwrap() {
                    SlotReply::Ran((slot, skipped)) => (slot.unwrap(), skipped),
                    other => panic!("{other:?}"),
                })
        };
        let (first, _) = next(20 * SEC).await.unwrap();
        assert_eq!(next(5 * SEC).await, None);
        sleep(6 * SEC).await;
        let (second, skipped) = next(SEC).await.expect("it has begun");
        assert_eq!((second, skipped), (first + 10 * SEC, 0));
        // Away for several: the last of them, and the next one after that.
        assert_eq!(next(5 * SEC).await, None);
        sleep(33 * SEC).await;
        let (third, skipped) = next(SEC).await.expect("it has begun");
        assert_eq!((third, skipped), (second + 30 * SEC, 2));
        let (fourth, skipped) = next(20 * SEC).await.unwrap();
        assert_eq!((fourth, skipped), (third + 10 * SEC, 0));
    });
}

#[test]
fn ticks_from_outside_are_for_the_nearest_slot() {
    paused(async {
        let clients = clients(2).await;
        let run = async |client: usize, n: u32| -> Reply<u32> {
            clients[client].once("w").every(SEC).run(async |_| Ok(n)).await
        };
        until(&clients[0], SEC, 996 * MS).await;
        for n in 1..1000 {
            // One comes 4 ms before the slot begins, and the other 4 ms after that.
            assert!(matches!(run(0, n).await, Ok(SlotReply::Ran(is)) if is == n));
            sleep(8 * MS).await;
            assert!(
                matches!(run(1, 0).await, Ok(SlotReply::Earlier(is)) if is == n),
                "{n}"
            );
            sleep(992 * MS).await;
        }
    });
}

#[test]
fn slot_behind_a_run_that_goes_on_is_skipped_and_counted() {
    paused(async {
        let clients = clients(2).await;
        until(&clients[0], SEC, 10 * MS).await;
        let long = tokio::spawn(clients[0].once("w").every(SEC).run(async |claim| {
            sleep(3200 * MS).await;
            Ok::<_, String>(claim.skipped())
        }));
        sleep(SEC).await;
        let other = clients[1].once("w").every(SEC);
        for _ in 0..2 {
            match other.run(async |_| Ok::<u64, String>(9)).await.unwrap() {
                SlotReply::Elsewhere {
                    slot,
                    running,
                    attempt: 1,
                    ..
                } => assert!(slot > running),
                other => panic!("{other:?}"),
            }
            sleep(SEC).await;
        }
        assert!(matches!(long.await.unwrap().unwrap(), SlotReply::Ran(0)));
        sleep(SEC).await;
        let next: Reply<u64> = other.run(async |claim| Ok(claim.skipped())).await;
        match next.unwrap() {
            SlotReply::Ran(skipped) => assert!((2..=4).contains(&skipped), "{skipped}"),
            other => panic!("{other:?}"),
        }
        // The first one comes too late for its slot.
        let named = clients[0].once("w").slot(UNIX_EPOCH + SEC);
        assert!(matches!(
            named.run(async |_| Ok::<u64, String>(0)).await.unwrap(),
            SlotReply::Missed { .. }
        ));
    });
}

#[test]
fn options_of_slots_are_checked() {
    paused(async {
        let clients = clients(1).await;
        let invalid = |every: dlock::OnceEvery, which: &str| match every.check() {
            Err(Error::InvalidOption { option, .. }) => assert_eq!(option, which),
            other => panic!("{other:?}"),
        };
        let once = || clients[0].once("w");
        invalid(once().every(MS), "every");
        invalid(once().every(Duration::from_nanos(20_000_001)), "every");
        invalid(once().every(Duration::MAX), "every");
        invalid(once().every(400 * DAY), "every");
        invalid(once().every(184 * DAY), "every");
        invalid(once().keep(365 * DAY).every(200 * DAY), "every");
        invalid(once().keep(3 * DAY).every(2 * DAY), "keep");
        invalid(once().lease(DAY).keep(DAY).every(SEC), "keep");
        assert!(once().every(2 * DAY).check().is_ok(), "kept for three periods");
        assert!(once().every(183 * DAY).check().is_ok(), "kept for a year");
        let ahead = once().slot(SystemTime::now() + DAY);
        let refused: Reply<u8> = ahead.run(async |_| panic!("it is to come")).await;
        assert!(
            matches!(refused, Err(OnceError::SlotTooFarAhead { .. })),
            "{refused:?}"
        );
        // Of a slot that is named, too.
        for (every, which) in [
            (once().every(Duration::ZERO), "every"),
            (once().keep(DAY).every(DAY), "keep"),
        ] {
            let named = every.slot(SystemTime::now() - SEC);
            let refused: Reply<u8> = named.run(async |_| panic!("its options are invalid")).await;
            let is_told = matches!(&refused, Err(OnceError::Store(Error::InvalidOption { option, .. })) if *option == which);
            assert!(is_told, "{refused:?}");
        }
    });
}

/// As beside a timer in the loop of a program.
#[test]
fn call_that_is_dropped_during_the_pause_after_an_error_does_not_end_the_pause() {
    paused(async {
        let clients = clients(1).await;
        let mut slots = clients[0].once("w").keep(3 * DAY).every(2 * DAY).slots();
        let (begun, mut errors) = (Instant::now(), 0);
        while begun.elapsed() < 10 * SEC {
            tokio::select! {
                reply = slots.next(async |_| Ok::<u8, String>(0)) => {
                    let reply = reply.unwrap_err();
                    assert!(matches!(reply, OnceError::Store(Error::InvalidOption { .. })), "{reply:?}");
                    errors += 1;
                }
                () = sleep(10 * MS) => {}
            }
        }
        // At once, and about every second.
        assert!((9..=11).contains(&errors), "{errors}");
    });
}

#[test]
fn slot_that_was_asked_for_when_the_call_was_dropped_is_asked_for_again() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        until(&client, 60 * SEC, SEC).await;
        let mut slots = client.once("w").every(60 * SEC).slots();
        let mut next = async |within: Duration| {
            let reply = slots.next(async |claim| Ok::<_, String>(claim.slot()));
            timeout(within, reply).await.ok().map(Result::unwrap)
        };
        assert!(next(58 * SEC).await.is_none(), "it has not begun");
        store.set_down(true);
        assert!(next(3 * SEC).await.is_none(), "the store is away");
        store.set_down(false);
        let Some(SlotReply::Ran(Some(first))) = next(SEC).await else {
            panic!("it has begun");
        };
        let Some(SlotReply::Ran(Some(second))) = next(60 * SEC).await else {
            panic!("the next one");
        };
        assert_eq!(second, first + 60 * SEC);
    });
}

/// Otherwise a loop that only logs its errors takes a whole core, and the runtime that the shutdown needs.
#[test]
fn client_that_refuses_is_asked_once_in_a_second() {
    paused(async {
        let clients = clients(1).await;
        let mut slots = clients[0].once("w").every(3600 * SEC).slots();
        clients[0].shutdown(SEC).await;
        let (begun, mut errors) = (Instant::now(), 0);
        while begun.elapsed() < 10 * SEC && errors < 100 {
            let refused = slots.next(async |_| Ok::<u8, String>(0)).await;
            assert!(
                matches!(refused, Err(OnceError::Store(Error::ClientClosed))),
                "{refused:?}"
            );
            errors += 1;
        }
        assert!((9..=12).contains(&errors), "{errors} errors in 10 s");
    });
}

#[test]
fn loop_ends_with_its_client() {
    paused(async {
        let clients = clients(1).await;
        let mut slots = clients[0].once("w").every(3600 * SEC).slots();
        let looping = tokio::spawn(async move { slots.next(async |_| Ok::<u8, String>(0)).await });
        sleep(SEC).await;
        clients[0].shutdown(SEC).await;
        let ended = looping.await.unwrap();
        assert!(
            matches!(
                ended,
                Err(OnceError::Store(Error::ClientClosed | Error::Draining))
            ),
            "{ended:?}"
        );
    });
}
