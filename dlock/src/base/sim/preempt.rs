//! What other threads do in between: a simulated world has one.

use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    static OTHERS: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Has this called wherever the library would go wrong if another thread did something at that moment, and it were not
/// prepared for it.
pub fn on_preempt(others: Option<Rc<dyn Fn()>>) {
    OTHERS.with(|slot| *slot.borrow_mut() = others);
}

/// Another thread may run now.
pub(crate) fn preempt() {
    let others = OTHERS.with(|slot| slot.borrow().clone());
    if let Some(others) = others {
        others();
    }
}
