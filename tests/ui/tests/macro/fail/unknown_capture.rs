use dlock::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "order:{ordr_id}")]
async fn capture(order_id: u64) -> Result<(), Error> {
    let _ = order_id;
    Ok(())
}

#[distributed_lock(key = "order:{order.idd}")]
async fn field(order: Order) -> Result<(), Error> {
    let _ = order.id;
    Ok(())
}

#[distributed_lock(keys = ["from:{from}", "to:{too}"])]
async fn one_of_several(from: u64, to: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
