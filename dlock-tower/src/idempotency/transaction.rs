//! The response that a handler has put into its own transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::Response;
use parking_lot::Mutex;

/// A handler's transaction.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// Whether the handler has declared that all of its effects are in it.
    declared: AtomicBool,
    /// The last response put into it.
    response: Mutex<Option<Put>>,
}

/// A response that a handler has put into a transaction.
#[derive(Debug, Clone)]
pub(super) struct Put {
    pub(super) response: Arc<Response<Bytes>>,
    /// An earlier transaction of the same handler was given a response too.
    pub(super) again: bool,
}

impl Transaction {
    pub(super) fn declare(&self) {
        self.declared.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_declared(&self) -> bool {
        self.declared.load(Ordering::Relaxed)
    }

    pub(super) fn put(&self, response: Response<Bytes>) {
        let mut put = self.response.lock();
        *put = Some(Put {
            response: Arc::new(response),
            again: put.is_some(),
        });
    }

    pub(super) fn has_response(&self) -> bool {
        self.response.lock().is_some()
    }

    pub(super) fn response(&self) -> Option<Put> {
        self.response.lock().clone()
    }
}
