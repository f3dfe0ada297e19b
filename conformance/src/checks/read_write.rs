//! Many readers, or one writer.

use dlock::store::{GrantId, Kind};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::is_released;

const READERS_SHARE: Promise = Promise("Readers share a lock");
const WRITER_ALONE: Promise = Promise("A writer excludes readers and writers");

pub async fn readers_share(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let first = a.takes(Kind::Read, &key, case.long()).await;
    let reply = b.asks(Kind::Read, &key, case.long()).await;
    READERS_SHARE.holds(reply.is_granted(), reply);
    let reply = a.asks(Kind::Read, &key, case.long()).await;
    READERS_SHARE.holds(reply.is_granted(), reply);
    READERS_SHARE.holds(a.renews(&first, case.long()).await, "the first reader is gone");
}

pub async fn writer_is_alone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let writer = a.takes(Kind::Write, &key, case.long()).await;
    for peer in [&a, &b] {
        for kind in [Kind::Read, Kind::Write] {
            let reply = peer.asks(kind, &key, case.long()).await;
            WRITER_ALONE.holds(reply.is_busy(), (kind, reply));
        }
    }
    assert!(a.gives(&writer).await);
    let reply = b.asks(Kind::Read, &key, case.long()).await;
    READERS_SHARE.holds(reply.is_granted(), reply);
}

pub async fn readers_keep_writer_out_until_the_last_leaves(case: Case) {
    let promise = Promise("A writer waits for all readers");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let first = a.takes(Kind::Read, &key, case.long()).await;
    let second = b.takes(Kind::Read, &key, case.long()).await;
    for (peer, reader) in [(&a, &first), (&b, &second)] {
        let reply = a.asks(Kind::Write, &key, case.long()).await;
        promise.holds(reply.is_busy(), reply);
        assert!(peer.gives(reader).await);
    }
    let writer = b.takes(Kind::Write, &key, case.long()).await;
    let release = peer_release_as(&writer, Kind::Read);
    // What it holds is a write lock.
    let reply = b.release(release).await;
    WRITER_ALONE.holds(matches!(reply, Ok(reply) if !is_released(reply)), reply);
    assert!(b.gives(&writer).await);
}

fn peer_release_as(held: &crate::verbs::Held, kind: Kind) -> dlock::store::ReleaseRequest {
    let mut request = held.release();
    request.kind = kind;
    request
}

pub async fn writer_reads_under_its_own_lock(case: Case) {
    let promise = Promise("nested_in: the write grant of the asking holder, which does not block it");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let writer = a.takes(Kind::Write, &key, case.long()).await;
    let mut nested = a.request(Kind::Read, &key, case.long());
    nested.nested_in = Some(writer.grant);
    let reader = a.takes_as(nested).await;
    WRITER_ALONE.holds(
        b.asks(Kind::Read, &key, case.long()).await.is_busy(),
        "a foreign reader entered",
    );
    // It goes on as a reader.
    promise.holds(a.gives(&writer).await, "the writer is gone");
    promise.holds(a.renews(&reader, case.long()).await, "the reader is gone");
    let reply = b.asks(Kind::Write, &key, case.long()).await;
    promise.holds(reply.is_busy(), reply);
    let reply = b.asks(Kind::Read, &key, case.long()).await;
    READERS_SHARE.holds(reply.is_granted(), reply);
}

