//! No promise without a test: what `docs/guarantees.md` names is there, and what Redisson's tests were ported to.

use std::path::Path;

/// The folders of tests/tests.
const PROGRAMS: [&str; 7] = [
    "command", "contract", "http", "interop", "memory", "redis", "stores",
];

/// The tests that the page names, as suite and test.
fn named(page: &str) -> Vec<(&str, &str)> {
    page.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|code| code.split_once(": "))
        // Not what stands in a block of code.
        .filter(|(suite, _)| suite.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_'))
        .collect()
}

#[test]
fn every_test_that_the_page_of_guarantees_names_is_there() {
    assert!(all_are_there("../docs/guarantees.md") > 500);
}

#[test]
fn every_test_that_the_page_about_schedules_names_is_there() {
    assert_eq!(all_are_there("../docs/cron.md"), 7);
}

#[test]
fn every_test_that_one_of_redissons_was_ported_to_is_there() {
    assert!(all_are_there("interop/PORTED.md") > 20);
}

/// Returns how many there are.
fn all_are_there(page: &str) -> usize {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(tests.join(page)).unwrap();
    let named: Vec<_> = named(&page)
        .into_iter()
        .filter(|(suite, _)| *suite != "suite")
        .collect();
    for (suite, test) in &named {
        // The contract of stores, which runs on each of them, has its tests in files by subject.
        let (folder, suite, test) = match test.split_once("::") {
            Some((subject, test)) if *suite == "conformance" => {
                (Some("../conformance/src/checks"), subject, test)
            }
            _ => (None, *suite, *test),
        };
        let programs = PROGRAMS.iter().map(|program| Path::new("tests").join(program));
        let text = programs
            .chain(folder.map(Into::into))
            .map(|folder| tests.join(folder).join(suite).with_extension("rs"))
            .find_map(|file| std::fs::read_to_string(file).ok())
            .unwrap_or_else(|| panic!("there is no suite {suite}"));
        if let Some(folder) = folder {
            let contract = std::fs::read_to_string(tests.join(folder).join("../contract.rs")).unwrap();
            let is_listed = contract.lines().any(|line| line.trim() == format!("{test},"));
            assert!(is_listed, "the contract does not list {suite}::{test}");
        } else {
            assert!(is_a_test(&text, test), "{suite} has no test {test} that is run");
        }
    }
    named.len()
}

/// What makes tests of the functions in it.
const MACROS: [&str; 3] = ["on_every_store!", "on_quorums!", "in_scenes!"];

/// Whether a file has a test of this name that is not ignored.
fn is_a_test(text: &str, name: &str) -> bool {
    text.match_indices(&format!("fn {name}(")).any(|(at, _)| {
        let mut above = text[..at].rsplit('\n');
        let is_code = above.next().is_some_and(|line| !line.contains("//"));
        let of_it = |line: &&str| ["#[", "//"].iter().any(|begin| line.trim().starts_with(begin));
        let said = |line: &str, word| line.trim().starts_with("#[") && line.contains(word);
        let attributes: Vec<_> = above.clone().take_while(of_it).collect();
        let is_test = attributes
            .iter()
            .any(|line| said(line, "test]") || said(line, "test("));
        let is_ignored = attributes.iter().any(|line| said(line, "ignore"));
        let outermost = above.find(|line| line.starts_with(|c: char| c.is_ascii_alphabetic() || c == '}'));
        let of_macro = outermost.is_some_and(|line| MACROS.iter().any(|name| line.starts_with(name)));
        is_code && !is_ignored && (is_test || of_macro)
    })
}

#[test]
fn function_that_is_no_test_is_told_from_one() {
    let text = "#[test]\nfn a() {}\n\nasync fn b() {}\n\n// #[test]\n// fn c() {}\n\n#[ignore]\n#[test]\nfn d() {}\n\n\
                on_every_store! {\n    async fn e(store: Store) {\n    }\n}\n\nfn f() {}\n\n\
                mod m {\n    /// It is.\n    #[tokio::test(flavor = \"x\")]\n    async fn g() {}\n}\n";
    let tests = ["a", "b", "c", "d", "e", "f", "g"].map(|name| is_a_test(text, name));
    assert_eq!(tests, [true, false, false, false, true, false, true]);
}

