//! Panics of the library and of the simulation, which are violations of the world in which they happen.
//!
//! The hook keeps them, since tokio swallows those of tasks.

use std::cell::RefCell;

use crate::user::OnPurpose;

thread_local! {
    /// What the thread has panicked with, while it runs a world.
    static SEEN: RefCell<Option<Seen>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Seen(Option<String>);

/// Until it is dropped, panics of this thread are kept and not printed.
pub(crate) struct Watched;

impl Drop for Watched {
    fn drop(&mut self) {
        SEEN.set(None);
    }
}

pub(crate) fn watch() -> Watched {
    SEEN.set(Some(Seen::default()));
    Watched
}

/// The first panic since the last call, with its place in the source.
pub(crate) fn take() -> Option<String> {
    SEEN.with_borrow_mut(|seen| seen.as_mut()?.0.take())
}

/// Silences panics of users, and keeps those of watched threads.
pub(crate) fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(set_hook);
}

fn set_hook() {
    let prints = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().is::<OnPurpose>() {
            return;
        }
        let is_kept = SEEN.with_borrow_mut(|seen| {
            let Some(Seen(first)) = seen else {
                return false;
            };
            let place = info
                .location()
                .map_or_else(String::new, |at| format!(" at {}:{}", at.file(), at.line()));
            let payload = info.payload();
            let message = payload.downcast_ref::<&str>().copied();
            let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            first.get_or_insert_with(|| format!("panicked{place}: {}", message.unwrap_or_default()));
            true
        });
        if !is_kept {
            prints(info);
        }
    }));
}
