//! Works for a long time and sees what is left of it, see `dlock_tests::soak`.

use std::process::ExitCode;

fn main() -> ExitCode {
    dlock_tests::soak::main()
}
