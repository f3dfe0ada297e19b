//! The modules of each crate import each other in one direction. A circle of modules can only be understood, changed and
//! tested as a whole.
//!
//! The imports are read from the tokens: `use` declarations and every path that begins with `crate`, `super` or `self`,
//! also inside macros. A name that a module re-exports counts as an import of the module that defines it. Unit tests may
//! import everything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The crates, with the folders in which not only the modules but also their files import in one direction.
const CRATES: [(&str, &[&str]); 10] = [
    ("dlock", &[]),
    ("dlock-tower", &["body", "retry", "idempotency", "key", "lock"]),
    ("dlock-macros", &[]),
    ("dlock-cli", &["bench", "run"]),
    ("conformance", &[]),
    ("stores/etcd", &[]),
    ("stores/mysql", &[]),
    ("stores/postgres", &[]),
    ("stores/zookeeper", &[]),
    ("benches/peers/runner", &[]),
];

/// The modules of `dlock`, from the lowest to the highest. `sim` and `testing` look at everything.
const LAYERS: [&str; 8] = [
    "base", "store", "engine", "runtime", "stores", "api", "testing", "sim",
];

#[test]
fn top_level_modules_form_no_circle() {
    for (name, _) in CRATES {
        let imports = Crate::read(name).imports(&[]);
        assert_eq!(circle(&imports), Imports::new(), "{name}");
    }
}

#[test]
fn files_of_listed_folders_form_no_circle() {
    for (name, folders) in CRATES {
        let modules = Crate::read(name);
        for folder in folders {
            let imports = modules.imports(&[folder]);
            assert!(imports.len() > 1, "{name}/{folder}: {imports:?}");
            assert_eq!(circle(&imports), Imports::new(), "{name}/{folder}");
        }
    }
}

#[test]
fn layers_of_the_core_import_downward() {
    let layer = |name: &str| LAYERS.iter().position(|layer| *layer == name);
    let imports = Crate::read("dlock").imports(&[]);
    let upward: Vec<_> = imports
        .iter()
        .filter(|((from, to), _)| match (layer(from), layer(to)) {
            (Some(from), Some(to)) => to > from,
            _ => false,
        })
        .collect();
    assert!(upward.is_empty(), "{upward:#?}");
    let looked_at = imports.keys().filter(|(from, _)| layer(from).is_some());
    assert!(looked_at.count() > 10, "{imports:?}");
}

#[test]
fn logs_and_metrics_of_locks_are_written_in_one_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dlock/src");
    let mut files = Vec::new();
    read_sources(&root, &root, &mut files);
    let writes: Vec<_> = files
        .iter()
        .filter(|(path, _)| {
            ["engine", "runtime", "api"]
                .iter()
                .any(|layer| path.starts_with(layer))
        })
        .filter(|(_, text)| text.contains("tracing::") || text.contains("metrics::"))
        .map(|(path, _)| path)
        .collect();
    let is_there = |path: &&String| *path == "runtime/emit.rs" || path.starts_with("runtime/emit/");
    assert!(!writes.is_empty() && writes.iter().all(is_there), "{writes:?}");
}

#[test]
fn circle_is_found_wherever_a_path_stands() {
    let lib = "mod a; mod b; mod c; pub use b::B; pub use self::c::C as D;";
    let circles = [
        ("use crate::B;", "use super::a::A;"),
        ("use crate::{x, b::{B, y}};", "fn b() { crate::a::f() }"),
        ("m! { B => $crate::b::B }", "use crate::a as other;"),
        ("mod inside { use super::super::b::B; }", "use crate::a::*;"),
        (
            "#[cfg(test)] mod tests { } use crate::B;",
            "struct B(super::a::A);",
        ),
    ];
    for (a, b) in circles {
        let modules = Crate::of([
            ("lib.rs", lib),
            ("a.rs", a),
            ("b.rs", b),
            ("c.rs", "use crate::B;"),
        ]);
        let found = circle(&modules.imports(&[]));
        let edges: Vec<_> = found.keys().map(|(from, to)| format!("{from}-{to}")).collect();
        assert_eq!(edges, ["a-b", "b-a"], "{a} {b}");
    }
}

