//! `#[once]`: the options, and the function whose body runs once.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned;
use syn::{Error, Expr, Ident, Path, Result, Token, token};

use crate::function::{self, Function, braces, nameable};
use crate::key::Key;
use crate::locked::{cloned, unlinted};
use crate::reader::{Reader, Words, equals, expanded};
use crate::value::{self, Time};
use crate::{async_trait, suggest};

const WORDS: Words = Words {
    names: &["key", "client", "keep", "lease", "wait", "attempts", "crate"],
    elsewhere: suggest::ONCE_ELSEWHERE,
    instead: INSTEAD,
    nameless: "which option? To name what is done once, write `key = \"…\"`",
};

const BY_CALL: &str = "call `client.once(…)`, which has a method of this name, instead of the attribute";
const BY_ERROR: &str = "the function's error says it, made by its `From<dlock::NotRun>`";
/// Options of `Once`, and of `#[distributed_lock]`, that this attribute does not have.
const INSTEAD: &[(&str, &str)] = &[
    ("every", BY_CALL),
    ("slot", BY_CALL),
    ("on_failure", BY_CALL),
    ("on_orphan", BY_CALL),
    ("on_error", BY_ERROR),
    ("on_busy", BY_ERROR),
];

/// Expands the attribute: the function whose body runs once, or the errors and the unchanged function.
pub(crate) fn attribute(options: TokenStream, item: TokenStream) -> TokenStream {
    expanded(options, item, check, expand)
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

fn expand(Options { key, settings }: &Options, function: Function) -> Result<TokenStream> {
    check(&function)?;
    let (inner, body) = function::inner_attributes(&function.body)?;
    // In braces of its own, whose items and imports do not change the return type in front of it.
    let body = unlinted(&braces(&function.body, body));
    let site = Span::mixed_site();
    let krate = match &settings.krate {
        Some(path) => path.to_token_stream(),
        None => quote_spanned!(site=> ::dlock),
    };
    let key = key.expression(&krate);
    let output = nameable(&function.sig.output);
    let client = match &settings.client {
        Some(client) => {
            let client = cloned(&krate, client.span(), &client.to_token_stream());
            quote_spanned!(site=> ::core::result::Result::Ok(#client))
        }
        None => quote_spanned!(site=> #krate::__macro::default_client()),
    };
    let mut set = TokenStream::new();
    for (name, time) in [
        ("lease", &settings.lease),
        ("keep", &settings.keep),
        ("wait", &settings.wait),
    ] {
        if let Some(time) = time {
            let name = Ident::new(name, site);
            set.extend(quote_spanned!(site=> .#name(#time)));
        }
    }
    if let Some(count) = &settings.attempts {
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
                #krate::__macro::boxed(#krate::Once::run(&__dlock_once, async move |_| { #returns #body })).await
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
    settings: Settings,
}

/// The options that may be absent.
#[derive(Default)]
struct Settings {
    /// The client; the process-wide default without it.
    client: Option<Expr>,
    keep: Option<Time>,
    lease: Option<Time>,
    wait: Option<Time>,
    attempts: Option<TokenStream>,
    /// The user's name for the `dlock` crate.
    krate: Option<Path>,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Options> {
        let mut key = None;
        let mut settings = Settings::default();
        let reader = Reader::read(input, &WORDS, |name, input| {
            let value = || equals(name, input);
            match name.to_string().as_str() {
                "key" if input.peek(token::Paren) => key = Some(Key::format_arguments(name, input)?),
                "key" => key = Some(Key::value(value()?)?),
                "client" => settings.client = Some(value::bare(value()?.parse()?)),
                "keep" => settings.keep = Some(Time::parse(name, value()?)?),
                "lease" => settings.lease = Some(Time::parse(name, value()?)?),
                "wait" => {
                    let input = value()?;
                    if input.peek(Token![try]) {
                        return Err(input.error("`wait` takes a time: not to wait, leave it out"));
                    }
                    let instead = ": not to wait, leave it out";
                    settings.wait = Some(Time::parse_or_say(name, input, instead)?);
                }
                "attempts" => settings.attempts = Some(value::count(name, value()?)?),
                "crate" => settings.krate = Some(value()?.call(Path::parse_mod_style)?),
                _ => return Ok(false),
            }
            Ok(true)
        });
        reader.finish()?;
        match key {
            Some(key) => Ok(Options { key, settings }),
            None => Err(Error::new(
                Span::call_site(),
                "what is done once? Name it with `key`, as in `#[once(key = \"welcome:{user}\")]`",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(options: TokenStream, item: TokenStream) -> String {
        attribute(options, item).to_string()
    }

    #[test]
    fn items_of_the_body_are_in_a_block_without_the_return_type() {
        let text = expanded(
            quote!(key = "report"),
            quote! {
                async fn report() -> Result<u32, NotRun> {
                    #![allow(clippy::all)]
                    use std::io::Result;
                    rows()
                }
            },
        );
        let body = quote!({
            use std::io::Result;
            rows()
        })
        .to_string();
        assert!(text.contains(&body), "{text}");
    }

    #[test]
    fn words_of_other_libraries_find_the_option_of_a_result() {
        for (word, option) in [
            ("ttl", "keep"),
            ("expire", "keep"),
            ("lock", "client"),
            ("retries", "attempts"),
        ] {
            let word = Ident::new(word, Span::call_site());
            let text = expanded(
                quote!(key = "k", #word = "1h"),
                quote!(
                    async fn f() {}
                ),
            );
            assert!(text.contains(&format!("did you mean `{option}`?")), "{text}");
        }
    }

    #[test]
    fn options_that_only_the_call_has_are_named_with_it() {
        for (word, instead) in INSTEAD {
            let word = Ident::new(word, Span::call_site());
            let text = expanded(
                quote!(key = "k", #word = 1),
                quote!(
                    async fn f() {}
                ),
            );
            let told = format!("there is no option `{word}`: {instead}");
            assert!(text.contains(&told), "{text}");
        }
    }

    #[test]
    fn method_of_async_trait_with_an_inner_attribute_is_told_what_to_do() {
        let text = expanded(
            quote!(key = "k"),
            quote! {
                fn f<'async_trait>(self) -> Pin<Box<dyn Future<Output = ()> + 'async_trait>> {
                    #![allow(unused_variables)]
                    Box::pin(async move {})
                }
            },
        );
        assert!(
            text.contains("cannot go on a method under `#[async_trait]`"),
            "{text}"
        );
    }
}
