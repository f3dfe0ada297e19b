//! What a user is told of a step that failed.

use super::{Outcome, Reason, StoreError};
use crate::{Error, LockKey};

impl StoreError {
    /// What a user is told when `what` failed on `key`.
    pub(crate) fn into_error(self, what: &str, key: &LockKey) -> Error {
        let StoreError {
            outcome,
            reason,
            message,
            source,
        } = self;
        let what = format!("{what} \"{key}\"");
        match (reason, outcome) {
            (Reason::KeyTaken(found), _) => Error::KeyTaken {
                key: key.clone(),
                found,
            },
            (Reason::Unsupported, _) => Error::Unsupported {
                what,
                reason: message,
            },
            (
                Reason::TooFewReplicas {
                    acknowledged,
                    wanted,
                    within,
                },
                _,
            ) => Error::NotReplicated {
                what,
                acknowledged,
                wanted,
                within,
            },
            (Reason::WrongUrl, _) => Error::InvalidUrl { reason: message },
            (Reason::Closed, _) => Error::ClientClosed,
            (Reason::Refused | Reason::RefusedForNow, _) => Error::Refused {
                what,
                message,
                source,
            },
            (Reason::Unreachable, Outcome::NotDone) => Error::Unreachable {
                what,
                message,
                source,
            },
            (Reason::Unreachable, Outcome::Unknown) => Error::OutcomeUnknown {
                what,
                message,
                source,
            },
        }
    }

    /// What a user is told when a store could not be opened.
    pub(crate) fn into_connect_error(self) -> Error {
        let what = "a first connection".to_owned();
        let StoreError {
            reason,
            message,
            source,
            ..
        } = self;
        match reason {
            Reason::Refused | Reason::RefusedForNow => Error::Refused {
                what,
                message,
                source,
            },
            Reason::WrongUrl => Error::InvalidUrl { reason: message },
            Reason::Unsupported => Error::Unsupported {
                what: "this URL".to_owned(),
                reason: message,
            },
            _ => Error::Unreachable {
                what,
                message,
                source,
            },
        }
    }
}
