//! A body under its lock: the statements that acquire, run the body and release.

use proc_macro2::{Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Type, TypePath};

use crate::arguments::Arguments;
use crate::names::replace_self;
use crate::options::Options;
use crate::value::Wait;

/// A body and the data that it needs to run under the lock.
pub(crate) struct Locked<'a> {
    pub(crate) options: &'a Options,
    /// The name of `self` there.
    pub(crate) self_is: Option<Ident>,
    /// The return type of the function.
    pub(crate) output: &'a Type,
    pub(crate) told_at: (Span, Span),
    pub(crate) arguments: &'a Arguments,
    pub(crate) body: Group,
    /// Whether a router may call the function.
    pub(crate) may_be_handler: bool,
}

impl Locked<'_> {
    /// Generates the statements of the function.
    ///
    /// One block owns the arguments, computes the key, acquires, enters the frame and runs the body, so that each
    /// argument is kept once. It runs inside a future that releases the lock when everything in the block is dropped;
    /// on a panic and on cancellation the same order holds. The braces around the body are of this crate's edition, so what
    /// the last expression of the body borrows is dropped before the arguments in every edition of the user.
    pub(crate) fn expand(&self) -> TokenStream {
        let krate = self.krate();
        let output = self.output;
        let unpack = &self.arguments.unpack;
        let key = self.user(self.options.keys.expression(&krate));
        let acquired = self.acquired(&krate);
        let dropped_on_loss = self.options.settings.dropped_on_loss.unwrap_or(true);
        let may_be_handler = self.may_be_handler;
        let take = self.arguments.take_all();
        let site = Span::mixed_site();
        let body = unlinted(&self.body);
        let told_at = self.told_at.0.resolved_at(site);
        let returns = quote_spanned! {told_at=>
            if let ::core::option::Option::Some(__dlock_output) = #krate::__macro::never::<#output>() {
                return __dlock_output;
            }
        };
        let failed = self.failed();
        // The function may start something for its caller to await, which clippy takes for a missing `.await` here.
        let allowed = (self.may_be_awaited()).then(|| quote!(#[allow(clippy::async_yields_async)]));
        quote_spanned! {site=>
            let __dlock_frame = #krate::__macro::Frame::new(#dropped_on_loss);
            let __dlock_entrance = #krate::__macro::Frame::entrance(&__dlock_frame);
            #allowed
            let __dlock_ran = __dlock_frame.run(async move {
                #returns
                #unpack
                #take
                let __dlock_key = #key;
                let __dlock_acquired = #krate::__macro::acquired(#acquired, #may_be_handler);
                __dlock_entrance.enter(__dlock_acquired).await;
                #body
            })
            .await;
            match __dlock_ran {
                ::core::result::Result::Ok(__dlock_output) => __dlock_output,
                #failed
            }
        }
    }

    /// Whether the value of the function may be a future, as far as its tokens tell. Such a function has an `on_error`.
    fn may_be_awaited(&self) -> bool {
        let is_result = |path: &TypePath| {
            path.path
                .segments
                .last()
                .is_some_and(|last| last.ident == "Result")
        };
        self.options.settings.on_error.is_some()
            && match self.output {
                Type::Path(path) => !is_result(path),
                Type::Tuple(_) => false,
                _ => true,
            }
    }

    fn krate(&self) -> TokenStream {
        match &self.options.settings.krate {
            Some(path) => path.to_token_stream(),
            None => quote_spanned!(Span::mixed_site()=> ::dlock),
        }
    }

    /// The user's code, with spans of its new place.
    fn user(&self, code: impl ToTokens) -> TokenStream {
        let code = code.to_token_stream();
        match &self.self_is {
            Some(with) => replace_self(code, with),
            None => code,
        }
    }

    /// The acquire: a `Result` of the guard of one or of several.
    fn acquired(&self, krate: &TokenStream) -> TokenStream {
        let site = Span::mixed_site();
        let (keys, options) = (&self.options.keys, &self.options.settings);
        let mut set = TokenStream::new();
        if let Some(kind) = &options.kind {
            set.extend(quote_spanned!(site=> .kind(#krate::LockKind::#kind)));
        }
        if let Some(group) = options.group.clone().or_else(|| keys.template()) {
            set.extend(quote_spanned!(site=> .group(#group)));
        }
        if options.prefer_writers {
            set.extend(quote_spanned!(site=> .prefer_writers()));
        }
        let times = [
            ("lease", &options.lease),
            ("fixed_lease", &options.fixed_lease),
            ("max_hold", &options.max_hold),
            ("min_hold", &options.min_hold),
        ];
        for (name, time) in times {
            if let Some(time) = time {
                let (name, time) = (Ident::new(name, site), self.user(time));
                set.extend(quote_spanned!(site=> .#name(#time)));
            }
        }
        if let Some(Wait::AtMost(time)) = &options.wait {
            let time = self.user(time);
            set.extend(quote_spanned!(site=> .wait(#time)));
        }
        if let Some(count) = &options.max_waiters {
            let count = self.user(count);
            set.extend(quote_spanned!(site=> .max_waiters(#count)));
        }
        let (lock, of) = match keys.is_several() {
            true => (quote_spanned!(site=> multi), quote_spanned!(site=> MultiLock)),
            false => (quote_spanned!(site=> lock), quote_spanned!(site=> Lock)),
        };
        let acquire = match options.wait {
            Some(Wait::Try) => quote_spanned!(site=> try_acquire),
            _ => quote_spanned!(site=> acquire),
        };
        // By its path: a trait of the user may have a method of this name, and come first.
        let acquired = quote_spanned! {site=>
            #krate::__macro::boxed(#krate::#of::#acquire(&__dlock_lock)).await
        };
        match &options.lock {
            Some(client) => {
                let client = cloned(krate, client.span(), &self.user(client));
                quote_spanned! {site=> {
                    let __dlock_client = #client;
                    let __dlock_lock = #krate::__macro::#lock(__dlock_client, __dlock_key)#set;
                    #acquired
                }}
            }
            None => quote_spanned! {site=>
                match #krate::__macro::default_client() {
                    ::core::result::Result::Ok(__dlock_client) => {
                        let __dlock_lock = #krate::__macro::#lock(__dlock_client, __dlock_key)#set;
                        #acquired
                    }
                    ::core::result::Result::Err(__dlock_error) => ::core::result::Result::Err(__dlock_error),
                }
            },
        }
    }

    /// Handles an error of the lock: match arms that return the function's value.
    fn failed(&self) -> TokenStream {
        let site = Span::mixed_site();
        let output = self.output;
        let call = |path: &syn::ExprPath| {
            let at = path.span().resolved_at(site);
            // With its type, so that a function that returns another one gets the error itself.
            quote_spanned! {at=> {
                // A function that never returns may be named.
                #[allow(clippy::diverging_sub_expression)]
                let __dlock_output: #output = #path(__dlock_error);
                #[allow(unreachable_code)]
                __dlock_output
            }}
        };
        let krate = self.krate();
        let busy = self.options.settings.on_busy.as_ref().map(|path| {
            let call = call(path);
            quote_spanned! {site=>
                ::core::result::Result::Err(__dlock_error) if #krate::Error::is_busy(&__dlock_error) => #call,
            }
        });
        let other = match &self.options.settings.on_error {
            Some(path) => call(path),
            None => self.converted(),
        };
        quote_spanned! {site=>
            #busy
            ::core::result::Result::Err(__dlock_error) => #other,
        }
    }

    /// The conversion, at the span of the return type: that is where it is missing.
    fn converted(&self) -> TokenStream {
        // Every token has this span: the compiler points from the first to the last of them.
        let (first, last) = self.told_at;
        let (first, last) = (
            first.resolved_at(Span::mixed_site()),
            last.resolved_at(Span::mixed_site()),
        );
        let krate = match &self.options.settings.krate {
            Some(path) => respan(path.to_token_stream(), first),
            None => quote_spanned!(first=> ::dlock),
        };
        let path = quote_spanned!(first=> #krate::__macro::FromLockError::);
        let call = quote_spanned!(last=> from_lock_error(__dlock_error));
        quote!(#path #call)
    }
}

/// A clone of the client that an expression of the user gives, or refers to. The reference is taken in front of the call:
/// otherwise a `?`, an `if`, a `match` or a block would be expected to give a client, not a reference to one.
pub(crate) fn cloned(krate: &TokenStream, span: Span, client: &TokenStream) -> TokenStream {
    let at = span.resolved_at(Span::mixed_site());
    quote_spanned! {at=>
        match &(#client) { __dlock_client => #krate::__macro::client(__dlock_client) }
    }
}

/// The body, with generated braces if it is a single expression: behind the statements of this macro the compiler would
/// report the user's braces as unused.
pub(crate) fn unlinted(body: &Group) -> Group {
    let mut body = body.clone();
    let mut tokens = body.stream().into_iter().peekable();
    let is_one = tokens.peek().is_some()
        && !tokens.any(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ';'));
    if is_one {
        body.set_span(body.span().resolved_at(Span::mixed_site()));
    }
    body
}

fn respan(code: TokenStream, at: Span) -> TokenStream {
    code.into_iter()
        .map(|mut token| {
            // The hygiene is the user's; only the span changes.
            token.set_span(token.span().located_at(at));
            token
        })
        .collect()
}
