//! The console of dlock-tower, in a real browser, and behind a mount path, a crowd, an outage, and hostile names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{Html, IntoResponse, Response};
use dlock::LockClient;
use dlock_tests::bins::Checkout;
use dlock_tests::{Flavor, Server, eventually};
use dlock_tower::console::Console;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower::ServiceExt;

use crate::browser_support::Browser;

const ESCAPE: &str = "\u{e00c}";
const ENTER: &str = "\u{e007}";
const MARKUP: &str = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>";

async fn client(url: &str, service: &str) -> LockClient {
    let client = LockClient::builder()
        .url(url)
        .service_name(service)
        .presence(true);
    client.build().await.unwrap()
}

/// Serves an app, which ends with the test's runtime; its address.
async fn serve(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    format!("http://{address}")
}

async fn mounted(client: &LockClient) -> String {
    let app = Router::new().nest_service("/deep/down/locks", Console::new(client.clone()).router());
    format!("{}/deep/down/locks", serve(app).await)
}

impl Browser {
    /// Types as people do, wherever the focus is.
    async fn types(&self, keys: &str) {
        let focused = self.client.active_element().await.unwrap();
        focused.send_keys(keys).await.unwrap();
    }

    async fn focus(&self) -> String {
        let focus = "const at = document.activeElement; return at.id || at.textContent";
        self.ask(focus, vec![]).await.as_str().unwrap().to_owned()
    }

    async fn focuses(&self, what: &str) {
        eventually(&format!("the focus is on {what}"), async || {
            self.focus().await == what
        })
        .await;
    }

    /// Whether it is no wider than its window, and nothing in it is cut off.
    async fn fits(&self) {
        let wide = "const root = document.documentElement;
            return [root.scrollWidth - root.clientWidth,
                ...[...document.querySelectorAll('td, dd, li, p, button')]
                    .filter((one) => one.checkVisibility() && one.getBoundingClientRect().right > root.clientWidth + 1)
                    .map((one) => one.textContent)]";
        assert_eq!(self.ask(wide, vec![]).await, json!([0]));
    }

    async fn ground(&self) -> Value {
        self.ask("return getComputedStyle(document.body).backgroundColor", vec![])
            .await
    }
}

const LIGHT: &str = "rgb(245, 245, 242)";
const DARK: &str = "rgb(20, 23, 26)";

#[tokio::test]
async fn console_of_a_shop_shows_the_holder_and_the_waiters() {
    let shop = Checkout::start(&[]);
    for slash in ["", "/"] {
        let page = Browser::open(&format!("{}/console{slash}", shop.url())).await;
        page.shows("#locks-empty", "No lock is held").await;
        let hold = || tokio::spawn(reqwest::get(format!("{}/lock?hold_ms=60000", shop.url())));
        let holder = hold();
        page.shows("#locks tbody", "lock").await;
        let waiter = hold();
        page.shows("#locks tbody td[data-label=waiting]", "1").await;
        page.shows("#locks tbody td[data-label='held by']", "checkout on ")
            .await;
        page.shows("#locks tbody td[data-label=at]", "routes.rs:").await;
        // A client that goes away gives its lock back.
        holder.abort();
        waiter.abort();
        page.shows("#locks-empty", "No lock is held").await;
        page.close().await;
    }
}

#[tokio::test]
async fn other_processes_are_shown_with_waiters_in_order_and_their_deadlock() {
    let server = Server::start(Flavor::Redis).await;
    let (a, b, ops) = (
        client(&server.url(), "checkout").await,
        client(&server.url(), "billing").await,
        client(&server.url(), "ops").await,
    );
    let url = mounted(&ops).await;
    let page = Browser::open(&url).await;
    let holder = a.lock("A").note("invoice 42").acquire().await.unwrap();
    let other = b.lock("B").acquire().await.unwrap();
    let (first, second) = (b.lock("A").note("first"), b.lock("A").note("second"));
    let first = tokio::spawn(other.scope(async move { first.acquire().await }));
    page.shows("#locks tbody", "A").await;
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let second = tokio::spawn(async move { second.acquire().await });
    page.shows("#locks tbody td[data-label=waiting]", "2").await;
    assert!(
        page.text("#locks tbody tr").await.starts_with('A'),
        "what is waited for stands first"
    );

    page.click("#locks tbody button").await;
    page.shows("#detail-title", "A").await;
    page.shows("#detail-body", "invoice 42").await;
    page.shows("#detail-body ol li:nth-child(1)", "“first”").await;
    page.shows("#detail-body ol li:nth-child(2)", "“second”").await;
    page.picture("console-detail").await;
    page.types(ESCAPE).await;
    page.focuses("A").await;

    let circle = a.lock("B");
    let circle = tokio::spawn(holder.scope(async move { circle.acquire().await }));
    page.shows("#alerts .bad", "Deadlock: A → B → A").await;
    page.picture("console-deadlock").await;
    circle.abort();
    first.abort();
    second.abort();
    eventually("no deadlock is shown any more", async || {
        page.count("#alerts .bad").await == 0
    })
    .await;
    drop((holder, other));
    page.close().await;
}

