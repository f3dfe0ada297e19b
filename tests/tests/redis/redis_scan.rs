//! Lists of locks while the server behind an address is replaced.

use dlock_tests::faults::{PATIENCE, ordinary, step};
use dlock_tests::{Flavor, Proxy, Server};
use redis::Value;

/// So many that a scan takes several commands.
const LOCKS: usize = 4000;

/// As Redisson's holders leave them, on the server itself.
const HELD: &str = r"for at = 1, tonumber(ARGV[1]) do
    redis.call('HSET', 'job:' .. at, '11111111-2222-3333-4444-555555555555:' .. at, '1')
end
return 1";

async fn server_with_locks() -> Server {
    let server = Server::start(Flavor::from_env()).await;
    let _: Value = server.command(&["EVAL", HELD, "0", &LOCKS.to_string()]).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_is_complete_though_the_server_is_replaced_half_way() {
    let (first, second) = (server_with_locks().await, server_with_locks().await);
    let address = Proxy::start(first.addr());
    let client = ordinary(&address.url()).await;
    assert_eq!(client.list("job:").await.unwrap().len(), LOCKS);
    let undisturbed = scans(&address);
    address.forget();
    let look = address.hold(1, step("inspect"));
    let listing = tokio::spawn(async move { client.list("job:").await });
    look.caught().await;
    address.retarget(second.addr());
    address.cut();
    let found = tokio::time::timeout(PATIENCE, listing)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(found.len(), LOCKS);
    assert_eq!(scans(&address), undisturbed + 1, "one began anew");
}

/// How many scans began.
fn scans(address: &Proxy) -> usize {
    address.count(|command| command.is("SCAN") && command.arg(1) == "0")
}
