//! The output of `#[async_trait]`, when that ran before this attribute.
//!
//! The function is no longer async: it returns `Box::pin(async move { … })`, where the block renames the arguments
//! (`let __self = self;`), and has the body in a `let __ret: T = { … };`. The lock goes around all of that, so that the
//! renamed arguments are dropped before it is released; only the type hint for the compiler, which comes first, stays
//! outside.

use proc_macro2::{Group, TokenStream};
use quote::{ToTokens, quote};
use syn::parse::Parser;
use syn::visit_mut::{self, VisitMut};
use syn::{Attribute, Block, Expr, ExprAsync, Ident, Local, Pat, Stmt, Type, parse_quote};

use crate::arguments::{Arguments, Attributes};
use crate::function::{Function, ends, inner_attributes};
use crate::locked::Locked;
use crate::names::Names;
use crate::options::Options;

/// A body that is one expression, `Box::pin(async move { … })`.
pub(crate) struct BoxedFuture {
    inner: Vec<Attribute>,
    pub(crate) future: Expr,
}

impl ToTokens for BoxedFuture {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        let BoxedFuture { inner, future } = self;
        tokens.extend(quote!(#(#inner)* #future));
    }
}

/// The body, if it is a boxed future.
pub(crate) fn boxed_future(body: &Group) -> Option<BoxedFuture> {
    let (inner, rest) = inner_attributes(body).ok()?;
    let stmts = Parser::parse2(Block::parse_within, rest).ok()?;
    let [Stmt::Expr(future, None)] = &*stmts else {
        return None;
    };
    let Expr::Call(call) = future else { return None };
    let Expr::Path(path) = &*call.func else {
        return None;
    };
    let mut last = path.path.segments.iter().rev().map(|segment| &segment.ident);
    let pins = last.next()? == "pin" && last.next()? == "Box";
    let is_block = matches!(call.args.first(), Some(Expr::Async(_)));
    (pins && is_block).then(|| BoxedFuture {
        inner,
        future: future.clone(),
    })
}

/// Puts the lock around the body.
pub(crate) fn lock(options: &Options, function: &Function, future: &mut Expr) {
    let mut visit = Visit {
        options,
        function,
        done: false,
    };
    if function.is_of_async_trait() {
        visit.visit_expr_mut(future);
    }
    if !visit.done
        && let Expr::Call(call) = future
        && let Some(Expr::Async(block)) = call.args.first_mut()
    {
        lock_written_by_hand(options, function, block);
    }
}

/// Looks for the block: `#[instrument]` may have put another one around it.
struct Visit<'a> {
    options: &'a Options,
    function: &'a Function,
    done: bool,
}

impl VisitMut for Visit<'_> {
    fn visit_expr_async_mut(&mut self, block: &mut ExprAsync) {
        if self.done {
            return;
        }
        match Parts::of(&block.block) {
            Some(parts) => {
                let stmts = parts.locked(self.options, self.function);
                block.block.stmts = vec![Stmt::Expr(Expr::Verbatim(stmts), None)];
                self.done = true;
            }
            None => visit_mut::visit_expr_async_mut(self, block),
        }
    }
}

/// The block in its parts.
struct Parts<'a> {
    hint: &'a [Stmt],
    arguments: &'a [Stmt],
    output: Type,
    body: &'a Block,
}

