//! The page at `/`, the events that it lives on, and the crowd behind its button.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode, Uri, header};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower::ServiceExt;
use uuid::Uuid;

use crate::demo;
use crate::error::Error;
use crate::routes::{Json, Shared};
use crate::service::Shop;

/// The articles that the page has buttons for.
pub(crate) const SKUS: &[&str] = &["sneaker", demo::SKU];

/// The whole page; it loads nothing else.
const PAGE: &str = include_str!("page.html");
/// What stands around the parts of it that are for `--demo` only.
const DEMO_PARTS: (&str, &str) = ("<!-- demo -->", "<!-- /demo -->");
/// It runs its own script, talks to this service, and does nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";
/// How often a page gets a message when nothing happens, so that it notices a broken connection.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);
/// The largest crowd that can be asked for.
const LARGEST_CROWD: u32 = 200;

/// The routes of the page; `shop_routes` are those that a crowd uses.
pub(crate) fn router(shop: Arc<Shop>, shop_routes: &Router, with_demo: bool) -> Router {
    let html = page(with_demo);
    let headers = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    let mut crowds = Router::new().route("/items/{sku}/crowd", post(crowd));
    if with_demo {
        crowds = crowds.route("/demo/crowd", post(crowd));
    }
    Router::new()
        .route("/", get(async move || (headers, Html(html))))
        .route("/events", get(events))
        .with_state(shop)
        .merge(crowds.with_state(shop_routes.clone()))
}

fn page(with_demo: bool) -> String {
    let (begin, end) = DEMO_PARTS;
    let mut html = String::with_capacity(PAGE.len());
    for part in PAGE.split(begin) {
        match part.split_once(end) {
            Some((for_demo, rest)) => {
                if with_demo {
                    html.push_str(for_demo);
                }
                html.push_str(rest);
            }
            None => html.push_str(part),
        }
    }
    html
}

/// The current state, and then its changes.
async fn events(State(shop): Shared) -> Result<Response, Error> {
    let Some(events) = shop.board().watch() else {
        return Err(Error::Http(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many pages are open, or the service is about to end".to_owned(),
        ));
    };
    let alive = KeepAlive::new().interval(SIGN_OF_LIFE);
    Ok(Sse::new(events).keep_alive(alive).into_response())
}

#[derive(Deserialize)]
struct Crowd {
    buyers: u32,
}

/// Many buyers at once, each with its own key. A browser sends at most six requests at a time to one server, which is
/// no crowd: so the service sends the requests to itself, by the same route and through the same layers.
async fn crowd(
    State(router): State<Router>,
    uri: Uri,
    Json(Crowd { buyers }): Json<Crowd>,
) -> Result<axum::Json<Value>, Error> {
    if !(1..=LARGEST_CROWD).contains(&buyers) {
        return Err(Error::BadRequest(format!(
            "buyers is {buyers}, it must be from 1 to {LARGEST_CROWD}"
        )));
    }
    let path = uri.path().strip_suffix("crowd").unwrap_or_default();
    let path = format!("{path}buy");
    let started = Instant::now();
    let mut crowd = JoinSet::new();
    for _ in 0..buyers {
        let request = Request::post(&path)
            .header(header::CONTENT_TYPE, "application/json")
            .header("idempotency-key", format!("\"{}\"", Uuid::new_v4()))
            .body(Body::from(r#"{"quantity":1}"#))
            .map_err(|_| Error::BadRequest("the path makes no sense".to_owned()))?;
        let buy = router.clone().oneshot(request);
        crowd.spawn(async { buy.await.map(|answer| answer.status()) });
    }
    let (mut sold, mut sold_out) = (0, 0);
    while let Some(answer) = crowd.join_next().await {
        match answer {
            Ok(Ok(StatusCode::CREATED)) => sold += 1,
            Ok(Ok(StatusCode::CONFLICT)) => sold_out += 1,
            _ => {}
        }
    }
    let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    tracing::info!(buyers, sold, sold_out, "a crowd was served");
    Ok(axum::Json(json!({
        "buyers": buyers, "sold": sold, "sold_out": sold_out, "failed": buyers - sold - sold_out,
        "took_ms": took_ms,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_the_demo_is_cut_out_without_it() {
        let (with, without) = (page(true), page(false));
        assert!(with.contains("/demo/") && !without.contains("demo"), "{without}");
        for page in [with, without] {
            assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
            assert!(!page.contains(DEMO_PARTS.0) && !page.contains(DEMO_PARTS.1));
        }
    }

    #[test]
    fn it_loads_nothing_from_elsewhere() {
        for foreign in ["http:", "https:", "src=", "@import", "url("] {
            assert!(!PAGE.contains(foreign), "{foreign}");
        }
    }
}
