//! Tries to break dlock, see `docs/chaos.md`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dlock_tests::chaos::main()
}
