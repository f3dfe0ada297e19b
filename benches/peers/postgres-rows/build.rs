//! Gives the program the versions that Cargo.lock pins.

fn main() {
    println!("cargo::rerun-if-changed=Cargo.lock");
    let lock = std::fs::read_to_string("Cargo.lock").expect("Cargo.lock is committed");
    for (name, variable) in [("tokio-postgres", "TOKIO_POSTGRES_VERSION")] {
        let entry = format!("name = \"{name}\"\nversion = \"");
        let begin = lock.find(&entry).expect("it is locked") + entry.len();
        let version = lock[begin..].split('"').next().expect("it has a version");
        println!("cargo::rustc-env={variable}={version}");
    }
}
