//! Renews many grants in one write.
//!
//! The servers agree on a `multi` that only checks that nodes exist as on any write. So its reply shows that the leader
//! has a quorum, which proves that the session is kept, and that none of the nodes was removed.

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{Renewal, StoreError};
use futures_util::future::join_all;

use crate::acquire::given;
use crate::core::Core;
use crate::gather::{Batch, MOST_BYTES, MOST_NODES};
use crate::queues::Renew;
use crate::session::{Answer, Epoch, refused};
use crate::wire::{Change, Code, Reply, Request};

/// How often a write is repeated without a node that is gone or refused, before all nodes are looked up, or asked for one by
/// one.
const REPEATS: usize = 4;

/// A renewal whose grant was held when it was sent.
struct Sent {
    renew: Renew,
    /// Of all its nodes.
    paths: Vec<String>,
}

impl Core {
    /// Renews the grants, and returns their locks.
    pub(crate) async fn renew(&self, batch: Batch) -> Vec<Arc<str>> {
        let epoch = self.session.epoch();
        let (mut locks, mut sent) = (Vec::new(), Vec::new());
        for (lock, renew) in batch {
            match self.holds(renew.grant, epoch) {
                Some(nodes) => {
                    let paths = nodes.into_iter().map(|(path, _)| path).collect();
                    sent.push(Sent { renew, paths });
                }
                None => answer(renew, Ok(Renewal::Gone)),
            }
            locks.push(lock);
        }
        let left = join_all(writes(sent).into_iter().map(|sent| self.check(sent, epoch))).await;
        let alone = left
            .into_iter()
            .flatten()
            .map(|sent| self.check(vec![sent], epoch));
        join_all(alone).await;
        locks
    }

    /// Answers the renewals in one write, repeated without those that fail in it. Returns those that must have writes of
    /// their own, because too many are refused.
    async fn check(&self, mut sent: Vec<Sent>, epoch: Epoch) -> Vec<Sent> {
        let mut repeats = 0..REPEATS;
        while !sent.is_empty() {
            let nodes: usize = sent.iter().map(Sent::nodes).sum();
            let checks = sent
                .iter()
                .flat_map(|sent| &sent.paths)
                .map(|path| Change::Check {
                    path: path.clone(),
                    version: -1,
                });
            let checked = self.session.ask(Request::Multi(checks.collect())).answer().await;
            let codes = match checked.map_err(StoreError::from) {
                Ok(answer) if answer.epoch != epoch || answer.reply == Err(Code::SESSION_EXPIRED) => {
                    sent.into_iter().for_each(|sent| self.node_is_gone(sent));
                    return Vec::new();
                }
                Ok(answer) => match answer.reply {
                    Ok(Reply::Multi(codes)) if codes.len() == nodes => codes,
                    Ok(_) => return fail(sent, &StoreError::unknown("the answer of another request came")),
                    Err(code) => return fail(sent, &refused(code, "to look for the nodes of locks")),
                },
                Err(error) => return fail(sent, &error),
            };
            if codes.iter().all(|code| *code == Code::OK) {
                self.renewed(sent, epoch);
                return Vec::new();
            }
            // The reply names only the first node that is gone, or that the client may not see.
            let failed = codes
                .iter()
                .enumerate()
                .find(|(_, code)| ![Code::OK, Code::ROLLED_BACK].contains(code));
            match (failed, repeats.next()) {
                (Some((at, &Code::NO_NODE)), Some(_)) => {
                    self.node_is_gone(sent.remove(owner(&sent, at)));
                    continue;
                }
                (Some((_, &Code::NO_NODE)) | None, _) => {}
                (Some((_, &Code::NO_AUTH)), None) if sent.len() > 1 => return sent,
                (Some((at, code @ &Code::NO_AUTH)), _) => {
                    let error = refused(*code, "to look for the nodes of locks");
                    answer(sent.remove(owner(&sent, at)).renew, Err(error));
                    continue;
                }
                (Some((_, &Code::SESSION_EXPIRED)), _) => {
                    sent.into_iter().for_each(|sent| self.node_is_gone(sent));
                    return Vec::new();
                }
                (Some((_, code)), _) => return fail(sent, &refused(*code, "to look for the nodes of locks")),
            }
            sent = match self.existing(sent).await {
                Ok(sent) => sent,
                Err((sent, error)) => return fail(sent, &error),
            };
        }
        Vec::new()
    }

    fn node_is_gone(&self, sent: Sent) {
        match sent.nodes() {
            1 => self.grants.remove(sent.renew.grant),
            // Its other nodes are deleted.
            _ => self.grants.again(sent.renew.grant, Duration::ZERO),
        }
        answer(sent.renew, Ok(Renewal::Gone));
    }

    /// Keeps the grants whose nodes exist; the callers of the others get their reply.
    async fn existing(&self, sent: Vec<Sent>) -> Result<Vec<Sent>, (Vec<Sent>, StoreError)> {
        let looks = sent
            .iter()
            .flat_map(|sent| &sent.paths)
            .map(|path| Request::Exists {
                path: path.clone(),
                watch: false,
            });
        // The connection may be to another server by now, which is behind.
        let sync = Request::Sync {
            path: self.root.clone(),
        };
        let mut found = Vec::new();
        for pending in self.session.ask_all(iter::once(sync).chain(looks)) {
            found.push(match pending.answer().await {
                Ok(Answer { reply: Ok(_), .. }) => true,
                Ok(Answer {
                    reply: Err(Code::NO_NODE),
                    ..
                }) => false,
                Ok(Answer { reply: Err(code), .. }) => {
                    return Err((sent, refused(code, "to look for the node of a lock")));
                }
                Err(no_reply) => return Err((sent, no_reply.into())),
            });
        }
        let (mut there, mut found) = (Vec::new(), found.into_iter().skip(1));
        for one in sent {
            // All of its nodes are passed.
            let exists = found.by_ref().take(one.nodes()).filter(|exists| *exists).count() == one.nodes();
            match exists {
                true => there.push(one),
                false => self.node_is_gone(one),
            }
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

impl Sent {
    fn nodes(&self) -> usize {
        self.paths.len()
    }
}

/// The index of the renewal that has the node at this index among all nodes.
fn owner(sent: &[Sent], at: usize) -> usize {
    let ends = sent.iter().scan(0, |end, sent| {
        *end += sent.nodes();
        Some(*end)
    });
    ends.take_while(|end| *end <= at).count()
}

/// Splits renewals of grants with several nodes into writes of about the usual size.
fn writes(sent: Vec<Sent>) -> Vec<Vec<Sent>> {
    let mut writes: Vec<Vec<Sent>> = Vec::new();
    let mut room = (0, 0);
    for one in sent {
        let size = (one.nodes(), one.paths.iter().map(|path| path.len() + 20).sum());
        if room.0 < size.0 || room.1 < size.1 || writes.is_empty() {
            room = (MOST_NODES, MOST_BYTES);
            writes.push(Vec::new());
        }
        room = (room.0.saturating_sub(size.0), room.1.saturating_sub(size.1));
        writes.last_mut().expect("one was just added").push(one);
    }
    writes
}

fn answer(renew: Renew, reply: Result<Renewal, StoreError>) {
    // The caller may have been dropped.
    let _ = renew.reply.send(reply);
}

/// Fails all of them, so that none is left.
fn fail(sent: Vec<Sent>, error: &StoreError) -> Vec<Sent> {
    for Sent { renew, .. } in sent {
        answer(renew, Err(error.clone()));
    }
    Vec::new()
}
