//! The whole way on a real PostgreSQL: the idempotency layer around a handler that sells in a transaction of
//! its own, so that the sale and the record of it commit together.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use dlock::record::Records;
use dlock_postgres::PostgresRecords;
use dlock_tests::Swallow;
use dlock_tests::faults::PATIENCE;
use dlock_tests::postgres::{PgProxy, Postgres, connect, fresh_table};
use dlock_tower::idempotency::{Outcome, caller};
use dlock_tower::{Idempotency, IdempotencyLayer};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tokio_postgres::NoTls;
use tower::ServiceExt;
use tower_layer::Layer;

/// How the handler's own connection to the database fares.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Fine,
    /// The reply to the COMMIT is lost.
    ReplyLost,
    /// The COMMIT itself is lost.
    CommitLost,
    /// The handler gives up before it.
    RolledBack,
}

struct Shop {
    server: Arc<Postgres>,
    proxy: PgProxy,
    store: PostgresRecords,
    table: String,
}

async fn shop() -> Arc<Shop> {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let store = PostgresRecords::builder(server.config(), NoTls)
        .timeout(PATIENCE)
        .table(&table)
        .connect()
        .await
        .unwrap();
    store.create_table().await.unwrap();
    let client = server.client().await;
    client
        .batch_execute(&format!("CREATE TABLE {table}_sales (attempt bigint)"))
        .await
        .unwrap();
    let proxy = PgProxy::start(server.addr());
    Arc::new(Shop {
        server,
        proxy,
        store,
        table,
    })
}

impl Shop {
    async fn sales(&self) -> i64 {
        let sql = format!("SELECT count(*) FROM {}_sales", self.table);
        self.server
            .client()
            .await
            .query_one(&sql, &[])
            .await
            .unwrap()
            .get(0)
    }

    /// The handler: its effect, its record, one COMMIT.
    async fn sell(
        &self,
        claim: Idempotency,
        fate: Fate,
    ) -> Result<Response<Bytes>, Box<dyn std::error::Error + Send + Sync>> {
        let mut client = connect(&self.server.config_at(self.proxy.addr())).await?;
        let tx = client.transaction().await?;
        let attempt = i64::from(claim.attempt());
        tx.execute(
            &format!("INSERT INTO {}_sales VALUES ($1)", self.table),
            &[&attempt],
        )
        .await?;
        let sold = Response::builder()
            .status(StatusCode::CREATED)
            .body(Bytes::from(format!("sold in attempt {attempt}")))?;
        let owned = self
            .store
            .owned(claim.record_key(), claim.claim_token(), claim.retention());
        owned
            .complete_in(&tx, &claim.in_transaction(sold.clone()))
            .await?;
        match fate {
            Fate::RolledBack => return Err("changed my mind".into()),
            Fate::ReplyLost => {
                self.proxy
                    .swallow(1, Swallow::Cut, |request| request.runs("COMMIT"));
            }
            Fate::CommitLost => {
                self.proxy.lose(1, |request| request.runs("COMMIT"));
            }
            Fate::Fine => {}
        }
        tx.commit().await?;
        Ok(sold)
    }
}

/// Sends the request through the layer; what comes back, and whether it was a replay.
async fn buy(shop: &Arc<Shop>, key: &str, fate: Fate) -> (StatusCode, String, bool) {
    let seller = shop.clone();
    let handler = tower::service_fn(move |request: Request<Body>| {
        let shop = seller.clone();
        async move {
            let claim = request.extensions().get::<Idempotency>().unwrap().clone();
            let answer = shop.sell(claim, fate).await;
            Ok::<_, Infallible>(answer.map_or_else(
                |error| {
                    let mut response = Response::new(Body::from(error.to_string()));
                    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                    // What was not committed has had no effect, so it is worth a retry.
                    response.extensions_mut().insert(Outcome::Retry);
                    response
                },
                |sold| sold.map(Body::from),
            ))
        }
    });
    let layer = IdempotencyLayer::new(Records::new(shop.store.clone()), caller::public());
    let request = Request::post("/orders")
        .header("idempotency-key", key)
        .body(Body::empty())
        .unwrap();
    let response = layer.layer(handler).oneshot(request).await.unwrap();
    let replayed = response.headers().contains_key("idempotent-replayed");
    let status = response.status();
    let Ok(body) = response.into_body().collect().await else {
        panic!("the body broke");
    };
    assert_eq!(layer.handle().shutdown(Duration::from_secs(20)).await, 0);
    (
        status,
        String::from_utf8(body.to_bytes().to_vec()).unwrap(),
        replayed,
    )
}

