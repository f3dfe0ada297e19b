//! The same plan goes the same way, every time and everywhere.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::plan::Runtimes;
use crate::trace::Keep;
use crate::{batch, draw, kept, panics, run};

const SEEDS: u64 = 1_000;

#[test]
fn worlds_go_the_same_way_twice() {
    panics::install();
    let next = AtomicU64::new(0);
    let differ = |runtimes| {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        (seed < SEEDS).then(|| {
            let plan = Rc::new(draw::plan(seed, runtimes));
            let outcome = run::run(&plan, Keep::Digest);
            assert!(
                outcome.violation.is_none(),
                "seed {seed}, {runtimes:?}: {:?}",
                outcome.violation
            );
            if let Some(story) = batch::differs(&plan, &outcome) {
                panic!("seed {seed}, {runtimes:?}: {story}");
            }
        })
    };
    for runtimes in [Runtimes::One, Runtimes::Each] {
        next.store(0, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| while differ(runtimes).is_some() {});
            }
        });
    }
}

/// On another machine too: the digests are kept with the plans.
#[test]
fn kept_plans_have_their_digests() {
    panics::install();
    for path in kept::list(&kept::directory()).expect("the kept plans") {
        let kept = kept::read(&path).expect("a kept plan");
        let Some(expected) = kept.digest else {
            continue;
        };
        let outcome = run::run(&Rc::new(kept.plan), Keep::Digest);
        assert_eq!(
            format!("{:016x}", outcome.digest),
            expected,
            "{}: its trace is another one; if a change of the library or of the simulation is why, write the new \
             digest there",
            path.display()
        );
    }
}
