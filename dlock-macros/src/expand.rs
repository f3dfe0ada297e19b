//! The function with the lock around its body.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{Error, Result};

use crate::arguments::{Arguments, Patterns};
use crate::async_trait::BoxedFuture;
use crate::function::{Function, braces, nameable};
use crate::locked::Locked;
use crate::names::Names;
use crate::options::Options;
use crate::reader::expanded;
use crate::{async_trait, function};

/// Expands the attribute: the function with its lock, or the errors and the unchanged function.
pub(crate) fn attribute(options: TokenStream, item: TokenStream) -> TokenStream {
    expanded(options, item, |function| check(function).map(drop), expand)
}

/// The kind of function, if it can wait for a lock.
enum Shape {
    Async,
    /// The output of `#[async_trait]`: `Box::pin(async move { … })`.
    Boxed(Box<BoxedFuture>),
}

fn check(function: &Function) -> Result<Shape> {
    let sig = &function.sig;
    if let Some(constness) = sig.constness {
        return Err(Error::new(
            constness.span,
            "a const function cannot wait for a lock",
        ));
    }
    if sig.asyncness.is_some() {
        return Ok(Shape::Async);
    }
    match async_trait::boxed_future(&function.body) {
        Some(boxed) => Ok(Shape::Boxed(Box::new(boxed))),
        None => Err(Error::new(
            sig.fn_token.span,
            "`#[distributed_lock]` goes on an `async fn`; where another attribute takes the `async` away, put `#[distributed_lock]` above it",
        )),
    }
}

fn expand(options: &Options, mut function: Function) -> Result<TokenStream> {
    match check(&function)? {
        Shape::Boxed(mut boxed) => {
            async_trait::lock(options, &function, &mut boxed.future);
            Ok(function.with_body(boxed.into_token_stream()))
        }
        Shape::Async => {
            let (inner, body) = function::inner_attributes(&function.body)?;
            let mut used = Names::default();
            used.add(options.written.clone());
            used.add(body.clone());
            let mut below = Names::default();
            for attr in &function.attrs {
                below.add_attribute(&attr.meta, &function.sig);
            }
            let read_all = ["instrument", "distributed_lock", "once"];
            let patterns = match read_all.iter().any(|name| function.has_attribute(name)) {
                true => Patterns::Keep,
                false => Patterns::KeepNamed(&below),
            };
            used.add_all(&below);
            let arguments = Arguments::of(&mut function.sig, &used, patterns);
            let locked = Locked {
                options,
                self_is: None,
                output: &nameable(&function.sig.output),
                told_at: function.told_at(),
                arguments: &arguments,
                body: braces(&function.body, body),
                may_be_handler: function::may_be_handler(&function.sig),
            };
            let locked = locked.expand();
            Ok(function.with_body(quote!(#(#inner)* #locked)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(item: TokenStream) -> String {
        attribute(quote!(key = "k"), item).to_string()
    }

    #[test]
    fn pattern_stays_where_an_attribute_below_names_a_variable_of_it() {
        let stays = |attr: TokenStream| {
            let text = expanded(quote!(#attr async fn run(Job { id, .. }: Job, Rest { n, .. }: Rest) {}));
            assert!(text.contains("__dlock_argument1"), "{text}");
            text.contains("run (Job { id , .. } : Job")
        };
        for attr in [
            quote!(#[traced(fields(id))]),
            quote!(#[fastrace::trace(properties = { "job": "{id}" })]),
            quote!(#[cfg_attr(all(), traced(fields(id)))]),
        ] {
            assert!(stays(attr.clone()), "{attr}");
        }
        for attr in [
            quote!(),
            quote!(#[traced]),
            quote!(#[traced(fields(other))]),
            quote!(#[doc = "{id}"]),
        ] {
            assert!(!stays(attr.clone()), "{attr}");
        }
    }

    #[test]
    fn boxed_function_keeps_its_inner_attributes_first() {
        for generics in [quote!(), quote!(<'async_trait>)] {
            let text = expanded(quote! {
                fn f #generics () -> Pin<Box<dyn Future<Output = ()>>> {
                    #![allow(unused_variables)]
                    Box::pin(async move { let __ret: () = { work() }; __ret })
                }
            });
            assert!(!text.contains("compile_error"), "{text}");
            assert!(
                text.contains("{ # ! [allow (unused_variables)] Box :: pin"),
                "{text}"
            );
        }
    }
}
