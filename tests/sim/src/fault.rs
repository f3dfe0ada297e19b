//! Faults and their times: storms and calms.

use crate::plan::{Millis, Plan, Trouble, Way};
use crate::trace::Who;
use crate::words;
use crate::world::{Event, tell, with};

/// The active faults.
#[derive(Debug)]
pub(crate) struct Weather {
    /// By their index in the plan.
    active: Vec<usize>,
    /// Since when there is none.
    calm_since: Option<Millis>,
    /// Whether there was one.
    has_been: bool,
    /// Crashes, stops and ends of processes that the runner has to carry out.
    pub(crate) orders: Vec<Order>,
}

/// What is done to a process from outside of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Stop(usize),
    Resume(usize),
    Suspend(usize),
    Wake(usize),
    Crash(usize),
    End(usize),
    Restart(usize),
}

/// Chances in a thousand of what happens to a message, and by how much it may be late.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Chances {
    pub(crate) lost: u32,
    pub(crate) late: u32,
    pub(crate) doubled: u32,
    pub(crate) broken: u32,
    pub(crate) by: Millis,
}

impl Weather {
    pub(crate) fn new(_plan: &Plan) -> Weather {
        Weather {
            active: Vec::new(),
            calm_since: Some(0),
            has_been: false,
            orders: Vec::new(),
        }
    }

    /// Since when there is no fault, if there is none.
    pub(crate) fn calm_since(&self) -> Option<Millis> {
        self.calm_since
    }

    /// Whether there was any fault so far.
    pub(crate) fn has_been(&self) -> bool {
        self.has_been
    }

    pub(crate) fn chances(&self, plan: &Plan) -> Chances {
        let mut all = Chances::default();
        for index in &self.active {
            if let Trouble::Storm {
                lost,
                late,
                doubled,
                broken,
                by,
            } = plan.faults[*index].what
            {
                all.lost = all.lost.max(lost);
                all.late = all.late.max(late);
                all.doubled = all.doubled.max(doubled);
                all.broken = all.broken.max(broken);
                all.by = all.by.max(by);
            }
        }
        all
    }

    /// Whether no message passes in this direction.
    pub(crate) fn is_cut(&self, plan: &Plan, of: (usize, usize), to_store: bool) -> bool {
        self.active.iter().any(|index| match plan.faults[*index].what {
            Trouble::Cut { process, store, way } => {
                process.is_none_or(|process| process == of.0)
                    && store.is_none_or(|store| store == of.1)
                    && match way {
                        Way::Both => true,
                        Way::ToStore => to_store,
                        Way::ToProcess => !to_store,
                    }
            }
            _ => false,
        })
    }
}

pub(crate) fn begin(index: usize) {
    with(|world| {
        let fault = world.plan.faults[index].clone();
        world.counts.faults += 1;
        tell!(world, Who::World, "{}", words::trouble(fault.what, fault.lasts));
        world.weather.active.push(index);
        world.weather.calm_since = None;
        world.weather.has_been = true;
        let ends = world.now + fault.lasts;
        world.schedule(ends, Event::FaultEnds(index));
        let orders = &mut world.weather.orders;
        match fault.what {
            Trouble::ProcessStops { process } => orders.push(Order::Stop(process)),
            Trouble::ProcessSuspended { process } => orders.push(Order::Suspend(process)),
            Trouble::ProcessCrashes { process } => orders.push(Order::Crash(process)),
            Trouble::ProcessEnds { process } => orders.push(Order::End(process)),
            _ => {}
        }
    });
    let what = with(|world| world.plan.faults[index].what);
    match what {
        Trouble::StoreStops { store, loses_data } => crate::store::stop(store, loses_data),
        Trouble::StoreLosesData { store } => crate::store::lose_data(store),
        Trouble::StoreFailsOver { store, lag } => crate::store::fail_over(store, lag),
        Trouble::StoreRefuses { store, full } => with(|world| world.stores[store].refuse(full)),
        Trouble::StoreIsSlow { store, each } => with(|world| world.stores[store].slow_down(each)),
        Trouble::StoreClockSteps { store, by } => {
            with(|world| {
                world.stores[store].step_clock(by);
                world.counts.sometimes("a store's clock that stepped");
            });
            crate::check::time::clock_stepped();
        }
        Trouble::ForcedOpen { key } => crate::store::force_open(&format!("k{key}").into()),
        _ => {}
    }
}

/// A replica that is to take over later is like its store for the last time.
pub(crate) fn replicates(index: usize) {
    with(|world| {
        if let Trouble::StoreFailsOver { store, .. } = world.plan.faults[index].what {
            world.stores[store].replicate();
        }
    });
}

pub(crate) fn end(index: usize) {
    let what = with(|world| {
        let what = world.plan.faults[index].what;
        if world.plan.faults[index].lasts > 0 {
            tell!(world, Who::World, "{}", words::relief(what));
        }
        world.weather.active.retain(|active| *active != index);
        if world.weather.active.is_empty() {
            world.weather.calm_since = Some(world.now);
        }
        let orders = &mut world.weather.orders;
        match what {
            Trouble::ProcessStops { process } => orders.push(Order::Resume(process)),
            Trouble::ProcessSuspended { process } => orders.push(Order::Wake(process)),
            Trouble::ProcessCrashes { process } | Trouble::ProcessEnds { process } => {
                orders.push(Order::Restart(process));
            }
            _ => {}
        }
        what
    });
    match what {
        Trouble::StoreStops { store, .. } | Trouble::StoreFailsOver { store, .. } => {
            crate::store::come_back(store);
        }
        Trouble::StoreIsSlow { store, .. } => with(|world| world.stores[store].slow_down(0)),
        Trouble::StoreRefuses { store, .. } => with(|world| world.stores[store].refuse_no_more()),
        _ => {}
    }
}
