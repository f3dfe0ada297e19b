//! What the compiler says of uses and of mistakes.

mod idempotency_ui;
mod macro_lints;
mod macro_ui;
mod tower_ui;
