//! The engine of dlock and what it is built on, compiled without tokio, clocks and I/O: the compiler keeps these out of the
//! decisions. Its tests are tables of what happens and what follows, and need no runtime.

#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "the files are those of the library, which uses and exports more of them"
)]

mod base;
#[path = "../../../dlock/src/engine/mod.rs"]
mod engine;

mod store;
