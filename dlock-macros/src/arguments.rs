//! The handling of the arguments.
//!
//! All arguments are dropped before the lock is released: an argument may be a permit or a transaction whose end must
//! happen under the lock. The arguments of an async function belong to the function and outlive every statement of it,
//! so they are moved into the future that runs inside the lock. An `async move` block captures only what it names, and
//! of a struct only the named fields; so each argument is named there as a whole.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::{Attribute, FnArg, Ident, Pat, PatType, ReceiverKind, Signature, Stmt, Type, parse_quote_spanned};

use crate::names::Names;

/// Statements that move the arguments.
#[derive(Default)]
pub(crate) struct Arguments {
    /// Before the key is computed: arguments whose patterns cannot stay in the signature.
    pub(crate) unpack: TokenStream,
    /// At the beginning of the body.
    take: Vec<TokenStream>,
}

/// Which patterns stay in the signature, because an attribute that is expanded later reads their variables there.
#[derive(Clone, Copy)]
pub(crate) enum Patterns<'a> {
    Keep,
    /// Those with a variable of these names.
    KeepNamed(&'a Names),
}

impl Arguments {
    /// Takes the arguments of `sig`.
    ///
    /// A pattern that leaves a part of its argument unbound (`_`, `..`, `ref`) leaves that part with the function. Such
    /// an argument gets a name in the signature and its pattern in a `let`, unless another attribute needs the pattern.
    pub(crate) fn of(sig: &mut Signature, used: &Names, patterns: Patterns<'_>) -> Arguments {
        let mut arguments = Arguments::default();
        for (index, input) in sig.inputs.iter_mut().enumerate() {
            match input {
                // A reference has nothing to drop.
                FnArg::Receiver(receiver) => {
                    if !matches!(receiver.kind, ReceiverKind::Reference(..)) {
                        arguments.take(&Attributes::default(), &receiver.self_token);
                    }
                }
                FnArg::Typed(argument) if matches!(*argument.ty, Type::Reference(_)) => {}
                FnArg::Typed(argument) => arguments.typed(index, argument, used, patterns),
            }
        }
        arguments
    }

