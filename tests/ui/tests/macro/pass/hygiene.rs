//! The attribute depends on no name of the user, and the user on none of the attribute.
#![allow(dead_code, unused_imports, unused_macros)]

mod names {
    pub struct Result;
    pub struct Option;
    pub struct String;
    pub trait Clone {}
    pub trait Into {}
    pub mod core {}
    pub mod std {}
    pub mod dlock {}
    macro_rules! format {
        () => {};
    }
}

mod user {
    use super::names::*;

    type Outcome = ::core::result::Result<u64, ::dlock::Error>;

    #[::dlock::distributed_lock(key = "{__dlock_key}:{key}:{lock.0}", lock = client, wait = "1s", fixed_lease = LEASE)]
    async fn run(
        client: ::dlock::LockClient,
        __dlock_key: u64,
        __dlock_guard: u64,
        __dlock_output: u64,
        key: u64,
        lock: (u64,),
        guard: u64,
    ) -> Outcome {
        ::core::result::Result::Ok(__dlock_key + __dlock_guard + __dlock_output + key + lock.0 + guard)
    }

    const LEASE: ::core::time::Duration = ::core::time::Duration::from_secs(1);

    pub async fn sum() -> Outcome {
        run(::dlock::LockClient::memory(), 1, 2, 3, 4, (5,), 6).await
    }
}

/// Traits of the user, with methods of every type.
mod methods {
    use dlock::{Error, LockClient, NotRun, distributed_lock, once};

    trait OfAll: Sized {
        fn acquire(self) {}
        fn try_acquire(self) {}
        fn enter(self) {}
        fn entrance(self) {}
        fn is_busy(self) {}
        fn once(self) {}
        fn run(self) {}
        fn from_lock_error(self) {}
    }

    impl<T> OfAll for T {}

    fn skipped(_: Error) -> Result<u64, Error> {
        Ok(0)
    }

    #[distributed_lock(key = "k", lock = client, wait = try, on_busy = skipped)]
    async fn one(client: &LockClient) -> Result<u64, Error> {
        Ok(1)
    }

    #[distributed_lock(keys = ["k", "l"], lock = client)]
    async fn several(client: &LockClient) -> Result<u64, Error> {
        Ok(2)
    }

    #[once(key = "k", client = client)]
    async fn once_only(client: &LockClient) -> Result<u64, NotRun> {
        Ok(3)
    }

    pub async fn sum() -> u64 {
        let client = LockClient::memory();
        let sum = one(&client).await.unwrap() + several(&client).await.unwrap();
        sum + once_only(&client).await.unwrap()
    }
}

#[tokio::main]
async fn main() {
    assert_eq!(user::sum().await.unwrap(), 21);
    assert_eq!(methods::sum().await, 6);
}
