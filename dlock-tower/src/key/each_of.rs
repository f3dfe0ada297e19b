//! Several keys at once.

use std::fmt;

use http::Request;

use super::change::Key;
use super::found::{ExtractKey, Found};
use crate::Rejection;

/// Locks two to six keys at once, all of them or none: `each_of((query("from"), query("to")))` locks two accounts. A
/// request for the same two in the other order waits for this one and never deadlocks with it; see
/// [`MultiLock`](dlock::MultiLock).
///
/// A part that lets the request pass adds no key; if all of them do, the request passes. A missing part is refused, as
/// it would be alone. For one key from several parts use [`all_of`](super::all_of).
pub fn each_of<T>(parts: T) -> Key<EachOf<T>> {
    Key::new(EachOf { parts })
}

/// See [`each_of`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let accounts = key::each_of((key::query("from"), key::query("to")));
/// let request = http::Request::post("/transfer?from=7&to=8").body(()).unwrap();
/// let (_, found) = accounts.extract(request).await?;
/// assert!(matches!(found, Found::Keys(keys) if keys.len() == 2));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct EachOf<T> {
    parts: T,
}

impl<T> fmt::Debug for EachOf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EachOf").finish_non_exhaustive()
    }
}

macro_rules! each_of {
    ($($part:ident),+) => {
        impl<B: Send, $($part: ExtractKey<B>),+> ExtractKey<B> for EachOf<($($part,)+)> {
            #[allow(non_snake_case, reason = "the parts are named like their types")]
            async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
                let ($($part,)+) = &self.parts;
                let mut keys = Vec::new();
                $(
                    let (request, found) = $part.extract(request).await?;
                    match found.normalized() {
                        Found::Key(key) => keys.push(key),
                        Found::Keys(more) => keys.extend(more),
                        Found::PassThrough => {}
                        missing @ Found::Missing(_) => return Ok((request, missing)),
                    }
                )+
                let found = match keys.is_empty() {
                    true => Found::PassThrough,
                    false => Found::all(keys),
                };
                Ok((request, found))
            }
        }
    };
}

each_of!(P1, P2);
each_of!(P1, P2, P3);
each_of!(P1, P2, P3, P4);
each_of!(P1, P2, P3, P4, P5);
each_of!(P1, P2, P3, P4, P5, P6);
