//! The ways in which a single request or reply is lost.

use dlock_tests::{Gateway, NetFault, Protocol, Swallow};

/// What is lost.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loss {
    /// The server never gets it.
    Request,
    /// The server has done it, and the connection breaks.
    Reply,
    /// The server has done it, and nothing comes back.
    Silence,
}

/// Each of them.
pub(super) const LOSSES: [Loss; 3] = [Loss::Request, Loss::Reply, Loss::Silence];

impl Loss {
    /// Of the next request that is so.
    pub(super) fn of<P: Protocol>(
        self,
        proxy: &Gateway<P>,
        is: impl Fn(&P::Request) -> bool + Send + 'static,
    ) -> NetFault {
        match self {
            Loss::Request => proxy.lose(1, is),
            Loss::Reply => proxy.swallow(1, Swallow::Cut, is),
            Loss::Silence => proxy.swallow(1, Swallow::Hang, is),
        }
    }
}