#[test]
fn circle_through_the_parent_of_the_files_is_found() {
    let lib = "mod f; use f::A;";
    let parent = "mod a; mod b; pub use a::A; pub const LIMIT: usize = 1; fn help() { b::f() }";
    let import = |a| {
        let modules = Crate::of([
            ("lib.rs", lib),
            ("f/mod.rs", parent),
            ("f/a.rs", a),
            ("f/b.rs", "use super::A;"),
        ]);
        circle(&modules.imports(&["f"])).len()
    };
    assert_eq!(import("use super::LIMIT; fn f() {}"), 1);
    assert_eq!(import("use super::b::f;"), 2);
    assert_eq!(import("use crate::A as Same;"), 0);
}

#[test]
fn imports_of_unit_tests_do_not_count() {
    let modules = Crate::of([
        ("lib.rs", "mod a; mod b; #[cfg(test)] mod checks;"),
        (
            "a.rs",
            "// use crate::b::B;\n/** crate::b::B */ const A: &str = \"crate::b::B\"; #[cfg(test)] use crate::b::B;",
        ),
        (
            "b.rs",
            "use crate::a::A; #[cfg(test)] mod tests { use crate::checks::C; }",
        ),
        ("checks.rs", "use crate::{a::A, b::B};"),
    ]);
    let edges: Vec<_> = modules.imports(&[]).into_keys().collect();
    assert_eq!(edges, [("b".to_owned(), "a".to_owned())]);
}

/// The names that one module imports from another.
type Imports = BTreeMap<(String, String), BTreeSet<String>>;
/// The segments of a path, from the root of the crate.
type Segments = Vec<String>;

/// What is left of the imports when all modules are gone that import nothing, or that nothing imports.
fn circle(imports: &Imports) -> Imports {
    let mut left = imports.clone();
    loop {
        let (from, to): (BTreeSet<String>, BTreeSet<String>) = left.keys().cloned().unzip();
        let before = left.len();
        // An import of the parent is a circle by itself: the parent has declared the module.
        left.retain(|edge, _| edge.1 == PARENT || (from.contains(&edge.1) && to.contains(&edge.0)));
        if left.len() == before {
            return left;
        }
    }
}

/// The module that declares those that are looked at.
const PARENT: &str = "(parent)";

#[derive(Default)]
struct Module {
    /// Paths that the module uses.
    used: BTreeSet<Segments>,
    /// Names that a `use` declares, with their paths.
    names: BTreeMap<String, Segments>,
    globs: Vec<Segments>,
    items: BTreeSet<String>,
}

#[derive(Default)]
struct Crate {
    modules: BTreeMap<Segments, Module>,
    /// Modules that are there for unit tests only.
    tests: BTreeSet<Segments>,
}

impl Crate {
    /// The crate in a folder of the repository.
    fn read(folder: &str) -> Crate {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(folder)
            .join("src");
        let mut files = Vec::new();
        read_sources(&root, &root, &mut files);
        assert!(files.len() > 5, "{} files in {}", files.len(), root.display());
        Crate::of(files.iter().map(|(path, text)| (path.as_str(), text.as_str())))
    }

    /// The crate with these files.
    fn of<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Crate {
        let files: Vec<(Segments, &str)> = files
            .into_iter()
            .map(|(path, text)| (module_of(path), text))
            .collect();
        let mut modules = Crate::default();
        for (path, _) in &files {
            modules.modules.entry(path.clone()).or_default();
        }
        for (path, text) in files {
            let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{path:?}: {error}"));
            modules.add(&path, tokens, true);
        }
        modules
    }

