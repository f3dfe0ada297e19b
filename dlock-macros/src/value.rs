//! The values of options.

use std::time::Duration;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::ParseStream;
use syn::spanned::Spanned;
use syn::{Error, Expr, ExprLit, ExprPath, Ident, Lit, Result, Token, UnOp};

use crate::suggest;

/// A time: a literal with its unit, parsed now, or an expression of type `Duration`.
pub(crate) enum Time {
    Literal(Duration),
    Expression(Expr),
}

impl Time {
    pub(crate) fn parse(option: &Ident, input: ParseStream<'_>) -> Result<Time> {
        Time::parse_or_say(option, input, "")
    }

    /// `instead` is what the error about a zero ends with: what to write.
    pub(crate) fn parse_or_say(option: &Ident, input: ParseStream<'_>, instead: &str) -> Result<Time> {
        let value = bare(input.parse()?);
        match &value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => match humantime::parse_duration(&text.value()) {
                    Ok(time) if time.is_zero() => Err(Error::new_spanned(
                        text,
                        format!("`{option}` cannot be zero{instead}"),
                    )),
                    Ok(time) => Ok(Time::Literal(time)),
                    Err(error) => {
                        let text_is = text.token();
                        Err(Error::new_spanned(
                            text,
                            format!("{text_is} is not a time: {error}"),
                        ))
                    }
                },
                Lit::Int(number) => Err(no_unit(option, &value, number.base10_digits())),
                _ => Err(no_unit(option, &value, "30")),
            },
            Expr::Unary(negative) if matches!(negative.op, UnOp::Neg(_)) => {
                Err(no_unit(option, &value, "30"))
            }
            _ => Ok(Time::Expression(value)),
        }
    }
}

fn no_unit(option: &Ident, value: &Expr, digits: &str) -> Error {
    let message = format!(
        "a time needs its unit: write `{option} = \"{digits}s\"`, or give an expression that is a `Duration`"
    );
    Error::new_spanned(value, message)
}

impl ToTokens for Time {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        let time = match self {
            Time::Literal(time) => {
                let (seconds, nanos) = (time.as_secs(), time.subsec_nanos());
                quote_spanned!(Span::mixed_site()=> ::core::time::Duration::new(#seconds, #nanos))
            }
            Time::Expression(value) => {
                // A separate block, so that a wrong type is reported on the expression and not as a wrong argument of a
                // method that the user never wrote.
                let span = value.span().resolved_at(Span::mixed_site());
                quote_spanned!(span=> { let __dlock_time: ::core::time::Duration = #value; __dlock_time })
            }
        };
        tokens.extend(time);
    }
}

/// How long an acquire may take.
pub(crate) enum Wait {
    /// `wait = try`: ask once.
    Try,
    /// At most this long.
    AtMost(Time),
}

impl Wait {
    pub(crate) fn parse(option: &Ident, input: ParseStream<'_>) -> Result<Wait> {
        if input.peek(Token![try]) {
            input.parse::<Token![try]>()?;
            return Ok(Wait::Try);
        }
        Time::parse_or_say(option, input, ": to ask once, write `wait = try`").map(Wait::AtMost)
    }
}

/// The path of a function, for `on_error` and `on_busy`.
pub(crate) fn function(option: &Ident, input: ParseStream<'_>) -> Result<ExprPath> {
    match bare(input.parse()?) {
        Expr::Path(path) => Ok(path),
        other => Err(Error::new_spanned(
            other,
            format!("`{option}` takes the path of a function, as in `{option} = errors::from_lock`"),
        )),
    }
}

/// The name of a group: a literal, since there must be one per kind of work and not one per call.
pub(crate) fn group(input: ParseStream<'_>) -> Result<String> {
    let value = bare(input.parse()?);
    match &value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text), ..
        }) if !text.value().is_empty() => Ok(text.value()),
        _ => Err(Error::new_spanned(
            value,
            "`group` takes a text that is the same in all calls, as in `group = \"orders\"`",
        )),
    }
}

/// A count, for `max_waiters`.
pub(crate) fn count(option: &Ident, input: ParseStream<'_>) -> Result<TokenStream> {
    let value = bare(input.parse()?);
    match &value {
        Expr::Lit(literal) if !matches!(literal.lit, Lit::Int(_)) => Err(Error::new_spanned(
            &value,
            format!("`{option}` takes a number, as in `{option} = 16`"),
        )),
        Expr::Unary(negative) if matches!(negative.op, UnOp::Neg(_)) => Err(Error::new_spanned(
            &value,
            format!("`{option}` cannot be negative"),
        )),
        Expr::Lit(_) => Ok(quote!(#value)),
        _ => {
            let span = value.span().resolved_at(Span::mixed_site());
            Ok(quote_spanned!(span=> { let __dlock_count: usize = #value; __dlock_count }))
        }
    }
}

/// `true` or `false`.
pub(crate) fn flag(option: &Ident, input: ParseStream<'_>) -> Result<bool> {
    let value = bare(input.parse()?);
    match &value {
        Expr::Lit(ExprLit {
            lit: Lit::Bool(flag), ..
        }) => Ok(flag.value),
        _ => Err(Error::new_spanned(
            value,
            format!("`{option}` is `true` or `false`"),
        )),
    }
}

/// As written; `lock` is `dlock::LockKind::Mutex`, the others are the variants of their names.
const KINDS: &[&str] = &["lock", "fair", "read", "write", "fenced"];

/// The kind of lock, as the variant of `dlock::LockKind`.
pub(crate) fn kind(input: ParseStream<'_>) -> Result<Ident> {
    let kind = word(input, "kind", KINDS)?;
    let text = kind.to_string();
    let variant = match text.as_str() {
        "lock" => "Mutex".to_owned(),
        other => {
            let (first, rest) = other.split_at(1);
            first.to_ascii_uppercase() + rest
        }
    };
    Ok(Ident::new(&variant, kind.span().resolved_at(Span::mixed_site())))
}

/// Whether the body is dropped when the lock is lost (`cancel`) or continues (`ignore`).
pub(crate) fn dropped_on_loss(input: ParseStream<'_>) -> Result<bool> {
    Ok(word(input, "on_lost", &["cancel", "ignore"])? == "cancel")
}

/// One word out of a few.
fn word(input: ParseStream<'_>, option: &str, known: &[&str]) -> Result<Ident> {
    let value = bare(input.parse()?);
    if let Expr::Path(path) = &value
        && let Some(word) = path.path.get_ident()
        && known.iter().any(|name| word == name)
    {
        return Ok(word.clone());
    }
    let choice = known
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    let meant = meant(&value).and_then(|text| suggest::nearest_value(&text, known));
    let message = match meant {
        Some(near) => format!("did you mean `{option} = {near}`? `{option}` is one of {choice}"),
        None => format!("`{option}` is one of {choice}"),
    };
    Err(Error::new_spanned(value, message))
}

/// A word that is mistyped, quoted, or written as a path.
fn meant(value: &Expr) -> Option<String> {
    match value {
        Expr::Path(path) => Some(path.path.segments.last()?.ident.to_string().to_lowercase()),
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value().to_lowercase()),
            _ => None,
        },
        _ => None,
    }
}

/// An expression without the invisible groups around a `macro_rules!` variable.
pub(crate) fn bare(value: Expr) -> Expr {
    match value {
        Expr::Group(group) => bare(*group.expr),
        other => other,
    }
}
