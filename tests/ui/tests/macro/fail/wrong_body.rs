use dlock::{Error, distributed_lock};

#[distributed_lock(key = "jobs")]
async fn tail() -> Result<u32, Error> {
    "text"
}

#[distributed_lock(key = "jobs")]
async fn early(early: bool) -> Result<u32, Error> {
    if early {
        return Ok("text");
    }
    Ok(1)
}

#[distributed_lock(key = "jobs")]
async fn nothing() -> Result<u32, Error> {
    let _one = 1;
}

#[distributed_lock(key = "jobs")]
async fn question() -> Result<u32, Error> {
    Ok("1".parse::<u32>()?)
}

fn main() {}
