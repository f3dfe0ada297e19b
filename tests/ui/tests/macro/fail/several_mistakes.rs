use dlock::{Error, distributed_lock};

#[distributed_lock(kye = "jobs", lease = 30, kind = fair, wait = try)]
fn everything() -> Result<(), Error> {
    Ok(())
}

fn main() {}
