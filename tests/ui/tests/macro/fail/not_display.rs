use dlock::{Error, distributed_lock};

struct Order {
    id: Id,
}

struct Id;

#[distributed_lock(key = "order:{order}")]
async fn capture(order: Order) -> Result<(), Error> {
    let _ = order.id;
    Ok(())
}

#[distributed_lock(key = "order:{order.id}")]
async fn field(order: Order) -> Result<(), Error> {
    let _ = order.id;
    Ok(())
}

#[distributed_lock(key("order:{}", order.id))]
async fn argument(order: Order) -> Result<(), Error> {
    let _ = order.id;
    Ok(())
}

fn main() {}
