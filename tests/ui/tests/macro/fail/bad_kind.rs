#![allow(unused)]

use dlock::{Error, LockKind, distributed_lock};

#[distributed_lock(key = "jobs", kind = fiar)]
async fn mistyped() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = "fair")]
async fn text() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = LockKind::Write)]
async fn variant() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["a", "b"], kind = shared)]
async fn elsewhere() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = permit)]
async fn no_such_kind() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["a", "b"], kind = fair)]
async fn fair_set() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = wirte, prefer_writers = true)]
async fn mistyped_beside_an_option() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", prefer_writers = true)]
async fn nobody_reads() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", kind = write, prefer_writers = "yes")]
async fn no_flag() -> Result<(), Error> {
    Ok(())
}

fn main() {}
