//! The function under the attribute. Its body stays tokens: what the compiler can read is enough.

use proc_macro2::{Delimiter, Group, Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::{Parse, ParseStream};
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Error, Result, ReturnType, Signature, Token, Type, TypeInfer, Visibility, parse_quote};

use crate::names::Names;

pub(crate) struct Function {
    pub(crate) attrs: Vec<Attribute>,
    vis: Visibility,
    defaultness: Option<Token![default]>,
    pub(crate) sig: Signature,
    /// With its braces.
    pub(crate) body: Group,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> Result<Function> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        let defaultness = if input.peek(Token![default]) && !input.peek2(Token![!]) {
            Some(input.parse()?)
        } else {
            None
        };
        let begins = input.fork();
        let sig: Signature = input.parse().map_err(|error| {
            let is_function = [
                begins.peek(Token![fn]),
                begins.peek(Token![async]),
                begins.peek(Token![const]),
            ];
            if is_function.contains(&true) || begins.peek(Token![unsafe]) || begins.peek(Token![extern]) {
                error
            } else {
                begins.error("this attribute goes on an async function")
            }
        })?;
        if input.peek(Token![;]) {
            return Err(
                input.error("there is no body here: put this attribute on the implementations of the method")
            );
        }
        match visible(input.parse()?) {
            TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => Ok(Function {
                attrs,
                vis,
                defaultness,
                sig,
                body,
            }),
            other => Err(Error::new(other.span(), "expected the body of the function")),
        }
    }
}

/// The token without the invisible groups around a `macro_rules!` variable.
fn visible(token: TokenTree) -> TokenTree {
    if let TokenTree::Group(group) = &token
        && group.delimiter() == Delimiter::None
    {
        let mut inside = group.stream().into_iter();
        if let (Some(only), None) = (inside.next(), inside.next()) {
            return visible(only);
        }
    }
    token
}

impl Function {
    /// Whether one of the attributes that are still to be expanded has this name, also inside a `cfg_attr`.
    pub(crate) fn has_attribute(&self, name: &str) -> bool {
        self.attrs.iter().any(|attr| {
            let mut names = Names::default();
            if attr.path().is_ident("cfg_attr") {
                names.add(attr.meta.to_token_stream());
            }
            names.has(name) || attr.path().segments.last().is_some_and(|last| last.ident == name)
        })
    }

    /// Whether `#[async_trait]` made it what it is: each of its functions has this lifetime.
    pub(crate) fn is_of_async_trait(&self) -> bool {
        (self.sig.generics.lifetimes()).any(|param| param.lifetime.ident == "async_trait")
    }

    /// The first and the last token of the return type, or the name of a function without one.
    pub(crate) fn told_at(&self) -> (Span, Span) {
        match &self.sig.output {
            ReturnType::Default => (self.sig.ident.span(), self.sig.ident.span()),
            ReturnType::Type(_, ty) => ends(ty),
        }
    }

    /// Returns the function with another body.
    pub(crate) fn with_body(&self, body: TokenStream) -> TokenStream {
        let mut tokens = TokenStream::new();
        for attr in &self.attrs {
            attr.to_tokens(&mut tokens);
        }
        self.vis.to_tokens(&mut tokens);
        self.defaultness.to_tokens(&mut tokens);
        self.sig.to_tokens(&mut tokens);
        braces(&self.body, body).to_tokens(&mut tokens);
        tokens
    }
}

/// The spans of the first and the last token, which stand for a longer piece.
pub(crate) fn ends(code: &impl ToTokens) -> (Span, Span) {
    let mut spans = code.to_token_stream().into_iter().map(|token| token.span());
    let first = spans.next().unwrap_or_else(Span::call_site);
    (first, spans.last().unwrap_or(first))
}

/// `{ inside }`, where `of` has its braces.
pub(crate) fn braces(of: &Group, inside: TokenStream) -> Group {
    let mut braces = Group::new(Delimiter::Brace, inside);
    braces.set_span(of.span());
    braces
}

/// The return type, as it may be named inside the function: `impl Trait` is inferred, and so is `!`, which is no type
/// elsewhere.
pub(crate) fn nameable(output: &ReturnType) -> Type {
    match output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, ty) if matches!(bare(ty), Type::Never(_)) => parse_quote!(_),
        ReturnType::Type(_, ty) => {
            let mut ty = (**ty).clone();
            EraseImplTrait.visit_type_mut(&mut ty);
            ty
        }
    }
}

struct EraseImplTrait;

impl VisitMut for EraseImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if let Type::ImplTrait(erased) = ty {
            let underscore_token = Token![_](erased.impl_token.span);
            *ty = Type::Infer(TypeInfer {
                attrs: Vec::new(),
                underscore_token,
            });
        } else {
            visit_mut::visit_type_mut(self, ty);
        }
    }
}

/// The attributes inside a body (`#![…]`), which have to stay first, and the rest of it.
pub(crate) fn inner_attributes(body: &Group) -> Result<(Vec<Attribute>, TokenStream)> {
    let split = |input: ParseStream<'_>| Ok((input.call(Attribute::parse_inner)?, input.parse()?));
    syn::parse::Parser::parse2(split, body.stream())
}

/// Whether a router may call the function: no extractor yields a reference, a number or a `self`.
pub(crate) fn may_be_handler(sig: &Signature) -> bool {
    const NEVER_EXTRACTED: [&str; 16] = [
        "bool", "char", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32", "u64",
        "u128", "usize",
    ];
    sig.inputs.iter().all(|input| match input {
        syn::FnArg::Receiver(_) => false,
        syn::FnArg::Typed(input) => match bare(&input.ty) {
            Type::Reference(_) | Type::Ptr(_) => false,
            Type::Path(ty) => !NEVER_EXTRACTED.iter().any(|name| ty.path.is_ident(name)),
            _ => true,
        },
    })
}

/// The type without the parentheses around it, and the invisible ones of `macro_rules!`.
fn bare(ty: &Type) -> &Type {
    match ty {
        Type::Group(group) => bare(&group.elem),
        Type::Paren(paren) => bare(&paren.elem),
        ty => ty,
    }
}