impl<'a> Parts<'a> {
    /// `None` if there is any other statement: it may be the user's, and belongs to the body.
    fn of(block: &'a Block) -> Option<Parts<'a>> {
        let hints = usize::from(block.stmts.first().is_some_and(is_hint));
        let (hint, stmts) = block.stmts.split_at(hints);
        let count = stmts.iter().take_while(|stmt| is_argument(stmt)).count();
        let (arguments, stmts) = stmts.split_at(count);
        let (output, body) = match stmts {
            [result] => result_of(result, "_")?,
            [result, end] if named(end)? == "__ret" => result_of(result, "__ret")?,
            _ => return None,
        };
        Some(Parts {
            hint,
            arguments,
            output: output.clone(),
            body,
        })
    }

    fn locked(&self, options: &Options, function: &Function) -> TokenStream {
        let body = self.body.to_token_stream();
        let mut used = Names::default();
        used.add(options.written.clone());
        used.add(body.clone());
        let mut arguments = Arguments::unpacked_by(self.arguments);
        let mut self_is = None;
        for (local, name) in self.arguments.iter().filter_map(declared) {
            if name == "__self" {
                self_is = Some(name.clone());
            }
            arguments.binding(&Attributes::of(&local.attrs), name, &used);
        }
        let locked = Locked {
            options,
            self_is,
            output: &self.output,
            told_at: if matches!(self.output, Type::Tuple(_)) {
                function.told_at()
            } else {
                ends(&self.output)
            },
            arguments: &arguments,
            body: group(body, &function.body),
            may_be_handler: false,
        };
        let (hint, locked) = (self.hint, locked.expand());
        quote!(#(#hint)* #locked)
    }
}

/// `if let Some(__ret) = None::<T> { return __ret; }`
fn is_hint(stmt: &Stmt) -> bool {
    let Stmt::Expr(Expr::If(hint), None) = stmt else {
        return false;
    };
    let Expr::Let(condition) = &*hint.cond else {
        return false;
    };
    matches!(&*condition.expr, Expr::Path(none) if none.path.segments.last().is_some_and(|last| last.ident == "None"))
}

/// `let x = x;`, `let __self = self;`, or `let (a, b) = { let __arg1 = __arg1; __arg1 };`.
fn is_argument(stmt: &Stmt) -> bool {
    if let Some((local, name)) = declared(stmt) {
        let value = local.init.as_ref().and_then(|init| variable(&init.expr));
        return value.is_some_and(|value| value == name || (value == "self" && name == "__self"));
    }
    let Stmt::Local(Local { init: Some(init), .. }) = stmt else {
        return false;
    };
    match &*init.expr {
        Expr::Block(moved) => {
            matches!(&*moved.block.stmts, [local, end] if is_argument(local) && named(end).is_some())
        }
        // As earlier versions write a pattern.
        value => variable(value).is_some_and(|name| name.to_string().starts_with("__arg")),
    }
}

/// `let name: T = { … };`, where `_` has no value.
fn result_of<'a>(stmt: &'a Stmt, name: &str) -> Option<(&'a Type, &'a Block)> {
    let Stmt::Local(Local {
        pat: Pat::Type(typed),
        init: Some(init),
        ..
    }) = stmt
    else {
        return None;
    };
    let Expr::Block(body) = &*init.expr else {
        return None;
    };
    let is_named = match &*typed.pat {
        Pat::Ident(pat) => pat.ident == name,
        Pat::Wild(_) => name == "_" && matches!(&*typed.ty, Type::Tuple(unit) if unit.elems.is_empty()),
        _ => false,
    };
    is_named.then_some((&*typed.ty, &body.block))
}

/// The variable that a `let` without a pattern declares.
fn declared(stmt: &Stmt) -> Option<(&Local, &Ident)> {
    match stmt {
        Stmt::Local(local) => match &local.pat {
            Pat::Ident(name) => Some((local, &name.ident)),
            _ => None,
        },
        _ => None,
    }
}

/// The variable that a block ends with.
fn named(stmt: &Stmt) -> Option<&Ident> {
    match stmt {
        Stmt::Expr(value, None) => variable(value),
        _ => None,
    }
}

fn variable(value: &Expr) -> Option<&Ident> {
    match value {
        Expr::Path(path) if path.qself.is_none() => path.path.get_ident(),
        _ => None,
    }
}

/// A `Box::pin(async move { … })` that is not `#[async_trait]`'s: all of it is the body.
fn lock_written_by_hand(options: &Options, function: &Function, block: &mut ExprAsync) {
    let output: Type = parse_quote!(_);
    let locked = Locked {
        options,
        self_is: None,
        output: &output,
        told_at: function.told_at(),
        arguments: &Arguments::default(),
        body: group(block.block.to_token_stream(), &function.body),
        may_be_handler: false,
    };
    block.block.stmts = vec![Stmt::Expr(Expr::Verbatim(locked.expand()), None)];
}

/// A block as one token.
fn group(block: TokenStream, or: &Group) -> Group {
    match block.into_iter().next() {
        Some(proc_macro2::TokenTree::Group(group)) => group,
        _ => or.clone(),
    }
}
