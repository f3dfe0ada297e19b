//! The span of a hold, from when its caller has it until the caller gives it up.

use std::time::Duration;

use super::Grant;
use crate::base::moment::Moment;
use crate::base::observed::observed;
use crate::runtime::emit::meter::Ended;
use crate::runtime::emit::trace::{self, ObservedSpan, Span};

/// Runs `tell` in this span, if there is one, and without it if the subscriber panics at its beginning.
pub(super) fn inside(span: Option<&ObservedSpan>, tell: impl FnOnce()) {
    let mut tell = Some(tell);
    let mut tell_once = || {
        if let Some(tell) = tell.take() {
            tell();
        }
    };
    if let Some(span) = span {
        observed(|| span.in_scope(&mut tell_once));
    }
    tell_once();
}

/// The tracing state of a grant.
pub(super) enum HoldSpan {
    /// The span of its holder, and what was left of the lease at a renewal that is not reported yet.
    Own(ObservedSpan, Option<Duration>),
    /// The span of the holder that handed it off, until the next one has begun.
    Before(ObservedSpan),
}

impl HoldSpan {
    pub(super) fn of_holder(self) -> Option<ObservedSpan> {
        match self {
            HoldSpan::Own(span, _) => Some(span),
            HoldSpan::Before(_) => None,
        }
    }
}

impl Grant {
    /// Begins the span, in the poll of the caller that has the hold. Reports the hold that was handed off to it.
    pub(crate) fn begins_span(&self, tell: impl FnOnce(Option<&Span>)) {
        if !trace::holds_are_traced() {
            return;
        }
        let before = {
            let mut state = self.state.lock();
            // It was re-entered.
            if let Some(HoldSpan::Own(..)) = state.room.span() {
                return;
            }
            state.room.take_span()
        };
        let span = trace::hold(self);
        if let Some(HoldSpan::Before(before)) = &before {
            span.follows_from(&**before);
            tell(Some(before));
        }
        self.state.lock().room.set_span(HoldSpan::Own(span, None));
        // The span of the previous hold ends here, without the mutex.
        drop(before);
    }

    /// Runs `tell` in the span, if there is one.
    pub(super) fn in_span(&self, tell: impl FnOnce()) {
        let span = match self.state.lock().room.span() {
            Some(HoldSpan::Own(span, _)) => Some(span.clone()),
            _ => None,
        };
        inside(span.as_ref(), tell);
    }

    /// Reports a confirmed renewal: not under the mutex of the watchdog, as the subscriber may call the client.
    pub(crate) fn tell_renewed(&self) {
        if !trace::holds_are_traced() {
            return;
        }
        let renewed = match self.state.lock().room.span_mut() {
            Some(HoldSpan::Own(span, renewed)) => renewed.take().map(|left| (span.clone(), left)),
            _ => None,
        };
        if let Some((span, left)) = renewed {
            inside(Some(&span), || trace::renewed(left));
        }
    }

    /// Ends the span: the caller gives the hold up, or has lost it.
    pub(crate) fn ends_span(&self, ended: Ended) {
        let span = self.state.lock().room.take_span();
        if let Some(HoldSpan::Own(span, _)) = span {
            trace::hold_ended(&span, ended, Moment::now().since(self.since));
        }
    }
}
