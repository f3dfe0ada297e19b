use dlock::{Error, distributed_lock};

fn number(_: Error) -> u32 {
    1
}

fn takes_text(_: String) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", on_error = number)]
async fn gives_another_type() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs", on_busy = takes_text)]
async fn takes_another_type() -> Result<(), Error> {
    Ok(())
}

fn main() {}
