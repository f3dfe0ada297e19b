//! The names that some code uses, as far as its tokens tell.

use std::collections::HashSet;

use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::ext::IdentExt;

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

/// The same code with another identifier for `self`.
pub(crate) fn replace_self(code: TokenStream, with: &Ident) -> TokenStream {
    code.into_iter()
        .map(|token| match token {
            TokenTree::Ident(ident) if ident == "self" => TokenTree::Ident(with.clone()),
            TokenTree::Group(group) => {
                let inside = replace_self(group.stream(), with);
                let mut replaced = proc_macro2::Group::new(group.delimiter(), inside);
                replaced.set_span(group.span());
                TokenTree::Group(replaced)
            }
            other => other,
        })
        .collect()
}
