use dlock::{Error, distributed_lock};

const ORDERS: &str = "orders";

#[distributed_lock(key = "a", group = ORDERS)]
async fn not_a_literal() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", group = format!("order:{id}"))]
async fn one_for_each_call(id: u64) -> Result<(), Error> {
    let _ = id;
    Ok(())
}

#[distributed_lock(key = "a", group = "")]
async fn empty() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", group = 7)]
async fn number() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", group)]
async fn no_value() -> Result<(), Error> {
    Ok(())
}

fn main() {
    let _ = ORDERS;
}
