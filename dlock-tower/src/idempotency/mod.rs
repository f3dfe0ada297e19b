//! Idempotent endpoints.

mod admission;
mod body;
pub mod caller;
mod capture;
mod claim;
mod extract;
mod fingerprint;
mod future;
mod handle;
mod key;
mod layer;
mod policy;
mod problem;
mod renewal;
mod replay;
mod run;
mod service;
mod settings;
mod stats;
mod stored;
mod stream;
mod task;

pub use body::ResponseBody;
pub use caller::Caller;
pub use extract::Idempotency;
pub use future::ResponseFuture;
pub use handle::IdempotencyHandle;
pub use key::MAX_KEY_BYTES;
pub use layer::{DEFAULT_LEASE, DEFAULT_LIMIT, DEFAULT_RETENTION, DEFAULT_RETRY_FOR, IdempotencyLayer};
pub use policy::{AtMostOnce, Class, Ending, Outcome, Policy, RetryAmbiguous, Verdict};
pub use problem::Problem;
pub use replay::{KEPT_HEADERS, REPLAYED};
pub use service::IdempotencyService;
pub use stats::IdempotencyStats;
