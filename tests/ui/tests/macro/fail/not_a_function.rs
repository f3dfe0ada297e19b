use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs")]
struct Job;

trait Jobs {
    #[distributed_lock(key = "jobs")]
    async fn run(&self) -> Result<(), Error>;
}

fn main() {}
