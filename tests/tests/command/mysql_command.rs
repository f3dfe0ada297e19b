//! The command `dlock` on MariaDB.

use dlock::LockClient;
use dlock_tests::mysql::Mysql;

use crate::command_support::{hold_one_by_one_with_clocks_hours_apart, look, runs_lists_and_measures};

#[tokio::test]
async fn command_runs_lists_and_measures_on_mysql() {
    let server = Mysql::shared().await;
    let base = server.url_at(server.addr());
    let url = format!(
        "{base}?table=locks_{:016x}&lease=60s&timeout=20s",
        fastrand::u64(..)
    );
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(2) && said.contains("create_table=true"), "{said}");
    let builder = LockClient::builder().scheme(dlock_mysql::scheme());
    runs_lists_and_measures(&format!("{url}&create_table=true"), builder, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_whose_clocks_are_hours_apart_never_hold_the_lock_at_once() {
    let server = Mysql::shared().await;
    let base = server.url_at(server.addr());
    let url = format!("{base}?table=locks_{:016x}&create_table=true", fastrand::u64(..));
    let (code, said) = look(&url, &["list"]);
    assert_eq!(code, Some(0), "{said}");
    hold_one_by_one_with_clocks_hours_apart(&url).await;
}
