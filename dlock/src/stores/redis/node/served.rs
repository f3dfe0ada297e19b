//! A connection that is served, and how that ends.

use std::future::Future;
use std::pin::Pin;

use super::alarm::Timer;
use super::contacts::Contacts;
use super::replicas::Wires;
use crate::store::StoreError;
use crate::stores::redis::connect::{Connected, Connector};

/// A spare connection, made because the one in use may be dead: the network or a middlebox forgets idle connections. A
/// server that is only slow does not answer on a new connection either, and that is then dropped.
type Spare = Pin<Box<dyn Future<Output = Result<Connected, StoreError>> + Send>>;

/// A connection that is served.
pub(super) struct Served {
    pub(super) wires: Wires,
    pub(super) contacts: Contacts,
    /// Completes when another server has taken over; `None` for a fixed address.
    pub(super) left: Option<Timer>,
    pub(super) spare: Option<Spare>,
    /// A spare was tried since the last answer, and was useless.
    pub(super) was_tried: bool,
}

impl Served {
    pub(super) fn new(connector: &Connector, connected: Connected) -> Served {
        let (endpoint, address) = (connector.endpoint.clone(), connected.address.clone());
        Served {
            wires: Wires::new(connected),
            contacts: Contacts::new(),
            left: (!endpoint.is_fixed())
                .then(|| -> Timer { Box::pin(async move { endpoint.left(&address, 0).await }) }),
            spare: None,
            was_tried: false,
        }
    }
}

/// Why a connection is not served any more.
pub(super) enum End {
    Broken,
    /// Another one exists already.
    Replaced(Box<Connected>),
    Closed,
}
