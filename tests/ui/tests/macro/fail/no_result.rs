use dlock::distributed_lock;

#[distributed_lock(key = "jobs")]
async fn number() -> u32 {
    1
}

#[distributed_lock(key = "jobs")]
async fn nothing() {}

#[distributed_lock(key = "jobs")]
async fn option() -> Option<Vec<u32>> {
    None
}

fn main() {}