#[tokio::test]
async fn everything_can_be_done_by_the_keyboard() {
    let client = LockClient::memory();
    let guards = [
        client.lock("order:1").acquire().await.unwrap(),
        client.lock("order:2").acquire().await.unwrap(),
    ];
    let page = Browser::open(&mounted(&client).await).await;
    page.shows("#locks tbody tr:nth-child(2)", "order:2").await;
    for (key, focus) in [
        ("j", "order:1"),
        ("j", "order:2"),
        ("j", "order:2"),
        ("k", "order:1"),
        ("/", "filter"),
    ] {
        page.types(key).await;
        page.focuses(focus).await;
    }
    page.types("rder:2").await;
    eventually("one is left", async || page.count("#locks tbody tr").await == 1).await;
    page.types(ENTER).await;
    page.focuses("order:2").await;
    // The page is drawn each second, and the focus stays.
    tokio::time::sleep(Duration::from_millis(2200)).await;
    page.focuses("order:2").await;
    page.types(ENTER).await;
    page.shows("#detail-title", "order:2").await;
    page.types(ESCAPE).await;
    page.focuses("order:2").await;
    page.types("p").await;
    page.shows("#live", "paused").await;
    page.types("p").await;
    page.shows("#live", "live").await;
    page.types("/").await;
    page.types(ESCAPE).await;
    eventually("both are there", async || {
        page.count("#locks tbody tr").await == 2
    })
    .await;
    // They can be switched off, for those who dictate.
    page.click("#keys").await;
    page.client.refresh().await.unwrap();
    page.shows("#locks tbody tr:nth-child(2)", "order:2").await;
    page.types("p").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(page.text("#live").await, "live");
    // Everything that can be clicked can be reached, and says what it is.
    let nameless = "return [...document.querySelectorAll('button, input, a')]
        .filter((one) => one.tabIndex < 0 || !(one.textContent.trim() || one.ariaLabel)).length";
    assert_eq!(page.ask(nameless, vec![]).await, json!(0));
    drop(guards);
    page.close().await;
}

#[tokio::test]
async fn it_is_light_or_dark_as_the_system_or_the_user_says() {
    let client = LockClient::memory();
    let _guard = client
        .lock("order:42")
        .note("invoice 42")
        .acquire()
        .await
        .unwrap();
    let url = mounted(&client).await;
    for (system, usual, turned) in [("1", LIGHT, DARK), ("0", DARK, DARK)] {
        let scheme = format!("--blink-settings=preferredColorScheme={system}");
        let page = Browser::with(&url, &[&scheme], Value::Null).await;
        page.shows("#locks tbody", "order:42").await;
        assert_eq!(page.ground().await, usual);
        page.picture(&format!("console-theme-{system}")).await;
        page.types("t").await;
        page.shows("#theme", "light").await;
        assert_eq!(page.ground().await, LIGHT);
        page.click("#theme").await;
        page.shows("#theme", "dark").await;
        assert_eq!(page.ground().await, turned);
        // It is remembered.
        page.client.refresh().await.unwrap();
        page.shows("#theme", "dark").await;
        assert_eq!(page.ground().await, DARK);
        page.close().await;
    }
}

#[tokio::test]
async fn it_fits_on_a_phone() {
    let client = LockClient::memory();
    let name =
        "a-very-long-name-of-a-lock-that-nobody-has-thought-of-and-that-does-not-fit-on-a-phone".repeat(5);
    let _guard = client.lock(name).note("n".repeat(190)).acquire().await.unwrap();
    let phone = json!({ "width": 320, "height": 1400, "pixelRatio": 2.0, "mobile": true });
    let dark = ["--blink-settings=preferredColorScheme=0"];
    let page = Browser::with(&mounted(&client).await, &dark, phone).await;
    page.shows("#locks tbody", "a-very-long").await;
    page.fits().await;
    page.picture("console-phone").await;
    page.click("#locks tbody button").await;
    page.shows("#detail-body", "nnnnn").await;
    page.fits().await;
    page.picture("console-phone-detail").await;
    page.close().await;
}

