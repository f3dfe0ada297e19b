//! The spans of waits and holds, as OpenTelemetry exports them.

use std::time::Duration;

use dlock::LockClient;
use dlock::stores::memory::MemoryStore;
use dlock_tests::paused;
use opentelemetry::trace::{SpanId, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tokio::time::sleep;
use tracing::field::Empty;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::DefaultGuard;
use tracing::{Instrument, Span};
use tracing_subscriber::layer::{Layer, SubscriberExt};

const SEC: Duration = Duration::from_secs(1);
const KEY: &str = "order:4711";

/// What is exported, and the subscriber of this thread until it is dropped.
struct Exported {
    spans: InMemorySpanExporter,
    provider: SdkTracerProvider,
    _subscriber: DefaultGuard,
}

impl Exported {
    /// As a service sets it up.
    fn at(level: LevelFilter) -> Exported {
        let spans = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder()
            .with_simple_exporter(spans.clone())
            .build();
        let bridge = tracing_opentelemetry::layer().with_tracer(provider.tracer("shop"));
        let subscriber = tracing_subscriber::registry().with(bridge.with_filter(level));
        Exported {
            spans,
            provider,
            _subscriber: tracing::subscriber::set_default(subscriber),
        }
    }

    /// All spans that have ended, in the order of their ends. None of their names has a key.
    fn spans(&self) -> Vec<SpanData> {
        self.provider.force_flush().expect("they are exported");
        let spans = self.spans.get_finished_spans().expect("they are kept");
        for span in &spans {
            assert!(
                ["request", "dlock.wait", "dlock.hold"].contains(&span.name.as_ref()),
                "{span:?}"
            );
        }
        spans
    }

    fn named(&self, name: &str) -> Vec<SpanData> {
        self.spans()
            .into_iter()
            .filter(|span| span.name == name)
            .collect()
    }

    fn only(&self, name: &str) -> SpanData {
        let mut spans = self.named(name);
        assert_eq!(spans.len(), 1, "{spans:?}");
        spans.remove(0)
    }
}

/// A request of a service that wants to know how it came to its lock.
fn request(number: u64) -> Span {
    tracing::info_span!(
        "request",
        number,
        dlock.wait_ms = Empty,
        dlock.path = Empty,
        dlock.token = Empty
    )
}

/// An attribute, as text: what was recorded last.
fn has(span: &SpanData, name: &str) -> String {
    let attribute = span
        .attributes
        .iter()
        .rev()
        .find(|attribute| attribute.key.as_str() == name);
    attribute.map_or_else(String::new, |attribute| attribute.value.to_string())
}

fn all(span: &SpanData, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| has(span, name)).collect()
}

fn millis(span: &SpanData, name: &str) -> f64 {
    has(span, name).parse().expect("a number")
}

fn id(span: &SpanData) -> SpanId {
    span.span_context.span_id()
}

fn linked(span: &SpanData) -> Vec<SpanId> {
    span.links
        .iter()
        .map(|link| link.span_context.span_id())
        .collect()
}

/// The request of this number.
fn of(spans: &[SpanData], number: u64) -> &SpanData {
    let is = |span: &&SpanData| has(span, "number") == number.to_string();
    spans.iter().find(is).expect("the request")
}

/// Whether a place is of interest is kept for the whole process, and tests without a subscriber have a say in that.
mod alone {
    use super::*;

    #[test]
    fn wait_and_hold_are_children_of_their_callers_and_linked_to_the_hold_before() {
        paused(async {
            let exported = Exported::at(LevelFilter::DEBUG);
            let client = LockClient::memory();
            let lock = client.lock(KEY).group("orders");
            let holds = |number| {
                let lock = lock.clone();
                let work = async move {
                    let guard = lock.acquire().await.unwrap();
                    // Soon enough for a handoff.
                    for _ in 0..20 {
                        tokio::task::yield_now().await;
                    }
                    guard.release().await.unwrap();
                };
                tokio::spawn(work.instrument(request(number)))
            };
            let (first, second) = (holds(1), holds(2));
            first.await.unwrap();
            second.await.unwrap();
            let requests = exported.named("request");
            let (first, second) = (of(&requests, 1), of(&requests, 2));
            assert_eq!(has(first, "dlock.path"), "free");
            assert_eq!(has(second, "dlock.path"), "handoff");
            assert!((0.0..10.0).contains(&millis(first, "dlock.wait_ms")), "{first:?}");
            assert!(
                (0.0..10.0).contains(&millis(second, "dlock.wait_ms")),
                "{second:?}"
            );

            let holds = exported.named("dlock.hold");
            let hold_of = |request: &SpanData| {
                let mut its = holds.iter().filter(|hold| hold.parent_span_id == id(request));
                its.next().expect("its hold").clone()
            };
            let (hold, next) = (hold_of(first), hold_of(second));
            assert_eq!(holds.len(), 2);
            let described = ["dlock.key", "dlock.kind", "dlock.group", "dlock.ended"];
            assert_eq!(all(&hold, &described), [KEY, "lock", "orders", "handoff"]);
            assert_eq!(all(&next, &described), [KEY, "lock", "orders", "released"]);
            assert!((0.0..10.0).contains(&millis(&next, "dlock.held_ms")), "{next:?}");
            let token = |span: &SpanData| has(span, "dlock.token").parse::<u64>().expect("a token");
            assert_eq!((token(&hold), token(&next)), (token(first), token(second)));
            assert_eq!(token(second), token(first) + 1);
            assert_eq!((linked(&hold), linked(&next)), (vec![], vec![id(&hold)]));
            assert_eq!(has(&hold, "dlock.grant"), has(&next, "dlock.grant"));

            let wait = exported.only("dlock.wait");
            assert_eq!(
                (wait.parent_span_id, linked(&wait)),
                (id(second), vec![id(&hold)])
            );
            let described = [
                "dlock.key",
                "dlock.kind",
                "dlock.group",
                "dlock.outcome",
                "dlock.path",
            ];
            assert_eq!(
                all(&wait, &described),
                [KEY, "lock", "orders", "acquired", "handoff"]
            );
            assert_eq!(token(&wait), token(second));
        });
    }

