//! Conversion of store failures to the errors that users get.

use super::{Outcome, Reason, StoreError};
use crate::{Error, LockKey};

impl StoreError {
    /// Converts the failure of `what` on `key` to the error for a user.
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
            // Also if this copy was refused, but an earlier one may have been carried out.
            (Reason::Refused | Reason::RefusedForNow | Reason::Unreachable, Outcome::Unknown) => {
                Error::OutcomeUnknown {
                    what,
                    message,
                    source,
                }
            }
            (Reason::Refused | Reason::RefusedForNow, Outcome::NotDone) => Error::Refused {
                what,
                message,
                source,
            },
            (Reason::Unreachable, Outcome::NotDone) => Error::Unreachable {
                what,
                message,
                source,
            },
        }
    }

    /// Converts the failure to open a store to the error for a user, as [`build`](crate::LockClientBuilder::build)
    /// reports it.
    ///
    /// ```
    /// use dlock::store::{Reason, StoreError};
    ///
    /// let error = StoreError::not_done(Reason::Refused, "the password is wrong").into_connect_error();
    /// assert!(matches!(error, dlock::Error::Refused { .. }));
    /// ```
    #[must_use]
    pub fn into_connect_error(self) -> Error {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_with_an_unknown_outcome_is_told_as_unknown() {
        let error = |reason, outcome| StoreError {
            outcome,
            ..StoreError::not_done(reason, "said so")
        };
        let told = |reason, outcome| match error(reason, outcome).into_error("the release of", &"k".into()) {
            Error::Refused { .. } => "refused",
            Error::Unreachable { .. } => "unreachable",
            Error::OutcomeUnknown { .. } => "unknown",
            other => panic!("{other}"),
        };
        for (reason, not_done) in [
            (Reason::Refused, "refused"),
            (Reason::RefusedForNow, "refused"),
            (Reason::Unreachable, "unreachable"),
        ] {
            assert_eq!(told(reason.clone(), Outcome::NotDone), not_done);
            assert_eq!(told(reason, Outcome::Unknown), "unknown");
        }
    }
}
