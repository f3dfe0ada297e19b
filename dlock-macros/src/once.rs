//! `#[once]`: the options, and the function whose body runs once.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Error, Expr, Ident, Path, Result, Token, token};

use crate::function::{self, Function, nameable};
use crate::key::Key;
use crate::options::{equals, skip};
use crate::value::{self, Time};
use crate::{async_trait, suggest};

const NAMES: &[&str] = &["key", "client", "keep", "lease", "wait", "attempts", "crate"];

/// Expands the attribute: the function whose body runs once, or the errors and the unchanged function.
pub(crate) fn attribute(options: TokenStream, item: TokenStream) -> TokenStream {
    let options = syn::parse2::<Options>(options);
    let function = syn::parse2::<Function>(item.clone());
    let expanded = match (options, function) {
        (Ok(options), Ok(function)) => expand(&options, &function),
        (Err(mut error), function) => {
            if let Err(other) = function.and_then(|function| check(&function)) {
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

fn check(function: &Function) -> Result<()> {
    if function.sig.asyncness.is_some() {
        return Ok(());
    }
    let why = match async_trait::boxed_future(&function.body) {
        Some(_) if function.is_of_async_trait() => {
            "`#[once]` cannot go on a method under `#[async_trait]`: put it on an `async fn` of its own, and call that from here"
        }
        _ => {
            "`#[once]` goes on an `async fn`; where another attribute takes the `async` away, put `#[once]` above it"
        }
    };
    Err(Error::new(function.sig.fn_token.span, why))
}

fn expand(options: &Options, function: &Function) -> Result<TokenStream> {
    check(function)?;
    let (inner, body) = function::inner_attributes(&function.body)?;
    let site = Span::mixed_site();
    let krate = match &options.krate {
        Some(path) => path.to_token_stream(),
        None => quote_spanned!(site=> ::dlock),
    };
    let key = options.key.expression(&krate);
    let output = nameable(&function.sig.output);
    let client = match &options.client {
        Some(client) => {
            let at = client.span().resolved_at(site);
            let client = quote_spanned!(at=> #krate::__macro::client(&#client));
            quote_spanned!(site=> ::core::result::Result::Ok(#client))
        }
        None => quote_spanned!(site=> #krate::__macro::default_client()),
    };
    let mut set = TokenStream::new();
    for (name, time) in [
        ("lease", &options.lease),
        ("keep", &options.keep),
        ("wait", &options.wait),
    ] {
        if let Some(time) = time {
            let name = Ident::new(name, site);
            set.extend(quote_spanned!(site=> .#name(#time)));
        }
    }
    if let Some(count) = &options.attempts {
        set.extend(quote_spanned!(site=> .on_failure(#krate::__macro::attempts(#count))));
    }
    let (first, last) = function.told_at();
    let (first, last) = (first.resolved_at(site), last.resolved_at(site));
    let told = quote_spanned!(first=> #krate::__macro::OnceOutput::);
    let call = quote_spanned!(last=> of_once(__dlock_ran));
    let returns = quote_spanned! {site=>
        if let ::core::option::Option::Some(__dlock_output) = #krate::__macro::never::<#output>() {
            return __dlock_output;
        }
    };
    let ran = quote_spanned! {site=>
        let __dlock_key = #key;
        let __dlock_client = #client;
        let __dlock_ran = match __dlock_client {
            ::core::result::Result::Ok(__dlock_client) => {
                let __dlock_once = #krate::__macro::once(__dlock_client, __dlock_key)#set;
                #krate::__macro::boxed(__dlock_once.run(async move |_| { #returns #body })).await
            }
            ::core::result::Result::Err(__dlock_error) => {
                ::core::result::Result::Err(#krate::OnceError::Store(__dlock_error))
            }
        };
    };
    Ok(function.with_body(quote!(#(#inner)* #ran #told #call)))
}

/// The options of the attribute.
struct Options {
    key: Key,
    /// The client; the process-wide default without it.
    client: Option<Expr>,
    keep: Option<Time>,
    lease: Option<Time>,
    wait: Option<Time>,
    attempts: Option<TokenStream>,
    /// The user's name for the `dlock` crate.
    krate: Option<Path>,
}

#[derive(Default)]
struct Reader {
    seen: Vec<Ident>,
    key: Option<Key>,
    client: Option<Expr>,
    keep: Option<Time>,
    lease: Option<Time>,
    wait: Option<Time>,
    attempts: Option<TokenStream>,
    krate: Option<Path>,
    error: Option<Error>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Options> {
        let mut reader = Reader::default();
        while !input.is_empty() {
            if let Err(error) = reader.option(input) {
                reader.fail(error);
                skip(input);
            } else if !input.is_empty()
                && let Err(error) = input.parse::<Token![,]>()
            {
                reader.fail(error);
                skip(input);
            }
        }
        if let Some(error) = reader.error {
            return Err(error);
        }
        let Some(key) = reader.key else {
            return Err(Error::new(
                Span::call_site(),
                "what is done once? Name it with `key`, as in `#[once(key = \"welcome:{user}\")]`",
            ));
        };
        Ok(Options {
            key,
            client: reader.client,
            keep: reader.keep,
            lease: reader.lease,
            wait: reader.wait,
            attempts: reader.attempts,
            krate: reader.krate,
        })
    }
}

impl Reader {
    fn option(&mut self, input: ParseStream<'_>) -> Result<()> {
        if input.peek(syn::Lit) {
            return Err(input.error("which option? To name what is done once, write `key = \"…\"`"));
        }
        let name = input.call(Ident::parse_any)?;
        if let Some(first) = self.seen.iter().find(|seen| **seen == name) {
            return Err(Error::new(name.span(), format!("`{first}` is given twice")));
        }
        self.seen.push(name.clone());
        match name.to_string().as_str() {
            "key" if input.peek(token::Paren) => self.key = Some(Key::format_arguments(&name, input)?),
            "key" => self.key = Some(Key::value(equals(&name, input)?)?),
            "client" => self.client = Some(value::bare(equals(&name, input)?.parse()?)),
            "keep" => self.keep = Some(Time::parse(&name, equals(&name, input)?)?),
            "lease" => self.lease = Some(Time::parse(&name, equals(&name, input)?)?),
            "wait" => {
                let value = equals(&name, input)?;
                let time = Time::parse_or_say(&name, value, ": not to wait, leave it out")?;
                self.wait = Some(time);
            }
            "attempts" => self.attempts = Some(value::count(&name, equals(&name, input)?)?),
            "crate" => self.krate = Some(equals(&name, input)?.call(Path::parse_mod_style)?),
            text => {
                let message = match suggest::nearest_option(text, NAMES) {
                    Some(near) => format!("there is no option `{text}`: did you mean `{near}`?"),
                    None => format!(
                        "there is no option `{text}`; the options are {}",
                        NAMES.join(", ")
                    ),
                };
                return Err(Error::new(name.span(), message));
            }
        }
        Ok(())
    }

    fn fail(&mut self, error: Error) {
        match &mut self.error {
            Some(first) => first.combine(error),
            none => *none = Some(error),
        }
    }
}
