//! The page of the checkout, in a real browser.

use dlock_tests::bins::Checkout;
use dlock_tests::{Flavor, Server, eventually};
use fantoccini::Locator;
use serde_json::json;

use crate::browser_support::Browser;

impl Browser {
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

    assert_eq!(page.count("#sales tbody tr").await, 12);
    page.picture("crowd").await;

    // nothing unsafe is available
    assert_eq!(page.count("[id^=unsafe]").await, 0);
    let source = page.client.source().await.unwrap();
    assert!(!source.contains("/demo/") && !source.contains("without locks"));
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
