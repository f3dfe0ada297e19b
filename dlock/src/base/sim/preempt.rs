//! Simulates preemption by other threads: a simulated world has one thread.

use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    static OTHERS: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Sets a function that is called at each point where another thread could interfere with the library.
pub fn on_preempt(others: Option<Rc<dyn Fn()>>) {
    OTHERS.with(|slot| *slot.borrow_mut() = others);
}

/// Lets another thread run.
pub(crate) fn preempt() {
    let others = OTHERS.with(|slot| slot.borrow().clone());
    if let Some(others) = others {
        others();
    }
}
