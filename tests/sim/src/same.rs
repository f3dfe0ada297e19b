//! Worlds keep all promises, and the same plan goes the same way, every time and everywhere.

use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::plan::Runtimes;
use crate::trace::Keep;
use crate::{batch, draw, kept, panics, run};

/// How many worlds of each sort: 500, or what `DLOCK_SIM_SEEDS` says.
fn seeds() -> u64 {
    std::env::var("DLOCK_SIM_SEEDS").map_or(500, |seeds| seeds.parse().expect("DLOCK_SIM_SEEDS is a number"))
}

/// Runs the worlds of all seeds twice; what is wrong with some of them.
fn wrong_twice(runtimes: Runtimes) -> String {
    panics::install();
    let seeds = seeds();
    let next = AtomicU64::new(0);
    let wrong = Mutex::new(Vec::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return;
            }
            let plan = Rc::new(draw::plan(seed, runtimes));
            let outcome = run::run(&plan, Keep::Digest);
            let differs = batch::differs(&plan, &outcome);
            let violation = outcome.violation.map(|it| format!("{}: {}", it.of, it.story));
            for story in differs.into_iter().chain(violation) {
                let mut wrong = wrong.lock().expect("no thread panics under it");
                wrong.push(format!("seed {seed}: {story}"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut wrong = wrong.into_inner().expect("no thread panics under it");
    wrong.sort();
    wrong.join("\n")
}

#[test]
fn worlds_in_one_runtime_keep_all_promises_and_go_the_same_way_twice() {
    assert_eq!(wrong_twice(Runtimes::One), "");
}

#[test]
fn worlds_of_several_runtimes_keep_all_promises_and_go_the_same_way_twice() {
    assert_eq!(wrong_twice(Runtimes::Each), "");
}

#[test]
fn kept_plans_show_what_they_have_to() {
    panics::install();
    for path in kept::list(&kept::directory()).expect("the kept plans") {
        let kept = kept::read(&path).expect("a kept plan");
        if let Err(why) = kept::check(&kept) {
            panic!("{}: {why}\nit found: {}", path.display(), kept.found);
        }
    }
}

/// On another machine too: digests are kept with plans.
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
            "{}: its trace is another one; where a change of the library or of the simulation is why, write the new \
             digest there",
            path.display()
        );
    }
}
