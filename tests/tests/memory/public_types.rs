//! Every public type of the published crates, and of the template of stores, has an example in its documentation, which is
//! compiled: text, output and ignored code are none.
//!
//! A type counts as public where its declaration says `pub`, whatever its module says. The types of modules that users
//! cannot reach are listed with the reason. Whether the examples are true, the documentation tests check.

use std::collections::BTreeSet;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

use crate::modules::read_sources;

const CRATES: [&str; 10] = [
    "dlock",
    "dlock-tower",
    "dlock-macros",
    "dlock-cli",
    "conformance",
    "stores/etcd",
    "stores/mysql",
    "stores/postgres",
    "stores/template",
    "stores/zookeeper",
];

/// Files and folders whose types are not part of the documentation, and why.
const HIDDEN: [(&str, &str); 7] = [
    ("dlock/src/sim", "compiled for the simulation only"),
    ("dlock/src/base/sim", "compiled for the simulation only"),
    (
        "dlock/src/stores/memory/sim.rs",
        "compiled for the simulation only",
    ),
    (
        "dlock/src/api/macro_support.rs",
        "for expanded attributes: `dlock::__macro`",
    ),
    (
        "dlock/src/api/run.rs",
        "for expanded attributes: `dlock::__macro`",
    ),
    ("dlock/src/base/request.rs", "for dlock-tower: `dlock::__request`"),
    ("conformance/src/need.rs", "for expanded `conform!`"),
];

#[test]
fn public_types_have_an_example() {
    let is_hidden = |path: &str| HIDDEN.iter().any(|(hidden, _)| path.starts_with(hidden));
    let (mut seen, mut without) = (0, Vec::new());
    for name in CRATES {
        for (path, text) in sources(name) {
            let types = public_types(text.parse().unwrap());
            seen += types.len();
            let missing = types
                .iter()
                .filter(|found| !found.has_example && !is_hidden(&path));
            without.extend(missing.map(|found| format!("{path}: {}", found.name)));
        }
    }
    assert!(
        without.is_empty(),
        "public types without an example:\n{}",
        without.join("\n")
    );
    assert!(seen > 150, "only {seen} types were found");
}

#[test]
fn hidden_files_have_types_without_an_example() {
    let without: BTreeSet<String> = CRATES
        .into_iter()
        .flat_map(sources)
        .filter(|(_, text)| {
            public_types(text.parse().unwrap())
                .iter()
                .any(|found| !found.has_example)
        })
        .map(|(path, _)| path)
        .collect();
    for (hidden, why) in HIDDEN {
        let is_needed = without.iter().any(|path| path.starts_with(hidden));
        assert!(is_needed, "{hidden} ({why}) need not be listed");
    }
}

#[test]
fn types_are_found_wherever_they_stand() {
    let declarations = [
        ("pub struct A;", &[("A", false)][..]),
        (
            "/// ```\n/// a()\n/// ```\n#[derive(Debug)]\npub enum A {}",
            &[("A", true)],
        ),
        ("#[doc = \"```\"]\npub unsafe trait A {}", &[("A", true)]),
        ("/// ```\npub fn f() {}\n/// A.\npub trait A {}", &[("A", false)]),
        (
            "/// A.\n#[non_exhaustive]\npub struct A { /** ``` */ pub b: u8 }",
            &[("A", false)],
        ),
        (
            "/// ```text\n/// a\n/// ```\n/// ```rust,ignore\n/// a\n/// ```\npub enum A {}",
            &[("A", false)],
        ),
        (
            "/// ```text\n/// a\n/// ```\n/// ```no_run\n/// a\n/// ```\npub enum A {}",
            &[("A", true)],
        ),
        (
            "pin_project! { /// ```\n pub struct A { #[pin] b: B } }",
            &[("A", true)],
        ),
        ("mod m { pub mod n { pub union A { b: u8 } } }", &[("A", false)]),
        ("pub(crate) struct A; struct B; #[doc(hidden)] pub enum C {}", &[]),
    ];
    for (text, expected) in declarations {
        let types = public_types(text.parse().unwrap());
        let found: Vec<_> = types
            .iter()
            .map(|found| (found.name.as_str(), found.has_example))
            .collect();
        assert_eq!(found, expected, "{text}");
    }
}

struct PublicType {
    name: String,
    has_example: bool,
}

/// The sources of a crate, by their paths in the repository.
fn sources(name: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join(name).join("src");
    let mut files = Vec::new();
    read_sources(&root, &folder, &mut files);
    assert!(!files.is_empty(), "{}", folder.display());
    files
}

/// The public types that these tokens declare, also inside modules and macros.
fn public_types(tokens: TokenStream) -> Vec<PublicType> {
    let (mut types, mut attributes) = (Vec::new(), String::new());
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let word = |at: usize| tokens.get(at).map(ToString::to_string).unwrap_or_default();
    for at in 0..tokens.len() {
        match (&tokens[at], word(at).as_str()) {
            // Of the item that follows: doc comments are attributes, too.
            (TokenTree::Group(attribute), _) if at > 0 && word(at - 1) == "#" => {
                attributes.push_str(&attribute.stream().to_string());
                attributes.push('\n');
            }
            (_, "pub") => {
                let kind = at + 1 + usize::from(word(at + 1) == "unsafe");
                let is_type = ["struct", "enum", "trait", "union"].contains(&word(kind).as_str());
                let declares = matches!(tokens.get(kind + 1), Some(TokenTree::Ident(_)));
                if is_type && declares && !attributes.contains("doc (hidden)") {
                    types.push(PublicType {
                        name: word(kind + 1),
                        has_example: has_example(&attributes),
                    });
                }
            }
            (TokenTree::Group(group), _) => {
                types.extend(public_types(group.stream()));
                attributes.clear();
            }
            (_, ";") => attributes.clear(),
            _ => {}
        }
    }
    types
}

/// Whether documentation, as the tokens of its attributes, has code that is compiled.
fn has_example(attributes: &str) -> bool {
    // Fences open and close in turns; what follows an opening one says what it has.
    let openings = attributes.split("```").skip(1).step_by(2);
    openings
        .map(|after| after.split(['"', '\\', '\n', ' ']).next().unwrap_or_default())
        .any(|language| ["", "rust", "no_run", "rust,no_run", "should_panic"].contains(&language))
}
