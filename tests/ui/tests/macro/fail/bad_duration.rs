use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs", lease = 30)]
async fn number() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", lease = "30")]
async fn no_unit() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", lease = "soon")]
async fn no_time() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", lease = "0s")]
async fn zero() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", wait = "0s")]
async fn zero_wait() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", max_hold = -1)]
async fn negative() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", max_hold = seconds)]
async fn no_duration(seconds: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
