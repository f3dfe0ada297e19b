//! The options of the attribute, and their parser.
//!
//! A mistake in one option does not hide a mistake in the next: unreadable input is skipped up to the next option, and
//! all errors are reported together, each on the token that caused it.

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprPath, Ident, Path, Result, Token, token};

use crate::key::Key;
use crate::keys::Keys;
use crate::suggest;
use crate::value::{self, Time, Wait};

const NAMES: &[&str] = &[
    "key",
    "keys",
    "lock",
    "lease",
    "fixed_lease",
    "wait",
    "max_hold",
    "min_hold",
    "max_waiters",
    "kind",
    "group",
    "prefer_writers",
    "on_busy",
    "on_error",
    "on_lost",
    "crate",
];

/// The options of the attribute.
pub(crate) struct Options {
    pub(crate) keys: Keys,
    /// The kind of lock; the plain lock without it.
    pub(crate) kind: Option<Ident>,
    /// The name of these locks in metrics; the text of the key without it.
    pub(crate) group: Option<String>,
    /// Whether readers yield to a waiting writer.
    pub(crate) prefer_writers: bool,
    /// The client; the process-wide default without it.
    pub(crate) lock: Option<Expr>,
    pub(crate) lease: Option<Time>,
    pub(crate) fixed_lease: Option<Time>,
    pub(crate) wait: Option<Wait>,
    pub(crate) max_hold: Option<Time>,
    pub(crate) min_hold: Option<Time>,
    pub(crate) max_waiters: Option<TokenStream>,
    pub(crate) on_busy: Option<ExprPath>,
    pub(crate) on_error: Option<ExprPath>,
    pub(crate) dropped_on_loss: bool,
    /// The user's name for the `dlock` crate.
    pub(crate) krate: Option<Path>,
    /// All of the above as written, to see which arguments it names.
    pub(crate) written: TokenStream,
}

/// What has been read so far.
#[derive(Default)]
struct Reader {
    seen: Vec<Ident>,
    keys: Option<Keys>,
    kind: Option<Ident>,
    group: Option<String>,
    prefer_writers: bool,
    lock: Option<Expr>,
    lease: Option<Time>,
    fixed_lease: Option<Time>,
    wait: Option<Wait>,
    max_hold: Option<Time>,
    min_hold: Option<Time>,
    max_waiters: Option<TokenStream>,
    on_busy: Option<ExprPath>,
    on_error: Option<ExprPath>,
    on_lost: Option<bool>,
    krate: Option<Path>,
    error: Option<Error>,
    /// Handles input that is not an option; it may have been meant as the key.
    unclear: bool,
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Options> {
        let written = input.fork().parse()?;
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
        reader.finish(written)
    }
}

