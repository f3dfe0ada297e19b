//! Hashes over parts.

use sha2::{Digest, Sha256};

/// A hash over parts, each delimited by its length.
pub(super) struct Parted(Sha256);

impl Parted {
    /// `what` separates hashes of different things.
    pub(super) fn new(what: &str) -> Parted {
        Parted(Sha256::new()).with(what)
    }

    pub(super) fn with(mut self, part: impl AsRef<[u8]>) -> Parted {
        let part = part.as_ref();
        self.0.update((part.len() as u64).to_be_bytes());
        self.0.update(part);
        self
    }

    pub(super) fn with_optional(self, part: Option<impl AsRef<[u8]>>) -> Parted {
        match part {
            Some(part) => self.with([1]).with(part),
            None => self.with([0]),
        }
    }

    pub(super) fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}
