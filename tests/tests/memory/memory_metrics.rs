//! What is counted of locks, by their groups, as an exporter shows it.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::operations::LockEventKind;
use dlock::store::Kind;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, LockClient, LockOptions, Loss, distributed_lock};
use dlock_tests::{paused, watched};
use futures_util::FutureExt;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// Runs a test whose metrics go nowhere else.
fn measured<F: Future<Output = ()>>(test: impl FnOnce(Shown) -> F) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let shown = Shown(recorder.handle());
    metrics::with_local_recorder(&recorder, || paused(test(shown)));
}

struct Shown(PrometheusHandle);

impl Shown {
    /// The value of the series of this name with these labels, or nothing where there is no such series.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let text = self.0.render();
        let line = text.lines().find(|line| {
            let series = line.rsplit_once(' ').map_or("", |(series, _)| series);
            let (of, all) = series.split_once('{').unwrap_or((series, ""));
            let all = format!(",{}", all.trim_end_matches('}'));
            of == name
                && labels
                    .iter()
                    .all(|(label, value)| all.contains(&format!(",{label}=\"{value}\"")))
        });
        line.and_then(|line| line.rsplit_once(' '))
            .and_then(|(_, value)| value.parse().ok())
    }

    fn waits(&self, group: &str, outcome: &str) -> Option<f64> {
        self.value(
            "dlock_wait_seconds_count",
            &[("group", group), ("outcome", outcome)],
        )
    }

    fn holds(&self, group: &str, ended: &str) -> Option<f64> {
        self.value("dlock_hold_seconds_count", &[("group", group), ("ended", ended)])
    }

    fn gauges(&self, group: &str) -> [Option<f64>; 3] {
        ["dlock_waiting", "dlock_held", "dlock_suspect"].map(|name| self.value(name, &[("group", group)]))
    }
}

#[test]
fn waits_are_counted_by_their_outcome_and_group() {
    measured(async |shown| {
        let client = LockClient::memory();
        let lock = client.lock("order:1").group("orders");
        assert_eq!(
            shown.waits("orders", "acquired"),
            None,
            "nothing before the first use"
        );
        let guard = lock.acquire().await.unwrap();
        assert_eq!(shown.gauges("orders"), [Some(0.0), Some(1.0), Some(0.0)]);
        lock.try_acquire().await.unwrap_err();
        assert!(lock.clone().wait(SEC).acquire().await.unwrap_err().is_busy());
        let one = tokio::spawn(lock.clone().max_waiters(1).acquire());
        sleep(MS).await;
        assert_eq!(shown.gauges("orders")[0], Some(1.0));
        lock.clone().max_waiters(1).acquire().await.unwrap_err();
        one.abort();
        one.await.unwrap_err();
        for outcome in ["acquired", "busy", "timeout", "refused", "cancelled"] {
            assert_eq!(shown.waits("orders", outcome), Some(1.0), "{outcome}");
        }
        assert_eq!(shown.waits("orders", "error"), Some(0.0));
        let waited = shown.value("dlock_wait_seconds_sum", &[("outcome", "timeout")]);
        assert!(
            waited.is_some_and(|waited| (1.0..1.1).contains(&waited)),
            "{waited:?}"
        );
        guard.release().await.unwrap();
        assert_eq!(shown.gauges("orders"), [Some(0.0); 3]);

        // Another group, another kind, and none: options carry it as well.
        let options = LockOptions::new().group("reads");
        drop(
            client
                .rw_lock("order:1")
                .read()
                .options(options)
                .acquire()
                .await
                .unwrap(),
        );
        drop(
            client
                .semaphore("s")
                .permits(2)
                .group("jobs")
                .acquire()
                .await
                .unwrap(),
        );
        drop(client.lock("order:2").acquire().await.unwrap());
        for (group, kind) in [("reads", "read"), ("jobs", "permit"), ("none", "lock")] {
            let labels = [("group", group), ("kind", kind), ("outcome", "acquired")];
            assert_eq!(
                shown.value("dlock_wait_seconds_count", &labels),
                Some(1.0),
                "{group}"
            );
        }
        assert!(
            !shown.0.render().contains("order:"),
            "no name of a lock is a label"
        );
    });
}

#[distributed_lock(key = "order:{id}", lock = client)]
async fn by_key(client: &LockClient, id: u64) -> Result<(), Error> {
    let _ = id;
    Ok(())
}

#[distributed_lock(key = "order:{id}", group = "refunds", lock = client)]
async fn by_name(client: &LockClient, id: u64) -> Result<(), Error> {
    let _ = id;
    Ok(())
}

#[distributed_lock(keys = ["order:{id}", "audit"], group = "audits", lock = client)]
async fn several_by_name(client: &LockClient, id: u64) -> Result<(), Error> {
    let _ = id;
    Ok(())
}

#[test]
fn attribute_names_the_group_or_the_text_of_its_key_does() {
    measured(async |shown| {
        let client = LockClient::memory();
        by_key(&client, 7).await.unwrap();
        by_name(&client, 8).await.unwrap();
        several_by_name(&client, 9).await.unwrap();
        for group in ["order:{id}", "refunds", "audits"] {
            assert_eq!(shown.waits(group, "acquired"), Some(1.0), "{group}");
        }
    });
}

