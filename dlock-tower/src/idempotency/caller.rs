//! The caller of a request. Clients choose their keys, so two of them may choose the same one: without the caller in
//! the record's name, one client would get the other's answer.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use http::request::Parts;
use uuid::Uuid;

use crate::Rejection;
use crate::problem::Problem;

/// The caller of a request.
///
/// ```
/// use dlock_tower::idempotency::caller::{self, Caller};
/// use http::request::Parts;
///
/// let by_tenant = caller::from_fn(|parts: &Parts| {
///     parts.headers.get("x-tenant").map(|tenant| Caller::new(tenant.as_bytes()))
/// });
/// # let _ = by_tenant;
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Caller(Option<Vec<u8>>);

impl Caller {
    /// Identifies a caller by a principal: a user, an account, a tenant. Not by a token that rotates: after a rotation
    /// a retry would belong to another caller.
    pub fn new(id: impl AsRef<[u8]>) -> Caller {
        Caller(Some(id.as_ref().to_owned()))
    }

    /// Returns the caller that all requests share; see [`public`].
    #[must_use]
    pub fn any() -> Caller {
        Caller(None)
    }

    /// The bytes that identify a principal.
    pub(super) fn id(&self) -> Option<&[u8]> {
        self.0.as_deref()
    }
}

/// Shows that there is one, without its identity.
impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "Caller(..)"
        } else {
            "Caller(any)"
        })
    }
}

/// Finds the caller of a request.
///
/// Implemented by the results of [`extension`], [`from_fn`] and [`public`], and by closures over
/// `&http::request::Parts`. It reads what the outer authentication has put into the request.
///
/// ```
/// use dlock_tower::Rejection;
/// use dlock_tower::idempotency::caller::{Caller, FindCaller};
/// use http::request::Parts;
///
/// #[derive(Clone)]
/// struct User { tenant: String, id: u64 } // your authentication leaves it in the request
///
/// struct UserOfTenant;
///
/// impl FindCaller for UserOfTenant {
///     fn find(&self, parts: &Parts) -> Result<Caller, Rejection> {
///         let user = parts.extensions.get::<User>();
///         let user = user.ok_or_else(|| Rejection::internal("the authentication is not in front"))?;
///         Ok(Caller::new(format!("{}/{}", user.id, user.tenant)))
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name the caller of a request",
    label = "not a caller",
    note = "keys are chosen by clients, so the layer must know whose they are: `caller::extension(|user: &User| user.id.clone())` takes it from an extension that the authentication has left",
    note = "`caller::from_fn(|parts| ...)` takes it from the head of the request; it returns a `String`, a `Caller`, an `Option` or a `Result` of those",
    note = "where all callers are one, say so: `caller::public()`"
)]
pub trait FindCaller: Send + Sync + 'static {
    /// Returns the caller.
    ///
    /// # Errors
    ///
    /// The answer that refuses the request.
    fn find(&self, parts: &Parts) -> Result<Caller, Rejection>;
}

/// Treats all callers as one: every client that sends a used key, with the same request, gets the stored answer. For
/// endpoints whose answers are public, or whose keys cannot be guessed.
#[must_use]
pub fn public() -> Public {
    Public
}

/// See [`public`].
///
/// ```
/// use dlock_tower::idempotency::caller::{self, Caller, FindCaller};
///
/// let (parts, ()) = http::Request::new(()).into_parts();
/// assert_eq!(caller::public().find(&parts).unwrap(), Caller::any());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Public;

impl FindCaller for Public {
    fn find(&self, _: &Parts) -> Result<Caller, Rejection> {
        Ok(Caller::any())
    }
}

/// Takes the caller from an extension of the request, set by the authentication. A request without that extension is
/// answered with 401.
///
/// ```
/// use dlock_tower::idempotency::caller;
///
/// #[derive(Clone)]
/// struct User { id: u64 }
///
/// let caller = caller::extension(|user: &User| user.id.to_string());
/// # let _ = caller;
/// ```
pub fn extension<T, F, R>(find: F) -> Extension<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> R + Send + Sync + 'static,
    R: IntoCaller,
{
    Extension {
        find,
        of: PhantomData,
    }
}

/// See [`extension`].
///
/// ```
/// use dlock_tower::idempotency::caller::{self, Caller, FindCaller};
///
/// #[derive(Clone)]
/// struct User(&'static str);
///
/// let (mut parts, ()) = http::Request::new(()).into_parts();
/// parts.extensions.insert(User("ann"));
/// let caller = caller::extension(|user: &User| user.0.to_owned());
/// assert_eq!(caller.find(&parts).unwrap(), Caller::new("ann"));
/// ```
pub struct Extension<T, F> {
    find: F,
    of: PhantomData<fn(&T)>,
}

