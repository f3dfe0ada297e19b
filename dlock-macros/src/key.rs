//! The value of `key`: a format literal, a list of format arguments, or an expression.

use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::parse::ParseStream;
use syn::spanned::Spanned;
use syn::{Error, Expr, Ident, Index, Lit, LitStr, Member, Result, parenthesized};

use crate::value::bare;

/// The library's limit: every call would refuse longer names, so they are refused at compile time.
const MAX_KEY_BYTES: usize = 512;

/// The source of the lock's name.
pub(crate) enum Key {
    /// A literal without captures.
    Text(LitStr),
    /// A literal with captures.
    Format(Format),
    /// `key("…", …)`: arguments as for `format!`.
    Arguments(TokenStream),
    /// Any value that converts into a `LockKey`.
    Expression(Expr),
}

/// A literal with captures.
pub(crate) struct Format {
    /// As the user wrote it.
    written: LitStr,
    /// With the names of the chains.
    rewritten: LitStr,
    chains: Vec<Chain>,
}

/// `{order.id}` in a literal: `format!` does not accept it, so it becomes a named argument.
pub(crate) struct Chain {
    name: Ident,
    root: Ident,
    fields: Vec<Member>,
}

impl Key {
    /// `key = …`
    pub(crate) fn value(input: ParseStream<'_>) -> Result<Key> {
        Key::of(input.parse()?)
    }

    /// The name of one lock.
    pub(crate) fn of(value: Expr) -> Result<Key> {
        match bare(value) {
            Expr::Lit(literal) => match literal.lit {
                Lit::Str(text) => Key::literal(text),
                other => Err(Error::new_spanned(
                    other,
                    "a key is a string, as in `key = \"order:{order_id}\"`, or an expression that makes a `LockKey`",
                )),
            },
            other => Ok(Key::Expression(other)),
        }
    }

    /// `key("…", …)`
    pub(crate) fn format_arguments(name: &Ident, input: ParseStream<'_>) -> Result<Key> {
        let content;
        parenthesized!(content in input);
        if content.is_empty() {
            return Err(Error::new(name.span(), "`key(…)` takes what `format!` takes"));
        }
        if !content.peek(LitStr) {
            return Err(content.error(
                "`key(…)` begins with a format string, as in `key(\"order:{}\", order.id())`; for one expression write `key = …`",
            ));
        }
        Ok(Key::Arguments(content.parse()?))
    }

    fn literal(text: LitStr) -> Result<Key> {
        let value = text.value();
        let Some(pieces) = pieces(&value) else {
            // Not even the compiler can read it; its message is better.
            return Ok(Key::Format(Format {
                rewritten: text.clone(),
                written: text,
                chains: Vec::new(),
            }));
        };
        let mut chains = Vec::new();
        let mut rewritten = String::new();
        let mut captures = false;
        for (at, piece) in pieces.into_iter().enumerate() {
            match piece {
                Piece::Text(part) => {
                    check_text(&text, part)?;
                    check_begin(&text, part, at)?;
                    rewritten.push_str(part);
                }
                Piece::Capture { name, spec } => {
                    captures = true;
                    check_capture(&text, name)?;
                    rewritten.push('{');
                    if name == "self" || name.contains('.') {
                        let chain = Chain::new(&text, name, chains.len())?;
                        rewritten.push_str(&chain.name.to_string());
                        chains.push(chain);
                    } else {
                        rewritten.push_str(name);
                    }
                    rewritten.push_str(spec);
                    rewritten.push('}');
                }
            }
        }
        if value.is_empty() {
            return Err(Error::new_spanned(text, "a lock needs a name: the key is empty"));
        }
        if !captures {
            return Ok(Key::Text(text));
        }
        let rewritten = if chains.is_empty() {
            text.clone()
        } else {
            LitStr::new(&rewritten, text.span())
        };
        Ok(Key::Format(Format {
            written: text,
            rewritten,
            chains,
        }))
    }

    /// The common text of the function's keys, with the names of the inserted values.
    pub(crate) fn template(&self) -> Option<String> {
        match self {
            Key::Text(text) => Some(text.value()),
            Key::Format(format) => Some(format.written.value()),
            Key::Arguments(_) | Key::Expression(_) => None,
        }
    }

