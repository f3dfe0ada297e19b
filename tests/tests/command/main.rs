//! Whole programs: the command, the examples, the chaos machine, and the harness that runs them.

mod browser_checkout;
mod browser_console;
mod browser_support;
mod chaos_checker;
mod command_doctor;
mod command_support;
mod etcd_command;
mod harness;
mod main_checkout;
mod mysql_command;
mod ops_metrics;
mod peers_report;
mod postgres_command;
mod redis_bench;
mod redis_checkout;
mod redis_cron;
mod redis_examples;
mod redis_operations;
mod redis_record;
mod redis_restart;
mod redis_run;
mod redis_run_lost;
mod redis_run_once;
mod redis_run_terminal;
mod redis_slots;
mod redis_soak;
