//! A model of dlock's protocol where servers lose data: small worlds of clients, servers and a network that misbehaves, of which every state is
//! looked at.
//!
//! Each model has the steps of the library, what must never be seen, and the rules of the protocol, any of which can be
//! taken out: then what the rule prevents must be found. docs/model.md says what is modelled and what was seen.
//!
//! - [`failover`]: servers that lose data.
//! - [`quorum`]: several servers, of which some lose their data.
//!
//! `cargo run -p dlock-model` goes through all of it and prints what it saw; the suites check it.

pub mod check;
pub mod failover;
pub mod quorum;

use check::{Case, Example, Report};

/// All worlds, in which all rules hold.
#[must_use]
pub fn worlds() -> Vec<Case<Report>> {
    let mut all = check::worlds::<failover::Rule>();
    all.extend(check::worlds::<quorum::Rule>());
    all
}

/// All rules, each to be taken out.
#[must_use]
pub fn rules() -> Vec<Case<Option<Example>>> {
    let mut all = check::rules::<failover::Rule>();
    all.extend(check::rules::<quorum::Rule>());
    all
}

#[cfg(test)]
mod tests;
