//! Of the layer `store`, what the engine needs.

#[path = "../../../dlock/src/store/announce.rs"]
mod announce;
#[path = "../../../dlock/src/store/failure.rs"]
mod failure;
#[path = "../../../dlock/src/store/lease.rs"]
mod lease;
#[path = "../../../dlock/src/store/release.rs"]
mod release;
#[path = "../../../dlock/src/store/renewal.rs"]
mod renewal;

pub(crate) use self::announce::Announce;
pub(crate) use self::failure::{Outcome, Reason, StoreError};
pub(crate) use self::lease::GivenLease;
pub(crate) use self::release::ReleaseReply;
pub(crate) use self::renewal::{Lane, Renewal};
