//! The attribute needs nothing from the prelude.
#![no_implicit_prelude]

#[::dlock::distributed_lock(key = "order:{id}", lock = client, wait = try)]
async fn run(client: ::dlock::LockClient, id: u64) -> ::core::result::Result<u64, ::dlock::Error> {
    ::core::result::Result::Ok(id)
}

fn main() {
    let _ = run;
}
