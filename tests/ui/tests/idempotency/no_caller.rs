fn layer(records: dlock::record::Records) {
    let _ = dlock_tower::IdempotencyLayer::new(records);
}

fn main() {}
