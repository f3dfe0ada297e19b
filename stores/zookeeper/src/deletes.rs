//! Combines deletions into one request, because a request costs the servers more than the deletion in it.

use std::sync::Arc;

use dlock::store::queue::{Carrier, Gather, Unanswered};
use dlock::store::{Reason, StoreError};
use futures_util::future::join_all;
use tokio::runtime;
use tokio::time::Instant;

use crate::session::{Answer, NoReply, Session};
use crate::wire::{Change, Code, Reply, Request};

/// The most nodes that one request deletes.
const MOST: usize = 64;

/// Deletes nodes; concurrent deletions share one request.
pub(crate) struct Deletes {
    session: Arc<Session>,
    gather: Gather<Multi>,
}

impl Deletes {
    pub(crate) fn new(session: Arc<Session>, runtime: runtime::Handle) -> Deletes {
        let gather = Gather::new(Multi(session.clone()), runtime);
        Deletes { session, gather }
    }

    pub(crate) async fn delete(&self, path: String) -> Result<Answer, NoReply> {
        let deadline = Instant::now() + self.session.config().timeout;
        let why = "no server answered in time";
        match self.gather.ask(path.into(), deadline).await {
            Ok(answer) => answer,
            Err(Unanswered::NotSent) => Err(NoReply::NotSent(StoreError::not_done(Reason::Unreachable, why))),
            Err(Unanswered::Unknown) => Err(NoReply::Lost(self.session.epoch(), StoreError::unknown(why))),
        }
    }
}

/// Sends deletions as one `multi`, which is atomic.
struct Multi(Arc<Session>);

impl Carrier for Multi {
    /// The path of a node.
    type Request = Arc<str>;
    type Answer = Result<Answer, NoReply>;

    fn key(path: &Arc<str>) -> &Arc<str> {
        path
    }

    fn most(&self) -> usize {
        MOST
    }

    async fn one(&self, path: Arc<str>) -> Result<Answer, NoReply> {
        let path = path.to_string();
        self.0.ask(Request::Delete { path }).answer().await
    }

    async fn several(&self, paths: Vec<Arc<str>>) -> Vec<Result<Answer, NoReply>> {
        let changes = paths.iter().map(|path| Change::Delete {
            path: path.to_string(),
            version: -1,
        });
        let deleted = self.0.ask(Request::Multi(changes.collect())).answer().await;
        let answer = match deleted {
            Ok(Answer {
                reply: Ok(Reply::Multi(codes)),
                epoch,
            }) if codes.iter().all(|code| *code == Code::OK) => Ok(Answer {
                reply: Ok(Reply::Done),
                epoch,
            }),
            Ok(Answer {
                reply: Err(code),
                epoch,
            }) if code.is_unknown() || code == Code::SESSION_EXPIRED => Ok(Answer {
                reply: Err(code),
                epoch,
            }),
            // The `multi` was rolled back, since one of the nodes is gone, for example.
            Ok(_) => return join_all(paths.into_iter().map(|path| self.one(path))).await,
            Err(no_reply) => Err(no_reply),
        };
        vec![answer; paths.len()]
    }
}
