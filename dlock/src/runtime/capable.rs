//! Whether the store supports the options of an acquisition.

use std::time::Duration;

use crate::Error;
use crate::runtime::options::{Lease, Options};
use crate::store::Capabilities;

/// Refuses options that the store does not support, and says what it supports.
pub(crate) fn check(options: &Options, lease: Duration, capabilities: &Capabilities) -> Result<(), Error> {
    capabilities.require(options.kind)?;
    let store = &capabilities.name;
    let lacks = |what: &str, reason| {
        Err(Error::Unsupported {
            what: what.to_owned(),
            reason,
        })
    };
    if options.lock.min_hold.is_some() && !capabilities.min_hold {
        return lacks(
            "min_hold",
            format!(
                "{store} cannot keep a key taken after its release, so leave it out or use a store that can"
            ),
        );
    }
    if matches!(options.lock.lease, Some(Lease::Fixed(_))) && !capabilities.fixed_lease {
        return lacks(
            "a fixed lease",
            format!("{store} has one lease for all that a client holds: use a renewed lease with max_hold"),
        );
    }
    if options.prefer_writers && !capabilities.prefer_writers {
        return lacks(
            "prefer_writers",
            format!("readers do not yield to a writer in {store}, so leave it out"),
        );
    }
    if options.permits.is_some_and(|permits| permits.limit.is_some()) && !capabilities.limits {
        return lacks(
            "a limit",
            format!("{store} does not judge a limit in an acquire: use a semaphore with a number of permits"),
        );
    }
    // The option that the lease comes from.
    let option = match options.lock.lease {
        Some(Lease::Fixed(fixed)) if lease < fixed => "max_hold",
        Some(Lease::Fixed(_)) => "fixed_lease",
        Some(Lease::Renewed(_)) | None => "lease",
    };
    let invalid = |reason| Err(Error::InvalidOption { option, reason });
    if lease < capabilities.shortest_lease {
        let least = capabilities.shortest_lease;
        return invalid(format!(
            "{lease:?} is shorter than {least:?}, the shortest lease that {store} has"
        ));
    }
    let Some(most) = capabilities.longest_lease else {
        return Ok(());
    };
    if lease > most {
        return invalid(format!(
            "{lease:?} is longer than {most:?}, the longest lease (max_lease) that {store} has"
        ));
    }
    let max_hold = options.lock.max_hold.unwrap_or(Duration::MAX);
    match options.lock.min_hold.map(|least| least.min(max_hold)) {
        // The first lease lasts as long.
        Some(least) if least > most => Err(Error::InvalidOption {
            option: "min_hold",
            reason: format!(
                "{least:?} is longer than {most:?}, the longest lease (max_lease) that {store} has"
            ),
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LockOptions;
    use crate::store::Kind;

    const LEASE: Duration = Duration::from_secs(30);

    fn refused(options: &Options, lease: Duration, capabilities: &Capabilities) -> String {
        check(options, lease, capabilities).unwrap_err().to_string()
    }

    #[test]
    fn what_the_store_lacks_is_refused_with_what_it_has() {
        let plain = Capabilities::new([Kind::Mutex, Kind::Read]);
        check(&Options::default(), LEASE, &plain).unwrap();
        let fair = Options {
            kind: Kind::Fair,
            ..Options::default()
        };
        assert_eq!(
            refused(&fair, LEASE, &plain),
            "a lock of kind fair is not supported: this store has lock, read; use a plain lock, whose waiters have no \
             order between processes, or a store with fair locks: Redis, Valkey, PostgreSQL, etcd or ZooKeeper"
        );
        let of = |lock| Options {
            lock,
            ..Options::default()
        };
        let kept = of(LockOptions::new().min_hold(LEASE));
        assert!(refused(&kept, LEASE, &plain).contains("min_hold"));
        check(&kept, LEASE, &plain.clone().min_hold(true)).unwrap();
        let limited = Options {
            kind: Kind::Permit,
            permits: Some(crate::runtime::options::Permits {
                amount: 1,
                total: None,
                limit: Some(3),
            }),
            ..Options::default()
        };
        let semaphores = Capabilities::new([Kind::Permit]);
        assert!(refused(&limited, LEASE, &semaphores).contains("a limit is not supported"));
        check(&limited, LEASE, &semaphores.limits(true)).unwrap();
    }

    #[test]
    fn leases_keep_to_what_the_store_has() {
        let store = Capabilities::new([Kind::Mutex])
            .shortest_lease(Duration::from_secs(2))
            .longest_lease(Duration::from_secs(60));
        let options = Options::default();
        let second = Duration::from_secs(1);
        assert!(refused(&options, second, &store).contains("option lease: 1s is shorter than 2s"));
        let fixed = LockOptions::new().fixed_lease(second);
        for (lock, named) in [
            (fixed, "option fixed_lease: 1s"),
            (
                LockOptions::new().fixed_lease(LEASE).max_hold(second),
                "option max_hold: 1s",
            ),
        ] {
            let reason = refused(
                &Options {
                    lock,
                    ..Options::default()
                },
                second,
                &store,
            );
            assert!(reason.contains(named), "{reason}");
        }
        assert!(refused(&options, Duration::from_secs(61), &store).contains("61s is longer than 60s"));
        check(&options, LEASE, &store).unwrap();
        let kept = |lock| Options {
            lock,
            ..Options::default()
        };
        let (store, long) = (store.min_hold(true), Duration::from_secs(300));
        let reason = refused(&kept(LockOptions::new().min_hold(long)), LEASE, &store);
        assert!(
            reason.contains("option min_hold") && reason.contains("300s is longer than 60s"),
            "{reason}"
        );
        let short = LockOptions::new().min_hold(Duration::from_secs(60));
        check(&kept(short), LEASE, &store).unwrap();
        let fixed = Options {
            lock: LockOptions::new().fixed_lease(LEASE),
            ..options
        };
        assert!(refused(&fixed, LEASE, &store.fixed_lease(false)).contains("max_hold"));
    }
}