    /// Reads the tokens of a module; `items`: those that stand at its top level.
    fn add(&mut self, module: &Segments, tokens: TokenStream, items: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            let word = |at: usize| match tokens.get(at) {
                Some(TokenTree::Ident(word)) => word.to_string(),
                Some(TokenTree::Punct(mark)) => mark.to_string(),
                _ => String::new(),
            };
            let begins_path = |at| word(at + 1) == ":" && word(at + 2) == ":";
            match (&tokens[at], word(at).as_str()) {
                (_, "#") if is_test(tokens.get(at + 1)) => {
                    let end = end_of_item(&tokens, at + 2);
                    let declared = tokens[at..end]
                        .iter()
                        .position(|token| token.to_string() == "mod");
                    if let Some(declared) = declared {
                        self.tests.insert(child(module, &word(at + declared + 1)));
                    }
                    at = end;
                    continue;
                }
                (_, "mod") if items => {
                    let inside = child(module, &word(at + 1));
                    self.modules.entry(inside.clone()).or_default();
                    if let Some(TokenTree::Group(body)) = tokens.get(at + 2) {
                        self.add(&inside, body.stream(), true);
                        at += 3;
                        continue;
                    }
                }
                (_, "use") => {
                    let end = end_of_item(&tokens, at);
                    let tree: TokenStream = tokens[at + 1..end - 1].iter().cloned().collect();
                    let exports =
                        at > 0 && (word(at - 1) == "pub" || matches!(&tokens[at - 1], TokenTree::Group(_)));
                    self.add_use(module, &[], tree, exports);
                    at = end;
                    continue;
                }
                (_, "crate" | "super" | "self") if begins_path(at) => {
                    let mut path = vec![word(at)];
                    while begins_path(at) && matches!(tokens.get(at + 3), Some(TokenTree::Ident(_))) {
                        at += 3;
                        path.push(word(at));
                    }
                    if let Some(path) = self.absolute(module, &path) {
                        self.module(module).used.insert(path);
                    }
                }
                (_, "struct" | "enum" | "trait" | "type" | "fn" | "const" | "static" | "union") if items => {
                    self.module(module).items.insert(word(at + 1));
                }
                (TokenTree::Group(group), _) => self.add(module, group.stream(), false),
                _ => {}
            }
            at += 1;
        }
    }

    /// Reads the tree of a `use` declaration behind `prefix`.
    fn add_use(&mut self, module: &Segments, prefix: &[String], tree: TokenStream, exports: bool) {
        let (mut path, mut name) = (prefix.to_vec(), None);
        let mut tokens = tree.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(word) if word == "as" => name = tokens.next().map(|name| name.to_string()),
                TokenTree::Ident(word) => path.push(word.to_string()),
                TokenTree::Group(list) => {
                    let list: Vec<TokenTree> = list.stream().into_iter().collect();
                    let is_comma =
                        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
                    for tree in list.split(is_comma).filter(|tree| !tree.is_empty()) {
                        self.add_use(module, &path, tree.iter().cloned().collect(), exports);
                    }
                    return;
                }
                TokenTree::Punct(mark) if mark.as_char() == '*' => path.push("*".to_owned()),
                _ => {}
            }
        }
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let Some(mut path) = self.absolute(module, &path) else {
            return;
        };
        let is_glob = path.last().is_some_and(|last| last == "*");
        if is_glob {
            path.pop();
        }
        let declared = self.module(module);
        match name.or_else(|| path.last().cloned()) {
            _ if is_glob => declared.globs.push(path.clone()),
            Some(name) => drop(declared.names.insert(name, path.clone())),
            None => {}
        }
        if !(exports && path.starts_with(module)) {
            self.module(module).used.insert(path);
        }
    }

    fn module(&mut self, path: &Segments) -> &mut Module {
        self.modules.entry(path.clone()).or_default()
    }

    /// The path from the root of the crate, unless it leads to another crate.
    fn absolute(&self, module: &Segments, path: &[String]) -> Option<Segments> {
        let mut base = module.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {}
            first if self.modules.contains_key(&child(module, first)) => {}
            _ => return None,
        }
        while rest.first().is_some_and(|first| first == "super") {
            base.pop();
            rest = &rest[1..];
        }
        Some([&base, rest].concat())
    }

    /// The module that defines what a path leads to.
    fn definition(&self, path: &[String], depth: usize) -> Segments {
        let mut at = Segments::new();
        for (index, name) in path.iter().enumerate() {
            let next = child(&at, name);
            if self.modules.contains_key(&next) {
                at = next;
                continue;
            }
            let Some(module) = self.modules.get(&at).filter(|_| depth < 8) else {
                return at;
            };
            let rest = &path[index + 1..];
            if let Some(named) = module.names.get(name) {
                return self.definition(&[named, rest].concat(), depth + 1);
            }
            if module.items.contains(name) {
                return at;
            }
            for glob in &module.globs {
                let target = self.definition(glob, depth + 1);
                let defined = self.modules.get(&target).is_some_and(|module| {
                    module.items.contains(name) || module.names.contains_key(name) || !module.globs.is_empty()
                });
                if defined {
                    return self.definition(&[&target[..], &path[index..]].concat(), depth + 1);
                }
            }
            return at;
        }
        at
    }

    /// What the modules in `folder` import from each other, and from the module of the folder itself.
    fn imports(&self, folder: &[&str]) -> Imports {
        let mut imports = Imports::new();
        let folder: Segments = folder.iter().map(|name| (*name).to_owned()).collect();
        for (path, module) in &self.modules {
            let is_test = self.tests.iter().any(|test| path.starts_with(test));
            let Some(from) = path.strip_prefix(&folder[..]).and_then(|inside| inside.first()) else {
                continue;
            };
            if is_test {
                continue;
            }
            for used in &module.used {
                let definition = self.definition(used, 0);
                let Some(inside) = definition.strip_prefix(&folder[..]) else {
                    continue;
                };
                let name = used.last().cloned().unwrap_or_default();
                let to = match inside.first() {
                    Some(to) => to,
                    None if self.modules[&folder].items.contains(&name) => PARENT,
                    None => continue,
                };
                if from != to {
                    let names = imports.entry((from.clone(), to.to_owned())).or_default();
                    names.insert(format!("{}: {}", path.join("::"), used.join("::")));
                }
            }
        }
        imports
    }
}

