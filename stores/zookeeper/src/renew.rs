//! Renews many grants in one write.
//!
//! The servers agree on a `multi` that only checks that nodes exist as on any write. So its reply shows that the leader
//! has a quorum, which proves that the session is kept, and that none of the nodes was removed.

use std::sync::Arc;

use dlock::store::{Renewal, StoreError};

use crate::acquire::given;
use crate::core::Core;
use crate::names::Node;
use crate::queues::Renew;
use crate::session::{Epoch, refused};
use crate::wire::{Change, Code, Reply, Request};

/// The most grants and the most bytes of paths in one write: servers accept a million bytes by default, and each change
/// has some overhead.
const MOST: (usize, usize) = (1000, 400_000);

/// The renewals in one write, each with its lock.
pub(crate) type Batch = Vec<(Arc<str>, Renew)>;

/// A renewal whose grant was held when it was sent.
struct Sent {
    renew: Renew,
    path: String,
}

impl Core {
    /// Removes as many renewals from the list as fit into one write.
    pub(crate) fn batch(&self, waiting: &mut Batch) -> Batch {
        let mut bytes = 0;
        let fits = waiting.iter().take(MOST.0).take_while(|(lock, _)| {
            bytes += self.root.len() + lock.len() + 80;
            bytes <= MOST.1
        });
        let count = fits.count().clamp(1, waiting.len());
        waiting.drain(..count).collect()
    }

    /// Renews the grants, and returns their locks.
    pub(crate) async fn renew(&self, batch: Batch) -> Vec<Arc<str>> {
        let epoch = self.session.epoch();
        let (mut locks, mut sent) = (Vec::new(), Vec::new());
        for (lock, renew) in batch {
            match self.grants.held(renew.grant, epoch) {
                Some((lock, node)) => sent.push(self.sent(&lock, &node, renew)),
                None => answer(renew, Ok(Renewal::Gone)),
            }
            locks.push(lock);
        }
        self.check(sent, epoch).await;
        locks
    }

    fn sent(&self, lock: &str, node: &Node, renew: Renew) -> Sent {
        let path = self.path_of(lock, &node.name);
        Sent { renew, path }
    }

    async fn check(&self, mut sent: Vec<Sent>, epoch: Epoch) {
        while !sent.is_empty() {
            let checks = sent.iter().map(|sent| Change::Check {
                path: sent.path.clone(),
                version: -1,
            });
            let checked = self.session.ask(Request::Multi(checks.collect())).answer().await;
            let codes = match checked.map_err(StoreError::from) {
                Ok(answer) if answer.epoch != epoch => vec![Code::NO_NODE; sent.len()],
                Ok(answer) => match answer.reply {
                    Ok(Reply::Multi(codes)) if codes.len() == sent.len() => codes,
                    Ok(_) => return fail(sent, &StoreError::unknown("the answer of another request came")),
                    Err(Code::SESSION_EXPIRED) => vec![Code::NO_NODE; sent.len()],
                    Err(code) => return fail(sent, &refused(code, "to look for the nodes of locks")),
                },
                Err(error) => return fail(sent, &error),
            };
            if codes.iter().all(|code| *code == Code::OK) {
                return self.renewed(sent, epoch);
            }
            let usual = [Code::OK, Code::NO_NODE, Code::ROLLED_BACK];
            if let Some(code) = codes.iter().find(|code| !usual.contains(code)) {
                return fail(sent, &refused(*code, "to look for the nodes of locks"));
            }
            // The reply names only the first node that is gone, so all others are looked up at once.
            sent = match self.existing(sent).await {
                Ok(sent) => sent,
                Err((sent, error)) => return fail(sent, &error),
            };
        }
    }

    /// Keeps the grants whose nodes exist; the callers of the others get their reply.
    async fn existing(&self, sent: Vec<Sent>) -> Result<Vec<Sent>, (Vec<Sent>, StoreError)> {
        let looks = sent.iter().map(|sent| Request::Exists {
            path: sent.path.clone(),
            watch: false,
        });
        // Follows a write of the same session, which the server has applied.
        let mut looks = self.session.ask_all(looks).into_iter();
        let (mut there, mut left) = (Vec::new(), sent.into_iter());
        for pending in looks.by_ref() {
            let answer = pending.answer().await;
            let Some(one) = left.next() else { break };
            let failed = match answer {
                Ok(answer) => match answer.reply {
                    Ok(_) => {
                        there.push(one);
                        continue;
                    }
                    Err(Code::NO_NODE) => {
                        self.grants.remove(one.renew.grant);
                        answer_gone(one);
                        continue;
                    }
                    Err(code) => refused(code, "to look for the node of a lock"),
                },
                Err(no_reply) => no_reply.into(),
            };
            there.push(one);
            there.extend(left);
            return Err((there, failed));
        }
        Ok(there)
    }

    fn renewed(&self, sent: Vec<Sent>, epoch: Epoch) {
        let kept_until = self.session.kept_until(epoch);
        for Sent { renew, .. } in sent {
            let Some(kept_until) = kept_until else {
                answer(renew, Ok(Renewal::Gone));
                continue;
            };
            self.grants.extend(renew.grant, renew.called + renew.lease);
            let renewal = match given(kept_until, renew.called, renew.lease) {
                Some(lease) => Renewal::RenewedFor(lease),
                None => Renewal::Renewed,
            };
            answer(renew, Ok(renewal));
        }
    }
}

fn answer(renew: Renew, reply: Result<Renewal, StoreError>) {
    // The caller may have been dropped.
    let _ = renew.reply.send(reply);
}

fn answer_gone(sent: Sent) {
    answer(sent.renew, Ok(Renewal::Gone));
}

fn fail(sent: Vec<Sent>, error: &StoreError) {
    for Sent { renew, .. } in sent {
        answer(renew, Err(error.clone()));
    }
}
