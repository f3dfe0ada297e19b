//! Messages that members have returned, and so deleted, and that no caller has received yet.

use parking_lot::Mutex;

use crate::base::chance::HashMap;
use crate::store::operations::EntryName;

type Messages = Vec<Vec<u8>>;

/// By mailbox.
#[derive(Debug, Default)]
pub(super) struct LateMail(Mutex<HashMap<EntryName, Messages>>);

impl LateMail {
    pub(super) fn put(&self, mailbox: &EntryName, messages: Messages) {
        if !messages.is_empty() {
            let mut mail = self.0.lock();
            mail.entry(mailbox.clone()).or_default().extend(messages);
        }
    }

    /// Removes the messages of a mailbox and returns each once.
    pub(super) fn take(&self, mailbox: &EntryName) -> Messages {
        let mut messages = self.0.lock().remove(mailbox).unwrap_or_default();
        messages.sort_unstable();
        messages.dedup();
        messages
    }
}
