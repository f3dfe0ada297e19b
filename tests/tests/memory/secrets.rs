//! No builder of a store or of a client shows its password.

use dlock::LockClient;
use dlock_etcd::EtcdLocks;
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_postgres::PostgresLocks;
use dlock_zookeeper::ZookeeperLocks;
use tokio_postgres::NoTls;

const PASSWORD: &str = "hunter2-of-the-database";

#[test]
fn debug_output_of_builders_shows_no_password() {
    let server = OptsBuilder::default()
        .user(Some("shop"))
        .pass(Some(PASSWORD))
        .db_name(Some("shop"));
    let url = format!("postgres://shop:{PASSWORD}@db.internal/shop");
    let builders = [
        shown(&MysqlLocks::builder(server)),
        shown(&PostgresLocks::builder(url.parse().unwrap(), NoTls)),
        shown(&EtcdLocks::builder(["etcd1:2379"]).user("shop", PASSWORD)),
        shown(&ZookeeperLocks::builder("zk1:2181").credentials("shop", PASSWORD)),
        shown(&LockClient::builder().url(format!("redis://shop:{PASSWORD}@redis.internal"))),
        shown(
            &LockClient::builder()
                .url("redis+sentinel://a,b/main")
                .sentinel_password(PASSWORD),
        ),
    ];
    for builder in builders {
        assert!(builder.contains("Builder"), "{builder}");
        assert!(!builder.contains(PASSWORD), "{builder}");
    }
}

#[test]
fn debug_output_of_the_mysql_builder_shows_its_other_options() {
    let builder = MysqlLocks::builder(OptsBuilder::default())
        .table("shop.locks")
        .prefix("shop:");
    let builder = format!("{builder:?}");
    for part in [
        "table: \"shop.locks\"",
        "prefix: \"shop:\"",
        "connections: 2",
        "timeout: 1s",
    ] {
        assert!(builder.contains(part), "{builder}");
    }
}

/// Both forms of the output.
fn shown(builder: &impl std::fmt::Debug) -> String {
    format!("{builder:?} {builder:#?}")
}
