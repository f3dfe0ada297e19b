//! Whole programs: the command, the examples, the chaos machine, and the harness that runs them.

mod browser_checkout;
mod chaos_checker;
mod harness;
mod main_checkout;
mod peers_report;
mod postgres_command;
mod redis_bench;
mod redis_checkout;
mod redis_run;
mod redis_run_lost;
mod redis_run_terminal;
mod redis_soak;
