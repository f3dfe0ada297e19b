use std::panic::Location;
use std::sync::Weak;

use uuid::Uuid;

use super::*;
use crate::base::moment::Moment;
use crate::engine::grant::Terms;
use crate::engine::handoff::{HandoffBudget, HandoffTerms};
use crate::runtime::grants::{Granted, Issuer};

const SEC: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);
const HOLD: u64 = 1;

/// A lock that was granted now, and may be handed on.
fn granted(registry: &Registry, now: Instant) -> Arc<Grant> {
    let issuer = Issuer {
        uuid: Uuid::from_u128(1),
        client: Weak::new(),
    };
    let what = Granted {
        kind: Kind::Lock,
        amount: 1,
        key: "k".into(),
        number: 1,
        token: 1,
        sent: now,
        lease: LEASE,
        budget: HandoffBudget::new(Kind::Lock, 10, (1, 11), Moment::of(now), Moment::of(now)),
        under: None,
    };
    let terms = Terms {
        lease: LEASE,
        renewed: true,
        max_end: None,
        min_until: None,
    };
    let grant = Arc::new(Grant::new(
        what,
        &Arc::new(issuer),
        terms,
        (HOLD, Location::caller()),
    ));
    registry.add(&grant, now);
    grant
}

/// As the next holder has it.
fn heir(grant: &Grant) -> Arc<Grant> {
    let wanted = HandoffTerms {
        lease: LEASE,
        max_hold: None,
        handoffs: 10,
    };
    Arc::new(grant.heir(&wanted, Location::caller()).0)
}

fn collect(registry: &Registry, now: Instant) -> Vec<u64> {
    let due = registry.collect(now, |_| Lane::default());
    due.into_iter().map(|(_, number)| number).collect()
}

#[test]
fn what_comes_in_doubt_between_two_holders_is_not_handed_on() {
    let now = clock::now();
    for failed in [false, true] {
        let registry = Registry::default();
        let grant = granted(&registry, now);
        assert_eq!(grant.leave(HOLD, now), Some(None));
        assert!(grant.may_be_handed_on(now));
        let heir = heir(&grant);
        if failed {
            let error = Err(BackendError::unknown("no answer"));
            registry.answered(now, std::iter::once((grant.number, LEASE, error)));
        } else {
            registry.doubt(None, |_| Lane::default());
        }
        assert!(!registry.replace(&heir));
        assert!(!grant.may_be_handed_on(now));
    }
}

#[test]
fn an_heir_is_renewed_whose_predecessor_was_being_renewed() {
    let now = clock::now();
    let registry = Registry::default();
    let grant = granted(&registry, now);
    let at = now + LEASE / 3;
    assert_eq!(collect(&registry, at), [1]);
    let asked = registry.ask(at, std::iter::once(1));
    assert_eq!(asked.len(), 1);
    let heir = heir(&grant);
    assert!(registry.replace(&heir));
    // The one question is enough.
    registry.doubt(None, |_| Lane::default());
    assert!(collect(&registry, at + SEC).is_empty());
    // Its answer is the heir's. What was asked before the doubt ends that for nobody.
    let yes = || std::iter::once((1, LEASE, Ok(Renewal::Renewed)));
    registry.answered(now, yes());
    assert!(heir.is_suspect());
    assert_eq!(collect(&registry, at + SEC), [1]);
    registry.answered(clock::now(), yes());
    assert!(!heir.is_suspect() && !grant.is_suspect());
    assert_eq!(registry.len(), 1);
}
