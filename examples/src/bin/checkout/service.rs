//! The work of the shop, with its locks: one attribute on [`Shop::buy_locked`] and one on
//! [`Shop::put_locked`]. The rest is written as if there were only one process with one request.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{LockClient, distributed_lock};
use dlock_tower::Idempotency;
use uuid::Uuid;

use crate::board::{Board, Sold};
use crate::error::Error;
use crate::store::{Account, Item, Store};

/// The most of anything that one request can ask for.
const MOST: i64 = 1_000_000;
/// The most requests of one process that may wait for the same article: more waiters would mean an outage.
pub(crate) const QUEUE: usize = 2_000;

/// How often a page that is open looks for what other copies have sold.
const LOOK: Duration = Duration::from_millis(500);

/// The shop: where its locks are, and where its data.
pub(crate) struct Shop {
    locks: LockClient,
    store: Store,
    board: Arc<Board>,
    think: Duration,
    wait: Duration,
    locked: bool,
}

/// A sale that was written down.
pub(crate) struct Sale {
    pub(crate) order: String,
    /// Nothing without locks.
    pub(crate) token: Option<u64>,
}

impl Shop {
    /// A shop with its locks. A request waits longer than the lease: when a copy dies with the lock of an article,
    /// the buyers wait for the end of the lease and are served.
    pub(crate) fn new(
        locks: LockClient,
        store: Store,
        board: Arc<Board>,
        think: Duration,
        locked: bool,
    ) -> Shop {
        let wait = locks.lease().saturating_add(Duration::from_secs(10));
        Shop {
            locks,
            store,
            board,
            think,
            wait,
            locked,
        }
    }

    pub(crate) fn locks(&self) -> &LockClient {
        &self.locks
    }

    /// The board on which all tasks record their work.
    pub(crate) fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// How long a request waits for its lock before it is told that another client has it.
    pub(crate) fn wait(&self) -> Duration {
        self.wait
    }

    /// Whether locks are taken at all.
    pub(crate) fn is_locked(&self) -> bool {
        self.locked
    }

    /// What is known of an article.
    pub(crate) async fn item(&self, sku: &Name) -> Result<Item, Error> {
        self.store
            .read(&item_key(sku))
            .await?
            .ok_or_else(|| Error::UnknownSku(sku.to_string()))
    }

    /// Sets the stock of an article; its sales begin at zero.
    pub(crate) async fn put(&self, sku: &Name, stock: i64) -> Result<Item, Error> {
        let stock = within(stock, 0, "stock")?;
        if self.locked {
            self.put_locked(sku, stock).await
        } else {
            self.put_now(sku, stock).await
        }
    }

    /// Sells some of an article, under the claim of the request's idempotency key if it has one.
    pub(crate) async fn buy(
        &self,
        sku: &Name,
        quantity: i64,
        claim: Option<&Idempotency>,
    ) -> Result<Sale, Error> {
        if !self.locked {
            return self.buy_without_lock(sku, quantity).await;
        }
        let quantity = within(quantity, 1, "quantity")?;
        self.buy_locked(sku, quantity, Instant::now(), claim).await
    }

    /// The same without the lock and the check of its token: wrong on purpose, for the demo.
    pub(crate) async fn buy_without_lock(&self, sku: &Name, quantity: i64) -> Result<Sale, Error> {
        let quantity = within(quantity, 1, "quantity")?;
        self.buy_now(sku, quantity, Instant::now()).await
    }