#[test]
fn holds_are_counted_by_how_they_ended() {
    measured(async |shown| {
        let client = LockClient::memory();
        let lock = client.lock("k").group("g");
        sleep(MS).await;
        let guard = lock.acquire().await.unwrap();
        sleep(2 * SEC).await;
        guard.release().await.unwrap();
        let held = shown.value("dlock_hold_seconds_sum", &[("ended", "released")]);
        assert!(held.is_some_and(|held| (2.0..2.1).contains(&held)), "{held:?}");
        drop(lock.acquire().await.unwrap());
        let lost = lock.clone().fixed_lease(SEC).acquire().await.unwrap();
        assert_eq!(lost.lost().await, Loss::Expired);
        drop(lost);
        let first = lock.acquire().await.unwrap();
        let second = tokio::spawn(lock.acquire());
        sleep(MS).await;
        first.release().await.unwrap();
        let second = second.await.unwrap().unwrap();
        assert_eq!(shown.gauges("g"), [Some(0.0), Some(1.0), Some(0.0)]);
        second.release().await.unwrap();
        sleep(MS).await;
        // Whoever drops a guard does not learn that the store had lost the lock.
        let dropped = lock.acquire().await.unwrap();
        assert!(client.force_release("k").await.unwrap());
        drop(dropped);
        sleep(MS).await;
        for (ended, count) in [
            ("released", 2.0),
            ("dropped", 1.0),
            ("lost", 2.0),
            ("handoff", 1.0),
        ] {
            assert_eq!(shown.holds("g", ended), Some(count), "{ended}");
        }
        assert_eq!(shown.gauges("g"), [Some(0.0); 3]);
        assert_eq!(shown.value("dlock_handoffs_total", &[]), Some(1.0));
        let expired = [("group", "g"), ("reason", "expired")];
        assert_eq!(shown.value("dlock_lost_total", &expired), Some(1.0));
        let gone = [("group", "g"), ("reason", "gone")];
        assert_eq!(shown.value("dlock_lost_total", &gone), Some(1.0));
    });
}

#[test]
fn handed_off_hold_is_counted_in_the_group_of_its_holder() {
    measured(async |shown| {
        let client = LockClient::memory();
        let first = client.lock("k").group("first").acquire().await.unwrap();
        let second = tokio::spawn(client.lock("k").group("second").acquire());
        sleep(MS).await;
        first.release().await.unwrap();
        let second = second.await.unwrap().unwrap();
        assert_eq!(shown.value("dlock_handoffs_total", &[]), Some(1.0));
        assert_eq!(shown.gauges("first"), [Some(0.0); 3]);
        assert_eq!(shown.gauges("second"), [Some(0.0), Some(1.0), Some(0.0)]);
        second.release().await.unwrap();
        assert_eq!(shown.holds("first", "handoff"), Some(1.0));
        assert_eq!(shown.holds("second", "released"), Some(1.0));
        assert_eq!(shown.gauges("second"), [Some(0.0); 3]);
    });
}

#[test]
fn renewals_show_what_was_left_of_the_lease_and_suspects_are_counted() {
    measured(async |shown| {
        let (watched, client) = watched().await;
        let guard = client
            .lock("k")
            .group("g")
            .lease(30 * SEC)
            .acquire()
            .await
            .unwrap();
        sleep(11 * SEC).await;
        let count = || shown.value("dlock_lease_remaining_ratio_count", &[]);
        let left = || shown.value("dlock_lease_remaining_ratio_sum", &[]).unwrap();
        assert_eq!(count(), Some(1.0));
        assert!((0.6..0.7).contains(&left()), "a renewal on time: {}", left());
        // Two thirds of the next lease pass without an answer.
        let before = left();
        watched.seen().hang_renewals.store(true, SeqCst);
        sleep(20 * SEC).await;
        assert!(guard.is_held());
        assert_eq!(shown.gauges("g"), [Some(0.0), Some(1.0), Some(1.0)], "suspect");
        watched.seen().hang_renewals.store(false, SeqCst);
        while count() == Some(1.0) {
            sleep(100 * MS).await;
        }
        let second = left() - before;
        assert!((0.0..0.4).contains(&second), "a near miss: {second}");
        assert_eq!(shown.gauges("g"), [Some(0.0), Some(1.0), Some(0.0)], "confirmed");
        let renewals = [("operation", "renew"), ("outcome", "ok")];
        assert_eq!(
            shown.value("dlock_store_request_seconds_count", &renewals),
            Some(2.0)
        );
        guard.release().await.unwrap();
        assert_eq!(shown.gauges("g"), [Some(0.0); 3]);
    });
}

