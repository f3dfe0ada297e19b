#![deny(unused)]

use dlock::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}")]
async fn unused(id: u64, count: u32, mut changing: u32) -> Result<(), Error> {
    Ok(())
}

fn main() {}
