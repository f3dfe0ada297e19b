//! Every state of every model is looked at: nothing is seen that must not be, what must be possible is seen, and each
//! rule that is taken out is missed. docs/model.md says the same.

use std::io::Write as _;

use crate::check::{self, Rule};
use crate::{failover, quorum};

const DOCUMENT: &str = include_str!("../../../docs/model.md");

/// Past the capture of test output: how many states there are is to be seen.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// With all rules, in all worlds of a model.
fn all_is_well<R: Rule>() {
    for world in check::worlds::<R>() {
        let report = (world.look)();
        say(&format!("{} {:.1?} |", report.row(), report.took));
        assert!(report.is_good(), "{}: {}", report.name, report.result());
        let row = report.row();
        assert!(DOCUMENT.contains(&row), "docs/model.md does not have this: {row}");
    }
}

/// Without each of the rules of a model.
fn each_rule_is_needed<R: Rule>() {
    for rule in check::rules::<R>() {
        let Some(example) = (rule.look)() else {
            panic!("{} can be taken out and nothing happens", rule.name);
        };
        say(&format!("{} {:.1?} |", example.row(), example.took));
        let (row, headline) = (example.row(), format!("Without `{}`", example.name));
        assert!(DOCUMENT.contains(&row), "docs/model.md does not have this: {row}");
        // Some are told there step by step.
        let told = example.told();
        assert!(
            !DOCUMENT.contains(&headline) || DOCUMENT.contains(&told),
            "docs/model.md tells this otherwise:\n{told}"
        );
    }
}

#[test]
fn where_data_are_lost_all_is_well_with_all_rules() {
    all_is_well::<failover::Rule>();
}

#[test]
fn where_data_are_lost_each_rule_is_needed() {
    each_rule_is_needed::<failover::Rule>();
}

#[test]
fn on_a_quorum_all_is_well_with_all_rules() {
    all_is_well::<quorum::Rule>();
}

#[test]
fn on_a_quorum_each_rule_is_needed() {
    each_rule_is_needed::<quorum::Rule>();
}
