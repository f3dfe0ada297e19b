//! Calls etcd's API on one connection.

use std::error::Error;

use futures_util::{Stream, stream};
use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::proto::{
    AlarmRequest, AlarmResponse, AuthenticateRequest, AuthenticateResponse, DeleteRangeRequest,
    DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, MemberListRequest, MemberListResponse, PutRequest, PutResponse, RangeRequest,
    RangeResponse, StatusRequest, StatusResponse, TxnRequest, TxnResponse, WatchRequest, WatchResponse,
};

/// A request with one reply.
pub(crate) trait Call: Message + Clone + Default + 'static {
    /// The server's reply.
    type Reply: Message + Default + 'static;
    /// The name of the method.
    const PATH: &'static str;
    /// Whether a follower passes the request to the leader, and answers however far behind it is itself.
    const IS_PASSED_ON: bool = false;
}

macro_rules! calls {
    ($($request:ident => $reply:ident at $path:literal,)*) => {
        $(impl Call for $request {
            type Reply = $reply;
            const PATH: &'static str = $path;
        })*
    };
}

calls! {
    RangeRequest => RangeResponse at "/etcdserverpb.KV/Range",
    PutRequest => PutResponse at "/etcdserverpb.KV/Put",
    DeleteRangeRequest => DeleteRangeResponse at "/etcdserverpb.KV/DeleteRange",
    TxnRequest => TxnResponse at "/etcdserverpb.KV/Txn",
    LeaseGrantRequest => LeaseGrantResponse at "/etcdserverpb.Lease/LeaseGrant",
    LeaseRevokeRequest => LeaseRevokeResponse at "/etcdserverpb.Lease/LeaseRevoke",
    StatusRequest => StatusResponse at "/etcdserverpb.Maintenance/Status",
    AlarmRequest => AlarmResponse at "/etcdserverpb.Maintenance/Alarm",
    MemberListRequest => MemberListResponse at "/etcdserverpb.Cluster/MemberList",
    AuthenticateRequest => AuthenticateResponse at "/etcdserverpb.Auth/Authenticate",
}

impl Call for LeaseTimeToLiveRequest {
    type Reply = LeaseTimeToLiveResponse;
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseTimeToLive";
    const IS_PASSED_ON: bool = true;
}

const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// A connection to one server.
#[derive(Debug, Clone)]
pub(crate) struct Rpc {
    grpc: Grpc<Channel>,
    token: Option<MetadataValue<Ascii>>,
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The request was not sent.
    NotSent(String),
    /// The request was sent, or may have been.
    Status(Status),
}

impl Trouble {
    /// Whether the server answered, with a refusal.
    pub(crate) fn is_answer(&self) -> bool {
        matches!(self, Trouble::Status(status) if status.source().is_none())
    }
}

impl Rpc {
    pub(crate) fn new(channel: Channel) -> Rpc {
        Rpc {
            // The server has no limit either: a reply that is refused here tells nothing of what was done.
            grpc: Grpc::new(channel).max_decoding_message_size(usize::MAX),
            token: None,
        }
    }

    /// Adds the token of a login to all requests.
    pub(crate) fn logged_in(mut self, token: &str) -> Result<Rpc, Status> {
        let token = token
            .parse()
            .map_err(|_| Status::internal("the token of the login is no header"))?;
        self.token = Some(token);
        Ok(self)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        // Makes a server without a leader fail at once instead of waiting for a leader.
        let yes = MetadataValue::from_static("true");
        request.metadata_mut().insert("hasleader", yes);
        request
    }

    /// Returns a client whose connection accepts a request.
    async fn ready(&self) -> Result<Grpc<Channel>, Trouble> {
        let mut grpc = self.grpc.clone();
        match grpc.ready().await {
            Ok(()) => Ok(grpc),
            Err(error) => Err(Trouble::NotSent(super::failure::describe(&error))),
        }
    }

    pub(crate) async fn call<C: Call>(&self, message: C) -> Result<C::Reply, Trouble> {
        let codec = ProstCodec::<C, C::Reply>::default();
        let mut grpc = self.ready().await?;
        let reply = grpc
            .unary(self.request(message), PathAndQuery::from_static(C::PATH), codec)
            .await;
        reply.map(tonic::Response::into_inner).map_err(Trouble::Status)
    }

    /// Renews a lease once.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<LeaseKeepAliveResponse, Trouble> {
        let once = stream::iter([LeaseKeepAliveRequest { id }]);
        let codec = ProstCodec::<LeaseKeepAliveRequest, LeaseKeepAliveResponse>::default();
        let mut grpc = self.ready().await?;
        let replies = grpc
            .streaming(self.request(once), PathAndQuery::from_static(KEEP_ALIVE), codec)
            .await;
        let mut replies = replies.map_err(Trouble::Status)?.into_inner();
        match replies.message().await.map_err(Trouble::Status)? {
            Some(reply) => Ok(reply),
            None => Err(Trouble::Status(Status::unavailable(
                "the server ended the stream",
            ))),
        }
    }

    /// Opens a stream of watches. The server's first reply follows the first of the `orders`.
    pub(crate) async fn watch(
        &self,
        orders: impl Stream<Item = WatchRequest> + Send + 'static,
    ) -> Result<Streaming<WatchResponse>, Trouble> {
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let mut grpc = self.ready().await?;
        let replies = grpc
            .streaming(self.request(orders), PathAndQuery::from_static(WATCH), codec)
            .await;
        replies.map(tonic::Response::into_inner).map_err(Trouble::Status)
    }
}
