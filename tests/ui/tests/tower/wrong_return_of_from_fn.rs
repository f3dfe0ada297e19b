fn main() {
    let _ = dlock_tower::key::from_fn(|parts| parts.headers.len());
}
