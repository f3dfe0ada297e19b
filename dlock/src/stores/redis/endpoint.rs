//! Where the server of a connection is: at a fixed address, or wherever the master is just now.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

use super::sentinel::Master;
use crate::store::url::Address;
use crate::store::{Reason, StoreError};

/// Where connections go to.
#[derive(Debug, Clone)]
pub(super) enum Endpoint {
    Fixed(Fixed),
    /// The master that sentinels name.
    Master(Master),
}

/// An address behind which the server may change: a name that is resolved anew, a proxy, a service of Kubernetes.
#[derive(Debug, Clone)]
pub(super) struct Fixed {
    address: Address,
    /// How often another server turned out to be the master there.
    changes: Arc<watch::Sender<u64>>,
}

impl Endpoint {
    pub(super) fn fixed(address: Address) -> Endpoint {
        Endpoint::Fixed(Fixed {
            address,
            changes: Arc::new(watch::Sender::new(0)),
        })
    }

    /// The address to connect to now; waits until one is known, or known to be unavailable.
    pub(super) async fn find(&self) -> Result<Address, StoreError> {
        match self {
            Endpoint::Fixed(fixed) => Ok(fixed.address.clone()),
            Endpoint::Master(master) => master.named().await,
        }
    }

    /// Why there is none yet, where it takes too long.
    pub(super) fn missing(&self) -> StoreError {
        match self {
            Endpoint::Fixed(fixed) => {
                StoreError::not_done(Reason::Unreachable, format!("{} was not asked", fixed.address))
            }
            Endpoint::Master(master) => master.missing(),
        }
    }

    /// Whether the address never changes.
    pub(super) fn is_fixed(&self) -> bool {
        matches!(self, Endpoint::Fixed(_))
    }

    /// Whether connections still go there.
    pub(super) fn is_at(&self, address: &Address) -> bool {
        match self {
            Endpoint::Fixed(_) => true,
            Endpoint::Master(master) => master.is_at(address),
        }
    }

    /// Until connections go somewhere else than there, or another server has been found at a fixed address.
    pub(super) async fn left(&self, address: &Address) {
        match self {
            Endpoint::Fixed(fixed) => {
                let mut changes = fixed.changes.subscribe();
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            Endpoint::Master(master) => master.left(address).await,
        }
    }

    /// The server is not there, or not what it should be.
    pub(super) fn doubt(&self) {
        if let Endpoint::Master(master) = self {
            master.look();
        }
    }

    /// The master at a fixed address is another server than before: connections that still stand lead elsewhere.
    pub(super) fn changed(&self) {
        if let Endpoint::Fixed(fixed) = self {
            fixed.changes.send_modify(|changes| *changes += 1);
        }
    }
}

/// For messages; without credentials.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Fixed(fixed) => fixed.address.fmt(f),
            Endpoint::Master(master) => master.fmt(f),
        }
    }
}
