//! docs/permissions.md, so that the suite of permissions uses what the page says and neither goes stale.

use crate::{Flavor, Server};

const PAGE: &str = include_str!("../../docs/permissions.md");

/// The words of the `ACL SETUSER` lines for this user under a heading, behind its name.
///
/// # Panics
/// When there is no such line.
pub fn of(user: &str, heading: &str) -> Vec<&'static str> {
    let section = section(heading);
    let begin = format!("ACL SETUSER {user} ");
    let words: Vec<_> = section
        .lines()
        .filter_map(|line| line.strip_prefix(&begin))
        .flat_map(str::split_whitespace)
        .collect();
    assert!(!words.is_empty(), "{heading} has no permissions for {user}");
    words
}

/// What stands under a heading.
fn section(heading: &str) -> &'static str {
    let (_, section) = PAGE
        .split_once(&format!("\n## {heading}\n"))
        .unwrap_or_else(|| panic!("docs/permissions.md has no heading {heading}"));
    section
        .split_once("\n## ")
        .map_or(section, |(section, _)| section)
}

/// The lines for the command line of ZooKeeper.
///
/// # Panics
/// When there is none.
pub fn of_zookeeper() -> Vec<&'static str> {
    let code = section("ZooKeeper").split("```\n").skip(1).step_by(2);
    let lines: Vec<_> = code.flat_map(str::lines).collect();
    assert!(!lines.is_empty(), "no lines for ZooKeeper");
    lines
}

/// The headings that have lines for this user.
pub fn headings(user: &str) -> Vec<&'static str> {
    let begin = format!("\nACL SETUSER {user} ");
    let sections = PAGE.split("\n## ").skip(1);
    sections
        .filter(|section| section.contains(&begin))
        .filter_map(|section| section.lines().next())
        .collect()
}

/// The commands under a heading.
///
/// # Panics
/// When it is not there.
pub fn commands(heading: &str) -> Vec<&'static str> {
    let mut words = of("svc", heading);
    words.retain(|word| word.starts_with('+'));
    words
}

/// The patterns of keys and channels under a heading.
///
/// # Panics
/// When it is not there.
pub fn patterns(heading: &str) -> Vec<&'static str> {
    let mut words = of("svc", heading);
    words.retain(|word| word.starts_with(['~', '&']));
    words
}

/// The headings for a user of a Cluster: of servers before 7 without those for what they do not have.
pub fn in_a_cluster(flavor: Flavor) -> &'static [&'static str] {
    match flavor {
        Flavor::Redis62 => &["Locks", "Cluster"],
        Flavor::Redis | Flavor::Valkey => &["Locks", "Cluster", "Sharded channels"],
    }
}

/// Makes a user on the server with what stands under these headings.
///
/// # Panics
/// When the server does not take it.
pub async fn give(server: &Server, user: &str, headings: &[&str]) {
    for heading in headings {
        let mut acl = vec!["ACL", "SETUSER", user];
        acl.extend(of(user, heading));
        server.command(&acl).await;
    }
}
