//! What the compiler says where a key is not one.
//!
//! The expected messages are those of the stable compiler. `TRYBUILD=overwrite` writes them anew.

#[test]
fn a_wrong_key_explains_itself() {
    trybuild::TestCases::new().compile_fail("tests/tower/*.rs");
}
