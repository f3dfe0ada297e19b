//! The function with the lock around its body.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{Error, Result};

use crate::arguments::Arguments;
use crate::function::{Function, braces, nameable};
use crate::locked::Locked;
use crate::names::Names;
use crate::options::Options;
use crate::{async_trait, function};

/// Expands the attribute: the function with its lock, or the errors and the unchanged function.
pub(crate) fn attribute(options: TokenStream, item: TokenStream) -> TokenStream {
    let options = syn::parse2::<Options>(options);
    let function = syn::parse2::<Function>(item.clone());
    let expanded = match (options, function) {
        (Ok(options), Ok(function)) => expand(&options, function),
        (Err(mut error), function) => {
            if let Err(other) = function.and_then(|function| check(&function).map(drop)) {
                error.combine(other);
            }
            Err(error)
        }
        (Ok(_), Err(error)) => Err(error),
    };
    expanded.unwrap_or_else(|error| {
        let errors = error.into_compile_error();
        quote!(#errors #item)
    })
}

/// The kind of function, if it can wait for a lock.
enum Shape {
    Async,
    /// The output of `#[async_trait]`: `Box::pin(async move { … })`.
    Boxed(Box<syn::Expr>),
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
        Some(future) => Ok(Shape::Boxed(Box::new(future))),
        None => Err(Error::new(
            sig.fn_token.span,
            "`#[distributed_lock]` goes on an `async fn`; where another attribute takes the `async` away, put `#[distributed_lock]` above it",
        )),
    }
}

fn expand(options: &Options, mut function: Function) -> Result<TokenStream> {
    match check(&function)? {
        Shape::Boxed(mut future) => {
            async_trait::lock(options, &function, &mut future);
            Ok(function.with_body(future.into_token_stream()))
        }
        Shape::Async => {
            let (inner, body) = function::inner_attributes(&function.body)?;
            let mut used = Names::default();
            used.add(options.written.clone());
            used.add(body.clone());
            for attr in &function.attrs {
                used.add_attribute(&attr.meta, &function.sig);
            }
            let below = ["instrument", "distributed_lock", "once"];
            let keep_patterns = below.iter().any(|name| function.has_attribute(name));
            let arguments = Arguments::of(&mut function.sig, &used, keep_patterns);
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
