//! A gRPC service whose method runs under a lock: `cargo run -p dlock-examples --features grpc --bin teller`, and `--help` for
//! what it can do.
//!
//! It shows a [`TaskLockLayer`] around **one method** of a tonic service. The layer's request is the decoded message, so the
//! key is a field of it; the layers for HTTP are outside tonic and see bytes. Withdrawals from one account run one at a
//! time over all tellers that share the `--url`, and the `--data`, where each account is a file that is read and written again.
//!
//! The messages are written by hand with prost, and the service without generated code, so that no user needs `protoc`.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::task::{Context, Poll};
use std::time::Duration;

use clap::{Parser, Subcommand};
use dlock::{LockClient, LockKey};
use dlock_tower::task::{TaskError, TaskLockLayer};
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use tonic::body::Body;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::{Layer, Service, ServiceExt, service_fn};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

const EXAMPLES: &str = "\
Examples:
  teller serve --data /tmp/accounts --open 1000
  teller withdraw --from http://127.0.0.1:50051 --account 7 --amount 1 --times 20 --at-once 8";

/// A bank with gRPC, or its customer.
#[derive(Debug, Parser)]
#[command(name = "teller", version, after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Serves withdrawals
    Serve {
        /// Where accounts are locked: memory:// (of this process), redis://…
        #[arg(long, env = "DLOCK_URL", value_name = "URL", default_value = "memory://")]
        url: String,
        /// The directory of the accounts
        #[arg(long, value_name = "DIR")]
        data: PathBuf,
        /// What is in an account at first
        #[arg(long, default_value_t = 1000)]
        open: u64,
        #[arg(long, default_value = "127.0.0.1:50051")]
        listen: SocketAddr,
        /// How long a withdrawal waits for its account
        #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = humantime::parse_duration)]
        wait: Duration,
        /// Between reading an account and writing it
        #[arg(long, value_name = "DURATION", default_value = "5ms", value_parser = humantime::parse_duration)]
        takes: Duration,
    },
    /// Withdraws
    Withdraw {
        #[arg(long, value_name = "URL")]
        from: String,
        #[arg(long)]
        account: u64,
        #[arg(long)]
        amount: u64,
        #[arg(long, default_value_t = 1)]
        times: usize,
        #[arg(long, default_value_t = 1)]
        at_once: usize,
    },
}

/// Takes an amount from an account.
#[derive(Clone, PartialEq, prost::Message)]
struct Withdraw {
    #[prost(uint64, tag = "1")]
    account: u64,
    #[prost(uint64, tag = "2")]
    amount: u64,
}

/// What was left, and the fencing token under which.
#[derive(Clone, PartialEq, prost::Message)]
struct Withdrawn {
    #[prost(uint64, tag = "1")]
    balance: u64,
    #[prost(uint64, tag = "2")]
    token: u64,
}

const WITHDRAW: &str = "/bank.Teller/Withdraw";

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .init();
    let ended = match Args::parse().what {
        What::Serve {
            url,
            data,
            open,
            listen,
            wait,
            takes,
        } => serve(&url, Accounts { data, open, takes }, listen, wait).await,
        What::Withdraw {
            from,
            account,
            amount,
            times,
            at_once,
        } => withdraw(from, Withdraw { account, amount }, times, at_once.max(1)).await,
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("teller: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(url: &str, accounts: Accounts, listen: SocketAddr, wait: Duration) -> Result<(), BoxError> {
    fs::create_dir_all(&accounts.data)?;
    let client = LockClient::builder().url(url).build().await?;
    let lock = TaskLockLayer::new(client.clone(), |request: &Request<Withdraw>| -> LockKey {
        format!("account:{}", request.get_ref().account).into()
    });
    // A customer waits at the counter, unlike a job in a queue; but not for ever.
    let lock = lock.wait(wait).max_hold(Duration::from_secs(10));
    lock.check()?;
    let method = lock
        .layer(service_fn(move |request: Request<Withdraw>| {
            let accounts = accounts.clone();
            async move { accounts.withdraw(request.into_inner()).await.map(Response::new) }
        }))
        .map_err(status);
    let incoming = TcpIncoming::bind(listen)?;
    tracing::info!("listening on http://{}", incoming.local_addr()?);
    Server::builder()
        .add_service(Teller { withdraw: method })
        .serve_with_incoming_shutdown(incoming, end())
        .await?;
    client.shutdown(Duration::from_secs(5)).await;
    tracing::info!("ended");
    Ok(())
}

/// Waits until the service is asked to end.
async fn end() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}

