//! The libraries that take part in each workload.

use crate::peer::Peer::{
    self, Dlock, DlockUnawaited, NodeRedlock, RedisPy, Redisson, RedissonDefaults, Redsync, Rslock,
};
use crate::workload::Workload;

/// A library that is measured, and for [`Workload::Lone`] the one whose process waits alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entrant {
    /// The library that the workload is about.
    pub peer: Peer,
    /// The library of the process that waits alone.
    pub lone: Option<Peer>,
}

impl Entrant {
    /// All entrants of a workload, in the order in which they are shown.
    #[must_use]
    pub fn all_of(workload: Workload) -> Vec<Entrant> {
        let alone = |peers: &[Peer]| {
            peers
                .iter()
                .map(|peer| Entrant {
                    peer: *peer,
                    lone: None,
                })
                .collect()
        };
        match workload {
            Workload::Sequential => alone(&[
                Redisson,
                Redsync,
                NodeRedlock,
                RedisPy,
                Rslock,
                Dlock,
                DlockUnawaited,
            ]),
            Workload::Parallel => alone(&[
                Redisson,
                RedissonDefaults,
                Redsync,
                NodeRedlock,
                RedisPy,
                Rslock,
                Dlock,
                DlockUnawaited,
            ]),
            Workload::Contended => alone(&[
                Redisson,
                RedissonDefaults,
                Redsync,
                NodeRedlock,
                RedisPy,
                Rslock,
                Dlock,
            ]),
            Workload::Processes | Workload::Wakeup => {
                alone(&[Redisson, Redsync, NodeRedlock, RedisPy, Rslock, Dlock])
            }
            Workload::Fair | Workload::Held => alone(&[Redisson, Dlock]),
            Workload::Lone => [(Redisson, Redisson), (Dlock, Dlock), (Dlock, Redisson)]
                .map(|(peer, lone)| Entrant {
                    peer,
                    lone: Some(lone),
                })
                .into(),
        }
    }

    /// As it is written in the results, as in `dlock+redisson`.
    #[must_use]
    pub fn name(self) -> String {
        match self.lone {
            Some(lone) => format!("{}+{}", self.peer.name(), lone.name()),
            None => self.peer.name().to_owned(),
        }
    }
}
