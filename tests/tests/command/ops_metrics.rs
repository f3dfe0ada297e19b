//! The dashboard and the alert rules of `ops/`, against the metrics that a running shop exports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dlock_tests::bins::Checkout;
use dlock_tests::{Flavor, Server, eventually};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

const DASHBOARD: &str = include_str!("../../../ops/grafana-dashboard.json");
const ALERTS: &str = include_str!("../../../ops/alerts.yaml");
const PAGE: &str = include_str!("../../../docs/metrics.md");

/// Every metric that is exported, and the values of its labels.
type Metrics = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Prometheus' text format, as far as it is needed: names, labels with values, and that each line has a number.
fn parsed(text: &str) -> Metrics {
    let mut metrics = Metrics::new();
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (series, value) = line
            .rsplit_once(' ')
            .unwrap_or_else(|| panic!("no value in {line:?}"));
        assert!(value.parse::<f64>().is_ok(), "{line:?}");
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let all = metrics.entry(name.to_owned()).or_default();
        for (label, value) in labels_in(labels.trim_end_matches('}')) {
            all.entry(label).or_default().insert(value);
        }
    }
    metrics
}

/// `a="x",b=~"y"` as pairs.
fn labels_in(text: &str) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while let Some((name, value)) = rest.split_once('"') {
        let name = name
            .trim_start_matches(',')
            .trim_end_matches(['=', '~', '!'])
            .trim();
        let (value, behind) = value
            .split_once('"')
            .unwrap_or_else(|| panic!("no end of {value:?}"));
        pairs.push((name.to_owned(), value.to_owned()));
        rest = behind;
    }
    pairs
}

/// The expressions of the dashboard, wherever they are in it.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == "expr" => found.push(text.clone()),
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

/// The metrics that a text names, with the labels that it selects them by.
fn named(expression: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut all = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find("dlock_") {
        let name: String = rest[at..]
            .chars()
            .take_while(|c| c.is_ascii_lowercase() || *c == '_')
            .collect();
        rest = &rest[at + name.len()..];
        let selector = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        all.push((
            name,
            selector.map(|(labels, _)| labels_in(labels)).unwrap_or_default(),
        ));
    }
    all
}

/// The labels of `by (…)`.
fn grouped_by(expression: &str) -> Vec<String> {
    let parts = expression.split(" by (").skip(1);
    let inside = parts
        .filter_map(|part| part.split_once(')'))
        .map(|(labels, _)| labels);
    inside
        .flat_map(|labels| labels.split(','))
        .map(|label| label.trim().to_owned())
        .collect()
}

/// The name, the expression and the `for:` of each alert rule.
fn rules() -> Vec<(&'static str, &'static str, Duration)> {
    let rules = ALERTS.split("- alert: ").skip(1).map(|rule| {
        let name = rule.lines().next().expect("a name");
        let value = |field: &str| {
            let mut lines = rule.lines().map(str::trim);
            let found = lines.find_map(|line| line.strip_prefix(field));
            found.unwrap_or_else(|| panic!("{name} has no {field:?}"))
        };
        (name, value("expr: "), duration(value("for: ")))
    });
    rules.collect()
}

fn duration(text: &str) -> Duration {
    humantime::parse_duration(text).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

/// For how long each part of an expression stays true after the last event: its range. `min_over_time` and what follows
/// `unless` are not true because of an event.
fn true_after_an_event(expression: &str) -> Vec<Duration> {
    let condition = expression
        .split_once(" unless ")
        .map_or(expression, |(condition, _)| condition);
    let calls = condition.split('[').zip(condition.split('[').skip(1));
    let calls = calls.filter(|(before, _)| {
        let call = before.rsplit_once('(').map_or(*before, |(call, _)| call);
        !call.ends_with("min_over_time")
    });
    let ranges = calls.map(|(_, behind)| behind.split_once(']').expect("the end of a range").0);
    ranges.map(duration).collect()
}

/// What a shop exports in which everything happened that leaves a series: asked once, for all tests.
async fn exported() -> &'static (Metrics, String) {
    static EXPORTED: OnceCell<(Metrics, String)> = OnceCell::const_new();
    EXPORTED.get_or_init(export).await
}

async fn scraped(copy: &Checkout) -> String {
    let response = reqwest::get(format!("{}/metrics", copy.url())).await;
    response.expect("an answer").text().await.expect("text")
}

async fn export() -> (Metrics, String) {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    // With two seconds for the first renewal, on a machine that stands still for seconds.
    let copy = Checkout::start(&["--locks", &url, "--store", &url, "--metrics", "--lease", "6s"]);
    copy.put("sneaker", 100).await;
    for n in 0..5 {
        assert_eq!(copy.buy("sneaker").await.expect("an answer").status, 201);
        let once = copy
            .post_once(&format!("k{n}"), "/items/sneaker/buy", json!({ "quantity": 1 }))
            .await;
        assert_eq!(once.expect("an answer").status, 201);
        let charge = copy
            .ask(Method::POST, "/accounts/ada/charge", Some(json!({ "amount": 1 })))
            .await;
        assert_eq!(charge.expect("an answer").status, 201);
    }
    let held = copy.ask(Method::GET, "/lock?hold_ms=2500", None).await;
    assert_eq!(held.expect("an answer").status, 200);
    let counted = || async { scraped(&copy).await.contains("dlock_lease_remaining_ratio_count") };
    eventually("a renewal was counted", counted).await;
    let text = scraped(&copy).await;
    (parsed(&text), text)
}

