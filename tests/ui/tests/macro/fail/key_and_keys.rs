#![allow(unused)]

use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs", keys = [from, to])]
async fn both(from: u64, to: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
