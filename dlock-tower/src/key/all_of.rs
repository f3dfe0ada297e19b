//! Several keys as one.

use std::fmt;

use dlock::LockKey;
use http::Request;

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::empty;
use crate::Rejection;

/// Joins two to six keys into one: `all_of((header("x-tenant"), path_param("id")))` gives `acme:42`.
///
/// Different parts never produce the same key: a `:` or `%` inside a part is escaped (`%3A`, `%25`), and no part may be
/// empty. If one of them lets the request pass, the request passes.
///
/// This is one lock with a longer name, not several locks: for those use [`each_of`](super::each_of). So a part that
/// names several keys is answered with 500 and an error in the log.
pub fn all_of<T>(parts: T) -> Key<AllOf<T>> {
    Key::new(AllOf { parts })
}

/// See [`all_of`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let order = key::all_of((key::header("x-tenant"), key::query("order")));
/// let request = http::Request::get("/?order=7").header("x-tenant", "acme").body(()).unwrap();
/// let (_, found) = order.extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "acme:7"));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct AllOf<T> {
    parts: T,
}

impl<T> fmt::Debug for AllOf<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllOf").finish_non_exhaustive()
    }
}

fn join(name: &mut String, part: &LockKey) -> Result<(), Rejection> {
    if part.as_str().is_empty() {
        return Err(empty());
    }
    if !name.is_empty() {
        name.push(':');
    }
    for c in part.as_str().chars() {
        match c {
            ':' => name.push_str("%3A"),
            '%' => name.push_str("%25"),
            c => name.push(c),
        }
    }
    Ok(())
}

fn several() -> Rejection {
    Rejection::internal("a part of `key::all_of`, which joins names into one, names several locks")
}

macro_rules! all_of {
    ($($part:ident),+) => {
        impl<B: Send, $($part: ExtractKey<B>),+> ExtractKey<B> for AllOf<($($part,)+)> {
            #[allow(non_snake_case, reason = "the parts are named like their types")]
            async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
                let ($($part,)+) = &self.parts;
                let mut name = String::new();
                $(
                    let (request, found) = $part.extract(request).await?;
                    match found.normalized() {
                        Found::Key(part) => join(&mut name, &part)?,
                        Found::Keys(_) => return Err(several()),
                        nothing => return Ok((request, nothing)),
                    }
                )+
                Ok((request, Found::Key(name.into())))
            }
        }
    };
}

all_of!(P1, P2);
all_of!(P1, P2, P3);
all_of!(P1, P2, P3, P4);
all_of!(P1, P2, P3, P4, P5);
all_of!(P1, P2, P3, P4, P5, P6);
