//! What a request locks: keys, taken from the request.
//!
//! A key is made by one of the functions here, or by a closure over the request's
//! [`Parts`](http::request::Parts):
//!
//! | function | the key is |
//! |---|---|
#![cfg_attr(feature = "axum", doc = "| [`path_param`] | a parameter of axum's route |")]
#![cfg_attr(
    not(feature = "axum"),
    doc = "| `path_param` | a parameter of axum's route (feature `axum`) |"
)]
//! | [`header`] | the value of a header |
//! | [`query`] | the value of a query parameter |
//! | [`json_field`] | a field of the JSON body, which is read ahead and passed on |
//! | [`method_and_path`], [`path`] | which resource is asked for |
//! | [`extension`] | a part of what a layer outside has added to the request, such as the user |
//! | [`fixed`] | always the same |
//! | [`from_fn`], any closure | what the closure says |
//! | [`all_of`] | several of them joined into one |
//! | [`each_of`], a closure that gives several | several at once, each a lock of its own |
//!
//! [`Key`] has methods that change a key: [`parsed`](Key::parsed), [`prefix`](Key::prefix), [`map`](Key::map),
//! [`or`](Key::or), [`optional`](Key::optional). **Prefix values from the request** with what they name: other services
//! use the same store, and `42` is an account here and an order there.
//!
//! **Give a key the type that the handler reads**: a handler that takes `Path<u64>` reads `7`, `007` and `+7` as one
//! account, but as texts they are three keys. `key::path_param("id").parsed::<u64>()` makes them one key. The page
//! [docs/keys.md](https://github.com/dlock-rs/dlock/blob/main/docs/keys.md) lists spellings that handlers treat as
//! equal: of numbers, UUIDs, Unicode, paths and queries.
//!
//! Keys come from user input, so an invalid lock name (empty, more than 512 bytes, control characters, braces, or one
//! that begins with `dlock:`) is the client's mistake: 400. The same holds for a header or parameter that is given twice, since the handler might read
//! the other one.
//!
//! ```
//! use dlock_tower::key;
//! use http::request::Parts;
//!
//! let account = key::header("x-account").parsed::<u64>().prefix("account:");
//! let both = key::all_of((key::header("x-tenant"), key::query("order"))).prefix("order:");
//! let transfer = key::each_of((key::query("from"), key::query("to"))).prefix("account:");
//! let own = key::from_fn(|parts: &Parts| {
//!     // No key: the request passes without a lock.
//!     (parts.uri.path() != "/health").then(|| "service".to_owned())
//! });
//! # let _ = (account, both, transfer, own);
//! ```

mod all_of;
mod change;
mod closure;
mod each_of;
mod extension;
mod fixed;
mod found;
mod header;
mod json;
mod parsed;
mod parts;
mod path;
#[cfg(feature = "axum")]
mod path_param;
mod query;

pub use all_of::{AllOf, all_of};
pub use change::{Key, Map, Optional, Or, Prefix};
pub use closure::{FromFn, IntoFound, from_fn};
pub use each_of::{EachOf, each_of};
pub use extension::{Extension, extension};
pub use fixed::{Fixed, fixed};
pub(crate) use found::Unrouted;
pub use found::{ExtractKey, Found};
pub use header::{Header, header};
pub use json::{DEFAULT_JSON_LIMIT, JsonField, json_field};
pub use parsed::Parsed;
pub(crate) use parts::{host, original_uri};
pub use path::{Path, method_and_path, path};
#[cfg(feature = "axum")]
pub use path_param::{PathParam, path_param};
pub use query::{Query, query};
