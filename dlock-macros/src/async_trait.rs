//! The output of `#[async_trait]`, when that ran before this attribute.
//!
//! The function is no longer async: it returns `Box::pin(async move { … })`, where the block renames the arguments
//! (`let __self = self;`), and has the body in a `let __ret: T = { … };`. The lock goes around all of that, so that the
//! renamed arguments are dropped before it is released; only the type hint for the compiler, which comes first, stays
//! outside.

use proc_macro2::{Group, TokenStream};
use quote::{ToTokens, quote};
use syn::visit_mut::{self, VisitMut};
use syn::{Block, Expr, ExprAsync, Ident, Local, Pat, Stmt, Type, parse_quote};

use crate::arguments::Arguments;
use crate::function::{Function, ends};
use crate::locked::Locked;
use crate::names::Names;
use crate::options::Options;

/// The body as one expression, if it is `Box::pin(async move { … })`.
pub(crate) fn boxed_future(body: &Group) -> Option<Expr> {
    let block: Block = syn::parse2(body.to_token_stream()).ok()?;
    let [Stmt::Expr(future, None)] = &*block.stmts else {
        return None;
    };
    let Expr::Call(call) = future else { return None };
    let Expr::Path(path) = &*call.func else {
        return None;
    };
    let mut last = path.path.segments.iter().rev().map(|segment| &segment.ident);
    let pins = last.next()? == "pin" && last.next()? == "Box";
    let is_block = matches!(call.args.first(), Some(Expr::Async(_)));
    (pins && is_block).then(|| future.clone())
}

/// Puts the lock around the body.
pub(crate) fn lock(options: &Options, function: &Function, future: &mut Expr) {
    let mut visit = Visit {
        options,
        function,
        done: false,
    };
    visit.visit_expr_mut(future);
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
    fn of(block: &'a Block) -> Option<Parts<'a>> {
        let at = block.stmts.iter().position(|stmt| result(stmt).is_some())?;
        let (output, body) = result(&block.stmts[at])?;
        let first_local = block
            .stmts
            .iter()
            .position(|stmt| matches!(stmt, Stmt::Local(_)))?;
        Some(Parts {
            hint: &block.stmts[..first_local],
            arguments: &block.stmts[first_local..at],
            output: output.clone(),
            body,
        })
    }

    fn locked(&self, options: &Options, function: &Function) -> TokenStream {
        let body = self.body.to_token_stream();
        let mut used = Names::default();
        used.add(options.written.clone());
        used.add(body.clone());
        let renamed = self.arguments.iter().filter_map(declared);
        let mut arguments = Arguments::unpacked_by(self.arguments);
        let mut self_is = None;
        for name in renamed {
            if name == "__self" {
                self_is = Some(name.clone());
            }
            arguments.binding(&[], name, &used);
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

/// `let __ret: T = { … };`, or `let _: () = { … };`.
fn result(stmt: &Stmt) -> Option<(&Type, &Block)> {
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
    let unit = matches!(&*typed.ty, Type::Tuple(unit) if unit.elems.is_empty());
    let named = match &*typed.pat {
        Pat::Ident(name) => name.ident == "__ret",
        Pat::Wild(_) => unit,
        _ => false,
    };
    named.then_some((&*typed.ty, &body.block))
}

/// The variable of `let x = x;`.
fn declared(stmt: &Stmt) -> Option<&Ident> {
    match stmt {
        Stmt::Local(Local {
            pat: Pat::Ident(name),
            ..
        }) => Some(&name.ident),
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
