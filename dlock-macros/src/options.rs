//! The options of `#[distributed_lock]`.

use proc_macro2::{Span, TokenStream};
use syn::parse::{Parse, ParseStream};
use syn::{Error, Expr, ExprPath, Ident, Path, Result, token};

use crate::key::Key;
use crate::keys::Keys;
use crate::reader::{Reader, Words, equals};
use crate::suggest;
use crate::value::{self, Time, Wait};

const WORDS: Words = Words {
    names: &[
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
    ],
    elsewhere: suggest::LOCKS_ELSEWHERE,
    instead: &[],
    nameless: "which option? To name the lock, write `key = \"…\"`",
};

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

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> Result<Options> {
        let written = input.fork().parse()?;
        let mut keys = None;
        let mut settings = Settings::default();
        let mut reader = Reader::read(input, &WORDS, |name, input| match name.to_string().as_str() {
            "key" if input.peek(token::Paren) => {
                keys = Some(Keys::One(Key::format_arguments(name, input)?));
                Ok(true)
            }
            "key" => {
                keys = Some(Keys::One(Key::value(equals(name, input)?)?));
                Ok(true)
            }
            "keys" => {
                keys = Some(Keys::value(name, equals(name, input)?)?);
                Ok(true)
            }
            other => settings.set(other, name, input),
        });
        check(&mut reader, keys.as_ref(), &settings);
        reader.finish()?;
        match keys {
            Some(keys) => Ok(Options {
                keys,
                settings,
                written,
            }),
            None => Err(Error::new(Span::call_site(), "which lock?")),
        }
    }
}

impl Settings {
    /// Reads the value of an option. `false` if there is none of that name.
    fn set(&mut self, option: &str, name: &Ident, input: ParseStream<'_>) -> Result<bool> {
        let value = || equals(name, input);
        match option {
            "lock" => self.lock = Some(value::bare(value()?.parse()?)),
            "lease" => self.lease = Some(Time::parse(name, value()?)?),
            "fixed_lease" => self.fixed_lease = Some(Time::parse(name, value()?)?),
            "wait" => self.wait = Some(Wait::parse(name, value()?)?),
            "max_hold" => self.max_hold = Some(Time::parse(name, value()?)?),
            "min_hold" => self.min_hold = Some(Time::parse(name, value()?)?),
            "max_waiters" => self.max_waiters = Some(value::count(name, value()?)?),
            "kind" => self.kind = Some(value::kind(value()?)?),
            "group" => self.group = Some(value::group(value()?)?),
            "prefer_writers" => self.prefer_writers = value::flag(name, value()?)?,
            "on_busy" => self.on_busy = Some(value::function(name, value()?)?),
            "on_error" => self.on_error = Some(value::function(name, value()?)?),
            "on_lost" => self.dropped_on_loss = Some(value::dropped_on_loss(value()?)?),
            "crate" => self.krate = Some(value()?.call(Path::parse_mod_style)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Checks that need all options together.
fn check(reader: &mut Reader, keys: Option<&Keys>, settings: &Settings) {
    let names = match (reader.seen("key"), reader.seen("keys")) {
        (Some(_), None) | (None, Some(_)) => None,
        (Some(_), Some(keys)) => Some(Error::new(keys.span(), "`key` and `keys` cannot both be given")),
        (None, None) if reader.unclear => None,
        (None, None) => Some(Error::new(
            Span::call_site(),
            "which lock? Name it with `key`, as in `#[distributed_lock(key = \"order:{order_id}\")]`",
        )),
    };
    if let Some(error) = names {
        reader.fail(error);
    }
    if let (Some(_), Some(fixed)) = (reader.seen("lease"), reader.seen("fixed_lease")) {
        let message = "`lease` is renewed and `fixed_lease` is not: only one of them can be given";
        reader.fail(Error::new(fixed.span(), message));
    }
    if let (Some(Keys::List(_) | Keys::Expression(_)), Some(kind)) = (keys, &settings.kind)
        && kind == "Fair"
    {
        let message = "fair locks cannot be acquired together: `kind = fair` takes one `key`";
        reader.fail(Error::new(kind.span().resolved_at(Span::call_site()), message));
    }
    if let Some(option) = reader.seen("prefer_writers")
        && settings.prefer_writers
        // One that cannot be read is told already.
        && (reader.seen("kind").is_some() == settings.kind.is_some())
        && !(settings.kind)
            .as_ref()
            .is_some_and(|kind| kind == "Read" || kind == "Write")
    {
        let message = "`prefer_writers` goes with `kind = write`: other locks have no readers and writers";
        reader.fail(Error::new(option.span(), message));
    }
}
