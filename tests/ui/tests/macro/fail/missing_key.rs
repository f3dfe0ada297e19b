use dlock::{Error, distributed_lock};

#[distributed_lock]
async fn nothing() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(lease = "30s")]
async fn no_key() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock("jobs")]
async fn no_name() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key)]
async fn no_value() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = , wait = "1s")]
async fn nothing_behind() -> Result<(), Error> {
    Ok(())
}

fn main() {}
