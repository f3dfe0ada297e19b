//! The map of `CONTRIBUTING.md` names files and folders that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Collects the paths of all files and folders of the repository, with a slash before and after each name.
fn paths(folder: &Path, prefix: &str, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name == "target" || name == ".git" || name == ".servers" {
            continue;
        }
        let path = format!("{prefix}{name}/");
        if entry.file_type().unwrap().is_dir() {
            paths(&entry.path(), &path, found);
        }
        found.insert(path);
    }
}

/// What is between backticks and looks like a path.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let is_path = |text: &&str| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
        text.chars().all(is_part) && (text.contains('/') || text.ends_with(".rs") || text.ends_with(".md"))
    };
    line.split('`').skip(1).step_by(2).filter(is_path)
}

/// The folder whose contents the row of a table describes; otherwise the repository.
fn described<'a>(line: &'a str, paths: &BTreeSet<String>) -> &'a str {
    let cell = line.strip_prefix("| `").and_then(|row| row.split('`').next());
    cell.filter(|cell| paths.contains(&format!("/{cell}/")))
        .unwrap_or("")
}

#[test]
fn paths_in_contributing_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = BTreeSet::new();
    paths(root, "/", &mut all);
    let text = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let (mut count, mut missing) = (0, Vec::new());
    // Blocks of commands are left out.
    for line in text.split("```").step_by(2).flat_map(str::lines) {
        let folder = described(line, &all);
        for name in named(line) {
            let end = format!("/{}/", name.trim_end_matches('/'));
            let is_in_folder =
                |path: &str| path.trim_start_matches('/').starts_with(folder) && path.ends_with(&end);
            let exists = |path: &String| *path == end || is_in_folder(path);
            count += 1;
            if !all.iter().any(exists) {
                missing.push(name);
            }
        }
    }
    assert!(count > 80, "{count} paths");
    assert_eq!(missing, Vec::<&str>::new());
}
