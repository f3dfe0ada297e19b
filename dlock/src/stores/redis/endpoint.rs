//! The address of a connection's server: fixed, or that of the current master.

use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

use super::sentinel::Master;
use crate::store::url::Address;
use crate::store::{Reason, StoreError};

/// The target of connections.
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

    /// Returns the current address; waits until one is known, or known to be unavailable.
    pub(super) async fn find(&self) -> Result<Address, StoreError> {
        match self {
            Endpoint::Fixed(fixed) => Ok(fixed.address.clone()),
            Endpoint::Master(master) => master.named().await,
        }
    }

    /// Why there is no address yet, if it takes too long.
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

    /// Whether connections still go to this address.
    pub(super) fn is_at(&self, address: &Address) -> bool {
        match self {
            Endpoint::Fixed(_) => true,
            Endpoint::Master(master) => master.is_at(address),
        }
    }

    /// Returns how often another server was found at a fixed address.
    pub(super) fn changes(&self) -> u64 {
        match self {
            Endpoint::Fixed(fixed) => *fixed.changes.borrow(),
            Endpoint::Master(_) => 0,
        }
    }

    /// Completes when the address changes, or another server was found at a fixed address after these
    /// [changes](Self::changes).
    pub(super) async fn left(&self, address: &Address, changes: u64) {
        match self {
            Endpoint::Fixed(fixed) => {
                let mut now = fixed.changes.subscribe();
                if now.wait_for(|now| *now != changes).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            Endpoint::Master(master) => master.left(address).await,
        }
    }

    /// Reports that the server is missing, or not what it should be.
    pub(super) fn doubt(&self) {
        if let Endpoint::Master(master) = self {
            master.look();
        }
    }

    /// Reports that the master at a fixed address is another server than before: existing connections lead to the old
    /// one.
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_server_that_was_found_while_a_connection_was_opened_is_another_one() {
        let address = Address::Tcp {
            host: "localhost".to_owned(),
            port: 6379,
        };
        let endpoint = Endpoint::fixed(address.clone());
        let changes = endpoint.changes();
        assert!(endpoint.left(&address, changes).now_or_never().is_none());
        endpoint.changed();
        assert!(endpoint.left(&address, changes).now_or_never().is_some());
        assert!(
            endpoint
                .left(&address, endpoint.changes())
                .now_or_never()
                .is_none()
        );
    }
}
