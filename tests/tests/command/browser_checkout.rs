//! The page of the checkout, in a real browser: a headless Chromium that is driven by its chromedriver.
//!
//! `scripts/browser.sh` says where both come from. With `DLOCK_SCREENSHOTS=DIR` each test leaves pictures of
//! the page there, to be looked at.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, thread};

use dlock_tests::bins::Checkout;
use dlock_tests::{Flavor, Server, child, eventually};
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser with one page open. It ends with the test, in whichever way that does.
struct Browser {
    driver: Child,
    client: Client,
    _files: TempDir,
}

impl Browser {
    /// Opens the page at a URL.
    async fn open(url: &str) -> Browser {
        Browser::with(url, &[], Value::Null).await
    }

    /// The same with further arguments of the browser, and the metrics of another device.
    async fn with(url: &str, more: &[&str], device: Value) -> Browser {
        let program = |variable, usual: &str| env::var(variable).unwrap_or_else(|_| usual.to_owned());
        let chromium = program("DLOCK_CHROMIUM", "chromium");
        let chromedriver = program("DLOCK_CHROMEDRIVER", "chromedriver");
        let files = tempfile::tempdir().expect("a directory");

        // The driver ends with this process, and the browser with the driver.
        let wrapper = files.path().join("chromium");
        let script = format!("#!/bin/sh\nexec setpriv --pdeathsig KILL -- \"{chromium}\" \"$@\"\n");
        fs::write(&wrapper, script).expect("a file can be written");
        fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).expect("it is ours");

        let mut command = child::command(&chromedriver);
        command
            .arg("--port=0")
            // what they leave lying about goes with it
            .env("TMPDIR", files.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut driver = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let port = port_of(&mut driver).unwrap_or_else(|| {
            let _ = driver.kill();
            panic!("{chromedriver} does not start; scripts/browser.sh installs it");
        });

        let mut options = json!({
            "binary": wrapper,
            "args": [
                "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--window-size=1180,1250",
                format!("--user-data-dir={}", files.path().join("profile").display()),
            ],
        });
        let args = options["args"].as_array_mut().expect("an array");
        args.extend(more.iter().map(|arg| json!(arg)));
        if !device.is_null() {
            options["mobileEmulation"] = json!({ "deviceMetrics": device });
        }
        let mut capabilities = serde_json::Map::new();
        capabilities.insert("goog:chromeOptions".to_owned(), options);
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await;
        let client = client.unwrap_or_else(|error| {
            let _ = driver.kill();
            panic!("{chromium} does not start: {error}");
        });
        client.goto(url).await.expect("the page is there");
        let browser = Browser {
            driver,
            client,
            _files: files,
        };
        browser.shows("#live", "live").await;
        browser
    }

    /// What a script answers.
    async fn ask(&self, script: &str, args: Vec<Value>) -> Value {
        self.client.execute(script, args).await.expect("a script runs")
    }

