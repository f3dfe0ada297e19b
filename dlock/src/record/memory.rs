//! Records in this process's memory.
