use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs", on_lost = panic)]
async fn on_lost() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", on_error = |_| Ok(()))]
async fn on_error() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", max_waiters = "many")]
async fn text() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", max_waiters = -1)]
async fn negative() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", max_waiters = limit)]
async fn wrong_type(limit: u8) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", lock = client)]
async fn wrong_client(client: String) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs" lease = "30s")]
async fn no_comma() -> Result<(), Error> {
    Ok(())
}

fn main() {}
