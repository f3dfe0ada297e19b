//! The value of `keys`: a list of keys, or one expression for all of them.

use proc_macro2::{Ident, Span, TokenStream};
use quote::quote_spanned;
use syn::parse::ParseStream;
use syn::spanned::Spanned;
use syn::{Error, Expr, Result};

use crate::key::{Key, place};
use crate::value::bare;

/// The locks that the function takes.
pub(crate) enum Keys {
    /// `key = …`
    One(Key),
    /// `keys = [a, b]`, each as for `key`.
    List(Vec<Key>),
    /// `keys = expr`: any iterable value.
    Expression(Expr),
}

impl Keys {
    /// `keys = …`
    pub(crate) fn value(name: &Ident, input: ParseStream<'_>) -> Result<Keys> {
        match bare(input.parse()?) {
            Expr::Array(list) if list.elems.is_empty() => Err(Error::new_spanned(
                list,
                "`keys` names no lock: name at least one",
            )),
            Expr::Array(list) => {
                // A mistake in one does not hide a mistake in the next.
                let mut error: Option<Error> = None;
                let mut keys = Vec::new();
                for element in list.elems {
                    match (Key::of(element), &mut error) {
                        (Ok(key), _) => keys.push(key),
                        (Err(another), Some(first)) => first.combine(another),
                        (Err(first), none) => *none = Some(first),
                    }
                }
                error.map_or(Ok(Keys::List(keys)), Err)
            }
            literal @ Expr::Lit(_) => Err(Error::new_spanned(
                literal,
                format!("`{name}` takes several, as in `{name} = [from, to]`; for one write `key = …`"),
            )),
            other => Ok(Keys::Expression(other)),
        }
    }

    /// The common text of the keys: that of the first one that has a text.
    pub(crate) fn template(&self) -> Option<String> {
        match self {
            Keys::One(key) => key.template(),
            Keys::List(keys) => keys.iter().find_map(Key::template),
            Keys::Expression(_) => None,
        }
    }

    pub(crate) fn is_several(&self) -> bool {
        !matches!(self, Keys::One(_))
    }

    /// An expression that creates the `LockKey`, or all of them, once. `krate` is the path of the library.
    pub(crate) fn expression(&self, krate: &TokenStream) -> TokenStream {
        match self {
            Keys::One(key) => key.expression(krate),
            Keys::List(keys) => {
                let keys = keys.iter().map(|key| key.expression(krate));
                quote_spanned!(Span::mixed_site()=> [#(#keys),*])
            }
            Keys::Expression(value) => {
                let site = value.span().resolved_at(Span::mixed_site());
                let value = place(value);
                quote_spanned!(site=> #krate::__macro::keys(#value))
            }
        }
    }
}
