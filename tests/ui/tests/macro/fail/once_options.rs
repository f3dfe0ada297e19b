use std::pin::Pin;

use dlock::{LockClient, NotRun, once};

#[once]
async fn without_a_name() -> Result<(), NotRun> {
    Ok(())
}

#[once("welcome")]
async fn bare_name() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome:{user}", kepe = "30d")]
async fn mistyped(user: u64) -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", ttl = "30d")]
async fn word_of_other_libraries() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", lock = client)]
async fn word_of_the_other_attribute(client: &LockClient) -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", max_hold = "30s")]
async fn of_a_lock() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", keep = "1d", keep = "2d")]
async fn twice() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", keep = "30 parsecs")]
async fn no_duration() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", wait = "0s")]
async fn zero_wait() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome", wait = try, keep = "1d")]
async fn try_once() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome")]
fn not_async() -> Result<(), NotRun> {
    Ok(())
}

#[once(key = "welcome")]
struct NoFunction;

trait Welcome {
    #[once(key = "welcome")]
    async fn no_body(&self) -> Result<(), NotRun>;
}

#[async_trait::async_trait]
trait Boxed {
    async fn boxed(&self) -> Result<(), NotRun>;
}

#[async_trait::async_trait]
impl Boxed for u32 {
    #[once(key = "welcome")]
    async fn boxed(&self) -> Result<(), NotRun> {
        Ok(())
    }
}

#[once(key = "welcome")]
fn boxed_by_hand() -> Pin<Box<dyn Future<Output = Result<(), NotRun>>>> {
    Box::pin(async move { Ok(()) })
}

fn main() {}
