//! A page for the person on call, to mount in any axum app: which locks are held and waited for, in all processes.
//!
//! [`Console`] creates the router. The page refreshes every second while it is visible; all its data comes from JSON
//! endpoints:
//!
//! | request | answer |
//! |---|---|
//! | `GET` of where it is mounted | the page: one file, which loads nothing else |
//! | `GET api/state`, `?find=TEXT&only=SORT` | locks with holders and waiters, clients, deadlocks, this process, what is unknown and why |
//! | `GET api/lock?key=KEY` | one lock: its holders are looked up and asked at this moment, other waiters are those of the last survey; without the store, the holds of this process |
//! | `POST api/break`, `api/revoke`, `api/forget` | with [`allow_actions`](Console::allow_actions): what an operator has done |
//!
//! The locks are those of the store and the prefix of its client. Holders and waiters of other processes are known only
//! as those processes published them: set [`presence`](dlock::LockClientBuilder::presence) in all of them. For unknown
//! values the page gives the reason. [docs/console.md](https://github.com/dlock-rs/dlock/blob/main/docs/console.md)
//! explains each part.
//!
//! # Access
//!
//! Lock names, hosts, source lines and notes are not for strangers, and the console has no user management: **put your
//! own authentication around it**, as a layer.
//!
//! ```
//! use axum::extract::Request;
//! use axum::http::StatusCode;
//! use axum::middleware::{Next, from_fn};
//! use axum::response::{IntoResponse, Response};
//! use axum::Router;
//! use dlock_tower::console::Console;
//!
//! /// Yours, in place of this one: a session, a token, the headers of a proxy.
//! async fn operators_only(request: Request, next: Next) -> Response {
//!     match request.headers().get("x-operator") {
//!         Some(_) => next.run(request).await,
//!         None => StatusCode::UNAUTHORIZED.into_response(),
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! let client = dlock::LockClient::builder().url("memory://").presence(true).build().await?;
//! let console = Console::new(client).router().layer(from_fn(operators_only));
//! let app: Router = Router::new().nest_service("/locks", console);
//! # use tower::ServiceExt;
//! # let request = || http::Request::get("/locks");
//! # let answer = app.clone().oneshot(request().body(axum::body::Body::empty()).unwrap()).await.unwrap();
//! # assert_eq!(answer.status(), 401);
//! # let request = request().header("x-operator", "ada").body(axum::body::Body::empty()).unwrap();
//! # assert_eq!(app.oneshot(request).await.unwrap().status(), 200);
//! # Ok(()) }
//! ```

mod actions;
mod answer;
mod filter;
mod look;
mod page;
mod survey;
mod timeline;
mod view;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::iter;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use dlock::operations::{ClientReport, SurveyedLock};
use dlock::store::Holder;
use dlock::{LockClient, LockKey};
use futures_util::future::join_all;
use http::StatusCode;
use http::request::Parts;
use http::uri::Authority;
use tracing::Instrument;

use self::actions::{Action, Actions, Operator};
use self::answer::Sender;
use self::filter::Filter;
use self::look::Look;
use self::timeline::Timeline;
use crate::key::host;

/// How often the store is surveyed by default.
const EVERY: Duration = Duration::from_secs(1);
/// The shortest and the longest time between two surveys.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The page for the person on call, see the [module](self).
///
/// ```
/// use std::time::Duration;
/// use dlock_tower::console::Console;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let client = dlock::LockClient::memory();
/// let console = Console::new(client).refresh(Duration::from_secs(2));
/// let app: axum::Router = axum::Router::new().nest_service("/admin/locks", console.router());
/// # let _ = app; }
/// ```
#[derive(Clone)]
pub struct Console {
    client: LockClient,
    every: Duration,
    allowed: bool,
    operator: Option<Operator>,
    hosts: Option<HashSet<String>>,
}

/// The state that all requests share.
struct Shared {
    client: LockClient,
    look: Look,
    timeline: Timeline,
    actions: Option<Actions>,
    /// Without ports; `None` for all.
    hosts: Option<HashSet<String>>,
}

impl Console {
    /// Creates the console for the locks of this client's store and prefix. It only reads.
    #[must_use]
    pub fn new(client: LockClient) -> Console {
        Console {
            client,
            every: EVERY,
            allowed: false,
            operator: None,
            hosts: None,
        }
    }

    /// Sets how often the store is surveyed at most, however many pages are open; once a second by default, and never
    /// more often than ten times a second; more than a day counts as a day. Each survey scans all keys of the store; a
    /// slow one is kept for four times its duration, so that surveys take at most a fifth of the time.
    #[must_use]
    pub fn refresh(mut self, every: Duration) -> Console {
        self.every = every.clamp(SHORTEST, LONGEST);
        self
    }

