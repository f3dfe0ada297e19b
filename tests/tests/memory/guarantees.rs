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
        let (before, _) =
            (text.split_once(&format!("fn {test}("))).unwrap_or_else(|| panic!("{suite} has no test {test}"));
        let attributes = before.rsplit("\n\n").next().unwrap_or_default();
        assert!(!attributes.contains("#[ignore"), "{test} is not run");
    }
    named.len()
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
