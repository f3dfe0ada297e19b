//! The names that some code uses, as far as its tokens tell.

use std::collections::HashSet;

use proc_macro2::{Ident, Punct, Spacing, TokenStream, TokenTree};
use quote::ToTokens;
use syn::ext::IdentExt;
use syn::punctuated::Punctuated;
use syn::{FnArg, Meta, Signature, Token};

/// The identifiers of some code, and its literals, which may name variables too (`"{order_id}"`).
#[derive(Default)]
pub(crate) struct Names {
    idents: HashSet<String>,
    literals: Vec<String>,
}

impl Names {
    /// Adds what `code` names.
    pub(crate) fn add(&mut self, code: TokenStream) {
        for token in code {
            match token {
                TokenTree::Ident(ident) => {
                    self.idents.insert(ident.to_string());
                }
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    if text.contains('{') {
                        self.literals.push(text);
                    }
                }
                TokenTree::Group(group) => self.add(group.stream()),
                TokenTree::Punct(_) => {}
            }
        }
    }

    /// Adds what others are in `names`.
    pub(crate) fn add_all(&mut self, names: &Names) {
        self.idents.extend(names.idents.iter().cloned());
        self.literals.extend(names.literals.iter().cloned());
    }

    /// Adds what an attribute names that is still to be expanded. An `#[instrument]` records all arguments that it does not
    /// skip.
    pub(crate) fn add_attribute(&mut self, attr: &Meta, sig: &Signature) {
        if attr.path().is_ident("cfg_attr")
            && let Meta::List(list) = attr
            && let Ok(parts) = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
        {
            // The first one is the condition.
            return parts
                .iter()
                .skip(1)
                .for_each(|part| self.add_attribute(part, sig));
        }
        let tokens = match attr {
            Meta::List(list) => list.tokens.clone(),
            Meta::Path(_) => TokenStream::new(),
            // As a comment is.
            Meta::NameValue(_) => return,
        };
        if !is_instrument(attr) {
            return self.add(tokens);
        }
        let mut skipped = Names::default();
        let mut tokens = tokens.into_iter().peekable();
        let mut records = true;
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(ident) if ident == "skip_all" => records = false,
                TokenTree::Ident(ident) if ident == "skip" => {
                    if let Some(TokenTree::Group(group)) =
                        tokens.next_if(|next| matches!(next, TokenTree::Group(_)))
                    {
                        skipped.add(group.stream());
                    }
                }
                other => self.add(other.into()),
            }
        }
        if records {
            self.add_arguments(sig, &skipped);
        }
    }

    /// Adds the arguments but for these.
    fn add_arguments(&mut self, sig: &Signature, but: &Names) {
        let mut arguments = Names::default();
        for input in &sig.inputs {
            if let FnArg::Typed(argument) = input {
                arguments.add(argument.pat.to_token_stream());
            }
        }
        let recorded = arguments.idents.difference(&but.idents).cloned();
        self.idents.extend(recorded);
    }

    /// Whether this identifier is in the code.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.idents.contains(name)
    }

    /// Whether the code may use this variable. In doubt, yes.
    pub(crate) fn contains(&self, name: &Ident) -> bool {
        // A literal names a raw identifier without its `r#`.
        let bare = name.unraw().to_string();
        self.has(&name.to_string()) || self.literals.iter().any(|text| text.contains(&bare))
    }
}

/// Whether this is an `#[instrument]`, by whatever path.
fn is_instrument(attr: &Meta) -> bool {
    (attr.path().segments.last()).is_some_and(|last| last.ident == "instrument")
}

/// The same code with another identifier for `self`, which in a path (`self::f`) is the module.
pub(crate) fn replace_self(code: TokenStream, with: &Ident) -> TokenStream {
    let mut tokens = code.into_iter().peekable();
    let mut replaced = TokenStream::new();
    while let Some(token) = tokens.next() {
        let is_module = tokens.peek().is_some_and(begins_path);
        replaced.extend([match token {
            TokenTree::Ident(ident) if ident == "self" && !is_module => TokenTree::Ident(with.clone()),
            TokenTree::Group(group) => {
                let inside = replace_self(group.stream(), with);
                let mut replaced = proc_macro2::Group::new(group.delimiter(), inside);
                replaced.set_span(group.span());
                TokenTree::Group(replaced)
            }
            other => other,
        }]);
    }
    replaced
}

/// Whether this is the first colon of a `::`.
fn begins_path(token: &TokenTree) -> bool {
    let is_joint_colon = |punct: &Punct| punct.as_char() == ':' && punct.spacing() == Spacing::Joint;
    matches!(token, TokenTree::Punct(punct) if is_joint_colon(punct))
}

#[cfg(test)]
mod tests {
    use quote::{format_ident, quote};
    use syn::{Attribute, parse_quote};

    use super::*;

    #[test]
    fn the_module_in_a_path_is_no_receiver() {
        let replaced = replace_self(
            quote!(self::key(self.id, &[self]) + self::OTHER),
            &format_ident!("it"),
        );
        let expected = quote!(self::key(it.id, &[it]) + self::OTHER);
        assert_eq!(replaced.to_string(), expected.to_string());
    }

    #[test]
    fn instrument_uses_what_it_records() {
        let sig: Signature = parse_quote!(fn f(&self, order: Order, (a, _b): (u8, u8), client: Client));
        let used = |attr: Attribute| {
            let mut names = Names::default();
            names.add_attribute(&attr.meta, &sig);
            ["order", "a", "client"].map(|name| names.has(name))
        };
        assert_eq!(used(parse_quote!(#[instrument])), [true; 3]);
        assert_eq!(used(parse_quote!(#[tracing::instrument(err)])), [true; 3]);
        assert_eq!(
            used(parse_quote!(#[instrument(skip(client))])),
            [true, true, false]
        );
        assert_eq!(
            used(parse_quote!(#[instrument(skip_all, fields(a))])),
            [false, true, false]
        );
        assert_eq!(
            used(parse_quote!(#[once(key = "a:{client}")])),
            [false; 3],
            "in a literal"
        );
        assert_eq!(used(parse_quote!(#[doc = "client"])), [false; 3]);
        assert_eq!(
            used(parse_quote!(#[cfg_attr(all(), inline, tracing::instrument(skip(client)))])),
            [true, true, false]
        );
    }
}
