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
    pub(crate) settings: Settings,
    /// All of them as written, to see which arguments they name.
    pub(crate) written: TokenStream,
}

/// The options that may be absent.
#[derive(Default)]
pub(crate) struct Settings {
    /// The kind of lock; the plain lock without it.
    pub(crate) kind: Option<Ident>,
    /// The name of these locks in metrics; the text of the key without it, if it has one.
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
    /// Whether the work is dropped when the lock is lost; it is without this.
    pub(crate) dropped_on_loss: Option<bool>,
    /// The user's name for the `dlock` crate.
    pub(crate) krate: Option<Path>,
}

/// What has been read so far.
#[derive(Default)]
struct Reader {
    seen: Vec<Ident>,
    keys: Option<Keys>,
    settings: Settings,
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
        if !NAMES.contains(&text.as_str()) {
            self.unclear = true;
            return Err(unknown(&name));
        }
        self.seen.push(name.clone());
        if text == "key" && input.peek(token::Paren) {
            self.keys = Some(Keys::One(Key::format_arguments(&name, input)?));
            return Ok(());
        }
        let (value, set) = (equals(&name, input)?, &mut self.settings);
        match text.as_str() {
            "key" => self.keys = Some(Keys::One(Key::value(value)?)),
            "keys" => self.keys = Some(Keys::value(&name, value)?),
            "lock" => set.lock = Some(value::bare(value.parse()?)),
            "lease" => set.lease = Some(Time::parse(&name, value)?),
            "fixed_lease" => set.fixed_lease = Some(Time::parse(&name, value)?),
            "wait" => set.wait = Some(Wait::parse(&name, value)?),
            "max_hold" => set.max_hold = Some(Time::parse(&name, value)?),
            "min_hold" => set.min_hold = Some(Time::parse(&name, value)?),
            "max_waiters" => set.max_waiters = Some(value::count(&name, value)?),
            "kind" => set.kind = Some(value::kind(value)?),
            "group" => set.group = Some(value::group(value)?),
            "prefer_writers" => set.prefer_writers = value::flag(&name, value)?,
            "on_busy" => set.on_busy = Some(value::function(&name, value)?),
            "on_error" => set.on_error = Some(value::function(&name, value)?),
            "on_lost" => set.dropped_on_loss = Some(value::dropped_on_loss(value)?),
            "crate" => set.krate = Some(value.call(Path::parse_mod_style)?),
            _ => unreachable!("`{text}` is a name of an option"),
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
        if let (Some(Keys::List(_) | Keys::Expression(_)), Some(kind)) = (&self.keys, &self.settings.kind)
            && kind == "Fair"
        {
            let message = "fair locks cannot be acquired together: `kind = fair` takes one `key`";
            let error = Error::new(kind.span().resolved_at(Span::call_site()), message);
            self.fail(error);
        }
        if let Some(option) = self.seen("prefer_writers")
            && self.settings.prefer_writers
            // One that cannot be read is told already.
            && (self.seen("kind").is_some() == self.settings.kind.is_some())
            && !(self.settings.kind)
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
                settings: self.settings,
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