pub async fn nested_reader_is_shown_and_forced_open_with_its_writer(case: Case) {
    let shown = Promise("inspect: a writer, and the readers nested in it");
    let forced = Promise("force_release: Ends any grant of the key");
    if !case.can().inspection {
        return case.leave_out("the store says that it has no Inspection");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let writer = a.takes(Kind::Write, &key, case.long()).await;
    let mut nested = a.request(Kind::Read, &key, case.long());
    nested.nested_in = Some(writer.grant);
    let reader = a.takes_as(nested).await;
    let holders = b.inspect(&key).await.expect("the store inspects");
    let mut kinds: Vec<_> = holders.iter().map(|holder| holder.kind).collect();
    kinds.sort_by_key(|kind| *kind == Kind::Read);
    shown.same(kinds, vec![Kind::Write, Kind::Read]);
    forced.same(b.force_release(&key).await.ok(), Some(true));
    for held in [&writer, &reader] {
        forced.holds(!a.renews(held, case.long()).await, held);
    }
    let reply = b.asks(Kind::Write, &key, case.long()).await;
    forced.holds(reply.is_granted(), reply);
}

pub async fn reader_under_foreign_writer_is_kept_out(case: Case) {
    let promise = Promise("nested_in: a write grant that does not exist admits no reader");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let writer = a.takes(Kind::Write, &key, case.long()).await;
    let mut request = b.request(Kind::Read, &key, case.long());
    request.nested_in = Some(b.grant());
    let reply = b.acquire(request).await;
    promise.holds(reply.as_ref().is_ok_and(crate::verbs::Reply::is_busy), reply);
    assert!(a.gives(&writer).await);
}

pub async fn reader_under_lost_writer_is_kept_out_of_a_free_lock(case: Case) {
    let promise = Promise("nested_in: a write grant that does not exist admits no reader");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let keeps_out = async |writer: GrantId| {
        let mut request = a.request(Kind::Read, &key, case.long());
        request.nested_in = Some(writer);
        let reply = a.acquire(request).await;
        promise.holds(reply.as_ref().is_ok_and(crate::verbs::Reply::is_busy), reply);
    };
    keeps_out(a.grant()).await;
    let released = a.takes(Kind::Write, &key, case.long()).await;
    assert!(a.gives(&released).await);
    keeps_out(released.grant).await;
    if case.can().inspection {
        // Another writer was there since.
        let forced = a.takes(Kind::Write, &key, case.long()).await;
        assert!(b.force_release(&key).await.is_ok_and(|forced| forced));
        let writer = b.takes(Kind::Write, &key, case.long()).await;
        assert!(b.gives(&writer).await);
        keeps_out(forced.grant).await;
    }
    // Readers are there.
    b.takes(Kind::Read, &key, case.long()).await;
    keeps_out(released.grant).await;
    // It left nothing.
    let reply = a.asks(Kind::Read, &key, case.long()).await;
    READERS_SHARE.holds(reply.is_granted(), reply);
}

pub async fn each_reader_has_its_own_lease(case: Case) {
    let promise = Promise("Each reader has a lease of its own");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let long = a.takes(Kind::Read, &key, case.long()).await;
    let short = b.takes(Kind::Read, &key, case.short()).await;
    tokio::time::sleep(2 * case.short()).await;
    promise.holds(
        !b.renews(&short, case.long()).await,
        "the short lease did not end",
    );
    promise.holds(
        a.renews(&long, case.long()).await,
        "the long lease ended with the short one",
    );
    let reply = b.asks(Kind::Write, &key, case.long()).await;
    promise.holds(reply.is_busy(), reply);
    // The rest ends by itself, too.
    promise.holds(a.renews(&long, case.short()).await, "it was there a moment ago");
    case.comes_free(&b, Kind::Write, &key, promise).await;
}

pub async fn read_write_tokens_grow(case: Case) {
    let promise = Promise("A fencing token is greater than every token of the key before");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut last = 0;
    for (peer, kind) in [
        (&a, Kind::Write),
        (&b, Kind::Read),
        (&a, Kind::Read),
        (&b, Kind::Write),
    ] {
        let held = peer.takes(kind, &key, case.long()).await;
        promise.holds(held.tokens.first > last, (last, &held.tokens));
        last = held.tokens.last;
        assert!(peer.gives(&held).await);
    }
}

pub async fn last_reader_wakes_writer(case: Case) {
    let promise = Promise("release: wakes the waiters of the key");
    if !case.can().notifications {
        return case.leave_out("the store has no notifications");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let reader = a.takes(Kind::Read, &key, case.long()).await;
    let mut watch = case.watches(b.watch(Kind::Write, &key, b.grant()), promise).await;
    assert!(a.gives(&reader).await);
    case.hears(&mut watch, promise).await;
    let writer = b.takes(Kind::Write, &key, case.long()).await;
    let mut watch = case.watches(a.watch(Kind::Read, &key, a.grant()), promise).await;
    assert!(b.gives(&writer).await);
    case.hears(&mut watch, promise).await;
}
