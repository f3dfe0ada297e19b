//! The requests and replies of ZooKeeper's protocol that the store uses.

use std::fmt;

use crate::jute::{Garbled, In, Out};

/// The id of notifications, which answer no request.
pub(crate) const NOTIFICATION: i32 = -1;
/// The id of pings and their replies.
pub(crate) const PING: i32 = -2;
/// The id of credentials and their replies.
pub(crate) const AUTH: i32 = -4;

mod code {
    pub(super) const DELETE: i32 = 2;
    pub(super) const CREATE: i32 = 1;
    pub(super) const EXISTS: i32 = 3;
    pub(super) const GET_DATA: i32 = 4;
    pub(super) const SET_DATA: i32 = 5;
    pub(super) const GET_CHILDREN: i32 = 8;
    pub(super) const SYNC: i32 = 9;
    pub(super) const PING: i32 = 11;
    pub(super) const CHECK: i32 = 13;
    pub(super) const MULTI: i32 = 14;
    pub(super) const CREATE2: i32 = 15;
    pub(super) const REMOVE_WATCHES: i32 = 18;
    pub(super) const CREATE_CONTAINER: i32 = 19;
    pub(super) const AUTH: i32 = 100;
    pub(super) const CLOSE: i32 = -11;
    pub(super) const ERROR: i32 = -1;
}

/// The error code in a server's reply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

impl Code {
    pub(crate) const OK: Code = Code(0);
    /// An operation of a failed `multi` that follows the failed operation.
    pub(crate) const ROLLED_BACK: Code = Code(-2);
    pub(crate) const NO_NODE: Code = Code(-101);
    pub(crate) const NO_AUTH: Code = Code(-102);
    pub(crate) const BAD_VERSION: Code = Code(-103);
    pub(crate) const NODE_EXISTS: Code = Code(-110);
    pub(crate) const NOT_EMPTY: Code = Code(-111);
    pub(crate) const SESSION_EXPIRED: Code = Code(-112);
    pub(crate) const THROTTLED: Code = Code(-127);

    /// What the user can do about a refusal.
    pub(crate) fn advice(self) -> Option<&'static str> {
        match self.0 {
            -102 => Some("the access list of that node has no such right for this client, or for its user"),
            -114 => Some("the servers want a user, as in zookeeper://user:password@host"),
            -119 => Some("that server has lost the majority, and only reads"),
            -124 => Some(
                "the servers want clients to log in: zookeeper://user:password@host does it by the scheme digest, and \
                 SASL is not supported",
            ),
            -125 => Some("the quota of a node above the locks is used up"),
            _ => None,
        }
    }

    /// Whether the server may have carried out the request nevertheless.
    pub(crate) fn is_unknown(self) -> bool {
        // system error, runtime inconsistency, connection loss, marshalling, operation timeout, session moved
        matches!(self.0, -1 | -2 | -4 | -5 | -7 | -118)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            -1 => "SystemError",
            -2 => "RuntimeInconsistency",
            -4 => "ConnectionLoss",
            -6 => "Unimplemented",
            -8 => "BadArguments",
            -101 => "NoNode",
            -102 => "NoAuth",
            -103 => "BadVersion",
            -108 => "NoChildrenForEphemerals",
            -110 => "NodeExists",
            -111 => "NotEmpty",
            -112 => "SessionExpired",
            -114 => "InvalidACL",
            -115 => "AuthFailed",
            -118 => "SessionMoved",
            -119 => "NotReadOnly",
            -124 => "SessionClosedRequireSaslAuth",
            -125 => "QuotaExceeded",
            -127 => "Throttled",
            code => return write!(f, "error {code}"),
        };
        f.write_str(name)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How long a node lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Persistent,
    /// As long as the session.
    Ephemeral,
    /// As long as the session, with a sequence number appended to the name.
    Sequential,
    /// Until it no longer has children.
    Container,
}

/// The clients that have access to the nodes that are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acl {
    /// All clients.
    Open,
    /// Clients with the same user and password.
    Creator,
}

/// An operation of a `multi`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Check {
        path: String,
        version: i32,
    },
    Create {
        path: String,
        data: Vec<u8>,
        mode: Mode,
    },
    Set {
        path: String,
        data: Vec<u8>,
        version: i32,
    },
    Delete {
        path: String,
        version: i32,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Request {
    Create {
        path: String,
        data: Vec<u8>,
        mode: Mode,
    },
    Delete {
        path: String,
    },
    Exists {
        path: String,
        watch: bool,
    },
    Data {
        path: String,
        watch: bool,
    },
    Children {
        path: String,
        watch: bool,
    },
    /// Makes the connected server catch up with the leader.
    Sync {
        path: String,
    },
    Set {
        path: String,
        data: Vec<u8>,
    },
    Multi(Vec<Change>),
    /// Removes the watches that this connection has of a node.
    Unwatch {
        path: String,
    },
}

/// The metadata of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The number of changes of its data.
    pub(crate) version: i32,
    /// The number of its children.
    pub(crate) children: i32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Created {
        path: String,
        czxid: i64,
    },
    Done,
    Data {
        data: Vec<u8>,
        stat: Stat,
    },
    Children(Vec<String>),
    Set {
        version: i32,
    },
    /// The result of each change: all are `Ok`, or none was made.
    Multi(Vec<Code>),
}

