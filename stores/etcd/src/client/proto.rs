//! The messages of etcd's API that the store uses, numbered as in `rpc.proto` and `kv.proto` of etcd 3.4 to 3.6.
//!
//! Written by hand, so that no build needs the compiler `protoc`.

use prost::{Enumeration, Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResponseHeader {
    #[prost(int64, tag = "3")]
    pub(crate) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(crate) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) limit: i64,
    #[prost(enumeration = "SortOrder", tag = "5")]
    pub(crate) sort_order: i32,
    #[prost(enumeration = "SortTarget", tag = "6")]
    pub(crate) sort_target: i32,
    #[prost(bool, tag = "8")]
    pub(crate) keys_only: bool,
    /// 0 for any.
    #[prost(int64, tag = "13")]
    pub(crate) max_create_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub(crate) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(crate) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteRangeResponse {
    #[prost(int64, tag = "2")]
    pub(crate) deleted: i64,
}

/// An operation of a transaction.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RequestOp {
    #[prost(oneof = "Request", tags = "1, 2, 3, 4")]
    pub(crate) request: Option<Request>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Request {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResponseOp {
    #[prost(oneof = "Response", tags = "1, 2, 3, 4")]
    pub(crate) response: Option<Response>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Response {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(PutResponse),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeResponse),
    #[prost(message, tag = "4")]
    Txn(TxnResponse),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum Target {
    Version = 0,
    Create = 1,
    Mod = 2,
    Value = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum Is {
    Equal = 0,
    Greater = 1,
    Less = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum SortOrder {
    None = 0,
    Ascend = 1,
    Descend = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum SortTarget {
    Key = 0,
    Create = 2,
}

/// From the first key up to and without the last.
pub(crate) type KeyRange = (Vec<u8>, Vec<u8>);

/// A condition of a transaction. It holds for a range without keys.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Compare {
    #[prost(enumeration = "Is", tag = "1")]
    pub(crate) result: i32,
    #[prost(enumeration = "Target", tag = "2")]
    pub(crate) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) key: Vec<u8>,
    #[prost(oneof = "Wanted", tags = "5, 6, 7")]
    pub(crate) value: Option<Wanted>,
    #[prost(bytes = "vec", tag = "64")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum Wanted {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(bytes, tag = "7")]
    Value(Vec<u8>),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub(crate) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(crate) responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchRequest {
    #[prost(oneof = "WatchOrder", tags = "1, 2")]
    pub(crate) order: Option<WatchOrder>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum WatchOrder {
    #[prost(message, tag = "1")]
    Create(WatchCreateRequest),
    #[prost(message, tag = "2")]
    Cancel(WatchCancelRequest),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum Filter {
    NoPut = 0,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(enumeration = "Filter", repeated, tag = "5")]
    pub(crate) filters: Vec<i32>,
    #[prost(int64, tag = "7")]
    pub(crate) watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchCancelRequest {
    #[prost(int64, tag = "1")]
    pub(crate) watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub(crate) watch_id: i64,
    #[prost(bool, tag = "3")]
    pub(crate) created: bool,
    #[prost(bool, tag = "4")]
    pub(crate) canceled: bool,
    #[prost(string, tag = "6")]
    pub(crate) cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(crate) enum EventKind {
    Put = 0,
    Delete = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    #[prost(enumeration = "EventKind", tag = "1")]
    pub(crate) kind: i32,
    /// Of a deleted key, its name and the revision that deleted it.
    #[prost(message, optional, tag = "2")]
    pub(crate) kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub(crate) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
    #[prost(string, tag = "4")]
    pub(crate) error: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseRevokeResponse {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseKeepAliveResponse {
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
    /// Zero or negative if the lease does not exist.
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseTimeToLiveRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
    #[prost(bool, tag = "2")]
    pub(crate) keys: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseTimeToLiveResponse {
    /// Negative if the lease does not exist.
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
    #[prost(bytes = "vec", repeated, tag = "5")]
    pub(crate) keys: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusResponse {
    #[prost(string, tag = "2")]
    pub(crate) version: String,
    #[prost(int64, tag = "3")]
    pub(crate) db_size: i64,
    /// 0 while there is no leader.
    #[prost(uint64, tag = "4")]
    pub(crate) leader: u64,
    #[prost(uint64, tag = "5")]
    pub(crate) raft_index: u64,
    #[prost(uint64, tag = "7")]
    pub(crate) raft_applied: u64,
    #[prost(bool, tag = "10")]
    pub(crate) is_learner: bool,
    /// 0 from servers older than 3.6.
    #[prost(int64, tag = "12")]
    pub(crate) db_size_quota: i64,
}

/// Requests the alarms of all members.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct AlarmRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AlarmResponse {
    #[prost(message, repeated, tag = "2")]
    pub(crate) alarms: Vec<Alarm>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Alarm {
    #[prost(uint64, tag = "1")]
    pub(crate) member: u64,
    /// 1: no space is left; 2: the data are corrupt.
    #[prost(int32, tag = "2")]
    pub(crate) kind: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemberListRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemberListResponse {
    #[prost(message, repeated, tag = "2")]
    pub(crate) members: Vec<Member>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Member {
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(string, repeated, tag = "4")]
    pub(crate) client_urls: Vec<String>,
    #[prost(bool, tag = "5")]
    pub(crate) is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) password: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(crate) token: String,
}

/// Returns the end of the range of all keys that begin with `prefix`.
pub(crate) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // The end of the range of all keys.
    vec![0]
}

impl Compare {
    /// Requires that this revision created the key; 0 means that the key does not exist.
    pub(crate) fn created(key: &[u8], revision: i64) -> Compare {
        Compare {
            result: Is::Equal.into(),
            target: Target::Create.into(),
            key: key.to_vec(),
            value: Some(Wanted::CreateRevision(revision)),
            range_end: Vec::new(),
        }
    }

    /// Requires that there is no key from `key` to `end`.
    pub(crate) fn none(key: Vec<u8>, end: Vec<u8>) -> Compare {
        Compare {
            range_end: end,
            ..Compare::created(&key, 0)
        }
    }

    /// Requires that there are keys in this range, and that revisions after this one created all of them.
    pub(crate) fn created_after((key, end): KeyRange, revision: i64) -> Compare {
        Compare {
            result: Is::Greater.into(),
            range_end: end,
            ..Compare::created(&key, revision)
        }
    }

    /// Requires that the key exists and that its value begins with this word and a space.
    pub(crate) fn begins(key: &[u8], word: &str) -> [Compare; 2] {
        // "!" is the character after the space.
        [(Is::Greater, ' '), (Is::Less, '!')].map(|(result, end)| Compare {
            result: result.into(),
            target: Target::Value.into(),
            value: Some(Wanted::Value(format!("{word}{end}").into_bytes())),
            ..Compare::created(key, 0)
        })
    }

    /// Requires that no key in this range was created or changed after this revision; keys may have been deleted.
    pub(crate) fn unchanged_since((key, end): KeyRange, revision: i64) -> Compare {
        Compare {
            result: Is::Less.into(),
            range_end: end,
            ..Compare::changed(&key, revision + 1)
        }
    }

    /// Requires that this revision changed the key last.
    pub(crate) fn changed(key: &[u8], revision: i64) -> Compare {
        Compare {
            target: Target::Mod.into(),
            value: Some(Wanted::ModRevision(revision)),
            ..Compare::created(key, 0)
        }
    }
}

impl From<Request> for RequestOp {
    fn from(request: Request) -> RequestOp {
        RequestOp {
            request: Some(request),
        }
    }
}

impl From<RangeRequest> for RequestOp {
    fn from(range: RangeRequest) -> RequestOp {
        Request::Range(range).into()
    }
}

impl From<TxnRequest> for RequestOp {
    fn from(txn: TxnRequest) -> RequestOp {
        Request::Txn(txn).into()
    }
}

impl RequestOp {
    pub(crate) fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> RequestOp {
        Request::Put(PutRequest { key, value, lease }).into()
    }

    pub(crate) fn delete(key: Vec<u8>) -> RequestOp {
        let range_end = Vec::new();
        Request::Delete(DeleteRangeRequest { key, range_end }).into()
    }

    pub(crate) fn delete_all((key, range_end): KeyRange) -> RequestOp {
        Request::Delete(DeleteRangeRequest { key, range_end }).into()
    }

    pub(crate) fn range(key: Vec<u8>, range_end: Vec<u8>, limit: i64) -> RequestOp {
        Request::Range(RangeRequest {
            key,
            range_end,
            limit,
            ..RangeRequest::default()
        })
        .into()
    }
}

impl TxnRequest {
    /// The first key that the transaction may put.
    pub(crate) fn first_put(&self) -> Option<&[u8]> {
        let mut operations = self.success.iter().chain(&self.failure);
        operations.find_map(|one| match &one.request {
            Some(Request::Put(put)) => Some(&put.key[..]),
            Some(Request::Txn(inner)) => inner.first_put(),
            _ => None,
        })
    }
}

impl TxnResponse {
    /// The revision of the store after the transaction.
    pub(crate) fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }

    /// Returns the keys that the range request at this index found.
    pub(crate) fn found(&self, at: usize) -> &[KeyValue] {
        match self.responses.get(at).and_then(|one| one.response.as_ref()) {
            Some(Response::Range(range)) => &range.kvs,
            _ => &[],
        }
    }

    /// Takes the reply of the inner transaction at this index, with the revision of the whole transaction.
    pub(crate) fn take_inner(&mut self, at: usize) -> Option<TxnResponse> {
        let header = self.header.clone();
        match self.responses.get_mut(at)?.response.take()? {
            Response::Txn(inner) => Some(TxnResponse { header, ..inner }),
            _ => None,
        }
    }

    /// Returns how many keys the deletion at this index deleted.
    pub(crate) fn deleted(&self, at: usize) -> i64 {
        match self.responses.get(at).and_then(|one| one.response.as_ref()) {
            Some(Response::Delete(delete)) => delete.deleted,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_ends_where_the_next_begins() {
        assert_eq!(end_of(b"a/"), b"a0");
        assert_eq!(end_of(&[1, 255]), [2]);
        assert_eq!(end_of(&[255, 255]), [0]);
        assert_eq!(end_of(b""), [0]);
    }

    /// The expected bytes are those that etcd's own tools write.
    #[test]
    fn condition_has_the_bytes_of_the_protocol() {
        let bytes = Compare::changed(b"k", 7).encode_to_vec();
        // target MOD, the key, mod_revision 7; EQUAL is the default
        assert_eq!(bytes, [0x10, 2, 0x1a, 1, b'k', 0x30, 7]);
        let bytes = Compare::none(b"k".to_vec(), b"l".to_vec()).encode_to_vec();
        assert_eq!(bytes, [0x10, 1, 0x1a, 1, b'k', 0x28, 0, 0x82, 0x04, 1, b'l']);
    }
}
