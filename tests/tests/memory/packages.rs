//! What is published beside the code: each package has the texts of both licences, and a page that says what it is.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the published packages.
const PUBLISHED: [&str; 9] = [
    "dlock",
    "dlock-macros",
    "dlock-tower",
    "dlock-cli",
    "conformance",
    "stores/etcd",
    "stores/mysql",
    "stores/postgres",
    "stores/zookeeper",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a key of the manifest whose value is a text.
fn value<'a>(manifest: &'a str, key: &str) -> Option<&'a str> {
    let values = manifest
        .lines()
        .filter_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix('='));
    values.map(|value| value.trim().trim_matches('"')).next()
}

#[test]
fn published_packages_are_those_that_are_listed() {
    let manifest = read(&root().join("Cargo.toml"));
    let members = manifest
        .lines()
        .find_map(|line| line.strip_prefix("members = ["))
        .expect("the members stand in one line");
    let members = members.trim_end_matches(']').split(", ");
    let is_published = |folder: &&str| {
        let manifest = read(&root().join(folder).join("Cargo.toml"));
        value(&manifest, "publish") != Some("false")
    };
    let mut found: Vec<_> = members
        .map(|member| member.trim_matches('"'))
        .filter(is_published)
        .collect();
    let mut listed = PUBLISHED.to_vec();
    found.sort_unstable();
    listed.sort_unstable();
    assert_eq!(found, listed);
}

#[test]
fn published_packages_have_both_licences() {
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let text = read(&root().join(licence));
        for folder in PUBLISHED {
            let copy = read(&root().join(folder).join(licence));
            assert!(
                copy == text,
                "{folder}/{licence} is not that of the repository: copy it again"
            );
        }
    }
}

#[test]
fn published_packages_have_a_page_of_their_own_name() {
    for folder in PUBLISHED {
        let folder = root().join(folder);
        let manifest = read(&folder.join("Cargo.toml"));
        let name = value(&manifest, "name").expect("a name");
        let page = value(&manifest, "readme").unwrap_or_else(|| panic!("{name} names no readme"));
        let page = read(&folder.join(page));
        assert!(page.starts_with(&format!("# {name}\n")), "{name}: {page:.80}");
    }
}

/// A crate of this name there belongs to somebody else.
#[test]
fn pages_of_packages_do_not_send_readers_to_docs_rs_for_dlock() {
    for folder in PUBLISHED {
        let page = read(&root().join(folder).join(match folder {
            "dlock" => "../README.md",
            _ => "README.md",
        }));
        assert!(!page.contains("docs.rs/dlock"), "{folder}");
    }
}