    /// Lets operators act: [end a hold](LockClient::break_hold), [ask its holder to stop](LockClient::revoke), and
    /// [forget a record](LockClient::forget_record); `false` by default. Each action needs a reason and is written to
    /// the store's audit log first. Requests from another site, or without the token of this process, are refused; your
    /// authentication decides which users may act.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock_tower::console::Console;
    ///
    /// let client = dlock::LockClient::memory();
    /// let console = Console::new(client).allow_actions(true).operator(|head| {
    ///     let user = head.headers.get("x-operator")?; // what your authentication has checked
    ///     user.to_str().ok().map(str::to_owned)
    /// });
    /// # let _ = console.router(); }
    /// ```
    #[must_use]
    pub fn allow_actions(mut self, allowed: bool) -> Console {
        self.allowed = allowed;
        self
    }

    /// Sets how the operator is named, from the head of the request, for the audit log and the holder; by default the
    /// service and the machine of this process.
    #[must_use]
    pub fn operator(
        mut self,
        operator: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Console {
        self.operator = Some(Arc::new(operator));
        self
    }

    /// Sets the hosts that the console serves, as browsers name them (`ops.example`, `localhost`, `10.0.0.7`); a port does
    /// not matter. All by default. Requests to others are answered with 421.
    ///
    /// For a console on plain HTTP that relies on its network, and not on an authentication: a page of another site may
    /// have its own name resolve to the address of the console (DNS rebinding), and then it is no other site for the
    /// browser. Behind a proxy that changes `Host`, name the host that the proxy sends.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock_tower::console::Console;
    ///
    /// let client = dlock::LockClient::memory();
    /// let console = Console::new(client).hosts(["ops.example", "localhost"]);
    /// # let _ = console.router(); }
    /// ```
    #[must_use]
    pub fn hosts(mut self, hosts: impl IntoIterator<Item = impl AsRef<str>>) -> Console {
        self.hosts = Some(hosts.into_iter().map(|host| name(host.as_ref())).collect());
        self
    }

    /// Returns the router, for any path, behind any proxy: its page contains no absolute path. On plain HTTP actions need
    /// a proxy that keeps `Host`, by which the console tells its own page from others. Mount it with
    /// [`nest_service`](Router::nest_service), which accepts the path with and without a trailing slash, and put your
    /// authentication around it. Created inside a runtime, it listens to the [events](LockClient::events) of its client
    /// for the timeline.
    pub fn router(self) -> Router {
        let shared = Arc::new(Shared {
            timeline: Timeline::new(&self.client),
            client: self.client,
            look: Look::new(self.every),
            actions: self.allowed.then(|| Actions::new(self.operator)),
            hosts: self.hosts,
        });
        timeline::watch(Arc::downgrade(&shared));
        let api = Router::new()
            .route("/api/state", get(state))
            .route("/api/lock", get(lock))
            .route("/api/break", post(act(Action::Break)))
            .route("/api/revoke", post(act(Action::Revoke)))
            .route("/api/forget", post(act(Action::Forget)))
            .layer(from_fn(only_from_here));
        Router::new()
            .route("/", get(async || page::page()))
            .merge(api)
            .fallback(elsewhere)
            .method_not_allowed_fallback(not_allowed)
            .layer(from_fn_with_state(shared.clone(), only_to_hosts))
            .layer(map_response(answer::with_headers))
            .with_state(shared)
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console")
            .field("client", &self.client)
            .field("every", &self.every)
            .field("allowed", &self.allowed)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

type Asked = State<Arc<Shared>>;

/// Refuses pages of other sites, whatever CORS layer is around.
async fn only_from_here(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    if Sender::of(&head) == Sender::Foreign {
        return answer::foreign("only the console's own page and programs may ask");
    }
    next.run(Request::from_parts(head, body)).await
}

/// Refuses requests to other hosts than those that are named, if any are.
async fn only_to_hosts(State(shared): Asked, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    if let Some(hosts) = &shared.hosts
        && !host(&head).is_some_and(|host| hosts.contains(&name(host)))
    {
        return answer::problem(
            StatusCode::MISDIRECTED_REQUEST,
            "urn:dlock:problem:unknown-host",
            "The console is not at this host",
            "its service names its hosts by Console::hosts",
        );
    }
    next.run(Request::from_parts(head, body)).await
}

/// The name of a host, without its port.
fn name(host: &str) -> String {
    let authority = host.parse::<Authority>();
    let name = authority.as_ref().map_or(host, Authority::host);
    name.to_ascii_lowercase()
}

async fn state(State(shared): Asked, Query(query): Query<HashMap<String, String>>) -> Response {
    let token = shared.actions.as_ref().map(|actions| actions.token.as_str());
    let filter = Filter::of(&query);
    let look = shared.look.at(&shared.client, &shared.timeline, token, filter);
    match look.await {
        // The clock of the browser may be wrong.
        Some((json, age)) => {
            let age = [("x-dlock-age-ms", view::millis(age).to_string())];
            (age, answer::data(json)).into_response()
        }
        None => answer::problem(
            StatusCode::SERVICE_UNAVAILABLE,
            "urn:dlock:problem:unavailable",
            "The locks could not be surveyed",
            "the survey panicked, or the service is ending: its log says why",
        ),
    }
}

fn act(
    action: Action,
) -> impl Fn(Asked, Request) -> Pin<Box<dyn Future<Output = Response> + Send>> + Clone + Send + Sync + 'static
{
    move |State(shared), request| {
        Box::pin(async move {
            let Some(actions) = &shared.actions else {
                return actions::not_allowed();
            };
            let order = match actions.order(action, request).await {
                Ok(order) => order,
                Err(refusal) => return *refusal,
            };
            // A client that goes away ends this request, but not the action: its log entry must be written.
            let acting = async move {
                let answer = order.carry_out(&shared.client).await;
                // The change must be visible at once. If the store failed, the action may have been carried out.
                if !answer.status().is_client_error() {
                    shared.look.again();
                }
                answer
            };
            match tokio::spawn(acting.in_current_span()).await {
                Ok(answer) => answer,
                Err(error) => match error.try_into_panic() {
                    Ok(panic) => resume_unwind(panic),
                    Err(_) => actions::interrupted(),
                },
            }
        })
    }
}

/// Returns one lock, now: a holder that answers is asked what it does.
async fn lock(State(shared): Asked, Query(mut query): Query<HashMap<String, String>>) -> Response {
    let Some(key) = query.remove("key") else {
        return answer::problem(
            StatusCode::BAD_REQUEST,
            "about:blank",
            "No lock is named",
            "name it: api/lock?key=order:42",
        );
    };
    // The name comes from a list of existing names, braces included.
    match now(&shared, LockKey::raw(key)).await {
        Ok((lock, unknown)) => {
            let unknown = unknown.map(|error| error.to_string());
            answer::data(view::of_lock(&lock, unknown.as_deref(), &shared.client.id()).to_string())
        }
        Err(error) => answer::failed(&error),
    }
}

/// Returns a lock, and the error if the store did not tell its holders: then they are those of this process.
async fn now(shared: &Shared, key: LockKey) -> Result<(SurveyedLock, Option<dlock::Error>), dlock::Error> {
    let client = &shared.client;
    let survey = shared.look.survey(client).await;
    let found = client.holders(key.clone()).await;
    let own = Arc::new(client.active());
    let (holders, unknown) = match found {
        Ok(holders) => (holders, None),
        Err(error) => match own_holds(&own, &key) {
            none if none.is_empty() => return Err(error),
            holders => (holders, Some(error)),
        },
    };
    // One client may have many of them, as readers.
    let written = holders.iter().filter_map(|holder| holder.client.as_ref());
    let answering =
        written.filter(|report| report.answers && !report.is_overdue() && report.client != own.client);
    let asked: HashSet<String> = answering.map(|report| report.client.clone()).collect();
    let asked = asked.into_iter().map(|id| async move {
        let answer = client.ask(&id).await.ok().flatten();
        Some((id, Arc::new(answer?)))
    });
    let answers: HashMap<String, Arc<ClientReport>> = join_all(asked).await.into_iter().flatten().collect();
    let holders = holders.into_iter().map(|holder| {
        let of_client = holder
            .client
            .as_ref()
            .and_then(|report| answers.get(&report.client));
        match of_client.cloned() {
            Some(answer) => holder.known(Some(answer)),
            // A holder that does not answer is shown as before.
            None => holder,
        }
    });
    let holders: Vec<_> = holders.collect();
    let surveyed = survey.iter().flat_map(|survey| survey.waiting_for(&key));
    let of_holders = holders.iter().filter_map(|holder| holder.client.clone());
    // The newest report of each client: one that waited during the survey may hold the lock now.
    let mut known = HashSet::new();
    let mut clients: Vec<_> = iter::once(own).chain(of_holders).chain(surveyed).collect();
    clients.retain(|report| known.insert(report.client.clone()));
    Ok((SurveyedLock::new(key, holders, clients), unknown))
}

/// What this process holds, known without the store.
fn own_holds(own: &Arc<ClientReport>, key: &LockKey) -> Vec<Holder> {
    let of_key = own.holds.iter().filter(|hold| hold.key == *key);
    let holder = of_key.map(|hold| Holder::new(hold.kind, hold.grant.clone(), 1, Some(hold.lease_left)));
    holder.map(|holder| holder.known(Some(own.clone()))).collect()
}

async fn elsewhere() -> Response {
    answer::problem(
        StatusCode::NOT_FOUND,
        "about:blank",
        "There is nothing here",
        "the console is where it is mounted, and api/state and api/lock?key=KEY below it",
    )
}

async fn not_allowed() -> Response {
    answer::problem(
        StatusCode::METHOD_NOT_ALLOWED,
        "about:blank",
        "This path does not take that method",
        "data are read by GET, actions are taken by POST",
    )
}
