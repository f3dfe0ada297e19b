//! Every kind of lock is known wherever users name it. The compiler says what else of the library a new kind needs: see
//! CONTRIBUTING.md.

use std::fs;
use std::path::Path;

use dlock::store::{Kind, Store};
use dlock::stores::memory::MemoryStore;
use dlock::{LockClient, LockKind};

/// The words of `kind = …` are those of the display, and the variants have their names.
#[test]
fn attribute_has_a_word_for_every_kind() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let source = fs::read_to_string(root.join("dlock-macros/src/value.rs")).unwrap();
    let words = LockKind::ALL.iter().map(|kind| format!("{:?}", kind.to_string()));
    let words = words.collect::<Vec<_>>().join(", ");
    let list = format!("const KINDS: &[&str] = &[{words}];");
    assert!(source.contains(&list), "dlock-macros/src/value.rs: {list}");
    for &kind in LockKind::ALL {
        let (word, variant) = (kind.to_string(), format!("{kind:?}"));
        assert!(
            word == variant.to_ascii_lowercase() || kind == LockKind::Mutex,
            "the attribute takes {word} for LockKind::{variant}"
        );
    }
}

#[tokio::test]
async fn client_acquires_and_releases_every_kind() {
    let client = LockClient::memory();
    let store = MemoryStore::new();
    for &kind in LockKind::ALL {
        assert!(store.capabilities().kinds.contains(&Kind::from(kind)), "{kind}");
        let guard = client.lock("k").kind(kind).acquire().await.unwrap();
        assert!(guard.is_held(), "{kind}");
        guard.release().await.unwrap();
    }
}
