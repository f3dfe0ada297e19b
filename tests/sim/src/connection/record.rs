//! The records of a simulated store, over the network.

use std::sync::Arc;
use std::time::Duration;

use dlock::record::{
    ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey, RecordLook, RecordStore, SlotOutcome,
    SlotReply, SlotRequest,
};
use dlock::sim;
use dlock::store::{StoreError, Watch};

use super::SimConnection;
use crate::store::record::{Reply, Request};
use crate::store::{self};
use crate::world::if_any;

pub(super) struct SimRecords(pub(super) Arc<SimConnection>);

impl SimRecords {
    fn ask<T>(
        &self,
        request: Request,
        sort: fn(Reply) -> Option<T>,
    ) -> impl Future<Output = Result<T, StoreError>> + Send + 'static + use<T>
    where
        T: 'static,
    {
        let reply = self.0.ask(store::Request::Record(request), |reply| match reply {
            store::Reply::Record(reply) => Some(reply),
            _ => None,
        });
        async move {
            reply
                .await
                .map(|reply| sort(reply).expect("the reply to this request"))
        }
    }

    /// An answer that the claim is the caller's gives it this time, counted from the request.
    fn knows<T, S>(
        &self,
        token: ClaimToken,
        lease: Duration,
        step: S,
        is_owner: fn(&T) -> bool,
    ) -> impl Future<Output = Result<T, StoreError>> + Send + 'static + use<T, S>
    where
        T: Send + 'static,
        S: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (process, _) = self.0.process;
        let until = if_any(|world| world.claim_until(process, lease)).unwrap_or_default();
        async move {
            let reply = step.await;
            if reply.as_ref().is_ok_and(is_owner) {
                if_any(|world| world.claim_is_known(process, &token, until));
            }
            reply
        }
    }

    /// What an owner sends at its end: it relies on the claim no more.
    fn ends(
        &self,
        token: &ClaimToken,
        request: Request,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static + use<> {
        if_any(|world| world.claim_is_given_up(token));
        self.ask(request, owner)
    }
}

fn owner(reply: Reply) -> Option<OwnerReply> {
    match reply {
        Reply::Owner(reply) => Some(reply),
        _ => None,
    }
}

fn claim(reply: Reply) -> Option<ClaimReply> {
    match reply {
        Reply::Claim(reply) => Some(reply),
        _ => None,
    }
}

impl RecordStore for SimRecords {
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static {
        if_any(|world| world.checks.records.name_claim(&request.token));
        let (token, lease) = (request.token.clone(), request.lease);
        let step = self.ask(Request::Claim(request), claim);
        self.knows(token, lease, step, |reply| {
            matches!(reply, ClaimReply::Claimed { .. })
        })
    }

    fn claim_slot(
        self: Arc<Self>,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> impl Future<Output = Result<SlotReply, StoreError>> + Send + 'static {
        if_any(|world| world.checks.records.name_claim(&request.token));
        let (token, lease) = (request.token.clone(), request.lease);
        let step = self.ask(Request::ClaimSlot(request, slot), |reply| match reply {
            Reply::Slot(reply) => Some(reply),
            _ => None,
        });
        self.knows(token, lease, step, |reply| {
            matches!(reply.outcome, SlotOutcome::Claim(ClaimReply::Claimed { .. }))
        })
    }

    fn inspect(
        self: Arc<Self>,
        key: RecordKey,
        _response: bool,
    ) -> impl Future<Output = Result<RecordLook, StoreError>> + Send + 'static {
        self.ask(Request::Look(key), |reply| match reply {
            Reply::Look(look) => Some(look),
            _ => None,
        })
    }

    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let request = Request::Extend {
            key,
            token: token.clone(),
            lease,
            retention,
        };
        let step = self.ask(request, owner);
        self.knows(token, lease, step, |reply| *reply == OwnerReply::Done)
    }

    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let request = Request::Complete {
            key,
            token: token.clone(),
            response,
            retention,
        };
        self.ends(&token, request)
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let request = Request::Release {
            key,
            token: token.clone(),
        };
        self.ends(&token, request)
    }

    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let request = Request::Abandon {
            key,
            token: token.clone(),
        };
        self.ends(&token, request)
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.0.listen(sim::record_topic(key))
    }
}
