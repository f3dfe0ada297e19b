//! What every store promises, on each of them: in memory, a server, a Cluster, one with sentinels, a quorum.

mod both_conformance;
mod both_fair;
mod both_fenced;
mod both_kinds;
mod both_latches;
mod both_locks;
mod both_multi;
mod both_operations;
mod both_prefer_writers;
mod both_read_write;
mod both_read_write_frames;
mod both_records;
mod both_semaphores;
