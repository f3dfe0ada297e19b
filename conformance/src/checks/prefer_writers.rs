//! Writers that are preferred to new readers.

use dlock::store::{Kind, ReleaseRequest};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::Reply;

const STAND_BACK: Promise = Promise("waiter: readers stand back for this write lock");

pub async fn waiting_writer_keeps_new_readers_out(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let reader = a.takes(Kind::Read, &key, case.long()).await;
    let mut writer = b.request(Kind::Write, &key, case.long());
    writer.waiter = Some(b.grant());
    let reply = b.acquire(writer.clone()).await;
    assert!(reply.as_ref().is_ok_and(Reply::is_busy), "{reply:?}");
    let reply = a.asks(Kind::Read, &key, case.long()).await;
    STAND_BACK.holds(reply.is_busy(), reply);
    STAND_BACK.holds(a.renews(&reader, case.long()).await, "the reader inside is gone");
    assert!(a.gives(&reader).await);
    // The same writer asks again, with a new grant.
    writer.grant = b.grant();
    let writer = b.takes_as(writer).await;
    assert!(b.gives(&writer).await);
    let reply = a.asks(Kind::Read, &key, case.long()).await;
    STAND_BACK.holds(reply.is_granted(), reply);
}

pub async fn writer_that_gives_up_lets_readers_in(case: Case) {
    let promise = Promise("waiter: A release of this id gives up its position ahead of the readers");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    a.takes(Kind::Read, &key, case.long()).await;
    let mut writer = b.request(Kind::Write, &key, case.long());
    let waiter = b.grant();
    writer.waiter = Some(waiter);
    let reply = b.acquire(writer).await;
    assert!(reply.as_ref().is_ok_and(Reply::is_busy), "{reply:?}");
    let mut watch = a.watch(Kind::Read, &key, a.grant());
    if case.can().notifications {
        case.hears(&mut watch, promise).await;
        case.settles(&mut watch).await;
    }
    let reply = b
        .release(ReleaseRequest::new(Kind::Write, key.clone(), waiter))
        .await;
    assert!(reply.is_ok(), "{reply:?}");
    if case.can().notifications {
        case.hears(&mut watch, promise).await;
    }
    let reply = a.asks(Kind::Read, &key, case.long()).await;
    promise.holds(reply.is_granted(), reply);
}
