use dlock::{Error, once};

#[once(key = "welcome")]
async fn no_result() -> u64 {
    7
}

#[once(key = "welcome")]
async fn error_of_locks() -> Result<u64, Error> {
    Ok(7)
}

#[once(key = "welcome")]
async fn text() -> Result<u64, String> {
    Ok(7)
}

fn main() {}