impl Request {
    /// Whether the servers agree on the request, so that a reply shows that the leader has a quorum.
    pub(crate) fn is_write(&self) -> bool {
        matches!(
            self,
            Request::Create { .. } | Request::Delete { .. } | Request::Set { .. } | Request::Multi(_)
        )
    }

    pub(crate) fn encode(&self, xid: i32, acl: Acl) -> Vec<u8> {
        let mut out = Out::new();
        out.int(xid);
        match self {
            Request::Create { path, data, mode } => {
                let code = match mode {
                    Mode::Container => code::CREATE_CONTAINER,
                    _ => code::CREATE2,
                };
                create(out.int(code), path, data, acl, *mode);
            }
            Request::Delete { path } => {
                out.int(code::DELETE).string(path).int(-1);
            }
            Request::Exists { path, watch } => {
                out.int(code::EXISTS).string(path).bool(*watch);
            }
            Request::Data { path, watch } => {
                out.int(code::GET_DATA).string(path).bool(*watch);
            }
            Request::Children { path, watch } => {
                out.int(code::GET_CHILDREN).string(path).bool(*watch);
            }
            Request::Sync { path } => {
                out.int(code::SYNC).string(path);
            }
            Request::Set { path, data } => {
                out.int(code::SET_DATA).string(path).buffer(data).int(-1);
            }
            Request::Multi(changes) => {
                out.int(code::MULTI);
                for change in changes {
                    change.encode(&mut out, acl);
                }
                out.int(-1).bool(true).int(-1);
            }
            Request::Unwatch { path } => {
                // Those of its data and those of its list.
                const ANY: i32 = 3;
                out.int(code::REMOVE_WATCHES).string(path).int(ANY);
            }
        }
        out.finish()
    }

    /// The size that servers compare with their `jute.maxbuffer`.
    pub(crate) fn bytes(&self, acl: Acl) -> usize {
        self.encode(0, acl).len() - size_of::<u32>()
    }

    /// Decodes the body of a successful reply.
    pub(crate) fn reply(&self, body: &mut In<'_>) -> Result<Reply, Garbled> {
        match self {
            Request::Create { .. } => {
                let path = body.string()?;
                let czxid = body.long()?;
                Ok(Reply::Created { path, czxid })
            }
            Request::Delete { .. }
            | Request::Sync { .. }
            | Request::Exists { .. }
            | Request::Unwatch { .. } => Ok(Reply::Done),
            Request::Data { .. } => {
                let data = body.buffer()?;
                let stat = stat(body)?;
                Ok(Reply::Data { data, stat })
            }
            Request::Children { .. } => Ok(Reply::Children(body.strings()?)),
            Request::Set { .. } => Ok(Reply::Set {
                version: stat(body)?.version,
            }),
            Request::Multi(_) => Ok(Reply::Multi(results(body)?)),
        }
    }
}

impl Change {
    /// Whether it creates a node that lasts until it is deleted.
    pub(crate) fn creates_persistent(&self) -> bool {
        matches!(
            self,
            Change::Create {
                mode: Mode::Persistent,
                ..
            }
        )
    }

    fn encode(&self, out: &mut Out, acl: Acl) {
        let code = match self {
            Change::Check { .. } => code::CHECK,
            Change::Create {
                mode: Mode::Container,
                ..
            } => code::CREATE_CONTAINER,
            Change::Create { .. } => code::CREATE,
            Change::Set { .. } => code::SET_DATA,
            Change::Delete { .. } => code::DELETE,
        };
        out.int(code).bool(false).int(-1);
        match self {
            Change::Check { path, version } | Change::Delete { path, version } => {
                out.string(path).int(*version);
            }
            Change::Create { path, data, mode } => create(out, path, data, acl, *mode),
            Change::Set { path, data, version } => {
                out.string(path).buffer(data).int(*version);
            }
        }
    }
}

fn create(out: &mut Out, path: &str, data: &[u8], acl: Acl, mode: Mode) {
    const ALL: i32 = 31;
    let flags = match mode {
        Mode::Persistent => 0,
        Mode::Ephemeral => 1,
        Mode::Sequential => 3,
        Mode::Container => 4,
    };
    let (scheme, id) = match acl {
        Acl::Open => ("world", "anyone"),
        Acl::Creator => ("auth", ""),
    };
    out.string(path).buffer(data);
    out.length(1).int(ALL).string(scheme).string(id).int(flags);
}

