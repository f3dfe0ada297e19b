//! The options of a layer.

use std::time::Duration;

use http::header::HeaderName;
use http::{Method, StatusCode};

/// How many attempts a request has, unless said otherwise: 5.
pub const DEFAULT_ATTEMPTS: u32 = 5;

/// Until when the last try begins, unless said otherwise: 30 s after the first.
pub const DEFAULT_TOTAL_TIME: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) header: HeaderName,
    pub(super) methods: Vec<Method>,
    pub(super) attempts: u32,
    pub(super) total_time: Duration,
    pub(super) pause: Duration,
    pub(super) longest_pause: Duration,
    pub(super) statuses: Vec<StatusCode>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            header: HeaderName::from_static("idempotency-key"),
            methods: vec![Method::POST, Method::PATCH],
            attempts: DEFAULT_ATTEMPTS,
            total_time: DEFAULT_TOTAL_TIME,
            pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(5),
            statuses: vec![
                StatusCode::TOO_MANY_REQUESTS,
                StatusCode::BAD_GATEWAY,
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::GATEWAY_TIMEOUT,
            ],
        }
    }
}
