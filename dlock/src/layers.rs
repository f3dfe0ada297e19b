//! The layers of the library: a module knows those below it, and no other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From the lowest to the highest. `sim` and `testing` look at everything.
const LAYERS: [&str; 8] = [
    "base", "store", "engine", "runtime", "stores", "api", "testing", "sim",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The words that follow `crate::` in code, those of a list in braces too. Tests may look at everything.
fn crate_paths(text: &str) -> BTreeSet<String> {
    let code = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
    let code: Vec<&str> = code.filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join(" ");
    let mut paths = BTreeSet::new();
    for (at, found) in code.match_indices("crate::") {
        let rest = &code[at + found.len()..];
        let list = rest.strip_prefix('{').and_then(|list| list.split_once("};"));
        let names: Vec<&str> = list.map_or_else(|| vec![rest], |(list, _)| list.split(',').collect());
        for name in names {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let name = name.trim();
            let end = name.find(|c| !is_part(c)).unwrap_or(name.len());
            paths.insert(name[..end].to_owned());
        }
    }
    paths
}

/// What `lib.rs` exports, with the layer that it comes from.
fn exports(lib: &str) -> Vec<(String, usize)> {
    let statements = lib
        .split(';')
        .filter_map(|part| part.split_once("pub use ").map(|(_, path)| path));
    let mut exports = Vec::new();
    for path in statements {
        let Some(layer) = path.split("::").next().and_then(layer_of) else {
            continue;
        };
        let names = path.rsplit("::").next().unwrap_or(path);
        let names = names.trim_matches(['{', '}']).split(',');
        exports.extend(names.map(|name| (name.trim().to_owned(), layer)));
    }
    exports
}

fn layer_of(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == name)
}

#[test]
fn modules_know_only_the_layers_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exports = exports(&fs::read_to_string(root.join("lib.rs")).unwrap());
    assert!(
        exports.len() > 20,
        "the exports of lib.rs are not found: {exports:?}"
    );
    let (mut files, mut looked_at, mut upward) = (Vec::new(), 0, Vec::new());
    sources(&root, &mut files);
    for file in files {
        let inside = file.strip_prefix(&root).unwrap();
        let top = inside
            .iter()
            .next()
            .and_then(|top| top.to_str())
            .unwrap_or_default();
        let Some(layer) = layer_of(top.trim_end_matches(".rs")) else {
            continue;
        };
        looked_at += 1;
        for name in crate_paths(&fs::read_to_string(&file).unwrap()) {
            let exported = || {
                exports
                    .iter()
                    .find(|(export, _)| *export == name)
                    .map(|(_, layer)| *layer)
            };
            let Some(used) = layer_of(&name).or_else(exported) else {
                continue;
            };
            if used > layer {
                upward.push(format!("{} uses {name} of {}", inside.display(), LAYERS[used]));
            }
        }
    }
    assert!(looked_at > 100, "{looked_at} files");
    assert!(upward.is_empty(), "{upward:#?}");
}