    #[test]
    fn information_alone_has_no_spans_of_holds_and_none_of_what_did_not_wait() {
        paused(async {
            let exported = Exported::at(LevelFilter::INFO);
            let client = LockClient::memory();
            async {
                let guard = client.lock(KEY).acquire().await.unwrap();
                let wait = client.lock(KEY).wait(SEC);
                assert!(wait.acquire().await.unwrap_err().is_busy());
                drop(guard);
            }
            .instrument(request(1))
            .await;
            assert_eq!(exported.named("dlock.hold"), []);
            let wait = exported.only("dlock.wait");
            assert_eq!(
                all(&wait, &["dlock.outcome", "dlock.wait_ms", "dlock.path"]),
                ["timeout", "1000", ""]
            );
            assert_eq!(has(&exported.only("request"), "dlock.wait_ms"), "1000");
        });
    }

    #[test]
    fn wait_that_is_dropped_ends_its_span_as_cancelled() {
        paused(async {
            let exported = Exported::at(LevelFilter::INFO);
            let client = LockClient::memory();
            let _guard = client.lock(KEY).acquire().await.unwrap();
            let lock = client.lock(KEY);
            tokio::time::timeout(SEC, lock.acquire()).await.unwrap_err();
            assert_eq!(has(&exported.only("dlock.wait"), "dlock.outcome"), "cancelled");
        });
    }

    #[test]
    fn renewals_and_the_loss_of_a_hold_are_events_on_its_span() {
        paused(async {
            let exported = Exported::at(LevelFilter::DEBUG);
            let client = LockClient::memory();
            let guard = client.lock(KEY).acquire().await.unwrap();
            sleep(25 * SEC).await;
            client.force_release(KEY).await.unwrap();
            guard.lost().await;
            let hold = exported.only("dlock.hold");
            assert_eq!(has(&hold, "dlock.ended"), "lost");
            let events: Vec<_> = hold.events.iter().map(|event| event.name.as_ref()).collect();
            assert_eq!(
                events,
                ["a lock was renewed", "a lock was renewed", "a lock was lost"]
            );
            let has = |at: usize, name: &str| {
                let attributes = &hold.events.events[at].attributes;
                attributes.iter().any(|attribute| attribute.key.as_str() == name)
            };
            assert!(has(0, "left_ms") && has(2, "reason"), "{hold:?}");
        });
    }

    #[test]
    fn path_says_whether_the_store_told_of_it_or_was_asked_again() {
        paused(async {
            let exported = Exported::at(LevelFilter::INFO);
            let store = MemoryStore::new();
            let client = async || LockClient::builder().store(store.clone()).build().await.unwrap();
            let (here, there) = (client().await, client().await);
            let paths = async |holds: dlock::Lock, ends: bool| {
                exported.spans.reset();
                let guard = holds.acquire().await.unwrap();
                let release = async {
                    sleep(SEC).await;
                    match ends {
                        true => drop(guard),
                        false => std::mem::forget(guard),
                    }
                };
                let (next, ()) = tokio::join!(there.lock(KEY).acquire(), release);
                next.unwrap().release().await.unwrap();
                has(&exported.only("dlock.wait"), "dlock.path")
            };
            assert_eq!(paths(here.lock(KEY), true).await, "notified");
            assert_eq!(paths(here.lock(KEY).fixed_lease(5 * SEC), false).await, "polled");
        });
    }

    #[test]
    fn set_of_locks_has_the_span_of_each_hold() {
        paused(async {
            let exported = Exported::at(LevelFilter::DEBUG);
            let client = LockClient::memory();
            async {
                let guard = client.multi(["a", "b"]).acquire().await.unwrap();
                let again = guard.scope(client.lock("a").acquire()).await.unwrap();
                drop((again, guard));
            }
            .instrument(request(1))
            .await;
            let holds = exported.named("dlock.hold");
            let mut keys: Vec<_> = holds.iter().map(|hold| has(hold, "dlock.key")).collect();
            keys.sort();
            assert_eq!(keys, ["a", "b"], "re-entry has no span of its own");
            let request = exported.only("request");
            assert!(holds.iter().all(|hold| hold.parent_span_id == id(&request)));
            assert_eq!(all(&request, &["dlock.path", "dlock.token"])[0], "free");
        });
    }
}
