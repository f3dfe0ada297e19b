use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs")]
fn plain() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "jobs")]
fn by_hand() -> impl Future<Output = Result<(), Error>> {
    async { Ok(()) }
}

fn main() {}
