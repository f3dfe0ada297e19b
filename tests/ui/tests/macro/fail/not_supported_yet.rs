#![allow(unused)]

use dlock::{Error, distributed_lock};

#[distributed_lock(keys = [from, to])]
async fn several(from: String, to: String) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = fair)]
async fn fair() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = "fair")]
async fn text() -> Result<(), Error> {
    Ok(())
}

fn main() {}