impl<T, F: Clone> Clone for Extension<T, F> {
    fn clone(&self) -> Self {
        Extension {
            find: self.find.clone(),
            of: PhantomData,
        }
    }
}

impl<T, F> fmt::Debug for Extension<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extension").finish_non_exhaustive()
    }
}

impl<T, F, R> FindCaller for Extension<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> R + Send + Sync + 'static,
    R: IntoCaller,
{
    fn find(&self, parts: &Parts) -> Result<Caller, Rejection> {
        match parts.extensions.get::<T>() {
            Some(principal) => (self.find)(principal).into_caller(),
            None => Err(Problem::NoCaller.rejection()),
        }
    }
}

/// Takes the caller from the request's head with a closure. Equivalent to the closure itself, but the type of its
/// argument need not be named.
pub fn from_fn<F, R>(find: F) -> FromFn<F>
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoCaller,
{
    FromFn { find }
}

/// See [`from_fn`].
///
/// ```
/// use dlock_tower::idempotency::caller::{self, FindCaller};
/// use http::request::Parts;
///
/// let caller = caller::from_fn(|parts: &Parts| parts.uri.host().map(str::to_owned));
/// let (parts, ()) = http::Request::new(()).into_parts();
/// assert_eq!(caller.find(&parts).unwrap_err().status(), 401); // no caller
/// ```
#[derive(Clone)]
pub struct FromFn<F> {
    find: F,
}

impl<F> fmt::Debug for FromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromFn").finish_non_exhaustive()
    }
}

impl<F, R> FindCaller for FromFn<F>
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoCaller,
{
    fn find(&self, parts: &Parts) -> Result<Caller, Rejection> {
        (self.find)(parts).into_caller()
    }
}

#[diagnostic::do_not_recommend]
impl<F, R> FindCaller for F
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: IntoCaller,
{
    fn find(&self, parts: &Parts) -> Result<Caller, Rejection> {
        self(parts).into_caller()
    }
}

/// What a closure that finds the caller may return: a [`Caller`], a text, a number; `None` if there is none, which is
/// answered with 401; an error that refuses the request.
///
/// ```
/// use dlock_tower::idempotency::caller;
///
/// struct User { id: u64 }
///
/// // An integer, a text, a UUID or a `Caller`; `None` is answered with 401.
/// let by_id = caller::extension(|user: &User| user.id);
/// let if_known = caller::extension(|user: &User| (user.id != 0).then_some(user.id));
/// # let _ = (by_id, if_known);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name a caller",
    label = "not a caller",
    note = "return a `String`, a `&'static str`, a `u64` or a `dlock_tower::idempotency::Caller`",
    note = "or an `Option` of those, where `None` is answered with 401",
    note = "or a `Result` of either, whose error is a `dlock_tower::Rejection`"
)]
pub trait IntoCaller {
    /// Converts it to the caller.
    ///
    /// # Errors
    ///
    /// The answer that refuses the request.
    fn into_caller(self) -> Result<Caller, Rejection>;
}

impl IntoCaller for Caller {
    fn into_caller(self) -> Result<Caller, Rejection> {
        Ok(self)
    }
}

macro_rules! texts {
    ($($name:ty),+) => {$(
        impl IntoCaller for $name {
            fn into_caller(self) -> Result<Caller, Rejection> {
                Ok(Caller::new(self.as_bytes()))
            }
        }
    )+};
}

texts!(String, &'static str, Cow<'static, str>, Arc<str>, Box<str>);

macro_rules! printed {
    ($($name:ty),+) => {$(
        impl IntoCaller for $name {
            fn into_caller(self) -> Result<Caller, Rejection> {
                self.to_string().into_caller()
            }
        }
    )+};
}

printed!(
    Uuid, u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize
);

impl<T: IntoCaller> IntoCaller for Option<T> {
    fn into_caller(self) -> Result<Caller, Rejection> {
        self.map_or_else(|| Err(Problem::NoCaller.rejection()), T::into_caller)
    }
}

impl<T: IntoCaller, E: Into<Rejection>> IntoCaller for Result<T, E> {
    fn into_caller(self) -> Result<Caller, Rejection> {
        self.map_err(E::into)?.into_caller()
    }
}