/// The last renewals before a `max_hold` cannot prolong the lease, however punctual they are.
#[test]
fn renewal_that_max_hold_cuts_short_is_no_near_miss() {
    measured(async |shown| {
        let client = LockClient::memory();
        let mut events = client.events();
        let lock = client.lock("k").lease(30 * SEC).max_hold(45 * SEC);
        let guard = lock.acquire().await.unwrap();
        assert_eq!(guard.lost().await, Loss::MaxHold);
        while let Some(event) = events.next().now_or_never().flatten() {
            let is_near_miss = matches!(event.what, LockEventKind::NearMiss { .. });
            assert!(!is_near_miss, "{event:?}");
        }
        let of_ratios = |what| shown.value(&format!("dlock_lease_remaining_ratio_{what}"), &[]);
        let (sum, count) = (of_ratios("sum").unwrap(), of_ratios("count").unwrap());
        assert!(count > 0.0 && sum / count > 0.6, "{sum} of {count}");
    });
}

/// A lease that is as long as a `min_hold` is no more than whole.
#[test]
fn remaining_part_of_a_lease_is_one_at_most() {
    measured(async |shown| {
        let client = LockClient::memory();
        let lock = client.lock("k").lease(30 * SEC).min_hold(300 * SEC);
        let guard = lock.acquire().await.unwrap();
        sleep(400 * SEC).await;
        assert!(guard.is_held());
        let of_ratios = |what| shown.value(&format!("dlock_lease_remaining_ratio_{what}"), &[]);
        let (sum, count) = (of_ratios("sum").unwrap(), of_ratios("count").unwrap());
        assert!(count > 0.0 && sum <= count, "{sum} of {count}");
    });
}

/// Locks that are acquired one after the other are renewed meanwhile, or begin their leases anew with the last one.
#[test]
fn renewals_while_several_locks_are_acquired_are_counted() {
    measured(async |shown| {
        let (watched, client) = watched().await;
        watched.seen().together.store(false, SeqCst);
        let locks = client.multi(["1:a", "2:b"]).fixed_lease(30 * SEC);
        let guard = locks.acquire().await.unwrap();
        let renewals = [("operation", "renew"), ("outcome", "ok")];
        let counted = shown.value("dlock_store_request_seconds_count", &renewals);
        assert_eq!(counted, Some(2.0), "one for each lane");
        guard.release().await.unwrap();
    });
}

#[test]
fn every_metric_says_what_it_means_and_is_on_its_page_with_its_labels() {
    let page = include_str!("../../../docs/metrics.md");
    measured(async |shown| {
        drop(LockClient::memory().lock("k").acquire().await.unwrap());
        let text = shown.0.render();
        let metrics: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
            .collect();
        assert!(metrics.len() > 5, "{metrics:?}");
        for metric in metrics {
            assert!(
                text.contains(&format!("# HELP {metric} ")),
                "{metric} is not described"
            );
            assert!(
                page.contains(&format!("`{metric}`")),
                "docs/metrics.md lacks {metric}"
            );
        }
        // Waits for a latch have no series.
        let kinds = Kind::ALL.iter().filter(|kind| **kind != Kind::Latch);
        let mut values: BTreeSet<_> = kinds.map(Kind::to_string).collect();
        for label in ["outcome", "ended", "reason", "operation"] {
            let begin = format!("{label}=\"");
            let shown = text.split(&begin).skip(1);
            let before = values.len();
            values.extend(shown.filter_map(|after| Some(after.split('"').next()?.to_owned())));
            assert!(values.len() > before, "no series has a label {label}");
        }
        for value in values {
            assert!(
                page.contains(&format!("`{value}`")),
                "docs/metrics.md lacks {value}"
            );
        }
    });
}

#[test]
fn release_that_failed_is_counted() {
    measured(async |shown| {
        let store = TestStore::new();
        let guard = store.client().lock("k").acquire().await.unwrap();
        let failed = || shown.value("dlock_release_failed_total", &[]);
        assert_eq!(failed(), Some(0.0), "there from the first lock on");
        store.fail_next(Step::Release, Fault::Refused);
        guard.release().await.unwrap_err();
        assert_eq!(failed(), Some(1.0));
    });
}

/// A store answers each renewal of a request by itself: one that fails is no answer of the store, and not counted as good.
#[test]
fn renewal_that_failed_is_counted_as_failed_and_is_no_reply_of_the_store() {
    measured(async |shown| {
        let store = TestStore::new();
        let client = store.client();
        let guard = client.lock("k").lease(30 * SEC).acquire().await.unwrap();
        let renewals = |outcome| {
            let series = [("operation", "renew"), ("outcome", outcome)];
            shown.value("dlock_store_request_seconds_count", &series)
        };
        for (fault, outcome, is_reply) in [
            (Fault::Unreachable, "failed", false),
            (Fault::Refused, "refused", true),
        ] {
            store.fail_next(Step::Renew, fault);
            let asked = Instant::now();
            while renewals(outcome) != Some(1.0) {
                assert!(asked.elapsed() < 60 * SEC, "{outcome}: {:?}", renewals(outcome));
                sleep(100 * MS).await;
            }
            let replied = client.health().last_reply.unwrap();
            assert_eq!(replied < 5 * SEC, is_reply, "{outcome}: {replied:?}");
        }
        assert!(guard.is_held());
        guard.release().await.unwrap();
    });
}
