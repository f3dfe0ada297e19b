//! Nothing that the attribute writes makes the compiler warn.
#![deny(warnings, unused, rust_2018_idioms, unreachable_pub, missing_docs, missing_debug_implementations)]
#![deny(unused_qualifications, unused_lifetimes, single_use_lifetimes, let_underscore_drop)]

use dlock::{Error, LockClient, distributed_lock};

/// An order.
#[derive(Debug)]
pub struct Order {
    /// Its number.
    pub id: u64,
}

/// Uses the argument in the key only.
#[distributed_lock(key = "order:{id}", lock = client)]
pub async fn key_only(client: LockClient, id: u64) -> Result<(), Error> {
    Ok(())
}

/// Has arguments that are not named, and some that change.
#[distributed_lock(key("order:{}", order.id), lock = client)]
pub async fn place(client: &LockClient, mut order: Order, _permit: String, _: Vec<u8>) -> Result<u64, Error> {
    use std::mem::take;
    order.id += 1;
    Ok(take(&mut order.id))
}

/// Never comes to an end.
#[distributed_lock(key = "forever", lock = client)]
pub async fn forever(client: LockClient) -> Result<(), Error> {
    loop {
        key_only(client.clone(), 1).await?;
    }
}

/// Gives nothing.
#[distributed_lock(key = "unit", lock = client, on_error = drop)]
pub async fn unit(client: LockClient) {}

fn main() {
    let _ = (key_only, place, forever, unit);
}
