//! The names of locks, and their number.

use dlock::store::Kind;
use dlock::{LockKey, MAX_KEY_BYTES};
use futures_util::future::join_all;

use crate::case::Case;
use crate::promise::Promise;

/// It is held, inspected and released by its name.
async fn is_a_lock(case: &Case, key: &LockKey) {
    let promise = Promise("A name is UTF-8 of 1 to MAX_KEY_BYTES bytes, without control characters");
    key.check().expect("a name that keeps the rules");
    let (a, b) = case.peers().await;
    let lease = case.short() * 20;
    // Very short names may be those of other tests, too.
    let held = match key.as_str().len() {
        1 => case.comes_free(&a, Kind::Mutex, key, promise).await,
        _ => a.takes(Kind::Mutex, key, lease).await,
    };
    let reply = b.asks(Kind::Mutex, key, lease).await;
    promise.holds(reply.is_busy(), ("acquire", key, reply));
    promise.holds(a.renews(&held, lease).await, ("renew", key));
    if case.can().inspection {
        let holders = b.inspect(key).await.expect("the store inspects");
        promise.holds(
            holders.len() == 1 && holders[0].id == held.grant.to_string(),
            ("inspect", key, holders),
        );
        let listed = b.list(key.as_str()).await.expect("the store lists");
        promise.holds(
            listed.iter().any(|(listed, _)| listed == key),
            ("list", key, listed),
        );
    }
    promise.holds(a.gives(&held).await, ("release", key));
}

pub async fn short_long_and_odd_names_are_locks(case: Case) {
    let prefix = case.prefix();
    let long = |end: &str| {
        format!(
            "{prefix}{}{end}",
            "x".repeat(MAX_KEY_BYTES - prefix.len() - end.len())
        )
    };
    is_a_lock(&case, &LockKey::from("k")).await;
    is_a_lock(&case, &LockKey::from(long(""))).await;
    is_a_lock(&case, &LockKey::from(long("ß😀"))).await;
    let odd = [
        " ",
        "with space",
        "größe",
        "日本語",
        "😀",
        "e\u{301}",
        "'",
        "\"",
        "\\",
        "%",
        "%s",
        "_",
        "*",
        "?",
        "[a]",
        "^$",
        "$1",
        ";",
        "--",
        "/",
        "../..",
        "a/b/",
        ":",
        "::",
        "#",
        "&",
        "=",
        "\u{a0}",
        "\u{feff}",
        "\u{202e}abc",
        "NULL",
        "0",
        "-1",
        "1e999",
    ];
    for odd in odd {
        is_a_lock(&case, &case.key(odd)).await;
    }
    for braces in ["{a}", "{", "}", "{}", "a{b}c", "{{a}}", "}{"] {
        is_a_lock(&case, &LockKey::raw(format!("{prefix}{braces}"))).await;
    }
}

pub async fn similar_names_are_different_locks(case: Case) {
    let promise = Promise("Locks are the same if their names are equal, byte for byte");
    let ((a, b), mut all) = (case.peers().await, Vec::new());
    for name in [
        "k", "K", "k ", " k", "kk", "k:", "k:1", "k/1", "\u{e9}", "e\u{301}", "k\u{a0}", "ss", "ß", "I", "ı",
    ] {
        let reply = a.asks(Kind::Mutex, &case.key(name), case.long()).await;
        promise.holds(reply.is_granted(), (name, &all));
        all.push(name);
    }
    for name in all {
        let reply = b.asks(Kind::Mutex, &case.key(name), case.long()).await;
        promise.holds(reply.is_busy(), (name, reply));
    }
}

pub async fn many_keys_are_held_at_once(case: Case) {
    let promise = Promise("Locks of different keys are independent, however many there are");
    let (a, b) = case.peers().await;
    let keys: Vec<_> = (0..500).map(|number| case.key(&number.to_string())).collect();
    let held = join_all(keys.iter().map(|key| a.takes(Kind::Mutex, key, case.long()))).await;
    let busy = join_all(keys.iter().map(|key| b.asks(Kind::Mutex, key, case.long()))).await;
    promise.holds(busy.iter().all(crate::verbs::Reply::is_busy), "not all are held");
    let renewed = join_all(held.iter().map(|held| a.renews(held, case.long()))).await;
    promise.holds(renewed.iter().all(|renewed| *renewed), "not all were renewed");
    let released = join_all(held.iter().map(|held| a.gives(held))).await;
    promise.holds(released.iter().all(|released| *released), "not all were released");
    let free = join_all(keys.iter().map(|key| b.asks(Kind::Mutex, key, case.long()))).await;
    promise.holds(
        free.iter().all(crate::verbs::Reply::is_granted),
        "not all are free",
    );
}
