//! `dlock completions` and `dlock man`: generated from the definition of the command line.

use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::output;

/// Prints the completions for this shell.
pub(crate) fn completions(mut all: Command, shell: Shell) -> Result<ExitCode, String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut all, "dlock", &mut script);
    output::print(String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual page of the whole command, or of the subcommand of these words.
pub(crate) fn man(mut all: Command, command: &[String]) -> Result<ExitCode, String> {
    all.build();
    let mut page = &all;
    for name in command {
        let found = page.find_subcommand(name);
        page =
            found.ok_or_else(|| format!("there is no command {}", crate::look::clean(&command.join(" "))))?;
    }
    let mut text = Vec::new();
    let rendered = clap_mangen::Man::new(page.clone()).render(&mut text);
    rendered.map_err(|error| error.to_string())?;
    output::print(String::from_utf8_lossy(&text));
    Ok(ExitCode::SUCCESS)
}
