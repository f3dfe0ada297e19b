//! Renews many grants in one write.
//!
//! The servers agree on a `multi` that only checks that nodes exist as on any write. So its reply shows that the leader
//! has a quorum, which proves that the session is kept, and that none of the nodes was removed.

use std::sync::Arc;

use dlock::store::{Renewal, StoreError};

use crate::acquire::given;
use crate::core::Core;
use crate::gather::Batch;
use crate::names::Node;
use crate::queues::Renew;
use crate::session::{Epoch, refused};
use crate::wire::{Change, Code, Reply, Request};

/// How often a write is repeated without a node that is gone before all nodes are looked up.
const REPEATS: usize = 4;

/// A renewal whose grant was held when it was sent.
struct Sent {
    renew: Renew,
    path: String,
}

impl Core {
    /// Renews the grants, and returns their locks.
    pub(crate) async fn renew(&self, batch: Batch) -> Vec<Arc<str>> {
        let epoch = self.session.epoch();
        let (mut locks, mut sent) = (Vec::new(), Vec::new());
        for (lock, renew) in batch {
            match self.grants.held(renew.grant, epoch) {
                Some((lock, node, _)) => sent.push(self.sent(&lock, &node, renew)),
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
        let mut repeats = 0..REPEATS;
        while !sent.is_empty() {
            let checks = sent.iter().map(|sent| Change::Check {
                path: sent.path.clone(),
                version: -1,
            });
            let checked = self.session.ask(Request::Multi(checks.collect())).answer().await;
            let codes = match checked.map_err(StoreError::from) {
                Ok(answer) if answer.epoch != epoch || answer.reply == Err(Code::SESSION_EXPIRED) => {
                    return sent.into_iter().for_each(|sent| self.node_is_gone(sent));
                }
                Ok(answer) => match answer.reply {
                    Ok(Reply::Multi(codes)) if codes.len() == sent.len() => codes,
                    Ok(_) => return fail(sent, &StoreError::unknown("the answer of another request came")),
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
            // The reply names only the first node that is gone.
            let gone = codes.iter().position(|code| *code == Code::NO_NODE);
            if let (Some(gone), Some(_)) = (gone, repeats.next()) {
                self.node_is_gone(sent.remove(gone));
                continue;
            }
            sent = match self.existing(sent).await {
                Ok(sent) => sent,
                Err((sent, error)) => return fail(sent, &error),
            };
        }
    }

    fn node_is_gone(&self, sent: Sent) {
        self.grants.remove(sent.renew.grant);
        answer(sent.renew, Ok(Renewal::Gone));
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
                        self.node_is_gone(one);
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

fn fail(sent: Vec<Sent>, error: &StoreError) {
    for Sent { renew, .. } in sent {
        answer(renew, Err(error.clone()));
    }
}
