//! Goes through all states of all models, takes out each rule in turn, and prints what it saw.

use std::process::ExitCode;

use dlock_model::check::{Example, grouped};
use dlock_model::{rules, worlds};

const HELP: &str = "\
Goes through all states of the models of dlock's protocol, and takes out each rule in turn.

  cargo run -p dlock-model                    both tables
  cargo run -p dlock-model -- NAME...         only what has one of the NAMEs in it, like `quorum` or `failover: flush`
  cargo run -p dlock-model -- --trace RULE    what happens without a rule, step by step (all rules: --trace '')
  cargo run -p dlock-model -- --list          the names
";

fn main() -> ExitCode {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    match names.first().map(String::as_str) {
        Some("-h" | "--help") => print!("{HELP}"),
        Some("--list") => list(),
        Some("--trace") => {
            names.remove(0);
            return if names.is_empty() {
                misused()
            } else {
                traces(&names)
            };
        }
        Some(option) if option.starts_with('-') => return misused(),
        _ => return tables(&names),
    }
    ExitCode::SUCCESS
}

fn misused() -> ExitCode {
    eprint!("{HELP}");
    ExitCode::from(2)
}

fn is_wanted(name: &str, names: &[String]) -> bool {
    let name = name.to_lowercase();
    names.is_empty() || names.iter().any(|part| name.contains(&part.to_lowercase()))
}

fn list() {
    worlds().iter().for_each(|world| println!("{}", world.name));
    rules().iter().for_each(|rule| println!("{}", rule.name));
}

fn tables(names: &[String]) -> ExitCode {
    let mut good = true;
    let mut head = Some(
        "| with all rules | different states | reached | steps deep | took | result |\n|---|--:|--:|--:|--:|---|",
    );
    for world in worlds().into_iter().filter(|world| is_wanted(&world.name, names)) {
        head.take().into_iter().for_each(|head| println!("{head}"));
        let report = (world.look)();
        good &= report.is_good();
        println!("{} {:.1?} | {} |", report.row(), report.took, report.result());
    }
    let mut head =
        Some("\n| without | what is seen | after steps | different states | took |\n|---|---|--:|--:|--:|");
    for rule in rules().into_iter().filter(|rule| is_wanted(&rule.name, names)) {
        head.take().into_iter().for_each(|head| println!("{head}"));
        match (rule.look)() {
            Some(example) => {
                let states = grouped(example.states);
                println!("{} {states} | {:.1?} |", example.row(), example.took);
            }
            None => {
                good = false;
                println!("| {} | NOTHING: it is not needed | | | |", rule.name);
            }
        }
    }
    if head.is_some()
        && names.iter().any(|name| !name.is_empty())
        && !worlds().iter().any(|world| is_wanted(&world.name, names))
    {
        eprintln!("nothing has a name with: {}; see --list", names.join(" "));
        return ExitCode::FAILURE;
    }
    code(good)
}

fn traces(names: &[String]) -> ExitCode {
    let wanted = rules().into_iter().filter(|rule| is_wanted(&rule.name, names));
    let found: Vec<_> = wanted.map(|rule| (rule.look)()).collect();
    if found.is_empty() {
        eprintln!("no rule has a name with: {}; see --list", names.join(" "));
    }
    for example in found.iter().flatten() {
        println!("{}", example.told());
    }
    code(!found.is_empty() && found.iter().all(Option::<Example>::is_some))
}

fn code(good: bool) -> ExitCode {
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
