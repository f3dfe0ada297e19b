//! The lock layer with kinds and with several keys per request: sharing, waiting, what is taken together, and what
//! becomes of it when one of them is lost.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dlock::testing::TestStore;
use dlock::{Held, LockClient, LockKey, LockKind};
use dlock_tower::key::{all_of, each_of, fixed, from_fn, header, query};
use dlock_tower::{LockLayer, NotStarted, Rejection};
use futures_util::future::join_all;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::sync::Barrier;
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};

type Req = Request<Full<Bytes>>;
type Res = Response<Full<Bytes>>;

const MS: Duration = Duration::from_millis(1);

fn request(method: Method, uri: &str) -> Req {
    let request = Request::builder().method(method).uri(uri);
    request.body(Full::default()).unwrap()
}

fn get(uri: &str) -> Req {
    request(Method::GET, uri)
}

fn post(uri: &str) -> Req {
    request(Method::POST, uri)
}

fn answer(text: impl Into<Bytes>) -> Res {
    Response::new(Full::new(text.into()))
}

async fn text<B: BodyExt<Data = Bytes, Error: std::fmt::Debug>>(response: Response<B>) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

/// Tells what the store says of the keys in the query, and what the request holds.
async fn who(client: LockClient, request: Req) -> Result<Res, Infallible> {
    let mut told = Vec::new();
    if let Some(held) = request.extensions().get::<Held>() {
        for key in held.keys() {
            let kind = client.inspect(key).await.unwrap().unwrap().kind;
            told.push(format!("{key} {kind} {}", held.fencing_token_of(key).is_some()));
        }
    }
    Ok(answer(told.join(", ")))
}

fn teller(
    client: &LockClient,
) -> impl Service<Req, Response = Res, Error = Infallible, Future: Send> + Clone + use<> {
    let client = client.clone();
    service_fn(move |request| who(client.clone(), request))
}

/// A name holds one thing only, so a plain lock cannot be beside the read-write lock of the layer.
#[tokio::test(start_paused = true)]
async fn plain_lock_of_the_same_name_is_refused_beside_read_write_and_the_error_says_what_to_do() {
    let client = TestStore::new().client();
    let inside = client.clone();
    let handler = service_fn(move |_: Req| {
        let plain = inside.lock("document:7");
        async move { Ok::<_, Infallible>(answer(plain.acquire().await.unwrap_err().to_string())) }
    });
    let layer = LockLayer::new(client.clone(), fixed("document:7"));
    let service = layer.read_write().unwrap().layer(handler);
    for request in [get("/"), post("/")] {
        let told = text(service.clone().oneshot(request).await.unwrap()).await;
        assert!(
            told.contains("as a lock of another kind (ask for it as one kind"),
            "{told}"
        );
    }
    // Elsewhere, and the other way round.
    let _held = client.rw_lock("document:7").read().acquire().await.unwrap();
    let refused = client.lock("document:7").acquire().await.unwrap_err();
    let told = refused.to_string();
    assert!(
        told.contains("use one kind for this name") && !told.contains("remove"),
        "{told}"
    );
    let _plain = client.lock("document:8").acquire().await.unwrap();
    let layer = LockLayer::new(client.clone(), fixed("document:8"));
    let service = layer.read_write().unwrap().layer(teller(&client));
    let response = service.oneshot(get("/")).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(response.headers().get("retry-after").is_none());
    assert!(text(response).await.contains("urn:dlock:problem:internal"));
}