fn child(module: &Segments, name: &str) -> Segments {
    [&module[..], &[name.to_owned()]].concat()
}

/// `lock/future.rs` is `lock::future`, `lock/mod.rs` is `lock`.
fn module_of(path: &str) -> Segments {
    let mut names: Segments = path
        .trim_end_matches(".rs")
        .split('/')
        .map(str::to_owned)
        .collect();
    if ["lib", "main", "mod"]
        .map(Some)
        .contains(&names.last().map(String::as_str))
    {
        names.pop();
    }
    names
}

/// Whether this is what stands behind the `#` of `#[cfg(test)]`, or `#[cfg(all(test, …))]`.
fn is_test(attribute: Option<&TokenTree>) -> bool {
    match attribute {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
            let text: String = group.stream().to_string().split_whitespace().collect();
            text == "cfg(test)" || text.starts_with("cfg(all(test,")
        }
        _ => false,
    }
}

/// Behind the first `;` or block.
fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let is_use = tokens.get(at).is_some_and(|token| token.to_string() == "use");
    let ends = |token: &TokenTree| match token {
        TokenTree::Punct(mark) => mark.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace && !is_use,
        _ => false,
    };
    let length = tokens[at..].iter().position(ends);
    length.map_or(tokens.len(), |length| at + length + 1)
}

/// The sources in a folder, by their paths from `root`.
pub(crate) fn read_sources(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_sources(root, &path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let inside = path.strip_prefix(root).unwrap();
            let inside: Vec<_> = inside.iter().map(|name| name.to_string_lossy()).collect();
            files.push((inside.join("/"), fs::read_to_string(&path).unwrap()));
        }
    }
}