    // A sale is not dropped half way when its lock is lost (`on_lost = ignore`): its last step is a write that the
    // store checks, and the buyer gets the store's answer. If the sale were dropped between the write and its answer,
    // a completed sale would be reported as failed.
    #[distributed_lock(
        key = "item:{sku}",
        lock = self.locks,
        wait = self.wait,
        max_waiters = QUEUE,
        on_lost = ignore
    )]
    async fn buy_locked(
        &self,
        sku: &Name,
        quantity: u64,
        asked: Instant,
        claim: Option<&Idempotency>,
    ) -> Result<Sale, Error> {
        // A copy that stood still while the request waited for the lock may find that another copy has sold meanwhile.
        if claim.is_some_and(|claim| !claim.is_held()) {
            return Err(Error::ClaimLost);
        }
        self.buy_now(sku, quantity, asked).await
    }

    #[distributed_lock(
        key = "item:{sku}",
        lock = self.locks,
        wait = self.wait,
        max_waiters = QUEUE,
        on_lost = ignore
    )]
    async fn put_locked(&self, sku: &Name, stock: u64) -> Result<Item, Error> {
        self.put_now(sku, stock).await
    }

    /// Read, think, write. Correct only while no other task does the same.
    async fn buy_now(&self, sku: &Name, quantity: u64, asked: Instant) -> Result<Sale, Error> {
        let record = item_key(sku);
        let token = fencing_token();
        let waited = asked.elapsed();
        let item: Option<Item> = match token {
            Some(token) => self.store.claim(&record, token, None).await?,
            None => self.store.read(&record).await?,
        };
        let item = item.ok_or_else(|| Error::UnknownSku(sku.to_string()))?;
        self.think().await;
        let Some(stock) = item.stock.checked_sub(quantity) else {
            return Err(Error::SoldOut {
                sku: sku.to_string(),
                left: item.stock,
                wanted: quantity,
            });
        };
        let sold = item.sold.saturating_add(quantity);
        let token_written = token.unwrap_or(item.token);
        let item = Item {
            stock,
            sold,
            token: token_written,
        };
        self.store.write(&record, item, token).await?;

        let order = Uuid::new_v4().to_string();
        tracing::info!(%sku, quantity, %order, token, waited = %Shown(waited), left = stock, "sold");
        let sold = Sold {
            sku: &sku.0,
            quantity,
            order: &order,
            token,
        };
        let promised = self.promised(sku, quantity).await.unwrap_or(item.sold);
        self.board.sold(&sold, &item, promised);
        Ok(Sale { order, token })
    }

    async fn put_now(&self, sku: &Name, stock: u64) -> Result<Item, Error> {
        let key = item_key(sku);
        let token = fencing_token();
        let token_written = match token {
            Some(token) => token,
            // Without locks the last token stays, so that copies with locks still find it.
            None => self.store.read::<Item>(&key).await?.map_or(0, |item| item.token),
        };
        let item = Item {
            stock,
            sold: 0,
            token: token_written,
        };
        self.store.write(&key, item, token).await?;
        // A note for the page only.
        if let Err(error) = self.store.write(&promised_key(sku), 0_u64, None).await {
            tracing::debug!(%error, "the page counts on from before");
        }
        tracing::info!(%sku, stock, token, "stock set");
        self.board.stock_set(&sku.0, &item);
        Ok(item)
    }

    /// Charges an account, and returns the total of its charges. It acquires no lock: the layer in front of the route
    /// has done so, and `token` is the token of that lock.
    pub(crate) async fn charge(&self, id: &Name, amount: i64, token: Option<u64>) -> Result<u64, Error> {
        let amount = within(amount, 1, "amount")?;
        let key = format!("checkout:account:{id}");
        let account: Option<Account> = match token {
            Some(token) => {
                let first = Account { charged: 0, token };
                self.store.claim(&key, token, Some(first)).await?
            }
            None => self.store.read(&key).await?,
        };
        let account = account.unwrap_or_default();
        self.think().await;
        let charged = account.charged.saturating_add(amount);
        let token_written = token.unwrap_or(account.token);
        let account = Account {
            charged,
            token: token_written,
        };
        self.store.write(&key, account, token).await?;
        tracing::info!(account = %id, amount, token, charged, "charged");
        Ok(charged)
    }

    /// Records that this many more pieces were promised to buyers, and returns how many all copies together have
    /// promised. Without locks the store's count of sales is wrong, and this count is not. It is for the page only;
    /// `None` while the store does not reply.
    async fn promised(&self, sku: &Name, more: u64) -> Option<u64> {
        let counted = self.store.add(&promised_key(sku), more).await;
        counted
            .inspect_err(|error| tracing::debug!(%error, "the page does not know how much was promised"))
            .ok()
    }

    /// Updates the board while a page shows it, where other copies sell as well. Never ends.
    pub(crate) async fn keep_up(&self, always: &[&str]) {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(mut skus) = self.board.watched() else {
                continue;
            };
            skus.extend(always.iter().map(|sku| (*sku).to_owned()));
            for sku in skus {
                let Ok(sku) = Name::parse(sku) else { continue };
                match self.store.read(&item_key(&sku)).await {
                    Ok(Some(item)) => {
                        if let Some(promised) = self.promised(&sku, 0).await {
                            self.board.looked(&sku.0, &item, promised);
                        }
                    }
                    Ok(None) => {}
                    Err(error) => {
                        tracing::debug!(%error, "the page shows the stock as it was");
                        break;
                    }
                }
            }
        }
    }

    /// Does nothing, and lets others in between, also when there is nothing to think about.
    async fn think(&self) {
        if self.think.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(self.think).await;
        }
    }
}

/// The token of the lock that this code runs under; nothing without locks.
fn fencing_token() -> Option<u64> {
    dlock::current().map(|held| held.fencing_token())
}

fn item_key(sku: &Name) -> String {
    format!("checkout:item:{sku}")
}

fn promised_key(sku: &Name) -> String {
    format!("checkout:promised:{sku}")
}

fn within(number: i64, least: i64, what: &str) -> Result<u64, Error> {
    u64::try_from(number)
        .ok()
        .filter(|_| (least..=MOST).contains(&number))
        .ok_or_else(|| Error::BadRequest(format!("{what} is {number}, it must be from {least} to {MOST}")))
}

/// The name of an article or an account, as a stranger gave it: it becomes part of a lock's name and of a
/// key on Redis.
#[derive(Debug)]
pub(crate) struct Name(String);

impl Name {
    const MOST_BYTES: usize = 128;

    pub(crate) fn parse(text: String) -> Result<Name, Error> {
        let reason = if text.is_empty() {
            "is empty"
        } else if text.len() > Name::MOST_BYTES {
            "has more than 128 bytes"
        } else if text.chars().any(char::is_control) {
            "has control characters"
        } else if text.contains(['{', '}']) {
            "has braces"
        } else {
            return Ok(Name(text));
        };
        Err(Error::BadRequest(format!("the name in the path {reason}")))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A time as people read it in a log.
struct Shown(Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1?}", self.0)
    }
}
