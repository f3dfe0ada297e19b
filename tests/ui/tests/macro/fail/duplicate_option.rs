use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs", lease = "30s", lease = "40s")]
async fn twice() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", key("jobs"))]
async fn two_keys() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", lease = "30s", fixed_lease = "40s")]
async fn fixed_and_renewed() -> Result<(), Error> {
    Ok(())
}

fn main() {}
