//! What the compiler says where it is not told whose keys they are.
//!
//! The expected messages are those of the stable compiler. `TRYBUILD=overwrite` writes them anew.

#[test]
fn a_layer_without_a_caller_explains_itself() {
    trybuild::TestCases::new().compile_fail("tests/idempotency/*.rs");
}
