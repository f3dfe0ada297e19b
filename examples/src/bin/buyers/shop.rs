//! The copies of the checkout, as a buyer knows them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::Args;

/// How long a buyer waits for an answer: longer than the checkout lets it wait for a lock.
const PATIENCE: Duration = Duration::from_secs(120);
/// The largest answer that is read.
const LARGEST: usize = 64 * 1024;
/// How often a buyer retries a purchase that is still in progress, each time after the time that it was told to wait.
const COME_BACK: usize = 60;
/// The longest that it waits then.
const LONGEST_PAUSE: u64 = 10;

/// The copies of the checkout.
pub(crate) struct Shop {
    client: Client<HttpConnector, Full<Bytes>>,
    items: Vec<String>,
    turn: AtomicUsize,
}

/// What a copy answered.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
    /// Whether it is one that was given before.
    pub(crate) replayed: bool,
    retry_after: Option<u64>,
}

impl Answer {
    #[cfg(test)]
    pub(crate) fn sold(body: Value) -> Answer {
        Answer {
            status: 201,
            body,
            replayed: false,
            retry_after: None,
        }
    }

    pub(crate) fn kind(&self) -> &str {
        self.body["type"].as_str().unwrap_or("without a type")
    }

    pub(crate) fn expect(self, status: u16, what: &str) -> Result<Value, String> {
        if self.status == status {
            return Ok(self.body);
        }
        let detail = self.body["detail"].as_str().unwrap_or("is this a checkout?");
        Err(format!("cannot {what}: {}, {detail}", self.status))
    }
}

impl Shop {
    pub(crate) fn new(args: &Args) -> Result<Shop, String> {
        let mut items = Vec::new();
        for url in &args.urls {
            let item = format!("{}/items/{}", url.trim_end_matches('/'), args.sku);
            let uri: Uri = item
                .parse()
                .map_err(|_| format!("{url} is no URL, as in http://127.0.0.1:3000"))?;
            if uri.scheme_str() != Some("http") || uri.host().is_none() {
                return Err(format!("{url} does not begin with http:// and a host"));
            }
            items.push(item);
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(Duration::from_secs(2)));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Shop {
            client,
            items,
            turn: AtomicUsize::new(0),
        })
    }

    /// Buys one piece: once, or that often under one key, each time from the next copy. All that was told.
    pub(crate) async fn buy(&self, retry_each: Option<u32>) -> Vec<Result<Answer, String>> {
        let key = retry_each.map(|_| format!("\"{}\"", Uuid::new_v4()));
        let mut told = Vec::new();
        for _ in 0..retry_each.unwrap_or(1) {
            told.push(self.buy_once(key.as_deref()).await);
        }
        told
    }

    /// When the answer before got lost, its purchase may still be in progress: that is waited for.
    async fn buy_once(&self, key: Option<&str>) -> Result<Answer, String> {
        let mut come_back = COME_BACK;
        loop {
            let body = Some(json!({ "quantity": 1 }));
            let answer = self.ask(Method::POST, "/buy", body, key).await?;
            if answer.kind() != "urn:dlock:problem:idempotency-in-progress" || come_back == 0 {
                return Ok(answer);
            }
            come_back -= 1;
            let pause = answer.retry_after.unwrap_or(1).min(LONGEST_PAUSE);
            tokio::time::sleep(Duration::from_secs(pause)).await;
        }
    }

    /// Asks the next copy. A copy that accepts no connection has not seen the request, so the buyer asks the copy
    /// after it; a copy that does not answer may have carried out the request, so no other copy is asked.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        key: Option<&str>,
    ) -> Result<Answer, String> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut refused = String::new();
        for n in 0..self.items.len() {
            let url = format!("{}{path}", self.items[(turn + n) % self.items.len()]);
            let mut request = Request::builder().method(method.clone()).uri(&url);
            if body.is_some() {
                request = request.header("content-type", "application/json");
            }
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            let bytes = body.as_ref().map(Value::to_string).unwrap_or_default();
            let request = request
                .body(Full::new(Bytes::from(bytes)))
                .map_err(|error| format!("cannot ask {url}: {error}"))?;
            let answer = async {
                let response = self.client.request(request).await.map_err(Broken::Request)?;
                let status = response.status().as_u16();
                let header = |name| response.headers().get(name)?.to_str().ok();
                let replayed = header("idempotent-replayed") == Some("true");
                let retry_after = header("retry-after").and_then(|seconds| seconds.parse().ok());
                let body = Limited::new(response.into_body(), LARGEST).collect().await;
                let body = body.map_err(|_| Broken::HalfWay)?.to_bytes();
                Ok(Answer {
                    status,
                    body: serde_json::from_slice(&body).unwrap_or_default(),
                    replayed,
                    retry_after,
                })
            };
            match tokio::time::timeout(PATIENCE, answer).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Broken::Request(error))) if error.is_connect() => {
                    refused = format!(
                        "no checkout answers at {url}: start one with cargo run -p dlock-examples --bin checkout"
                    );
                }
                Ok(Err(_)) => return Err(format!("{url} broke off")),
                Err(_) => return Err(format!("{url} did not answer in {PATIENCE:?}")),
            }
        }
        Err(refused)
    }
}

enum Broken {
    Request(hyper_util::client::legacy::Error),
    HalfWay,
}