#[tokio::test]
async fn operator_who_may_act_revokes_and_breaks_with_a_reason() {
    let server = Server::start(Flavor::Redis).await;
    let (a, ops) = (
        client(&server.url(), "checkout").await,
        client(&server.url(), "ops").await,
    );
    let guard = a.lock("order:42").acquire().await.unwrap();
    let console = Console::new(ops)
        .allow_actions(true)
        .operator(|_| Some("ada".to_owned()));
    let app = Router::new().nest_service("/locks", console.router());
    let page = Browser::open(&format!("{}/locks", serve(app).await)).await;
    page.click("#locks tbody button").await;
    page.shows("#detail-body .holder", "checkout on ").await;
    // Without a reason nothing is done.
    page.click("#detail-body form button.danger:not([hidden])").await;
    page.click("#detail-body form button:not(.danger)").await;
    page.click("#detail-body form input").await;
    page.types("its machine burns").await;
    page.types(ENTER).await;
    page.shows("#detail-body output", "The holder is asked to stop")
        .await;
    let said = guard.revoked().await.expect("an intervention");
    assert_eq!(
        (said.by.as_str(), said.reason.as_str()),
        ("ada", "its machine burns")
    );
    assert!(guard.is_held());
    page.picture("console-actions").await;
    for _ in ["once", "and it asks whether one is sure"] {
        page.click("#detail-body form button.danger:not([hidden])").await;
    }
    page.shows("#detail-status", "Nobody holds the lock now").await;
    eventually("its holder knows", async || !guard.is_held()).await;
    page.types(ESCAPE).await;
    page.click("#record").await;
    page.types("payment-7").await;
    page.click("#forget-why").await;
    page.types("the answer was wrong").await;
    page.types(ENTER).await;
    page.shows("#forget-said", "no such record").await;
    let audit: Vec<redis::Value> = server.query(&["XRANGE", "dlock:audit", "-", "+"]).await;
    let last = format!("{:?}", audit.last());
    for part in ["forget", "payment-7", "ada", "the answer was wrong"] {
        assert!(last.contains(part), "{part} in {last}");
    }
    page.close().await;
}

/// What anybody can write beside the locks, with the store's own permissions.
#[tokio::test]
async fn hostile_names_and_notes_are_shown_and_do_nothing() {
    let server = Server::start(Flavor::Redis).await;
    let client = client(&server.url(), "ops").await;
    let _guard = client.lock(MARKUP).note(MARKUP).acquire().await.unwrap();
    let hold = format!("{}:1", client.id());
    let long = "k".repeat(64 * 1024);
    // It looks like the other one.
    let twin = format!("{}l", &long[1..]);
    let wild = "wild\u{1b}[2J\u{202e}\n\u{0}\u{3164}\u{e0041}name";
    for name in [wild, &long, &twin] {
        server.command(&["HSET", name, &hold, "1"]).await;
        server.command(&["PEXPIRE", name, "600000"]).await;
    }
    let page = Browser::open(&mounted(&client).await).await;
    let shows = async |count| {
        let what = format!("{count} are shown");
        eventually(&what, async || page.count("#locks tbody tr").await == count).await;
    };
    shows(4).await;
    // Drawn again, they are still two rows, of which one can go.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    server.command(&["DEL", &twin]).await;
    shows(3).await;
    let all = page.text("#locks tbody").await;
    assert!(all.contains(MARKUP), "{all}");
    assert!(
        all.contains("wild\\u{1b}[2J\\u{202e}\\u{a}\\u{0}\\u{3164}\\u{e0041}name"),
        "{all}"
    );
    assert!(all.len() < 4000, "the long one is shortened");
    page.fits().await;
    for row in 1..=3 {
        page.click(&format!("#locks tbody tr:nth-child({row}) button"))
            .await;
        page.shows("#detail-body", "held for").await;
        page.types(ESCAPE).await;
    }
    assert_eq!(page.count("img, #locks script, dialog script").await, 0);
    let title = page.text("title").await;
    assert!(title.starts_with("Locks"), "{title}");
    page.picture("console-hostile").await;
    page.close().await;
}

#[tokio::test]
async fn outage_and_sign_out_are_said_and_what_was_known_stays() {
    let server = Server::start(Flavor::Redis).await;
    let client = LockClient::builder()
        .url(server.url())
        .lease(Duration::from_secs(600));
    let client = client.build().await.unwrap();
    let _guard = client.lock("mine").acquire().await.unwrap();
    let signed_in = Arc::new(AtomicBool::new(true));
    let authentication = {
        let signed_in = signed_in.clone();
        from_fn(move |request: Request, next: Next| {
            let signed_in = signed_in.load(Ordering::Relaxed);
            async move {
                match signed_in {
                    true => next.run(request).await,
                    false => refused(),
                }
            }
        })
    };
    let console = Console::new(client).router().layer(authentication);
    let page = Browser::open(&format!(
        "{}/locks/",
        serve(Router::new().nest_service("/locks", console)).await
    ))
    .await;
    page.shows("#locks tbody", "mine").await;
    server.stop();
    page.shows("#alerts", "Not known: the locks of other processes")
        .await;
    page.shows("#locks tbody", "mine").await;
    page.picture("console-outage").await;
    server.cont();
    eventually("it has come back", async || {
        page.count("#alerts .alert").await == 0
    })
    .await;
    signed_in.store(false, Ordering::Relaxed);
    page.shows("#live", "signed out").await;
    page.shows("#locks tbody", "mine").await;
    signed_in.store(true, Ordering::Relaxed);
    page.shows("#live", "live").await;
    page.close().await;
}

