//! The span of a hold, from when its caller has it until the caller gives it up.

use super::Grant;
use crate::base::moment::Moment;
use crate::runtime::emit::meter::Ended;
use crate::runtime::emit::trace::{self, Span};

/// What a grant keeps of the trace.
pub(super) enum HoldSpan {
    /// That of its holder.
    Own(Span),
    /// That of the holder who handed it off, until the next one has begun.
    Before(Span),
}

impl Grant {
    /// The caller has it, in whose poll this is. Tells of the hold that was handed off to it.
    pub(crate) fn begins_span(&self, tell: impl FnOnce(Option<&Span>)) {
        if !trace::holds_are_traced() {
            return;
        }
        let before = {
            let mut state = self.state.lock();
            // It was entered once more.
            if let Some(HoldSpan::Own(_)) = state.room.span() {
                return;
            }
            state.room.take_span()
        };
        let span = trace::hold(self);
        if let Some(HoldSpan::Before(before)) = &before {
            span.follows_from(before);
            tell(Some(before));
        }
        self.state.lock().room.set_span(HoldSpan::Own(span));
        // That of the hold before ends here, without the lock.
        drop(before);
    }

    /// Runs `tell` in the span, where there is one.
    pub(super) fn in_span(&self, tell: impl FnOnce()) {
        let span = match self.state.lock().room.span() {
            Some(HoldSpan::Own(span)) => Some(span.clone()),
            _ => None,
        };
        match span {
            Some(span) => span.in_scope(tell),
            None => tell(),
        }
    }

    /// The caller gives it up, or has lost it.
    pub(crate) fn ends_span(&self, ended: Ended) {
        let span = self.state.lock().room.take_span();
        if let Some(HoldSpan::Own(span)) = span {
            trace::hold_ended(&span, ended, Moment::now().since(self.since));
        }
    }
}
