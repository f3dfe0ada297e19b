//! Takes permits.

use dlock::store::{AcquireReply, Reason, StoreError};

use super::Ask;
use super::numbers::{Numbers, amount};
use super::queue::Queued;
use crate::grants::{Own, State};
use crate::layout::{leases_of, total_of};
use crate::names::Mark;
use crate::session::{Answer, NoReply, refused};
use crate::wire::{Change, Code, Mode, Reply, Request};

impl Ask<'_> {
    /// Takes the permits. `None` if the own node is gone, or if a number has changed.
    pub(super) async fn take(
        &self,
        queued: &Queued,
        numbers: &Numbers,
    ) -> Result<Option<AcquireReply>, StoreError> {
        let (core, amount, grant) = (self.core, amount(self.request), self.request.grant);
        let own = Own {
            lock: self.queue.clone(),
            mark: Mark::draw(),
            epoch: queued.epoch,
            state: State::Takes {
                node: Some(queued.node.clone()),
                amount,
            },
            deadline: self.called + self.request.lease,
        };
        let request = Request::Multi(self.changes(queued, numbers, &own));
        let (bytes, limit) = (
            request.bytes(core.session.config().acl),
            core.session.config().largest_request,
        );
        if bytes > limit {
            self.leaves().await?;
            let message =
                format!("{amount} permits at once take a request of {bytes} bytes, and it has up to {limit}");
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        core.grants.remove(self.id());
        core.grants.insert(grant, own.clone());
        let Answer { reply, epoch } = match core.session.ask(request).answer().await {
            Ok(answer) => answer,
            Err(NoReply::Lost(_, error) | NoReply::NotSent(error)) => return Err(error),
        };
        let codes = match reply {
            Ok(Reply::Multi(codes)) => codes,
            Ok(_) => return Err(StoreError::unknown("the answer of another request came")),
            // The nodes of the session are gone.
            Err(Code::SESSION_EXPIRED) => vec![Code::NO_NODE],
            Err(code) => return Err(refused(code, "to take permits")),
        };
        let failed = codes
            .iter()
            .position(|code| *code != Code::OK && *code != Code::ROLLED_BACK);
        let Some(failed) = failed else {
            let held = Own {
                state: State::Permits(amount),
                epoch,
                ..own
            };
            let granted = core.granted(grant, held, queued.czxid, self.called, self.request.lease)?;
            return Ok(Some(granted));
        };
        // Nothing was changed.
        core.grants.remove(grant);
        if failed == 0 && codes[0] == Code::NO_NODE {
            return Ok(None);
        }
        let state = State::First {
            node: queued.node.clone(),
            czxid: queued.czxid,
        };
        self.is_in(queued, state);
        match codes[failed] {
            Code::NO_NODE | Code::BAD_VERSION | Code::NODE_EXISTS => Ok(None),
            code => {
                self.leaves().await?;
                Err(refused(code, "to take permits"))
            }
        }
    }

    /// The changes by which the first in the queue takes permits.
    fn changes(&self, queued: &Queued, numbers: &Numbers, own: &Own) -> Vec<Change> {
        let core = self.core;
        let node = core.path_of(self.queue, &queued.node.name);
        let mut changes = vec![Change::Check {
            path: node.clone(),
            version: -1,
        }];
        changes.extend(numbers.total.map(|(_, version)| Change::Check {
            path: core.path(&total_of(self.semaphore)),
            version,
        }));
        let (path, data) = (core.path(&leases_of(self.semaphore)), Vec::new());
        changes.push(match numbers.leases {
            Some(version) => Change::Set { path, data, version },
            // Only together with its children: servers never remove a container that had none.
            None => Change::Create {
                path,
                data,
                mode: Mode::Container,
            },
        });
        let leases = core.leases(own, amount(self.request)).into_iter();
        changes.extend(leases.map(|path| Change::Create {
            path,
            data: self.request.grant.to_string().into_bytes(),
            mode: Mode::Ephemeral,
        }));
        changes.push(Change::Delete {
            path: node,
            version: -1,
        });
        changes
    }
}