#[tokio::test]
async fn dashboard_and_alerts_name_only_what_a_running_shop_exports() {
    let (metrics, text) = exported().await;
    let mut found = Vec::new();
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    expressions(&dashboard, &mut found);
    let on_dashboard = found.len();
    found.extend(
        ALERTS
            .lines()
            .filter_map(|line| line.trim().strip_prefix("expr: "))
            .map(str::to_owned),
    );
    assert!(on_dashboard >= 10 && found.len() >= on_dashboard + 6, "{found:?}");
    for expression in &found {
        let all = named(expression);
        assert!(!all.is_empty(), "no metric in {expression:?}");
        for (name, selected) in &all {
            let labels = metrics
                .get(name)
                .unwrap_or_else(|| panic!("{name} is not exported:\n{text}"));
            for (label, values) in selected {
                let exported = labels
                    .get(label)
                    .unwrap_or_else(|| panic!("{name} has no label {label}: {labels:?}"));
                // A value that never comes makes `=` select nothing, and `!=` leave out nothing.
                for value in values.split('|') {
                    assert!(
                        exported.contains(value),
                        "no {name} has {label}={value:?}: {exported:?}"
                    );
                }
            }
        }
        for label in grouped_by(expression) {
            let is_there = all.iter().any(|(name, _)| metrics[name].contains_key(&label));
            assert!(
                is_there || label == "instance",
                "no metric of {expression:?} has a label {label}"
            );
        }
    }
}

#[tokio::test]
async fn page_names_the_metrics_that_a_running_shop_exports() {
    let (metrics, text) = exported().await;
    for name in metrics.keys().filter(|name| name.starts_with("dlock_")) {
        let base = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        assert!(
            PAGE.contains(&format!("`{base}`")),
            "docs/metrics.md does not name {base}"
        );
    }
    let rows = PAGE.lines().filter(|line| line.starts_with("| `dlock_"));
    let in_table: Vec<_> = rows
        .filter_map(|row| row.split(" | ").next())
        .flat_map(named)
        .collect();
    assert!(in_table.len() >= 12, "{in_table:?}");
    for (name, _) in in_table {
        let is_exported = ["", "_bucket"]
            .iter()
            .any(|end| metrics.contains_key(&format!("{name}{end}")));
        assert!(is_exported, "{name} is not exported:\n{text}");
    }
    for metric in [
        "dlock_wait_seconds_bucket",
        "dlock_hold_seconds_bucket",
        "dlock_store_request_seconds_bucket",
    ] {
        assert!(metrics[metric].contains_key("le"), "{metric} has buckets");
    }
}

#[tokio::test]
async fn groups_are_templates_and_paths_and_no_label_is_the_name_of_a_lock() {
    let (_, text) = exported().await;
    assert!(
        text.contains("group=\"item:{sku}\""),
        "the text of the attribute:\n{text}"
    );
    assert!(
        text.contains("group=\"/accounts/{id}/charge\""),
        "the path of the layer:\n{text}"
    );
    for line in text.lines().filter(|line| line.starts_with("dlock_")) {
        assert!(!line.contains("sneaker") && !line.contains("ada"), "{line}");
    }
    for help in ["dlock_wait_seconds", "dlock_held", "dlock_lost_total"] {
        assert!(text.contains(&format!("# HELP {help} ")), "{help} is described");
    }
}

/// A rule that is true for less than its `for:` after a single event never fires if such events are rare.
#[test]
fn alert_of_rare_events_stays_true_for_twice_as_long_as_it_has_to_wait() {
    let rules = rules();
    assert!(rules.len() >= 10, "{rules:?}");
    let mut compared = 0;
    for (name, expression, wait) in rules {
        for range in true_after_an_event(expression) {
            assert!(range >= wait * 2, "{name}: [{range:?}] with for: {wait:?}");
            compared += usize::from(!wait.is_zero());
        }
    }
    assert!(compared >= 7, "only {compared} ranges");
}

/// A restart of the store reconnects every process once.
#[test]
fn alert_of_reconnects_does_not_add_up_processes() {
    let (_, expression, _) = *rules()
        .iter()
        .find(|(_, expression, _)| expression.contains("dlock_store_reconnects_total"))
        .expect("a rule for reconnects");
    assert_eq!(grouped_by(expression), ["instance"], "{expression}");
}

/// Candidates of leader elections wait and lead for long by design, without a group unless they are given one.
#[test]
fn alerts_of_long_waits_and_holds_leave_out_locks_without_a_group() {
    for alert in ["DlockContention", "DlockLongHolds", "DlockWaitersStuck"] {
        let rules = rules();
        let (_, expression, _) = rules.iter().find(|(name, ..)| *name == alert).expect("the rule");
        assert!(expression.contains("group!=\"none\""), "{alert}: {expression}");
        assert!(
            PAGE.contains(&format!("`{alert}`")),
            "docs/metrics.md has no {alert}"
        );
    }
}
