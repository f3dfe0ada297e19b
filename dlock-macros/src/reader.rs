//! The frame of both attributes: how the options in their brackets are read, and what becomes of a mistake.
//!
//! A mistake in one option does not hide a mistake in the next: unreadable input is skipped up to the next option, and
//! all errors are reported together, each on the token that caused it.

use proc_macro2::{TokenStream, TokenTree};
use quote::quote;
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Ident, Result, Token, token};

use crate::function::Function;
use crate::suggest;

/// Expands an attribute: the function as `expand` makes it, or the errors and the unchanged function.
pub(crate) fn expanded<O: Parse>(
    options: TokenStream,
    item: TokenStream,
    check: impl FnOnce(&Function) -> Result<()>,
    expand: impl FnOnce(&O, Function) -> Result<TokenStream>,
) -> TokenStream {
    let options = syn::parse2::<O>(options);
    let function = syn::parse2::<Function>(item.clone());
    let expanded = match (options, function) {
        (Ok(options), Ok(function)) => expand(&options, function),
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

/// The words of an attribute.
pub(crate) struct Words {
    /// The options.
    pub(crate) names: &'static [&'static str],
    /// Words that other libraries use for them.
    pub(crate) elsewhere: &'static [(&'static str, &'static str)],
    /// What the attribute does not have, and what to do instead.
    pub(crate) instead: &'static [(&'static str, &'static str)],
    /// The error about a value without a name.
    pub(crate) nameless: &'static str,
}

/// The names that have been read so far, and the mistakes.
#[derive(Default)]
pub(crate) struct Reader {
    seen: Vec<Ident>,
    error: Option<Error>,
    /// Whether some input is not an option; it may have been meant as the key.
    pub(crate) unclear: bool,
}

impl Reader {
    /// Reads all of `input`. `set` reads the value of an option, and returns `false` if there is none of that name.
    pub(crate) fn read(
        input: ParseStream<'_>,
        words: &Words,
        mut set: impl FnMut(&Ident, ParseStream<'_>) -> Result<bool>,
    ) -> Reader {
        let mut reader = Reader::default();
        while !input.is_empty() {
            if let Err(error) = reader.option(input, words, &mut set) {
                reader.fail(error);
                skip(input);
            } else if !input.is_empty()
                && let Err(error) = input.parse::<Token![,]>()
            {
                reader.fail(error);
                skip(input);
            }
        }
        reader
    }

    fn option(
        &mut self,
        input: ParseStream<'_>,
        words: &Words,
        set: &mut impl FnMut(&Ident, ParseStream<'_>) -> Result<bool>,
    ) -> Result<()> {
        if input.peek(syn::Lit) {
            self.unclear = true;
            return Err(input.error(words.nameless));
        }
        let name = input.call(Ident::parse_any)?;
        if let Some(first) = self.seen.iter().find(|seen| **seen == name) {
            return Err(Error::new(name.span(), format!("`{first}` is given twice")));
        }
        // Also if its value is wrong: it is there.
        self.seen.push(name.clone());
        if set(&name, input)? {
            return Ok(());
        }
        self.seen.pop();
        self.unclear = true;
        Err(unknown(&name, words))
    }

    pub(crate) fn fail(&mut self, error: Error) {
        match &mut self.error {
            Some(first) => first.combine(error),
            none => *none = Some(error),
        }
    }

    /// The option of this name, if it is given.
    pub(crate) fn seen(&self, name: &str) -> Option<&Ident> {
        self.seen.iter().find(|seen| *seen == name)
    }

    /// The mistakes, if there are any.
    pub(crate) fn finish(self) -> Result<()> {
        self.error.map_or(Ok(()), Err)
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

fn unknown(name: &Ident, words: &Words) -> Error {
    let text = name.to_string();
    if let Some((_, instead)) = words.instead.iter().find(|(word, _)| *word == text) {
        return Error::new(name.span(), format!("there is no option `{text}`: {instead}"));
    }
    let message = match suggest::nearest(&text, words.names, words.elsewhere) {
        Some(near) => format!("there is no option `{text}`: did you mean `{near}`?"),
        None => format!(
            "there is no option `{text}`; the options are {}",
            words.names.join(", ")
        ),
    };
    Error::new(name.span(), message)
}

/// Skips to where the next option begins.
fn skip(input: ParseStream<'_>) {
    while !input.is_empty() {
        let option_next = input.peek(Token![,])
            && (input.peek3(Token![=]) || input.peek3(token::Paren))
            && input.peek2(Ident::peek_any);
        if input.parse::<TokenTree>().is_err() || option_next {
            return;
        }
    }
}