/// A transaction that loses against another one (SQLSTATE 40001) has had no effect, and spends no key.
#[tokio::test]
async fn serialization_conflict_releases_the_key() {
    let shop = shop().await;
    let sql = format!(
        "CREATE TABLE {0}_stock (n bigint); INSERT INTO {0}_stock VALUES (10)",
        shop.table
    );
    let other = shop.server.client().await;
    other.batch_execute(&sql).await.unwrap();
    for late in [false, true] {
        let layer = IdempotencyLayer::new(Records::new(shop.store.clone()), caller::public());
        let seller = shop.clone();
        let handler = tower::service_fn(move |request: Request<Body>| {
            let shop = seller.clone();
            async move {
                let claim = request.extensions().get::<Idempotency>().unwrap().clone();
                let answer = take_from_stock(&shop, &claim, late).await;
                Ok::<_, Infallible>(answer.unwrap_or_else(|error| {
                    let mut response = Response::new(Body::from(error.to_string()));
                    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                    response
                }))
            }
        });
        let service = layer.layer(handler);
        for wanted in [500, 200, 200] {
            let request = Request::post("/orders")
                .header("idempotency-key", if late { "late" } else { "early" })
                .body(Body::empty())
                .unwrap();
            let response = service.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status().as_u16(), wanted, "late: {late}");
        }
    }
    let sql = format!("SELECT n FROM {}_stock", shop.table);
    let left: i64 = other.query_one(&sql, &[]).await.unwrap().get(0);
    // Two sales, and one by the other transaction in each of the two conflicts.
    assert_eq!(left, 6);
}

/// Sells one. The first time another transaction is quicker: before the response is put into the transaction, or
/// afterwards (`late`).
async fn take_from_stock(
    shop: &Shop,
    claim: &Idempotency,
    late: bool,
) -> Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static RUNS: AtomicU32 = AtomicU32::new(0);
    claim.transactional();
    let mut client = connect(&shop.server.config()).await?;
    let tx = client
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::Serializable)
        .start()
        .await?;
    let table = format!("{}_stock", shop.table);
    let seen: i64 = tx.query_one(&format!("SELECT n FROM {table}"), &[]).await?.get(0);
    let is_first = RUNS.fetch_add(1, Ordering::SeqCst).is_multiple_of(2);
    let conflict = async {
        let other = shop.server.client().await;
        let sell = format!("UPDATE {table} SET n = n - 1");
        other.batch_execute(&sell).await
    };
    if is_first && !late {
        conflict.await?;
        tx.execute(&format!("UPDATE {table} SET n = $1"), &[&(seen - 1)])
            .await?;
        unreachable!("the conflict is noticed");
    }
    let owned = shop
        .store
        .owned(claim.record_key(), claim.claim_token(), claim.retention());
    let sold = Response::new(Bytes::from("sold"));
    if is_first {
        let stored = claim.in_transaction(sold);
        conflict.await?;
        tx.execute(&format!("UPDATE {table} SET n = $1"), &[&(seen - 1)])
            .await?;
        owned.complete_in(&tx, &stored).await?;
        unreachable!("the conflict is noticed");
    }
    tx.execute(&format!("UPDATE {table} SET n = $1"), &[&(seen - 1)])
        .await?;
    owned.complete_in(&tx, &claim.in_transaction(sold)).await?;
    tx.commit().await?;
    Ok(Response::new(Body::empty()))
}

#[tokio::test]
async fn sale_and_record_commit_together_and_a_retry_is_a_replay() {
    let shop = shop().await;
    let sold = "sold in attempt 1".to_owned();
    assert_eq!(
        buy(&shop, "k", Fate::Fine).await,
        (StatusCode::CREATED, sold.clone(), false)
    );
    assert_eq!(
        buy(&shop, "k", Fate::Fine).await,
        (StatusCode::CREATED, sold, true)
    );
    assert_eq!(shop.sales().await, 1);
}

#[tokio::test]
async fn a_commit_whose_reply_is_lost_is_answered_as_committed() {
    let shop = shop().await;
    let sold = "sold in attempt 1".to_owned();
    assert_eq!(
        buy(&shop, "k", Fate::ReplyLost).await,
        (StatusCode::CREATED, sold.clone(), false)
    );
    assert_eq!(
        buy(&shop, "k", Fate::Fine).await,
        (StatusCode::CREATED, sold, true)
    );
    assert_eq!(shop.sales().await, 1);
}

#[tokio::test]
async fn what_was_not_committed_has_neither_effect_nor_record_and_may_be_tried_again() {
    let shop = shop().await;
    for (key, fate) in [("lost", Fate::CommitLost), ("back", Fate::RolledBack)] {
        let before = shop.sales().await;
        let (status, _, replayed) = buy(&shop, key, fate).await;
        assert_eq!((status, replayed), (StatusCode::INTERNAL_SERVER_ERROR, false));
        assert_eq!(shop.sales().await, before);
        let (status, _, replayed) = buy(&shop, key, Fate::Fine).await;
        assert_eq!((status, replayed), (StatusCode::CREATED, false));
        assert_eq!(shop.sales().await, before + 1);
    }
}
