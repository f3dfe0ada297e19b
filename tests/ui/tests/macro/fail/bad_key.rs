#![allow(unused)]

use dlock::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "order:{}")]
async fn positional(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{order.id()}")]
async fn call(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{{{order.id}}}")]
async fn braces(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{order.id")]
async fn unclosed(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "")]
async fn empty() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = 7)]
async fn number() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key(order.id))]
async fn no_format(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key())]
async fn nothing() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = order.id)]
async fn not_a_key(order: Order) -> Result<(), Error> {
    Ok(())
}

fn main() {}
