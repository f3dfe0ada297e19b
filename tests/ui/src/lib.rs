//! What the compiler says where dlock is used well, and where it is not: see the suites in `tests`.
