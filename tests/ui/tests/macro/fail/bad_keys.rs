#![allow(unused)]

use dlock::{Error, distributed_lock};

#[distributed_lock(keys = [])]
async fn none() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = "jobs")]
async fn one() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["", "a{{b}}", 7])]
async fn bad_ones() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = [from, to])]
async fn no_key(from: u64, to: String) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = both)]
async fn no_keys(both: (String, String)) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = numbers)]
async fn numbers(numbers: Vec<u64>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