/// The answer to a customer: the codes of the layers for HTTP.
fn status(error: TaskError<Status>) -> Status {
    match error {
        TaskError::Inner(status) => status,
        // It has not begun: try again.
        TaskError::Busy { .. } => Status::aborted(error.to_string()),
        // It would never begin.
        error if error.is_permanent() => Status::internal(error.to_string()),
        TaskError::Store(_) => Status::unavailable(error.to_string()),
        // It was interrupted: its outcome is unknown.
        _ => Status::unknown(error.to_string()),
    }
}

/// Files that are read and rewritten; two concurrent writers would corrupt them.
#[derive(Clone)]
struct Accounts {
    data: PathBuf,
    open: u64,
    takes: Duration,
}

impl Accounts {
    async fn withdraw(&self, Withdraw { account, amount }: Withdraw) -> Result<Withdrawn, Status> {
        let failed = |error: io::Error| Status::internal(error.to_string());
        let path = self.data.join(account.to_string());
        let balance = self.balance(&path).map_err(failed)?;
        let Some(balance) = balance.checked_sub(amount) else {
            return Err(Status::failed_precondition(format!("there is only {balance}")));
        };
        tokio::time::sleep(self.takes).await;
        let held = dlock::current().expect("the layer holds the account's lock");
        let token = held.fencing_token();
        // Beside the account, and renamed: a teller that is killed while it writes leaves the account as it was.
        let beside = self.data.join(format!("{account}.{token}"));
        fs::write(&beside, balance.to_string()).map_err(failed)?;
        fs::rename(&beside, &path).map_err(failed)?;
        Ok(Withdrawn { balance, token })
    }

    fn balance(&self, path: &Path) -> io::Result<u64> {
        match fs::read_to_string(path) {
            Ok(text) => text
                .parse()
                .map_err(|_| io::Error::other("the account holds no number")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(self.open),
            Err(error) => Err(error),
        }
    }
}

/// The service, as tonic would generate it.
#[derive(Clone)]
struct Teller<S> {
    withdraw: S,
}

impl<S> NamedService for Teller<S> {
    const NAME: &'static str = "bank.Teller";
}

impl<S> Service<HttpRequest<Body>> for Teller<S>
where
    S: Service<Request<Withdraw>, Response = Response<Withdrawn>, Error = Status> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<HttpResponse<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let method = self.withdraw.clone();
        Box::pin(async move {
            if request.uri().path() != WITHDRAW {
                return Ok(Status::unimplemented("no such method").into_http());
            }
            let mut grpc = tonic::server::Grpc::new(ProstCodec::default());
            Ok(grpc.unary(method, request).await)
        })
    }
}

async fn withdraw(from: String, what: Withdraw, times: usize, at_once: usize) -> Result<(), BoxError> {
    let channel = Endpoint::from_shared(from)?.connect().await?;
    let withdrawals = stream::iter((0..times).map(|_| async {
        loop {
            let mut client = tonic::client::Grpc::new(channel.clone());
            client
                .ready()
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Withdraw, Withdrawn>::default();
            let path = PathAndQuery::from_static(WITHDRAW);
            match client.unary(Request::new(what.clone()), path, codec).await {
                Ok(done) => {
                    let Withdrawn { balance, token } = done.into_inner();
                    println!("{balance} left, token {token}");
                    return Ok::<_, Status>(());
                }
                Err(status) if status.code() == Code::Aborted => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(status) => return Err(status),
            }
        }
    }));
    withdrawals
        .buffer_unordered(at_once)
        .try_collect::<Vec<_>>()
        .await?;
    Ok(())
}