    fn typed(&mut self, index: usize, argument: &mut PatType, used: &Names, patterns: Patterns<'_>) {
        let attrs = Attributes::of(&argument.attrs);
        let mut bindings = Bindings::default();
        bindings.collect(&mut argument.pat, &attrs, used);
        let keep_pattern = match patterns {
            Patterns::Keep => true,
            Patterns::KeepNamed(names) => bindings.names.iter().any(|binding| names.contains(&binding.name)),
        };
        let is_moved = matches!(*argument.pat, Pat::Wild(_)) || (bindings.leave_a_part && !keep_pattern);
        // What is expected comes true in one place: at the variables that are unused, or at the pattern.
        let expected_of_names = bindings.names.iter().any(|name| !name.is_used);
        if is_moved || expected_of_names {
            argument.attrs.retain(|attr| !Role::Expectation.is_of(attr));
        }
        if is_moved {
            let name = format_ident!("__dlock_argument{index}", span = Span::mixed_site());
            // In brackets: attributes that record arguments look for plain names.
            let renamed = parse_quote_spanned!(Span::mixed_site()=> (#name));
            let pat = std::mem::replace(&mut *argument.pat, renamed);
            if matches!(pat, Pat::Wild(_)) {
                self.take(&attrs, &name);
                return;
            }
            let mutability = bindings.change_it.then(|| quote!(mut));
            let Attributes {
                conditions, lints, ..
            } = &attrs;
            let expected = attrs.expected.iter().filter(|_| !expected_of_names);
            self.unpack.extend(quote_spanned! {Span::mixed_site()=>
                #(#conditions)* let #mutability #name = #name;
                #(#conditions)* #(#lints)* #(#expected)* let #pat = #name;
            });
        }
        for Binding { name, attrs, .. } in bindings.names {
            self.binding(&attrs, &name, used);
        }
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
    pub(crate) fn binding(&mut self, attrs: &Attributes, name: &Ident, used: &Names) {
        if is_used(name, used) {
            self.take(attrs, name);
        } else {
            // The compiler must warn of that, unless it is told not to.
            let Attributes {
                conditions,
                lints,
                expected,
            } = attrs;
            self.take.push(quote_spanned! {Span::mixed_site()=>
                #(#conditions)* #(#lints)* #(#expected)* let #name = #name;
            });
        }
    }

    fn take(&mut self, attrs: &Attributes, name: &impl ToTokens) {
        let conditions = &attrs.conditions;
        let name = name.to_token_stream();
        // Only where it is needed: a crate that forbids the lint refuses the attribute.
        let underscored = name.to_string().starts_with('_');
        let allowed = underscored.then(|| quote!(#[allow(clippy::used_underscore_binding)]));
        self.take.push(quote_spanned! {Span::mixed_site()=>
            #(#conditions)*
            #allowed
            let _ = &#name;
        });
    }

    /// The statements at the beginning of the body. The last argument comes first: a block drops its captures in the
    /// order of capture, and a function drops its last argument first.
    pub(crate) fn take_all(&self) -> TokenStream {
        self.take.iter().rev().cloned().collect()
    }
}

/// Whether the compiler has nothing to say of a variable.
fn is_used(name: &Ident, used: &Names) -> bool {
    used.contains(name) || name.to_string().starts_with('_')
}

/// The attributes of an argument, or of a field of its pattern, that its statements need as well.
#[derive(Clone, Default)]
pub(crate) struct Attributes {
    conditions: Vec<Attribute>,
    lints: Vec<Attribute>,
    expected: Vec<Attribute>,
}

impl Attributes {
    pub(crate) fn of(attrs: &[Attribute]) -> Attributes {
        let all = |role: Role| attrs.iter().filter(|attr| role.is_of(attr)).cloned().collect();
        Attributes {
            conditions: all(Role::Condition),
            lints: all(Role::Lint),
            expected: all(Role::Expectation),
        }
    }

    /// These, and those of a field below them.
    fn and(&self, field: &[Attribute]) -> Attributes {
        let mut all = self.clone();
        let field = Attributes::of(field);
        all.conditions.extend(field.conditions);
        all.lints.extend(field.lints);
        all.expected.extend(field.expected);
        all
    }
}

/// What an attribute is for.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    /// The argument may be absent.
    Condition,
    /// What the compiler says of it.
    Lint,
    /// What it has to have said.
    Expectation,
}

impl Role {
    fn is_of(self, attr: &Attribute) -> bool {
        Role::of(attr) == Some(self)
    }

    /// `None` if it is for another attribute, and has no meaning on a statement.
    fn of(attr: &Attribute) -> Option<Role> {
        let roles: Option<Vec<Role>> = names(attr).iter().map(|name| Role::named(name)).collect();
        let roles = roles?;
        let has = |role| roles.contains(&role).then_some(role);
        has(Role::Condition)
            .or(has(Role::Expectation))
            .or(has(Role::Lint))
    }

    fn named(attribute: &str) -> Option<Role> {
        match attribute {
            "cfg" => Some(Role::Condition),
            "allow" | "warn" | "deny" | "forbid" => Some(Role::Lint),
            "expect" => Some(Role::Expectation),
            _ => None,
        }
    }
}

/// The name of an attribute, or those of the ones in a `cfg_attr`.
fn names(attr: &Attribute) -> Vec<String> {
    if !attr.path().is_ident("cfg_attr") {
        return attr
            .path()
            .get_ident()
            .map(Ident::to_string)
            .into_iter()
            .collect();
    }
    let Ok(list) = attr.meta.require_list() else {
        return Vec::new();
    };
    let tokens: Vec<TokenTree> = list.tokens.clone().into_iter().collect();
    // Each name comes after a comma, the first one after that of the condition.
    let name = |pair: &[TokenTree]| match pair {
        [TokenTree::Punct(comma), TokenTree::Ident(name)] if comma.as_char() == ',' => Some(name.to_string()),
        _ => None,
    };
    tokens.windows(2).filter_map(name).collect()
}

/// A variable of a pattern.
struct Binding {
    name: Ident,
    /// Those of the argument, and of the fields that the variable is in.
    attrs: Attributes,
    is_used: bool,
}

/// The variables of a pattern.
#[derive(Default)]
struct Bindings {
    names: Vec<Binding>,
    /// Whether they do not capture all of the argument.
    leave_a_part: bool,
    /// Whether one of them is a `ref mut`.
    change_it: bool,
}

impl Bindings {
    fn add(&mut self, name: &Ident, attrs: &Attributes, used: &Names) {
        self.names.push(Binding {
            name: name.clone(),
            attrs: attrs.clone(),
            is_used: is_used(name, used),
        });
    }

    /// Adds the variables of `pat`, which is below `attrs`.
    fn collect(&mut self, pat: &mut Pat, attrs: &Attributes, used: &Names) {
        match pat {
            Pat::Ident(binding) if binding.by_ref.is_none() => {
                // A pattern behind `@` binds copies.
                self.add(&binding.ident, attrs, used);
                if let Some((_, pat)) = &mut binding.subpat {
                    self.copies(pat, attrs, used);
                }
            }
            Pat::Ident(binding) => {
                self.add(&binding.ident, attrs, used);
                self.leave_a_part = true;
                self.change_it |= binding.mutability.is_some();
            }
            Pat::Paren(paren) => self.collect(&mut paren.pat, attrs, used),
            Pat::Type(typed) => self.collect(&mut typed.pat, attrs, used),
            Pat::Tuple(tuple) => self.collect_all(&mut tuple.elems, attrs, used),
            Pat::TupleStruct(tuple) => self.collect_all(&mut tuple.elems, attrs, used),
            Pat::Slice(slice) => self.collect_all(&mut slice.elems, attrs, used),
            Pat::Struct(fields) => {
                self.leave_a_part |= fields.rest.is_some();
                for field in &mut fields.fields {
                    let before = self.names.len();
                    self.collect(&mut field.pat, &attrs.and(&field.attrs), used);
                    if self.names[before..].iter().any(|name| !name.is_used) {
                        field.attrs.retain(|attr| !Role::Expectation.is_of(attr));
                    }
                }
            }
            // A value behind a reference is copied.
            Pat::Reference(reference) => self.copies(&mut reference.pat, attrs, used),
            _ => self.leave_a_part = true,
        }
    }

    fn collect_all<'a>(
        &mut self,
        pats: impl IntoIterator<Item = &'a mut Pat>,
        attrs: &Attributes,
        used: &Names,
    ) {
        pats.into_iter().for_each(|pat| self.collect(pat, attrs, used));
    }

    /// Adds the variables of a pattern that binds copies.
    fn copies(&mut self, pat: &mut Pat, attrs: &Attributes, used: &Names) {
        let mut copies = Bindings::default();
        copies.collect(pat, attrs, used);
        self.names.append(&mut copies.names);
    }
}
