//! What the suites of all stores test in the same way: the contract of stores (crate `dlock-conformance`) on a server as it
//! is, behind a network with faults, and on one that is stopped and started again, or whose clock is set.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock_conformance::{Fixture, Report, Verdict, run_only};
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Clock, Direction, Gateway, Node, Protocol, Swallow};

/// What clients of a store ask its server.
pub(super) type Asked<B> = <<B as Backend>::Wire as Protocol>::Request;

/// A store on a server, with data of its own there.
pub(super) trait Backend: Sized + Send + Sync + 'static {
    type Server: Node + 'static;
    /// What it speaks.
    type Wire: Protocol;
    /// The unit of leases.
    const TICK: Duration = Duration::from_millis(100);

    /// With data of its own.
    fn on(server: Arc<Self::Server>) -> impl Future<Output = Self> + Send;

    fn server(&self) -> &Arc<Self::Server>;

    /// The store as another process has it, through the proxy or without one.
    fn store(
        &self,
        proxy: Option<&Gateway<Self::Wire>>,
        timeout: Duration,
    ) -> impl Future<Output = Arc<dyn Store>> + Send;

    /// Loses all data. Where that takes others with it, only on a server of its own.
    fn forget(&self, own: bool) -> impl Future<Output = bool> + Send;

    /// Whether this acquires a lock.
    fn acquires(request: &Asked<Self>) -> bool;
}

/// A store without faults but that it can lose its data.
pub(super) struct Plain<B>(pub(super) B);

impl<B: Backend> Fixture for Plain<B> {
    async fn store(&self) -> Arc<dyn Store> {
        self.0.store(None, PATIENCE).await
    }

    fn tick(&self) -> Duration {
        B::TICK
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        self.0.forget(false).await
    }
}

/// A server behind a network that fails, and perhaps a process that does.
struct Faulty<B: Backend> {
    backend: B,
    proxy: Gateway<B::Wire>,
    own: bool,
}

impl<B: Backend> Faulty<B> {
    async fn on(server: Arc<B::Server>, own: bool) -> Self {
        Faulty {
            proxy: Gateway::start(server.addr()),
            backend: B::on(server).await,
            own,
        }
    }
}

impl<B: Backend> Fixture for Faulty<B> {
    async fn store(&self) -> Arc<dyn Store> {
        let timeout = Duration::from_secs(2);
        self.backend.store(Some(&self.proxy), timeout).await
    }

    fn tick(&self) -> Duration {
        B::TICK
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        self.backend.forget(self.own).await
    }

    async fn restart(&self) -> bool {
        if self.own {
            self.backend.server().restart().await;
        }
        self.own
    }

    async fn cut(&self) -> bool {
        self.proxy.refuse();
        self.proxy.cut();
        true
    }

    async fn freeze(&self) -> bool {
        match self.own {
            true => self.backend.server().stop(),
            false => self.proxy.block(Direction::Both),
        }
        true
    }

    async fn heal(&self) {
        if self.own {
            self.backend.server().cont();
        }
        self.proxy.unblock(Direction::Both);
        self.proxy.accept();
    }

    async fn lose_next_reply(&self) -> bool {
        self.proxy.swallow(1, Swallow::Cut, B::acquires);
        true
    }
}

/// A server whose clock is an hour ahead, and can be set back.
struct Stepped<B>(B, Clock);

const HOUR: Duration = Duration::from_secs(3600);

impl<B: Backend> Fixture for Stepped<B> {
    async fn store(&self) -> Arc<dyn Store> {
        self.0.store(None, Duration::from_secs(20)).await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn set_clock_back(&self, by: Duration) -> bool {
        self.1.set(HOUR.saturating_sub(by)).is_ok()
    }
}

/// Runs these checks, of which none may be left out.
async fn keeps(fixture: impl Fixture, checks: &[&str]) {
    let report: Report = run_only(fixture, |name| checks.contains(&name)).await;
    assert_eq!(report.checks.len(), checks.len(), "{report}");
    let kept = report.checks.iter().all(|check| check.verdict == Verdict::Kept);
    assert!(kept, "{report}");
}

/// Where the network fails, and others use the server.
pub(super) async fn keeps_contract_behind_a_network<B: Backend>(server: Arc<B::Server>) {
    let fixture = Faulty::<B>::on(server, false).await;
    let mut checks = vec![
        "exclusion::storm_of_clients_never_shares_a_lock",
        "order::steps_take_effect_in_the_order_of_calls",
        "release::release_undoes_acquire_dropped_at_any_poll",
        "faults::acquire_with_lost_reply_is_undone_by_release",
        "faults::unreachable_store_fails_in_bounded_time",
        "faults::frozen_store_fails_in_bounded_time",
    ];
    if fixture.forget().await {
        checks.push("tokens::tokens_grow_after_data_loss");
    }
    keeps(fixture, &checks).await;
}

/// Where the server is the test's own.
pub(super) async fn keeps_contract_over_restarts<B: Backend>(server: B::Server) {
    let checks = [
        "tokens::tokens_grow_over_restart",
        "client::holder_learns_of_lost_data",
        "faults::frozen_store_fails_in_bounded_time",
        "faults::restarted_store_serves_again",
    ];
    keeps(Faulty::<B>::on(Arc::new(server), true).await, &checks).await;
}

/// Where the server goes by this clock.
pub(super) async fn keeps_tokens_though_the_clock_goes_back<B: Backend>(
    start: impl AsyncFnOnce(&Clock) -> B::Server,
) {
    let clock = Clock::new().expect("libfaketime");
    clock.set(HOUR).expect("its file can be written");
    let backend = B::on(Arc::new(start(&clock).await)).await;
    keeps(
        Stepped(backend, clock),
        &["faults::tokens_grow_though_clock_goes_back"],
    )
    .await;
}