    /// The text of the first element that a selector finds; empty when there is none.
    async fn text(&self, selector: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.textContent ?? ''";
        let text = self.ask(script, vec![json!(selector)]).await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// How many elements there are.
    async fn count(&self, selector: &str) -> u64 {
        let script = "return document.querySelectorAll(arguments[0]).length";
        let count = self.ask(script, vec![json!(selector)]).await;
        count.as_u64().expect("a number")
    }

    /// Waits until an element has this text in it.
    async fn shows(&self, selector: &str, text: &str) {
        let what = format!("{selector} shows {text:?}");
        eventually(&what, async || self.text(selector).await.contains(text)).await;
    }

    /// Clicks as people do: on what is seen and enabled.
    async fn click(&self, selector: &str) {
        let button = self.client.find(Locator::Css(selector)).await.expect(selector);
        assert!(button.is_displayed().await.unwrap(), "{selector} is not seen");
        eventually(&format!("{selector} is enabled"), async || {
            button.is_enabled().await.unwrap()
        })
        .await;
        button.click().await.expect(selector);
    }

    /// Sets the stock by the keyboard.
    async fn set_stock(&self, input: &str, stock: u64) {
        const ENTER: char = '\u{e007}';
        let input = self.client.find(Locator::Css(input)).await.expect(input);
        input.clear().await.unwrap();
        input.send_keys(&format!("{stock}{ENTER}")).await.unwrap();
    }

    /// Stock left, sold, and orders of an article, as the page says.
    async fn numbers(&self, sku: &str) -> [String; 3] {
        let card = format!("section[data-sku='{sku}'] ");
        [
            self.text(&format!("{card}dd.left")).await,
            self.text(&format!("{card}dd.sold")).await,
            self.text(&format!("{card}dd.orders")).await,
        ]
    }

    async fn shows_numbers(&self, sku: &str, numbers: [u64; 3]) {
        let numbers = numbers.map(|number| number.to_string());
        let what = format!("{sku} has {numbers:?} left, sold and ordered");
        eventually(&what, async || self.numbers(sku).await == numbers).await;
    }

    /// A picture of the page, if it is asked for.
    async fn picture(&self, name: &str) {
        if let Some(directory) = env::var_os("DLOCK_SCREENSHOTS") {
            let picture = self.client.screenshot().await.expect("a picture");
            fs::write(PathBuf::from(directory).join(format!("{name}.png")), picture).expect("a file");
        }
    }

    async fn close(self) {
        let _ = self.client.clone().close().await;
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// The port that the driver has chosen.
fn port_of(driver: &mut Child) -> Option<u16> {
    let output = BufReader::new(driver.stdout.take()?);
    let (found, port) = mpsc::channel();
    thread::spawn(move || {
        for line in output.lines().map_while(Result::ok) {
            if let Some((_, rest)) = line.split_once("started successfully on port ") {
                let _ = found.send(rest.trim_end_matches('.').parse().ok());
            }
        }
    });
    port.recv_timeout(Duration::from_secs(20)).ok().flatten()
}

#[tokio::test]
async fn a_crowd_with_locks_and_keys_buys_no_more_than_there_is() {
    let shop = Checkout::start(&["--think", "10ms"]);
    let page = Browser::open(shop.url()).await;
    page.shows("section[data-sku=sneaker] .verdict", "No stock").await;
    page.set_stock("#stock", 70).await;
    page.shows("#said", "70 pieces").await;
    page.shows_numbers("sneaker", [70, 0, 0]).await;

    // what is shown in between is watched as well
    let watch = "window.most = [0, 0, 0]; new MutationObserver(() => {
        const number = (name) => Number(document.querySelector(`section[data-sku=sneaker] dd.${name}`).textContent);
        const now = [number('sold'), number('orders'), number('left') + number('sold')];
        window.most = now.map((n, i) => Math.max(n, window.most[i]));
        window.pictures = (window.pictures ?? 0) + 1;
    }).observe(document.body, { subtree: true, childList: true, characterData: true })";
    page.ask(watch, vec![]).await;
    page.click("#crowd").await;
    page.shows_numbers("sneaker", [20, 50, 50]).await;
    page.shows("#said", "50 told “sold”, 0 told “sold out”").await;
    page.click("#crowd").await;
    page.shows("#said", "20 told “sold”, 30 told “sold out”").await;
    page.shows_numbers("sneaker", [0, 70, 70]).await;
    page.shows("section[data-sku=sneaker] .verdict", "not one oversold")
        .await;
    let most = page.ask("return window.most", vec![]).await;
    assert_eq!(most, json!([70, 70, 70]), "it never shows more than the stock");
    let pictures = page.ask("return window.pictures", vec![]).await;
    assert!(
        pictures.as_u64() > Some(10),
        "it shows what happens while it happens"
    );

    // one inside at a time, the others wait
    let key = page.text("#keys tbody tr").await;
    assert!(key.starts_with("item:sneaker–"), "its hold has not ended: {key}");
    let waited: u64 = page
        .text("#keys tbody td:nth-child(5)")
        .await
        .parse()
        .expect("a number");
    assert!(waited >= 20, "{waited} waited");
    assert_eq!(page.text("#keys tbody td:nth-child(6)").await, "1");
    assert_eq!(page.count("#sales tbody tr").await, 12);
    page.picture("crowd").await;

    // nothing unsafe is available
    assert_eq!(page.count("[id^=unsafe]").await, 0);
    let source = page.client.source().await.unwrap();
    assert!(!source.contains("/demo/") && !source.contains("without locks"));
    page.close().await;
}

#[tokio::test]
async fn page_shows_the_holder_and_the_waiters() {
    let shop = Checkout::start(&[]);
    let page = Browser::open(shop.url()).await;
    let (one, two) = tokio::join!(shop.get("/lock?hold_ms=8000"), async {
        page.shows("#keys tbody", "lock").await; // the first one has it, so the second one waits
        let (two, ()) = tokio::join!(shop.get("/lock?hold_ms=100"), async {
            page.shows("#keys tbody td:nth-child(4)", "1").await;
            page.shows("#keys tbody td:nth-child(2)", "token ").await;
            page.shows("#keys tbody td:nth-child(3)", ".").await;
        });
        two
    });
    assert_eq!((one.status, two.status), (200, 200));
    page.shows("#keys tbody td:nth-child(3)", "free").await;
    page.shows("#keys tbody td:nth-child(4)", "0").await;
    page.close().await;
}

#[tokio::test]
async fn the_same_purchase_again_is_replayed() {
    let shop = Checkout::start(&[]);
    let page = Browser::open(shop.url()).await;
    page.set_stock("#stock", 10).await;
    page.shows("#said", "10 pieces").await;
    page.click("#buy").await;
    page.shows("#said", "order ").await;
    let bought = page.text("#said").await;
    assert!(bought.contains("under token"), "{bought}");
    for times in 1..=2_u32 {
        page.click("#retry").await;
        page.shows("#replayed", &times.to_string()).await;
        page.shows("#said", &format!("Replayed, the same answer as before: {bought}"))
            .await;
        page.shows("#sales tbody td:last-child", &times.to_string()).await;
    }
    page.shows("#replays tbody tr", "/items/sneaker/buy").await;
    page.shows_numbers("sneaker", [9, 1, 1]).await;
    assert_eq!(shop.item("sneaker").await, (9, 1));
    page.click("#buy").await;
    page.shows_numbers("sneaker", [8, 2, 2]).await;
    page.close().await;
}

#[tokio::test]
async fn in_demo_mode_it_shows_what_goes_wrong_otherwise() {
    let shop = Checkout::start(&["--demo"]);
    let page = Browser::open(shop.url()).await;
    page.set_stock("#stock", 20).await;
    page.set_stock("#unsafe-stock", 20).await;
    page.shows("#unsafe-said", "20 pieces").await;
    page.shows("#said", "20 pieces").await;
    page.click("#unsafe-double").await;
    page.shows("#unsafe-said", "two orders").await;
    page.shows_numbers("sneaker-unsafe", [18, 2, 2]).await;

    page.click("#crowd").await;
    page.shows("#said", "20 told “sold”").await;
    page.click("#unsafe-crowd").await;
    page.shows("#unsafe-said", "50 told “sold”").await;
    let card = "section[data-sku=sneaker-unsafe] ";
    page.shows(
        &format!("{card}.verdict"),
        "Oversold by 32: 52 orders for 20 pieces",
    )
    .await;
    let red = "return parseFloat(document.querySelector(arguments[0]).style.width)";
    let width = page.ask(red, vec![json!(format!("{card}i.over"))]).await;
    assert!(width.as_f64() > Some(50.0), "{width}");

    // the other article is as right as ever, and its card says so
    page.shows_numbers("sneaker", [0, 20, 20]).await;
    page.shows("section[data-sku=sneaker] .verdict", "not one oversold")
        .await;
    page.click("#buy").await;
    page.shows("#said", "409").await;
    page.set_stock("#stock", 30).await;
    page.shows_numbers("sneaker", [30, 0, 0]).await;
    page.click("#buy").await;
    page.shows("#said", "order").await;
    page.click("#retry").await;
    page.shows("#said", "Replayed").await;
    page.picture("demo").await;
    page.close().await;
}

/// Two copies without locks sell more than there is, and the page of either shows it: it counts the orders of both.
#[tokio::test]
async fn two_copies_without_locks_show_what_they_oversold() {
    let server = Server::start(Flavor::Redis).await;
    let [one, two] = ["1", "2"]
        .map(|_| Checkout::start(&["--without-locks", "--store", &server.url(), "--think", "20ms"]));
    let page = Browser::open(one.url()).await;
    page.shows("#safe", "no locks").await;
    page.shows("#warning", "--without-locks").await;
    assert_eq!(page.count("#safe.bad").await, 1, "no green badge without locks");
    one.put("sneaker", 20).await;
    page.shows_numbers("sneaker", [20, 0, 0]).await;
    let crowd = json!({ "buyers": 40 });
    tokio::join!(
        one.post("/items/sneaker/crowd", crowd.clone()),
        two.post("/items/sneaker/crowd", crowd),
    );
    page.shows("section[data-sku=sneaker] dd.orders", "80").await;
    page.shows(
        "section[data-sku=sneaker] .verdict",
        "Oversold by 60: 80 orders for 20 pieces",
    )
    .await;
    // The stock is set anew by the copy that the page does not belong to.
    two.put("sneaker", 20).await;
    page.shows_numbers("sneaker", [20, 0, 0]).await;
    page.close().await;
}

#[tokio::test]
async fn a_page_whose_service_was_gone_comes_back_with_what_is_so_now() {
    let shop = Checkout::start(&[]);
    shop.put("sneaker", 5).await;
    let page = Browser::open(shop.url()).await;
    page.shows_numbers("sneaker", [5, 0, 0]).await;
    let address = shop.url().trim_start_matches("http://").to_owned();
    drop(shop);
    page.shows("#live", "reconnecting").await;
    page.click("#buy").await;
    page.shows("#said", "does not answer").await;

    let shop = Checkout::start_at(&address, &[]);
    shop.put("sneaker", 8).await;
    page.shows("#live", "live").await;
    page.shows_numbers("sneaker", [8, 0, 0]).await;
    page.click("#retry").await;
    page.shows_numbers("sneaker", [7, 1, 1]).await;
    page.close().await;
}

#[tokio::test]
async fn it_fits_on_a_phone_and_into_the_dark() {
    let shop = Checkout::start(&["--demo"]);
    shop.put("sneaker", 20).await;
    let name = "a-very-long-name-of-an-article-that-nobody-has-thought-of-and-that-does-not-fit-on-a-phone";
    shop.put(name, 20).await;
    assert_eq!(shop.buy(name).await.unwrap().status, 201);
    let phone = json!({ "width": 320, "height": 2400, "pixelRatio": 2.0, "mobile": true });
    let dark = ["--blink-settings=preferredColorScheme=0"];
    let page = Browser::with(shop.url(), &dark, phone).await;
    page.shows_numbers(name, [19, 1, 1]).await;
    let size = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]";
    assert_eq!(
        page.ask(size, vec![]).await,
        json!([320, 320]),
        "it is as wide as the phone"
    );
    let cut = "return [...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length";
    assert_eq!(page.ask(cut, vec![]).await, json!(0), "every column is seen");
    let ground = "return getComputedStyle(document.body).backgroundColor";
    assert_eq!(
        page.ask(ground, vec![]).await,
        json!("rgb(20, 23, 26)"),
        "it is dark"
    );
    page.click("#unsafe-crowd").await;
    page.picture("phone").await;
    // every button can be reached and says what it is
    let nameless = "return [...document.querySelectorAll('button, input')]
        .filter((one) => one.tabIndex < 0 || !(one.textContent.trim() || one.ariaLabel)).length";
    assert_eq!(page.ask(nameless, vec![]).await, json!(0));
    page.close().await;
}
