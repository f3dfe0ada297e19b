use dlock_tower::idempotency::caller;

fn layer(records: dlock::record::Records) {
    let _ = dlock_tower::IdempotencyLayer::new(records, caller::from_fn(|parts| parts.uri.clone()));
}

fn main() {}
