//! The network between the members of a cluster, from which one of them can be cut off.
//!
//! Members know each other by addresses that do not exist, and each member reaches them through its own HTTP proxy. So the
//! proxy knows from which member a request comes, and to which member it goes.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, bail};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::network::{Door, Weather};

/// Addresses for documentation (RFC 5737), with the number of the member behind it.
const NOWHERE: &str = "192.0.2.";

/// The ways between all members.
#[derive(Debug)]
pub(super) struct Peers {
    /// The proxy of each member.
    doors: Vec<Door>,
    cut_off: watch::Sender<Option<usize>>,
}

/// The ways that begin at a member.
struct Ways {
    from: usize,
    members: Vec<SocketAddr>,
    cut_off: watch::Sender<Option<usize>>,
}

impl Peers {
    /// Between members that listen there.
    pub(super) fn start(members: &[SocketAddr]) -> Peers {
        let cut_off = watch::Sender::new(None);
        let doors = (0..members.len()).map(|from| {
            let ways = Arc::new(Ways {
                from,
                members: members.to_vec(),
                cut_off: cut_off.clone(),
            });
            Door::open(
                "dlock-tests-peers",
                Arc::<Weather>::default(),
                move |client, _| {
                    let ways = ways.clone();
                    let service = service_fn(move |request| ways.clone().forward(request));
                    let http = hyper::server::conn::http1::Builder::new();
                    tokio::spawn(http.serve_connection(TokioIo::new(client), service));
                },
            )
        });
        Peers {
            doors: doors.collect(),
            cut_off,
        }
    }

    /// The URL by which the others know a member.
    pub(super) fn url(member: usize) -> String {
        format!("http://{NOWHERE}{member}:2380")
    }

    /// The URL of a member's proxy.
    pub(super) fn proxy(&self, member: usize) -> String {
        format!("http://{}", self.doors[member].addr())
    }

    /// Breaks all connections of this member, and no other; `None` heals.
    pub(super) fn cut_off(&self, member: Option<usize>) {
        self.cut_off.send_replace(member);
    }
}

impl Ways {
    async fn forward(self: Arc<Self>, request: Request<Incoming>) -> anyhow::Result<Response<Incoming>> {
        let host = request.uri().host().context("it is for a proxy")?;
        let to: usize = host
            .strip_prefix(NOWHERE)
            .context("it is for a member")?
            .parse()?;
        let from = self.from;
        let is_cut = move |cut: &Option<usize>| *cut == Some(from) || *cut == Some(to);
        let mut cut_off = self.cut_off.subscribe();
        if is_cut(&cut_off.borrow()) {
            bail!("there is no way");
        }
        let server = TcpStream::connect(self.members[to]).await?;
        let (mut requests, connection) = hyper::client::conn::http1::handshake(TokioIo::new(server)).await?;
        tokio::spawn(async move {
            tokio::select! {
                _ = connection => {}
                _ = cut_off.wait_for(is_cut) => {}
            }
        });
        let (mut parts, body) = request.into_parts();
        parts.uri = Uri::from(parts.uri.path_and_query().context("it has a path")?.clone());
        Ok(requests.send_request(Request::from_parts(parts, body)).await?)
    }
}
