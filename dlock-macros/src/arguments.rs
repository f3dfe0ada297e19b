//! The handling of the arguments.
//!
//! All arguments are dropped before the lock is released: an argument may be a permit or a transaction whose end must
//! happen under the lock. The arguments of an async function belong to the function and outlive every statement of it,
//! so they are moved into the future that runs inside the lock. An `async move` block captures only what it names, and
//! of a struct only the named fields; so each argument is named there as a whole.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{Attribute, FnArg, Ident, Pat, ReceiverKind, Signature, Stmt, Type, parse_quote_spanned};

use crate::names::Names;

/// Statements that move the arguments.
#[derive(Default)]
pub(crate) struct Arguments {
    /// Before the key is computed: arguments whose patterns cannot stay in the signature.
    pub(crate) unpack: TokenStream,
    /// At the beginning of the body.
    take: Vec<TokenStream>,
}

impl Arguments {
    /// Takes the arguments of `sig`.
    ///
    /// A pattern that leaves a part of its argument unbound (`_`, `..`, `ref`) leaves that part with the function. Such
    /// an argument gets a name in the signature and its pattern in a `let`, unless `keep_patterns` says that another
    /// attribute needs the pattern.
    pub(crate) fn of(sig: &mut Signature, used: &Names, keep_patterns: bool) -> Arguments {
        let mut arguments = Arguments::default();
        for (index, input) in sig.inputs.iter_mut().enumerate() {
            match input {
                // A reference has nothing to drop.
                FnArg::Receiver(receiver) => {
                    if !matches!(receiver.kind, ReceiverKind::Reference(..)) {
                        arguments.take(&[], &receiver.self_token);
                    }
                }
                FnArg::Typed(argument) if matches!(*argument.ty, Type::Reference(_)) => {}
                FnArg::Typed(argument) => {
                    let attrs = conditions(&argument.attrs);
                    let mut bindings = Bindings::default();
                    bindings.collect(&argument.pat);
                    if matches!(*argument.pat, Pat::Wild(_)) || (bindings.leave_a_part && !keep_patterns) {
                        let name = format_ident!("__dlock_argument{index}", span = Span::mixed_site());
                        // In brackets: attributes that record arguments look for plain names.
                        let renamed = parse_quote_spanned!(Span::mixed_site()=> (#name));
                        let pat = std::mem::replace(&mut *argument.pat, renamed);
                        if matches!(pat, Pat::Wild(_)) {
                            arguments.take(&attrs, &name);
                            continue;
                        }
                        let mutability = bindings.change_it.then(|| quote!(mut));
                        arguments.unpack.extend(quote_spanned! {Span::mixed_site()=>
                            #(#attrs)* let #mutability #name = #name;
                            #(#attrs)* let #pat = #name;
                        });
                    }
                    for name in bindings.names {
                        arguments.binding(&attrs, &name, used);
                    }
                }
            }
        }
        arguments
    }

    /// Arguments that these statements name.
    pub(crate) fn unpacked_by(stmts: &[Stmt]) -> Arguments {
        let unpack = stmts.iter().map(ToTokens::to_token_stream).collect();
        Arguments {
            unpack,
            take: Vec::new(),
        }
    }

    /// A variable that holds an argument.
    pub(crate) fn binding(&mut self, attrs: &[&Attribute], name: &Ident, used: &Names) {
        if used.contains(name) || name.to_string().starts_with('_') {
            self.take(attrs, name);
        } else {
            // It is unused, and the compiler must warn of that.
            self.take
                .push(quote_spanned!(Span::mixed_site()=> #(#attrs)* let #name = #name;));
        }
    }

    fn take(&mut self, attrs: &[&Attribute], name: &impl ToTokens) {
        self.take.push(quote_spanned! {Span::mixed_site()=>
            #(#attrs)*
            #[allow(clippy::used_underscore_binding)]
            let _ = &#name;
        });
    }

    /// The statements at the beginning of the body. The last argument comes first: a block drops its captures in the
    /// order of capture, and a function drops its last argument first.
    pub(crate) fn take_all(&self) -> TokenStream {
        self.take.iter().rev().cloned().collect()
    }
}

/// `#[cfg]`s, under which an argument may be absent.
fn conditions(attrs: &[Attribute]) -> Vec<&Attribute> {
    attrs.iter().filter(|attr| attr.path().is_ident("cfg")).collect()
}

/// The variables of a pattern.
#[derive(Default)]
struct Bindings {
    names: Vec<Ident>,
    /// Whether they do not capture all of the argument.
    leave_a_part: bool,
    /// Whether one of them is a `ref mut`.
    change_it: bool,
}

impl Bindings {
    fn collect(&mut self, pat: &Pat) {
        match pat {
            Pat::Ident(binding) if binding.by_ref.is_none() => {
                // A pattern behind `@` binds copies.
                self.names.push(binding.ident.clone());
                if let Some((_, pat)) = &binding.subpat {
                    let mut copies = Bindings::default();
                    copies.collect(pat);
                    self.names.append(&mut copies.names);
                }
            }
            Pat::Ident(binding) => {
                self.names.push(binding.ident.clone());
                self.leave_a_part = true;
                self.change_it |= binding.mutability.is_some();
            }
            Pat::Paren(paren) => self.collect(&paren.pat),
            Pat::Type(typed) => self.collect(&typed.pat),
            Pat::Tuple(tuple) => tuple.elems.iter().for_each(|pat| self.collect(pat)),
            Pat::TupleStruct(tuple) => tuple.elems.iter().for_each(|pat| self.collect(pat)),
            Pat::Slice(slice) => slice.elems.iter().for_each(|pat| self.collect(pat)),
            Pat::Struct(fields) => {
                self.leave_a_part |= fields.rest.is_some();
                fields.fields.iter().for_each(|field| self.collect(&field.pat));
            }
            Pat::Reference(reference) => {
                // A value behind a reference is copied.
                let mut copies = Bindings::default();
                copies.collect(&reference.pat);
                self.names.append(&mut copies.names);
            }
            _ => self.leave_a_part = true,
        }
    }
}