/// What a proxy in front of several processes can do.
#[tokio::test]
async fn action_whose_answer_is_lost_may_have_been_done_and_a_process_that_only_reads_does_nothing() {
    let client = client("memory://console-proxy", "ops").await;
    let guard = client.lock("k").acquire().await.unwrap();
    let (loses, other) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(false)));
    let reader = Console::new(client.clone()).router();
    let proxy = {
        let (loses, other) = (loses.clone(), other.clone());
        from_fn(move |request: Request, next: Next| {
            let (loses, other) = (loses.load(Ordering::Relaxed), other.load(Ordering::Relaxed));
            let reader = reader.clone();
            async move {
                let is_action = request.method() == Method::POST;
                let answer = match other {
                    true => reader.oneshot(request).await.unwrap(),
                    false => next.run(request).await,
                };
                match is_action && loses {
                    true => (StatusCode::GATEWAY_TIMEOUT, Html("<h1>504</h1>")).into_response(),
                    false => answer,
                }
            }
        })
    };
    let console = Console::new(client.clone()).allow_actions(true).router();
    let app = Router::new().nest_service("/locks", console.layer(proxy));
    let page = Browser::open(&format!("{}/locks", serve(app).await)).await;
    page.click("#locks tbody button").await;
    page.shows("#detail-body .holder", "Held by").await;
    page.click("#detail-body form input").await;
    page.types("it burns").await;
    page.types(ENTER).await;
    page.shows("#detail-body output", "may or may not have been done")
        .await;
    guard.revoked().await.expect("it was done");
    loses.store(false, Ordering::Relaxed);
    other.store(true, Ordering::Relaxed);
    // The page sees that process.
    eventually("no record can be forgotten there", async || {
        page.ask("return document.getElementById('records').hidden", vec![])
            .await
            == json!(true)
    })
    .await;
    page.types(ENTER).await;
    page.shows("#detail-body output", "Not done").await;
    page.close().await;
}

#[tokio::test]
async fn age_is_that_of_the_survey_and_only_news_are_read_aloud() {
    let client = LockClient::memory();
    client.drain();
    let console = Console::new(client).refresh(Duration::from_secs(60)).router();
    let page = Browser::open(&serve(console).await).await;
    page.shows("#alerts", "This process drains").await;
    // The clock of the browser is slow.
    let prepare = "const now = Date.now;
        Date.now = () => now() - 60000;
        window.said = 0;
        const all = { childList: true, characterData: true, subtree: true };
        for (const region of document.querySelectorAll('[aria-live=polite], [role=status]')) {
            new MutationObserver((news) => { window.said += news.length; }).observe(region, all);
        }
        return document.getElementById('alerts').ariaLive";
    assert_eq!(page.ask(prepare, vec![]).await, json!("polite"));
    page.shows("#as-of", " s old").await;
    let age = page.text("#as-of").await;
    eventually("it grows", async || page.text("#as-of").await != age).await;
    assert_eq!(page.text("#live").await, "live");
    assert_eq!(page.ask("return window.said", vec![]).await, json!(0));
    page.close().await;
}

#[tokio::test]
async fn events_of_other_days_have_their_date() {
    let client = LockClient::memory();
    let page = Browser::open(&mounted(&client).await).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("k").acquire());
    tokio::time::sleep(Duration::from_millis(1200)).await;
    guard.release().await.unwrap();
    let _guard = waiter.await.unwrap().unwrap();
    page.shows("#timeline", "waited").await;
    let has_date = "const time = document.querySelector('#timeline time');
        return time.textContent.startsWith(new Date(time.dateTime).toLocaleDateString())";
    assert_eq!(page.ask(has_date, vec![]).await, json!(false), "today");
    let earlier = "const asked = window.fetch;
        window.fetch = async (...of) => {
            const answer = await asked(...of);
            const state = await answer.json();
            for (const event of state.events?.entries ?? []) event.at_ms -= 48 * 3600 * 1000;
            return new Response(JSON.stringify(state), { headers: answer.headers });
        }";
    page.ask(earlier, vec![]).await;
    eventually("its date is shown", async || {
        page.ask(has_date, vec![]).await == json!(true)
    })
    .await;
    page.close().await;
}

fn refused() -> Response {
    (StatusCode::UNAUTHORIZED, "who are you?").into_response()
}
