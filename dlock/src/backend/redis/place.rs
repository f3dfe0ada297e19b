//! Where the server of a connection is: at a fixed address, or wherever the master is just now.

use std::fmt;

use super::sentinel::Master;
use crate::backend::{BackendError, Reason};
use crate::url::Address;

/// Where connections go to.
#[derive(Debug, Clone)]
pub(super) enum Place {
    Fixed(Address),
    /// The master that sentinels name.
    Master(Master),
}

impl Place {
    /// The address to connect to now; waits until there is one, or none to be had.
    pub(super) async fn find(&self) -> Result<Address, BackendError> {
        match self {
            Place::Fixed(address) => Ok(address.clone()),
            Place::Master(master) => master.named().await,
        }
    }

    /// Why there is none yet, where it takes too long.
    pub(super) fn missing(&self) -> BackendError {
        match self {
            Place::Fixed(address) => {
                BackendError::not_done(Reason::Unreachable, format!("{address} was not asked"))
            }
            Place::Master(master) => master.missing(),
        }
    }

    /// Whether the server is always the one that was first connected to.
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self, Place::Fixed(_))
    }

    /// Whether connections still go there.
    pub(super) fn is_at(&self, address: &Address) -> bool {
        match self {
            Place::Fixed(_) => true,
            Place::Master(master) => master.is_at(address),
        }
    }

    /// Until connections go somewhere else than there.
    pub(super) async fn left(&self, address: &Address) {
        match self {
            Place::Fixed(_) => std::future::pending().await,
            Place::Master(master) => master.left(address).await,
        }
    }

    /// The server is not there, or not what it should be.
    pub(super) fn doubt(&self) {
        if let Place::Master(master) = self {
            master.look();
        }
    }
}

/// For messages; without credentials.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Fixed(address) => address.fmt(f),
            Place::Master(master) => master.fmt(f),
        }
    }
}
