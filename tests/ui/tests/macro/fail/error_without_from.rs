use dlock::distributed_lock;

#[derive(Debug)]
struct MyError;

#[distributed_lock(key = "jobs")]
async fn mine() -> Result<(), MyError> {
    Ok(())
}

#[distributed_lock(key = "jobs")]
async fn text() -> Result<Vec<u32>, String> {
    Ok(Vec::new())
}

fn main() {}