impl Reader {
    fn option(&mut self, input: ParseStream<'_>) -> Result<()> {
        if input.peek(syn::Lit) {
            self.unclear = true;
            return Err(input.error("which option? To name the lock, write `key = \"…\"`"));
        }
        let name = input.call(Ident::parse_any)?;
        if let Some(first) = self.seen.iter().find(|seen| **seen == name) {
            return Err(Error::new(name.span(), format!("`{first}` is given twice")));
        }
        let text = name.to_string();
        if NAMES.contains(&text.as_str()) {
            self.seen.push(name.clone());
        }
        match text.as_str() {
            "key" if input.peek(token::Paren) => {
                self.keys = Some(Keys::One(Key::format_arguments(&name, input)?));
            }
            "key" => self.keys = Some(Keys::One(Key::value(equals(&name, input)?)?)),
            "keys" => self.keys = Some(Keys::value(&name, equals(&name, input)?)?),
            "lock" => self.lock = Some(value::bare(equals(&name, input)?.parse()?)),
            "lease" => self.lease = Some(Time::parse(&name, equals(&name, input)?)?),
            "fixed_lease" => self.fixed_lease = Some(Time::parse(&name, equals(&name, input)?)?),
            "wait" => self.wait = Some(Wait::parse(&name, equals(&name, input)?)?),
            "max_hold" => self.max_hold = Some(Time::parse(&name, equals(&name, input)?)?),
            "min_hold" => self.min_hold = Some(Time::parse(&name, equals(&name, input)?)?),
            "max_waiters" => self.max_waiters = Some(value::count(&name, equals(&name, input)?)?),
            "kind" => self.kind = Some(value::kind(equals(&name, input)?)?),
            "group" => self.group = Some(value::group(equals(&name, input)?)?),
            "prefer_writers" => self.prefer_writers = value::flag(&name, equals(&name, input)?)?,
            "on_busy" => self.on_busy = Some(value::function(&name, equals(&name, input)?)?),
            "on_error" => self.on_error = Some(value::function(&name, equals(&name, input)?)?),
            "on_lost" => self.on_lost = Some(value::dropped_on_loss(equals(&name, input)?)?),
            "crate" => self.krate = Some(equals(&name, input)?.call(Path::parse_mod_style)?),
            _ => {
                self.unclear = true;
                return Err(unknown(&name));
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

    fn seen(&self, name: &str) -> Option<&Ident> {
        self.seen.iter().find(|seen| *seen == name)
    }

    /// Checks that need all options together.
    fn finish(mut self, written: TokenStream) -> Result<Options> {
        let keys = match (self.seen("key"), self.seen("keys")) {
            (Some(_), None) | (None, Some(_)) => None,
            (Some(_), Some(keys)) => Some(Error::new(keys.span(), "`key` and `keys` cannot both be given")),
            (None, None) if self.unclear => None,
            (None, None) => Some(Error::new(
                Span::call_site(),
                "which lock? Name it with `key`, as in `#[distributed_lock(key = \"order:{order_id}\")]`",
            )),
        };
        if let Some(error) = keys {
            self.fail(error);
        }
        if let (Some(_), Some(fixed)) = (self.seen("lease"), self.seen("fixed_lease")) {
            let message = "`lease` is renewed and `fixed_lease` is not: only one of them can be given";
            let error = Error::new(fixed.span(), message);
            self.fail(error);
        }
        if let (Some(Keys::List(_) | Keys::Expression(_)), Some(kind)) = (&self.keys, &self.kind)
            && kind == "Fair"
        {
            let message = "fair locks cannot be acquired together: `kind = fair` takes one `key`";
            let error = Error::new(kind.span().resolved_at(Span::call_site()), message);
            self.fail(error);
        }
        if let Some(option) = self.seen("prefer_writers")
            && self.prefer_writers
            && !self
                .kind
                .as_ref()
                .is_some_and(|kind| kind == "Read" || kind == "Write")
        {
            let message =
                "`prefer_writers` goes with `kind = write`: other locks have no readers and writers";
            let error = Error::new(option.span(), message);
            self.fail(error);
        }
        match (self.error, self.keys) {
            (Some(error), _) => Err(error),
            (None, None) => Err(Error::new(Span::call_site(), "which lock?")),
            (None, Some(keys)) => Ok(Options {
                keys,
                kind: self.kind,
                group: self.group,
                prefer_writers: self.prefer_writers,
                lock: self.lock,
                lease: self.lease,
                fixed_lease: self.fixed_lease,
                wait: self.wait,
                max_hold: self.max_hold,
                min_hold: self.min_hold,
                max_waiters: self.max_waiters,
                on_busy: self.on_busy,
                on_error: self.on_error,
                dropped_on_loss: self.on_lost.unwrap_or(true),
                krate: self.krate,
                written,
            }),
        }
    }
}

/// The input after the `=`.
pub(crate) fn equals<'a, 'b>(name: &Ident, input: &'a syn::parse::ParseBuffer<'b>) -> Result<ParseStream<'a>>
where
    'b: 'a,
{
    if !input.peek(Token![=]) {
        let message = format!("`{name}` needs a value: `{name} = …`");
        return Err(if input.is_empty() || input.peek(Token![,]) {
            Error::new(name.span(), message)
        } else {
            input.error(message)
        });
    }
    input.parse::<Token![=]>()?;
    if input.is_empty() || input.peek(Token![,]) {
        return Err(Error::new(
            name.span(),
            format!("`{name}` needs a value: `{name} = …`"),
        ));
    }
    Ok(input)
}

fn unknown(name: &Ident) -> Error {
    let text = name.to_string();
    let message = match suggest::nearest_option(&text, NAMES) {
        Some(near) => format!("there is no option `{text}`: did you mean `{near}`?"),
        None => format!(
            "there is no option `{text}`; the options are {}",
            NAMES.join(", ")
        ),
    };
    Error::new(name.span(), message)
}

/// Skips to where the next option begins.
pub(crate) fn skip(input: ParseStream<'_>) {
    while !input.is_empty() {
        let option_next = input.peek(Token![,])
            && (input.peek3(Token![=]) || input.peek3(token::Paren))
            && input.peek2(Ident::peek_any);
        if input.parse::<TokenTree>().is_err() || option_next {
            return;
        }
    }
}
