//! What the compiler says about `#[distributed_lock]` and `#[once]`: nothing where it is used well, and the user's own
//! token with what to do where it is not.
//!
//! The expected messages are those of the stable compiler. `TRYBUILD=overwrite` writes them anew.

#[test]
fn good_uses_compile_without_a_warning() {
    trybuild::TestCases::new().pass("tests/macro/pass/*.rs");
}

#[test]
fn mistakes_are_told_where_they_are() {
    trybuild::TestCases::new().compile_fail("tests/macro/fail/*.rs");
}