    /// An expression that creates the `LockKey`, once. `krate` is the path of the library.
    pub(crate) fn expression(&self, krate: &TokenStream) -> TokenStream {
        let site = Span::mixed_site();
        match self {
            Key::Text(text) => quote_spanned!(site=> #krate::__macro::key(#text)),
            Key::Format(Format {
                rewritten, chains, ..
            }) => {
                let chains = chains
                    .iter()
                    .map(|Chain { name, root, fields }| quote!(#name = #root #(.#fields)*));
                quote_spanned!(site=> #krate::__macro::key(::std::format!(#rewritten #(, #chains)*)))
            }
            Key::Arguments(arguments) => {
                quote_spanned!(site=> #krate::__macro::key(::std::format!(#arguments)))
            }
            Key::Expression(value) => {
                let site = value.span().resolved_at(site);
                let value = place(value);
                quote_spanned!(site=> #krate::__macro::key(#value))
            }
        }
    }
}

impl Chain {
    fn new(text: &LitStr, name: &str, index: usize) -> Result<Chain> {
        let mut parts = name.split('.');
        let root = parts.next().and_then(|part| ident(part, text.span()));
        // Fields have no hygiene. As tokens of this macro they keep the compiler from offering to replace
        // the whole literal by another field.
        let at = text.span().resolved_at(Span::mixed_site());
        let fields = parts.map(|part| {
            if part.starts_with(|first: char| first.is_ascii_digit()) {
                if !part.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                let index = part.parse().ok()?;
                return Some(Member::Unnamed(Index { index, span: at }));
            }
            ident(part, at).map(Member::Named)
        });
        match (root, fields.collect::<Option<Vec<_>>>()) {
            (Some(root), Some(fields)) => Ok(Chain {
                name: format_ident!("__dlock_field{index}"),
                root,
                fields,
            }),
            _ => Err(not_a_capture(text, name)),
        }
    }
}

/// An identifier. `type` is `r#type`, as in every format literal.
fn ident(text: &str, span: Span) -> Option<Ident> {
    if text == "self" {
        return Some(Ident::new("self", span));
    }
    if text == "gen" {
        // To `syn` it is no keyword. To the compiler it is one in the edition of `span`, which may be that of this crate.
        return Some(Ident::new_raw("gen", span));
    }
    let raw = || match text {
        // These cannot be raw.
        "_" | "Self" | "super" | "crate" => None,
        keyword => syn::parse_str(&format!("r#{keyword}")).ok(),
    };
    let mut ident: Ident = syn::parse_str(text).ok().or_else(raw)?;
    ident.set_span(span);
    Some(ident)
}

/// An expression to move from. A place is not: the body needs the argument as well.
pub(crate) fn place(value: &Expr) -> TokenStream {
    if is_place(value) {
        let site = value.span().resolved_at(Span::mixed_site());
        quote_spanned!(site=> ::core::clone::Clone::clone(&#value))
    } else {
        quote!(#value)
    }
}

fn is_place(value: &Expr) -> bool {
    match value {
        Expr::Path(path) => path.qself.is_none(),
        Expr::Field(field) => is_place(&field.base),
        Expr::Index(index) => is_place(&index.expr),
        Expr::Paren(paren) => is_place(&paren.expr),
        Expr::Group(group) => is_place(&group.expr),
        _ => false,
    }
}

/// A format literal in its parts.
enum Piece<'a> {
    /// As written, including `{{` and `}}`.
    Text(&'a str),
    /// `{name:spec}`; the spec includes its colon.
    Capture { name: &'a str, spec: &'a str },
}

/// `None` if a brace has no partner.
fn pieces(value: &str) -> Option<Vec<Piece<'_>>> {
    let mut pieces = Vec::new();
    let mut rest = value;
    while let Some(at) = rest.find(['{', '}']) {
        let (text, tail) = rest.split_at(at);
        pieces.push(Piece::Text(text));
        if tail.starts_with("{{") || tail.starts_with("}}") {
            let (escape, tail) = tail.split_at(2);
            pieces.push(Piece::Text(escape));
            rest = tail;
            continue;
        }
        let inside = tail.strip_prefix('{')?;
        let end = inside
            .find(['{', '}'])
            .filter(|end| inside[*end..].starts_with('}'))?;
        let (capture, tail) = inside.split_at(end);
        let (name, spec) = capture.split_at(name_len(capture));
        pieces.push(Piece::Capture {
            name: name.trim(),
            spec,
        });
        rest = &tail[1..];
    }
    pieces.push(Piece::Text(rest));
    Some(pieces)
}

/// The length of what is before the spec: `{id::>5}` fills with colons, and `{config::ID}` is a path.
fn name_len(capture: &str) -> usize {
    let mut begin = 0;
    while let Some(colon) = capture[begin..].find(':').map(|at| begin + at) {
        let is_path = capture[colon..]
            .strip_prefix("::")
            .is_some_and(|next| next.starts_with(|first: char| first == '_' || first.is_alphabetic()));
        if !is_path {
            return colon;
        }
        begin = colon + 2;
    }
    capture.len()
}

/// What every call would refuse is refused at compile time.
fn check_text(text: &LitStr, part: &str) -> Result<()> {
    let wrong = if part.contains(['{', '}']) {
        "a key cannot contain braces; `LockKey::raw` makes a key with them, for `key = …`"
    } else if part.contains(char::is_control) {
        "a key cannot contain control characters"
    } else if part.len() > MAX_KEY_BYTES {
        "a key has 512 bytes at most"
    } else {
        return Ok(());
    };
    Err(Error::new_spanned(text, wrong))
}

fn check_begin(text: &LitStr, part: &str, at: usize) -> Result<()> {
    match at == 0 && part.starts_with("dlock:") {
        true => Err(Error::new_spanned(
            text,
            "a key cannot begin with `dlock:`, as dlock's own keys do: put a prefix before it",
        )),
        false => Ok(()),
    }
}

fn check_capture(text: &LitStr, name: &str) -> Result<()> {
    if name.is_empty() || name.bytes().all(|byte| byte.is_ascii_digit()) {
        let message = format!(
            "`{{{name}}}` has no value here: name an argument, as in `{{order_id}}`, or write `key({}, …)`",
            text.token()
        );
        return Err(Error::new_spanned(text, message));
    }
    if !name.contains('.') && ident(name, text.span()).is_none() {
        return Err(not_a_capture(text, name));
    }
    Ok(())
}

fn not_a_capture(text: &LitStr, name: &str) -> Error {
    let message = format!(
        "`{{{name}}}` is not an argument or a field of one, as in `{{order.id}}`: for other expressions write `key(\"…{{}}…\", {name})`"
    );
    Error::new_spanned(text, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literal(text: &str) -> Result<Key> {
        Key::literal(LitStr::new(text, Span::call_site()))
    }

    fn expanded(text: &str) -> String {
        literal(text)
            .unwrap()
            .expression(&quote!(::dlock))
            .to_string()
            .replace(' ', "")
    }

    fn error(text: &str) -> String {
        literal(text)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn plain_captures_are_left_to_the_compiler() {
        assert!(expanded("order:{id}:{n:>4}").contains("format!(\"order:{id}:{n:>4}\")"));
        assert!(!expanded("jobs").contains("format"));
    }

    #[test]
    fn field_chains_become_named_arguments() {
        let text = expanded("{order.id:>width$}:{pair.0.1}:{self.name}:{id}");
        assert!(
            text.contains("\"{__dlock_field0:>width$}:{__dlock_field1}:{__dlock_field2}:{id}\""),
            "{text}"
        );
        assert!(text.contains("__dlock_field0=order.id"), "{text}");
        assert!(text.contains("__dlock_field1=pair.0.1"), "{text}");
        assert!(text.contains("__dlock_field2=self.name"), "{text}");
    }

    #[test]
    fn template_is_the_text_of_the_key() {
        let many: String = (0..12).map(|n| format!("{{job.f{n}:>4}}")).collect();
        for text in ["{order.id}:{pair.0:>4}:{id}", "{order.type}", "{self}", &many] {
            assert_eq!(literal(text).unwrap().template().as_deref(), Some(text));
        }
    }

    #[test]
    fn keywords_are_raw_identifiers() {
        assert!(expanded("{type}:{match:>3}").contains("\"{type}:{match:>3}\""));
        let text = expanded("{order.type}:{self.fn.0}:{async.r#ref}");
        for part in ["=order.r#type", "=self.r#fn.0", "=r#async.r#ref"] {
            assert!(text.contains(part), "{text}");
        }
        // A keyword of edition 2024 only, which `r#gen` names in every edition.
        let text = expanded("{order.gen}:{gen.0}");
        for part in ["=order.r#gen", "=r#gen.0"] {
            assert!(text.contains(part), "{text}");
        }
        for name in ["Self", "super", "crate", "_", "order.crate"] {
            assert!(
                error(&format!("{{{name}}}")).contains("is not an argument"),
                "{name}"
            );
        }
    }

    #[test]
    fn what_no_call_could_use_is_refused() {
        assert!(error("").contains("empty"));
        assert!(error("a{{b}}").contains("braces"));
        assert!(error("a\nb").contains("control"));
        assert!(error("dlock:audit").contains("dlock:"));
        assert!(error("dlock:{order}").contains("a prefix before it"));
        for text in ["dlock", "a:dlock:b", "{order}dlock:"] {
            expanded(text);
        }
        assert!(error(&"x".repeat(513)).contains("512"));
    }

    #[test]
    fn captures_that_are_no_arguments_say_what_to_write() {
        assert!(error("{}").contains("key("));
        assert!(error("{0}").contains("key("));
        assert!(error("{order.id()}").contains("order.id()"));
        assert!(error("{a + b}").contains("a + b"));
        for name in [
            "pair.0 + 1",
            "pair.0()",
            "pair.0[1]",
            "pair.0u8",
            "pair.1e5",
            "pair.0x1",
        ] {
            assert!(error(&format!("{{{name}}}")).contains(name), "{name}");
        }
        for path in ["Self::ID", "config::ID", "config::order::ID", "Self::_ID"] {
            for spec in ["", ":>5", "::>5"] {
                let error = error(&format!("{{{path}{spec}}}"));
                assert!(error.ends_with(&format!("`key(\"…{{}}…\", {path})`")), "{error}");
            }
        }
        // Colons that fill.
        assert!(expanded("{id::>5}:{order.id::<5}").contains("\"{id::>5}:{__dlock_field0::<5}\""));
    }

    #[test]
    fn place_is_cloned() {
        for (key, is_cloned) in [
            (quote!(name), true),
            (quote!(order.name), true),
            (quote!(orders[0].name), true),
            (quote!(names[index]), true),
            (quote!(order.name()), false),
            (quote!(names()[0].clone()), false),
        ] {
            let value = Key::of(syn::parse2(key.clone()).unwrap()).unwrap();
            let text = value.expression(&quote!(::dlock)).to_string();
            assert_eq!(text.contains("Clone"), is_cloned, "{key}");
        }
    }
}