#[tokio::test(start_paused = true)]
async fn with_read_write_safe_methods_share_and_others_do_not() {
    let store = TestStore::new();
    let (a, b) = (store.client(), store.client());
    // Each waits for the other inside, which takes both at a time.
    let both = Arc::new(Barrier::new(2));
    let service = |client: &LockClient| {
        let both = both.clone();
        let handler = service_fn(move |_: Req| {
            let both = both.clone();
            async move {
                both.wait().await;
                Ok::<_, Infallible>(answer("read"))
            }
        });
        LockLayer::new(client.clone(), query("doc"))
            .read_write()
            .unwrap()
            .layer(handler)
    };
    // In one process and across.
    for (one, other) in [(&a, &a), (&a, &b)] {
        let one = service(one).oneshot(get("/?doc=1"));
        let other = service(other).oneshot(request(Method::HEAD, "/?doc=1"));
        let (one, other) = tokio::join!(one, other);
        assert_eq!(
            (one.unwrap().status(), other.unwrap().status()),
            (StatusCode::OK, StatusCode::OK)
        );
    }

    // A writer waits until the last reader has left, and keeps them out.
    let writes = LockLayer::new(b.clone(), query("doc"))
        .read_write()
        .unwrap()
        .wait(100 * MS);
    let reading = a.lock("1").kind(LockKind::Read).acquire().await.unwrap();
    let busy = writes.layer(teller(&b)).oneshot(post("/?doc=1")).await.unwrap();
    assert_eq!(busy.status(), StatusCode::LOCKED);
    reading.release().await.unwrap();
    let told = writes.layer(teller(&b)).oneshot(post("/?doc=1")).await.unwrap();
    assert_eq!(text(told).await, "1 write true");
    let writing = a.lock("1").kind(LockKind::Write).acquire().await.unwrap();
    for method in [Method::GET, Method::HEAD, Method::POST, Method::DELETE] {
        let answer = writes.layer(teller(&b)).oneshot(request(method, "/?doc=1")).await;
        assert_eq!(answer.unwrap().status(), StatusCode::LOCKED);
    }
    // Nothing is locked for a question about what is allowed.
    let options = writes
        .layer(teller(&b))
        .oneshot(request(Method::OPTIONS, "/?doc=1"))
        .await;
    assert_eq!(text(options.unwrap()).await, "");
    drop(writing);
    assert_eq!((a.held(), b.held(), store.held()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn methods_that_are_skipped_on_purpose_are_skipped_under_read_write_too() {
    let store = TestStore::new();
    let client = store.client();
    let layer = LockLayer::new(client.clone(), query("doc")).read_write().unwrap();
    let skipping = layer.clone().skip_methods([Method::GET]);
    let told = async |layer: &LockLayer<_>, method| {
        text(
            layer
                .layer(teller(&client))
                .oneshot(request(method, "/?doc=1"))
                .await
                .unwrap(),
        )
        .await
    };
    assert_eq!(told(&layer, Method::GET).await, "1 read true");
    assert_eq!(told(&layer, Method::HEAD).await, "1 read true");
    assert_eq!(told(&skipping, Method::GET).await, "");
    assert_eq!(told(&skipping, Method::OPTIONS).await, "1 read true");
}

#[tokio::test(start_paused = true)]
async fn a_kind_is_for_all_methods() {
    let store = TestStore::new();
    let client = store.client();
    for kind in [LockKind::Mutex, LockKind::Read, LockKind::Write] {
        let layer = LockLayer::new(client.clone(), query("doc")).kind(kind).unwrap();
        for method in [Method::GET, Method::POST] {
            let response = layer
                .layer(teller(&client))
                .oneshot(request(method, "/?doc=1"))
                .await;
            assert_eq!(text(response.unwrap()).await, format!("1 {kind} true"));
        }
        // HEAD passes, as ever.
        let response = layer
            .layer(teller(&client))
            .oneshot(request(Method::HEAD, "/?doc=1"))
            .await;
        assert_eq!(text(response.unwrap()).await, "");
    }
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_held_together_in_whatever_order_they_are_named() {
    let store = TestStore::new();
    let client = store.client();
    let accounts: Arc<Vec<AtomicI64>> = Arc::new((0..3).map(|_| AtomicI64::new(100)).collect());
    let key = each_of((query("from"), query("to"))).prefix("account:");
    let handler = {
        let (accounts, client) = (accounts.clone(), client.clone());
        service_fn(move |request: Req| {
            let (accounts, client) = (accounts.clone(), client.clone());
            async move {
                let held = request.extensions().get::<Held>().unwrap();
                let keys: Vec<_> = held.keys().map(LockKey::as_str).collect();
                let at = |name: &str| name["account:".len()..].parse::<usize>().unwrap();
                let (one, other) = (at(keys[0]), at(keys[1]));
                // Each of them alone is entered below.
                drop(client.lock(keys[1]).try_acquire().await.unwrap());
                let before = [one, other].map(|at| accounts[at].load(Ordering::SeqCst));
                sleep(MS).await;
                accounts[one].store(before[0] - 1, Ordering::SeqCst);
                accounts[other].store(before[1] + 1, Ordering::SeqCst);
                Ok::<_, Infallible>(answer("moved"))
            }
        })
    };
    let service = LockLayer::new(client.clone(), key)
        .wait(Duration::from_secs(60))
        .layer(handler);
    let pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)];
    let requests = (0..60).map(|i| {
        let (from, to) = pairs[i % pairs.len()];
        service.clone().oneshot(post(&format!("/?from={from}&to={to}")))
    });
    for response in join_all(requests).await {
        assert_eq!(response.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(
        accounts.iter().map(|a| a.load(Ordering::SeqCst)).sum::<i64>(),
        300
    );
    assert_eq!((client.held(), store.held(), store.watched()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_that_is_busy_keeps_the_request_out_and_the_others_free() {
    let store = TestStore::new();
    let (a, b) = (store.client(), store.client());
    let key = each_of((query("from"), query("to")));
    let layer = LockLayer::new(a.clone(), key).try_once();
    let busy = b.lock("2").acquire().await.unwrap();
    let response = layer
        .layer(teller(&a))
        .oneshot(post("/?from=1&to=2"))
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::LOCKED);
    assert!(response.extensions().get::<NotStarted>().is_some());
    assert_eq!(store.held(), 1);
    drop(busy);
    let response = layer
        .layer(teller(&a))
        .oneshot(post("/?from=2&to=1"))
        .await
        .unwrap();
    assert_eq!(text(response).await, "1 lock true, 2 lock true");
    // The same one twice is one.
    let response = layer
        .layer(teller(&a))
        .oneshot(post("/?from=2&to=2"))
        .await
        .unwrap();
    assert_eq!(text(response).await, "2 lock true");
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_one_stops_the_handler_and_frees_the_others() {
    let store = TestStore::new();
    let client = store.client();
    let stopped = Arc::new(AtomicUsize::new(0));
    struct Stops(Arc<AtomicUsize>);
    impl Drop for Stops {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let handler = {
        let stopped = stopped.clone();
        service_fn(move |_: Req| {
            let stops = Stops(stopped.clone());
            async move {
                let _stops = stops;
                std::future::pending::<Result<Res, Infallible>>().await
            }
        })
    };
    let layer = LockLayer::new(client.clone(), each_of((fixed("a"), fixed("b"))));
    let lost = async {
        sleep(MS).await;
        assert!(store.lose("b"));
    };
    let (response, ()) = tokio::join!(layer.layer(handler).oneshot(post("/")), lost);
    let response = response.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.extensions().get::<NotStarted>().is_none());
    assert_eq!(stopped.load(Ordering::SeqCst), 1);
    sleep(MS).await;
    assert_eq!((store.held(), client.held()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn until_the_body_is_sent_all_of_them_are_held() {
    let store = TestStore::new();
    let client = store.client();
    let layer = LockLayer::new(client.clone(), each_of((fixed("a"), fixed("b"))));
    let response = layer
        .until_body(Duration::from_secs(60))
        .layer(teller(&client))
        .oneshot(post("/"))
        .await
        .unwrap();
    assert_eq!(store.held(), 2);
    assert_eq!(text(response).await, "a lock true, b lock true");
    assert_eq!(store.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn parts_that_pass_add_nothing_and_parts_that_miss_refuse() {
    let store = TestStore::new();
    let client = store.client();
    let told = async |layer: LockLayer<_>, uri: &str| {
        let response = layer.layer(teller(&client)).oneshot(post(uri)).await.unwrap();
        (response.status(), text(response).await)
    };
    let key = || each_of((query("from"), query("to").optional(), header("x").optional()));
    let layer = || LockLayer::new(client.clone(), key().prefix("p:").map(str::to_uppercase));
    assert_eq!(
        told(layer(), "/?from=a").await,
        (StatusCode::OK, "P:A lock true".into())
    );
    let both = "P:A lock true, P:B lock true".to_owned();
    assert_eq!(told(layer(), "/?from=b&to=a").await, (StatusCode::OK, both));
    assert_eq!(told(layer(), "/?to=a").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(told(layer(), "/?from=a&to=").await.0, StatusCode::BAD_REQUEST);
    assert_eq!(told(layer(), "/?from=a&to=%7B").await.0, StatusCode::BAD_REQUEST);

    // If all of them pass, the request does.
    let optional = || {
        LockLayer::new(
            client.clone(),
            each_of((query("a").optional(), query("b").optional())),
        )
    };
    let response = optional()
        .layer(teller(&client))
        .oneshot(post("/"))
        .await
        .unwrap();
    assert_eq!(
        (response.status(), text(response).await),
        (StatusCode::OK, String::new())
    );

    // Several names cannot be joined into one.
    let joined = LockLayer::new(
        client.clone(),
        all_of((each_of((query("a"), query("b"))), query("c"))),
    );
    let response = joined
        .layer(teller(&client))
        .oneshot(post("/?a=1&b=2&c=3"))
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(store.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn closures_may_name_several_or_none() {
    let client = LockClient::memory();
    fn items(parts: &Parts) -> Vec<String> {
        let query = parts.uri.query().unwrap_or_default();
        query
            .split(',')
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect()
    }
    let layer = LockLayer::new(client.clone(), items);
    let told = async |uri: &str| {
        let response = layer.layer(teller(&client)).oneshot(post(uri)).await.unwrap();
        (response.status(), text(response).await)
    };
    let two = "x lock true, y lock true".to_owned();
    assert_eq!(told("/?y,x").await, (StatusCode::OK, two));
    assert_eq!(told("/").await.0, StatusCode::BAD_REQUEST);

    let optional = LockLayer::new(client.clone(), from_fn(items).optional());
    let response = optional.layer(teller(&client)).oneshot(post("/")).await.unwrap();
    assert_eq!(
        (response.status(), text(response).await),
        (StatusCode::OK, String::new())
    );

    let fallible = |parts: &Parts| match items(parts).as_slice() {
        [] => Err(Rejection::new(StatusCode::IM_A_TEAPOT, "which?")),
        [one, ..] => Ok(Some([one.clone(), "always".to_owned()])),
    };
    let fallible = LockLayer::new(client.clone(), from_fn(fallible));
    let response = fallible.layer(teller(&client)).oneshot(post("/")).await.unwrap();
    assert_eq!(response.status(), StatusCode::IM_A_TEAPOT);
    let response = fallible
        .layer(teller(&client))
        .oneshot(post("/?x"))
        .await
        .unwrap();
    assert_eq!(text(response).await, "always lock true, x lock true");
}

#[tokio::test(start_paused = true)]
async fn requests_that_read_stand_back_for_one_that_writes_where_writers_are_preferred() {
    let store = TestStore::new();
    let (a, b) = (store.client(), store.client());
    let layer = |client: &LockClient| LockLayer::new(client.clone(), query("doc")).read_write().unwrap();
    for prefers in [false, true] {
        let reading = a.lock("1").kind(LockKind::Read).acquire().await.unwrap();
        let writes = match prefers {
            true => layer(&b).prefer_writers(),
            false => layer(&b),
        };
        let write = tokio::spawn(writes.layer(teller(&b)).oneshot(post("/?doc=1")));
        sleep(MS).await;
        let read = layer(&a).try_once().layer(teller(&a)).oneshot(get("/?doc=1"));
        let expected = if prefers {
            StatusCode::LOCKED
        } else {
            StatusCode::OK
        };
        assert_eq!(read.await.unwrap().status(), expected);
        reading.release().await.unwrap();
        let told = write.await.unwrap().unwrap();
        assert_eq!(text(told).await, "1 write true");
    }
    // A lock without readers has none that stand back.
    let wrong = LockLayer::new(a.clone(), query("doc")).prefer_writers();
    assert!(wrong.check().unwrap_err().to_string().contains("prefer_writers"));
    assert_eq!((a.held(), b.held(), store.held()), (0, 0, 0));
}
