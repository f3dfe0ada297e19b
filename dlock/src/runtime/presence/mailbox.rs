//! What other clients may ask of a client: to publish what it does, or to check a lock. A message cannot make it do
//! anything that it would not do by itself.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use uuid::Uuid;

use crate::base::report::Intervention;
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::grants::Grant;
use crate::store::operations::{EntryName, Operations};
use crate::store::{GrantId, Outcome, Watch};

/// The version of messages.
const VERSION: &str = "dlock 1";
/// The pause after mail that a notification told of: a user who may publish can send any number of notifications.
const PAUSE: Duration = Duration::from_millis(100);
/// How many grants are looked at together.
const AT_ONCE: usize = 256;
/// How long an answer is kept.
const ANSWERED: Duration = Duration::from_secs(10);

/// A message to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// Publish what you do, under this name.
    Ask { reply: Uuid },
    /// This grant was changed by an operator: check it.
    Look { grant: GrantId },
}

impl Message {
    pub(crate) fn write(&self) -> String {
        match self {
            Message::Ask { reply } => format!("{VERSION}\task\t{reply}"),
            Message::Look { grant } => format!("{VERSION}\tlook\t{grant}"),
        }
    }

    fn read(text: &[u8]) -> Option<Message> {
        let text = std::str::from_utf8(text).ok()?;
        let mut fields = text.split('\t');
        let (version, what, about) = (fields.next()?, fields.next()?, fields.next()?);
        match what {
            _ if version != VERSION => None,
            "ask" => Some(Message::Ask {
                reply: Uuid::try_parse(about).ok()?,
            }),
            "look" => Some(Message::Look {
                grant: GrantId::parse(about)?,
            }),
            _ => None,
        }
    }
}

/// The mailbox of a client.
pub(super) struct Mailbox {
    name: EntryName,
    /// The subscription of a client that answers.
    watch: Option<Watch>,
    /// Whether some messages may be lost: the reply with them, or what was to be done for them.
    may_have_lost_some: bool,
}

impl Mailbox {
    pub(super) fn of(shared: &Shared, operations: &Arc<dyn Operations>, may_have_lost_some: bool) -> Mailbox {
        let name = EntryName::of_client("ask", shared.issuer().uuid);
        let answers = shared.settings.publicity.answers;
        let watch = answers.then(|| operations.clone().watch(&name));
        Mailbox {
            name,
            watch,
            may_have_lost_some,
        }
    }

    /// Waits for a message. Cancel safe.
    pub(super) async fn has_mail(&mut self) {
        match &mut self.watch {
            Some(watch) => watch.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Reads and handles all messages, of which one was told, and pauses.
    pub(super) async fn read_told(&mut self, shared: &Arc<Shared>, operations: &Arc<dyn Operations>) {
        self.read(shared, operations).await;
        tokio::time::sleep(PAUSE).await;
    }

    /// Reads and handles all messages.
    pub(super) async fn read(&mut self, shared: &Arc<Shared>, operations: &Arc<dyn Operations>) {
        self.watch.iter_mut().for_each(Watch::seen);
        let mail = operations.clone().mail(self.name.clone());
        let messages = match tokio::time::timeout(patience(shared), shared.noting(mail)).await {
            Ok(Ok(messages)) => messages,
            Ok(Err(error)) => {
                self.may_have_lost_some |= error.outcome == Outcome::Unknown;
                return;
            }
            Err(_) => {
                self.may_have_lost_some = true;
                return;
            }
        };
        if std::mem::take(&mut self.may_have_lost_some) {
            self.may_have_lost_some = !look_at_all(shared, operations).await;
        }
        let mut asked = Vec::new();
        for message in messages.iter().filter_map(|message| Message::read(message)) {
            match message {
                Message::Ask { reply } if shared.settings.publicity.answers => asked.push(reply),
                Message::Ask { .. } => {}
                Message::Look { grant } => look(shared, operations, grant).await,
            }
        }
        if asked.is_empty() {
            return;
        }
        asked.dedup();
        let report = shared.report(false).write();
        let answers = asked
            .into_iter()
            .map(|reply| answer(shared, operations, reply, &report));
        join_all(answers).await;
    }
}

/// Longer than the store takes to reply or to fail: what it returns is deleted there, and a message is read once.
fn patience(shared: &Shared) -> Duration {
    shared.settings.timeout * 2
}

async fn answer(shared: &Arc<Shared>, operations: &Arc<dyn Operations>, reply: Uuid, report: &str) {
    let name = EntryName::of_client("reply", reply);
    let put = operations.clone().put(name, report.into(), ANSWERED, true);
    if let Ok(Err(error)) = tokio::time::timeout(shared.settings.timeout, put).await {
        Event::NotWritten { error: Some(&error) }.emit();
    }
}

/// Checks a grant of this client: whether its holder is asked to stop, and whether the store still has it.
async fn look(shared: &Arc<Shared>, operations: &Arc<dyn Operations>, id: GrantId) {
    if id.client() != shared.issuer().uuid {
        return;
    }
    let Some(grant) = shared.watchdog.grant(id.number()) else {
        return;
    };
    look_for_revocation(shared, operations, &grant).await;
    let confirmed = shared.renew_one(&grant);
    let _ = tokio::time::timeout(shared.settings.timeout, confirmed).await;
}

/// Looks whether the holder of any grant is asked to stop. Returns false once none of some is answered: there may be a hundred
/// thousand, and the store be gone.
async fn look_at_all(shared: &Arc<Shared>, operations: &Arc<dyn Operations>) -> bool {
    for grants in shared.watchdog.grants(usize::MAX).chunks(AT_ONCE) {
        let looks = grants
            .iter()
            .map(|grant| look_for_revocation(shared, operations, grant));
        if !join_all(looks).await.contains(&true) {
            return false;
        }
    }
    true
}

/// Returns whether the store has answered.
async fn look_for_revocation(
    shared: &Arc<Shared>,
    operations: &Arc<dyn Operations>,
    grant: &Arc<Grant>,
) -> bool {
    let name = EntryName::of_grant("revoked", grant.key.clone(), grant.id());
    let entry = operations.clone().get(name);
    let Ok(Ok(entry)) = tokio::time::timeout(patience(shared), entry).await else {
        return false;
    };
    if let Some(entry) = entry
        && let Some(intervention) = Intervention::read(&entry.value)
        && grant.revoke(intervention.clone())
    {
        Event::Revoked {
            of: grant.of(),
            key: &grant.key,
            grant: grant.id(),
            intervention: &intervention,
        }
        .emit();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_reads_as_it_was_written_and_others_are_passed_over() {
        let grant = GrantId::parse("0192f3a4-0000-8000-8000-000000000001:7").unwrap();
        for message in [
            Message::Ask {
                reply: Uuid::from_u128(7),
            },
            Message::Look { grant },
        ] {
            assert_eq!(Message::read(message.write().as_bytes()), Some(message));
        }
        for other in [
            "",
            "dlock 2\task\t0192f3a4-0000-8000-8000-000000000001",
            "dlock 1\tstop\tx",
            "dlock 1\task\tx",
        ] {
            assert_eq!(Message::read(other.as_bytes()), None, "{other}");
        }
        assert_eq!(Message::read(b"\xff"), None);
    }
}