/// Decodes the result of each operation of a `multi`.
fn results(body: &mut In<'_>) -> Result<Vec<Code>, Garbled> {
    let mut results = Vec::new();
    loop {
        let (code, done, _) = (body.int()?, body.bool()?, body.int()?);
        if done {
            return Ok(results);
        }
        let result = match code {
            code::ERROR => Code(body.int()?),
            code::CREATE => body.string().map(|_| Code::OK)?,
            // A container was created.
            code::CREATE2 => {
                body.string()?;
                stat(body).map(|_| Code::OK)?
            }
            code::SET_DATA => stat(body).map(|_| Code::OK)?,
            code::CHECK | code::DELETE => Code::OK,
            _ => return Err(Garbled),
        };
        results.push(result);
    }
}

/// Reads the metadata of a node.
fn stat(body: &mut In<'_>) -> Result<Stat, Garbled> {
    for _ in 0..4 {
        body.long()?;
    }
    let version = body.int()?;
    for _ in 0..2 {
        body.int()?;
    }
    body.long()?;
    body.int()?;
    let children = body.int()?;
    body.long()?;
    Ok(Stat { version, children })
}

/// Encodes the request for a session, new or resumed.
pub(crate) fn hello(timeout_ms: i32, id: i64, password: &[u8]) -> Vec<u8> {
    let mut out = Out::new();
    // The last change that this client has seen is left out: after a loss of data every server would refuse it forever.
    out.int(0)
        .long(0)
        .int(timeout_ms)
        .long(id)
        .buffer(password)
        .bool(false);
    out.finish()
}

/// The session that a server grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// Zero or negative if the session has expired.
    pub(crate) timeout_ms: i32,
    pub(crate) id: i64,
    pub(crate) password: Vec<u8>,
}

impl Welcome {
    pub(crate) fn decode(message: &[u8]) -> Result<Welcome, Garbled> {
        let mut message = In::new(message);
        message.int()?;
        Ok(Welcome {
            timeout_ms: message.int()?,
            id: message.long()?,
            password: message.buffer()?,
        })
    }
}

pub(crate) fn ping() -> Vec<u8> {
    let mut out = Out::new();
    out.int(PING).int(code::PING);
    out.finish()
}

pub(crate) fn auth(credentials: &str) -> Vec<u8> {
    let mut out = Out::new();
    out.int(AUTH).int(code::AUTH).int(0);
    out.string("digest").string(credentials);
    out.finish()
}

pub(crate) fn close(xid: i32) -> Vec<u8> {
    let mut out = Out::new();
    out.int(xid).int(code::CLOSE);
    out.finish()
}

/// The header of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) xid: i32,
    pub(crate) code: Code,
}

impl Head {
    pub(crate) fn decode(message: &mut In<'_>) -> Result<Head, Garbled> {
        let (xid, _zxid, code) = (message.int()?, message.long()?, message.int()?);
        Ok(Head {
            xid,
            code: Code(code),
        })
    }
}

/// A change of a watched node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) path: String,
    pub(crate) is_deleted: bool,
}

/// Returns what a notification says of a node; `None` if it is about the session.
pub(crate) fn notified(body: &mut In<'_>) -> Result<Option<Changed>, Garbled> {
    const DELETED: i32 = 2;
    let (event, _state, path) = (body.int()?, body.int()?, body.string()?);
    let is_deleted = event == DELETED;
    Ok((event > 0).then_some(Changed { path, is_deleted }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_multi_names_the_change_that_failed() {
        let mut out = Out::new();
        for code in [0, -101, -2] {
            out.int(-1).bool(false).int(code).int(code);
        }
        out.int(-1).bool(true).int(-1);
        let message = out.finish();
        let results = results(&mut In::new(&message[4..]));
        assert_eq!(results, Ok(vec![Code::OK, Code::NO_NODE, Code::ROLLED_BACK]));
    }

    #[test]
    fn results_of_a_multi_are_told_apart() {
        let mut out = Out::new();
        out.int(13).bool(false).int(0);
        out.int(1).bool(false).int(0).string("/a");
        let stat = |out: &mut Out| {
            out.long(1).long(1).long(1).long(1);
            out.int(0).int(0).int(0).long(0).int(0).int(0).long(1);
        };
        stat(out.int(15).bool(false).int(0).string("/b"));
        stat(out.int(5).bool(false).int(0));
        out.int(2).bool(false).int(0);
        out.int(-1).bool(true).int(-1);
        let message = out.finish();
        let mut body = In::new(&message[4..]);
        assert_eq!(results(&mut body), Ok(vec![Code::OK; 5]));
        assert!(body.is_empty());
    }

    #[test]
    fn only_what_the_servers_agreed_on_is_a_write() {
        let path = || "/a".to_owned();
        assert!(Request::Multi(vec![]).is_write() && Request::Delete { path: path() }.is_write());
        let data = Vec::new();
        assert!(Request::Set { path: path(), data }.is_write());
        assert!(!Request::Sync { path: path() }.is_write());
        assert!(
            !Request::Exists {
                path: path(),
                watch: true
            }
            .is_write()
        );
    }
}
