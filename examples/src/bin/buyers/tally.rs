//! Counting.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::time::Duration;

use serde_json::Value;

use crate::Args;
use crate::shop::Answer;

const SOLD_OUT: u16 = 409;

/// The result.
pub(crate) struct Tally {
    args: Args,
    took: Duration,
    sold: usize,
    sold_out: usize,
    unanswered: usize,
    others: BTreeMap<String, usize>,
    /// Answers that were given before.
    replays: usize,
    /// Buyers with more orders than one.
    bought_twice: usize,
    tokens: Vec<u64>,
    store_sold: u64,
    store_left: u64,
}

impl Tally {
    /// `told` is what each buyer was told, one after another.
    pub(crate) fn new(
        args: Args,
        took: Duration,
        told: Vec<Vec<Result<Answer, String>>>,
        item: &Value,
    ) -> Tally {
        let mut tally = Tally {
            args,
            took,
            sold: 0,
            sold_out: 0,
            unanswered: 0,
            others: BTreeMap::new(),
            replays: 0,
            bought_twice: 0,
            tokens: Vec::new(),
            store_sold: item["sold"].as_u64().unwrap_or_default(),
            store_left: item["stock"].as_u64().unwrap_or_default(),
        };
        for told in told {
            tally.count(told);
        }
        tally
    }

    /// One buyer, which may have asked several times for the same piece. Answers that are equal are one: each
    /// order is counted, and a purchase that was refused otherwise only when nothing better came of it.
    fn count(&mut self, told: Vec<Result<Answer, String>>) {
        let answers: Vec<Answer> = told.into_iter().flatten().collect();
        self.replays += answers.iter().filter(|answer| answer.replayed).count();
        let mut orders = HashSet::new();
        for answer in answers.iter().filter(|answer| answer.status == 201) {
            if orders.insert(answer.body["order"].as_str()) {
                self.tokens.extend(answer.body["fencing_token"].as_u64());
            }
        }
        self.sold += orders.len();
        self.bought_twice += usize::from(orders.len() > 1);
        if !orders.is_empty() {
        } else if answers.iter().any(|answer| answer.status == SOLD_OUT) {
            self.sold_out += 1;
        } else if let Some(answer) = answers.first() {
            let other = format!("{} {}", answer.status, answer.kind());
            *self.others.entry(other).or_default() += 1;
        } else {
            self.unanswered += 1;
        }
    }

    /// Whether something happened that locks and keys must prevent.
    pub(crate) fn is_bad(&self) -> bool {
        self.oversold() > 0
            || self.lost() > 0
            || self.bought_twice > 0
            || self.distinct_tokens() < self.tokens.len()
    }

    fn distinct_tokens(&self) -> usize {
        self.tokens.iter().collect::<HashSet<_>>().len()
    }

    fn oversold(&self) -> usize {
        self.sold.saturating_sub(self.args.stock as usize)
    }

    /// Sales that buyers were told, and that another sale overwrote in the store. It may also have more than they were
    /// told: answers get lost.
    fn lost(&self) -> u64 {
        (self.sold as u64).saturating_sub(self.store_sold)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Args {
            urls,
            buyers,
            at_a_time,
            stock,
            sku,
            ..
        } = &self.args;
        let copies = if urls.len() == 1 {
            "1 copy".to_owned()
        } else {
            format!("{} copies", urls.len())
        };
        writeln!(
            f,
            "{buyers} buyers, {at_a_time} at a time, {stock} pieces of \"{sku}\", {copies}, {:.1?}",
            self.took
        )?;
        writeln!(f, "  told \"sold\"       {:>5}", self.sold)?;
        writeln!(f, "  told \"sold out\"   {:>5}", self.sold_out)?;
        for (other, count) in &self.others {
            writeln!(f, "  told otherwise    {count:>5}  {other}")?;
        }
        if let Some(times) = self.args.retry_each {
            let sent = "each purchase sent";
            writeln!(
                f,
                "  told once more    {:>5}  {sent} {times} times with one key",
                self.replays
            )?;
        }
        if self.bought_twice > 0 {
            let say = "buyers that asked for one piece have several";
            writeln!(f, "  BOUGHT TWICE      {:>5}  {say}", self.bought_twice)?;
        }
        if self.unanswered > 0 {
            writeln!(
                f,
                "  told nothing      {:>5}  their copy broke off; they may have bought or not",
                self.unanswered
            )?;
        }
        writeln!(
            f,
            "  sold by the store {:>5}  {} left",
            self.store_sold, self.store_left
        )?;
        match self.tokens.len() {
            0 => writeln!(f, "  fencing tokens     none  (without locks there are none)")?,
            all => {
                let distinct = self.distinct_tokens();
                let say = if distinct == all {
                    "no token twice"
                } else {
                    "SOME TOKENS TWICE"
                };
                writeln!(f, "  fencing tokens    {distinct:>5}  {say}")?;
            }
        }
        match (self.oversold(), self.lost()) {
            (0, 0) => f.write_str("not one oversold"),
            (0, lost) => write!(f, "{lost} SALES LOST by the store"),
            (over, 0) => write!(f, "OVERSOLD by {over}"),
            (over, lost) => write!(f, "OVERSOLD by {over}, and {lost} SALES LOST by the store"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    /// Buyers that were told of orders with these tokens, in a shop with 10 pieces whose store has sold so many.
    fn tally(tokens: &[u64], store_sold: u64) -> Tally {
        let args = Args::parse_from(["buyers", "--stock", "10"]);
        let told = tokens.iter().enumerate().map(|(order, token)| {
            let body = json!({ "order": format!("order {order}"), "fencing_token": token });
            vec![Ok(Answer::sold(body))]
        });
        let item = json!({ "sold": store_sold, "stock": 0 });
        Tally::new(args, Duration::from_secs(1), told.collect(), &item)
    }

    #[test]
    fn both_sides_must_match_and_tokens_differ() {
        let fine = tally(&[1, 2, 3], 3);
        assert!(
            !fine.is_bad() && fine.to_string().ends_with("not one oversold"),
            "{fine}"
        );
        // An answer got lost.
        assert!(!tally(&[1, 2, 3], 4).is_bad());

        let lost = tally(&[1, 2, 3], 1);
        assert!(
            lost.is_bad() && lost.to_string().contains("2 SALES LOST"),
            "{lost}"
        );
        let twice = tally(&[1, 2, 2], 3);
        assert!(
            twice.is_bad() && twice.to_string().contains("SOME TOKENS TWICE"),
            "{twice}"
        );
        let over = tally(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 11);
        assert!(
            over.is_bad() && over.to_string().ends_with("OVERSOLD by 1"),
            "{over}"
        );
    }
}
