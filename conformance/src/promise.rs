//! The message of a failed test.

use std::fmt::Debug;

/// A promise of the contract, in the words of the seam's documentation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promise(pub(crate) &'static str);

/// The promise about a kind that the store does not support.
pub(crate) const REFUSED: Promise =
    Promise("A kind that the store does not support fails with Unsupported, and nothing is done");

/// The promise about the holders of a key.
pub(crate) const HOLDERS: Promise = Promise(
    "inspect: There is one Holder for each grant, but one for each permit of a grant of several; a grant that is kept by its min_hold is among them",
);

impl Promise {
    /// Fails the test unless the promise is kept, and says what was found instead.
    #[track_caller]
    pub(crate) fn holds(self, kept: bool, found: impl Debug) {
        if !kept {
            self.is_broken(found);
        }
    }

    /// Fails the test, and says what was found.
    #[track_caller]
    pub(crate) fn is_broken(self, found: impl Debug) -> ! {
        panic!("broken promise: \"{}\"\n  found: {found:?}", self.0);
    }

    /// The same for two values that must be equal.
    #[track_caller]
    pub(crate) fn same<T: PartialEq + Debug>(self, found: T, expected: T) {
        assert!(
            found == expected,
            "broken promise: \"{}\"\n  found:    {found:?}\n  expected: {expected:?}",
            self.0
        );
    }
}
