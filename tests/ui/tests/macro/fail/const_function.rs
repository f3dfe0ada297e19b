use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs")]
const fn constant() -> Result<(), Error> {
    Ok(())
}

fn main() {}
