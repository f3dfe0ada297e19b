use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs", laese = "30s")]
async fn mistyped() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", timeout = "30s")]
async fn from_elsewhere() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", colour = "red")]
async fn unheard_of() -> Result<(), Error> {
    Ok(())
}

fn main() {}
