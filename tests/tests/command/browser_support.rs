//! A real browser: a headless Chromium that is driven by its chromedriver.
//!
//! `scripts/browser.sh` says where both come from. With `DLOCK_SCREENSHOTS=DIR` tests leave pictures of the pages
//! there, to be looked at.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{env, fs, thread};

use dlock_tests::{child, eventually};
use fantoccini::{Client, ClientBuilder, Locator};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tempfile::TempDir;

/// A browser with one page open. It ends with the test, in whichever way that does.
pub(crate) struct Browser {
    driver: Child,
    pub(crate) client: Client,
    _files: TempDir,
}

impl Browser {
    /// Opens the page at a URL.
    pub(crate) async fn open(url: &str) -> Browser {
        Browser::with(url, &[], Value::Null).await
    }

    /// The same with further arguments of the browser, and the metrics of another device.
    pub(crate) async fn with(url: &str, more: &[&str], device: Value) -> Browser {
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
    pub(crate) async fn ask(&self, script: &str, args: Vec<Value>) -> Value {
        self.client.execute(script, args).await.expect("a script runs")
    }

    /// The text of the first element that a selector finds; empty when there is none.
    pub(crate) async fn text(&self, selector: &str) -> String {
        let script = "return document.querySelector(arguments[0])?.textContent ?? ''";
        let text = self.ask(script, vec![json!(selector)]).await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// How many elements there are.
    pub(crate) async fn count(&self, selector: &str) -> u64 {
        let script = "return document.querySelectorAll(arguments[0]).length";
        let count = self.ask(script, vec![json!(selector)]).await;
        count.as_u64().expect("a number")
    }

    /// Waits until an element has this text in it.
    pub(crate) async fn shows(&self, selector: &str, text: &str) {
        let what = format!("{selector} shows {text:?}");
        eventually(&what, async || self.text(selector).await.contains(text)).await;
    }

    /// Clicks as people do: on what is seen and enabled.
    pub(crate) async fn click(&self, selector: &str) {
        let button = self.client.find(Locator::Css(selector)).await.expect(selector);
        assert!(button.is_displayed().await.unwrap(), "{selector} is not seen");
        eventually(&format!("{selector} is enabled"), async || {
            button.is_enabled().await.unwrap()
        })
        .await;
        button.click().await.expect(selector);
    }

    /// A picture of the page, if it is asked for.
    pub(crate) async fn picture(&self, name: &str) {
        if let Some(directory) = env::var_os("DLOCK_SCREENSHOTS") {
            let picture = self.client.screenshot().await.expect("a picture");
            fs::write(PathBuf::from(directory).join(format!("{name}.png")), picture).expect("a file");
        }
    }

    pub(crate) async fn close(self) {
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
