//! The settings of a store that is opened by a URL, and their defaults.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;

use crate::Error;
use crate::store::credentials::Provider;
use crate::store::url::{Topology, UrlOptions};

/// The default timeout of one store operation.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);
/// The default limit of requests that wait to be sent to a store.
pub(crate) const DEFAULT_MAX_QUEUED: usize = 65_536;
/// The default time for replicas to acknowledge something.
const DEFAULT_WITHIN: Duration = Duration::from_millis(500);

/// The settings of every store that is opened by a URL.
#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "only servers want to know")
)]
#[derive(Debug, Clone)]
pub(crate) struct Common {
    pub(crate) timeout: Duration,
    /// How many requests may wait to be sent.
    pub(crate) max_queued: usize,
    pub(crate) prefix: String,
    pub(crate) service_name: String,
    pub(crate) tls: Tls,
    /// The source of user and password, if they are not in the URL.
    pub(crate) credentials: Option<Provider>,
    /// The replicas that must acknowledge acquires and renewals.
    pub(crate) replicas: Option<MinReplicas>,
    /// Identifies the holders of this client's locks.
    pub(crate) uuid: Uuid,
}

/// Certificates for encrypted connections, in PEM.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    /// The authority to trust, instead of the system's.
    #[cfg(feature = "tls")]
    pub(crate) root: Option<Vec<u8>>,
    /// Our own certificate and its key.
    #[cfg(feature = "tls")]
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It contains a private key.
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// How many replicas have to acknowledge acquires and renewals, and within which time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MinReplicas {
    pub(crate) count: u32,
    pub(crate) within: Duration,
}

impl MinReplicas {
    pub(crate) fn in_url(options: &UrlOptions) -> Result<Option<MinReplicas>, Error> {
        match (options.min_replicas, options.min_replicas_within) {
            (Some(count), within) => Ok(Some(MinReplicas {
                count,
                within: within.unwrap_or(DEFAULT_WITHIN),
            })),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Error::invalid_option(
                "min_replicas_within",
                "it has no effect without min_replicas, the number of replicas",
            )),
        }
    }

    pub(crate) fn check(self, store: Option<&Topology>, lease: Duration) -> Result<(), Error> {
        let no_replicas = |reason: &str| Error::invalid_option("min_replicas", reason);
        match store {
            Some(Topology::Server(_) | Topology::Sentinel(_) | Topology::Cluster(_)) => {}
            Some(Topology::Registered(_)) => {
                return Err(no_replicas("only Redis and Valkey have such replicas"));
            }
            Some(Topology::Memory { .. }) => return Err(no_replicas("a store in memory has no replicas")),
            Some(Topology::Quorum(_)) => {
                return Err(no_replicas(
                    "a quorum needs none: a majority of its servers has each lock itself",
                ));
            }
            None => return Err(no_replicas("it goes with a URL, not with a store of your own")),
        }
        if self.count == 0 {
            return Err(no_replicas("it must be at least 1; omit it to require none"));
        }
        let invalid = |reason| Error::InvalidOption {
            option: "min_replicas_within",
            reason,
        };
        if self.within < Duration::from_millis(1) {
            return Err(invalid("it must be at least 1ms".to_owned()));
        }
        if self.within > lease / 3 {
            return Err(invalid(format!(
                "{:?} is longer than a third of the lease, which is {lease:?}: too little would be left of it",
                self.within
            )));
        }
        Ok(())
    }
}