/// A file that its program does not name is not even compiled.
#[test]
fn every_file_of_a_program_of_tests_is_a_module_of_it() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut modules = 0;
    for program in PROGRAMS {
        let folder = tests.join(program);
        modules += are_modules(&folder, &folder.join("main.rs"));
    }
    assert!(modules > 150, "{modules}");
}

/// Returns how many files there are beside the one that names them, and in folders.
fn are_modules(folder: &Path, by: &Path) -> usize {
    let names = std::fs::read_to_string(by).unwrap();
    let mut modules = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_file = path.extension().is_some_and(|end| end == "rs");
        if path == by || !is_file && !path.is_dir() {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        let is_named = names.lines().any(|line| line.ends_with(&format!("mod {name};")));
        assert!(is_named, "{} does not name {name}", by.display());
        modules += 1;
        if path.is_dir() {
            let inside = Some(path.join("mod.rs")).filter(|file| file.exists());
            modules += are_modules(&path, &inside.unwrap_or_else(|| path.with_extension("rs")));
        }
    }
    modules
}

/// A promise is a line of a table under "promise"; each names what shows it.
#[test]
fn every_promise_names_what_shows_it() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guarantees.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (mut promises, mut under) = (0, false);
    for line in page.lines() {
        if line.starts_with("| promise |") {
            under = true;
        } else if !line.starts_with('|') {
            under = false;
        } else if under && !line.starts_with("|---") {
            promises += 1;
            assert!(!named(line).is_empty(), "no test for: {line}");
        }
    }
    assert!(promises > 10, "{promises}");
}

/// A sample that does not compile is a promise as well.
#[test]
fn every_page_with_samples_of_rust_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let compiled = std::fs::read_to_string(root.join("tests/src/lib.rs")).unwrap();
    let mut pages = 0;
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let file = entry.unwrap();
        let name = file.file_name().into_string().unwrap();
        let page = std::fs::read_to_string(file.path()).unwrap();
        if page.contains("```rust") {
            pages += 1;
            assert!(
                !page.contains("```rust,ignore"),
                "{name} has a sample that is ignored"
            );
            assert!(
                compiled.contains(&format!(": \"docs/{name}\",")),
                "{name} is not compiled"
            );
        }
    }
    assert!(pages > 10, "{pages}");
}

/// Only rustdoc hides a line that begins with `# `: a reader of the file sees it, and a copy of the sample has it.
#[test]
fn samples_of_pages_and_packages_show_all_of_their_lines() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = |folder: &str| {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let packages = [vec![root.clone()], files("."), files("stores")].concat();
    let readmes = packages.iter().map(|folder| folder.join("README.md"));
    let (mut samples, mut pages) = (0, files("docs"));
    pages.extend(readmes.filter(|readme| readme.exists()));
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        let (found, hidden) = samples_and_hidden_lines(&text);
        assert_eq!(
            hidden,
            [""; 0],
            "{} shows lines that rustdoc hides",
            page.display()
        );
        samples += found;
    }
    assert!(samples > 40, "{samples}");
}

/// The number of samples of Rust, and their lines that rustdoc hides. A block whose fence has only an attribute of rustdoc
/// is a sample as well.
fn samples_and_hidden_lines(page: &str) -> (usize, Vec<&str>) {
    const ATTRIBUTES: [&str; 4] = ["rust", "no_run", "should_panic", "compile_fail"];
    let (mut samples, mut hidden) = (0, Vec::new());
    // Of the block that a line is in: whether it is a sample.
    let mut block = None;
    for line in page.lines().map(str::trim) {
        match (line.strip_prefix("```"), block) {
            (Some(fence), None) => {
                let is_sample = ATTRIBUTES.contains(&fence.split(',').next().unwrap_or(fence));
                samples += usize::from(is_sample);
                block = Some(is_sample);
            }
            (Some(_), Some(_)) => block = None,
            (None, Some(true)) if line == "#" || line.starts_with("# ") => hidden.push(line),
            (None, _) => {}
        }
    }
    (samples, hidden)
}

#[test]
fn lines_that_only_rustdoc_hides_are_found() {
    let page = "# A\n```rust\n#[a]\n# b\n  #\nc\n```\n```sh\n# d\n```\n# e\n```rust,no_run\n# f\n```\n\
                ```no_run\n# g\n```\n# h\n```text\n# i\n```\n";
    let hidden = vec!["# b", "#", "# f", "# g"];
    assert_eq!(samples_and_hidden_lines(page), (3, hidden));
}
