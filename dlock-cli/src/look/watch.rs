//! `dlock watch`: the locks that are held and waited for, full-screen.

use std::convert::Infallible;
use std::io::{IsTerminal, Read};
use std::process::ExitCode;
use std::time::Duration;

use dlock::{Error, LockClient};
#[cfg(unix)]
use nix::sys::termios::{
    _POSIX_VDISABLE, InputFlags, LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::args::WatchArgs;
use super::survey::{Survey, wait_json, wait_line};
use super::text::{json_line, told};
use crate::screen::{Painter, terminal_size};

/// How long the terminal may take to enter the screen, and to leave it, also where it is slow.
const SCREEN_WITHIN: Duration = Duration::from_secs(2);

/// Refreshes until the user quits.
pub(super) async fn watch(client: &LockClient, args: &WatchArgs) -> Result<ExitCode, Error> {
    if args.once || args.json || !std::io::stdout().is_terminal() {
        loop {
            let survey = Survey::of(client, &args.pattern).await?;
            match args.json {
                true => say!("{}", json_line(&all_json(&survey))),
                false => lines(&survey).iter().for_each(|line| say!("{line}")),
            }
            if args.once {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(args.every).await;
        }
    }
    let mut screen = Screen::enter();
    tokio::select! {
        biased;
        () = is_left() => Ok(ExitCode::SUCCESS),
        signal = is_ended() => Ok(ExitCode::from(128 + signal)),
        never = refresh(client, args, &mut screen) => match never {},
    }
}

async fn refresh(client: &LockClient, args: &WatchArgs, screen: &mut Screen) -> Infallible {
    loop {
        // An outage of the store is one of the things to watch.
        let lines = match Survey::of(client, &args.pattern).await {
            Ok(survey) => lines(&survey),
            Err(error) => vec![told(&error)],
        };
        screen.show(&lines);
        tokio::time::sleep(args.every).await;
    }
}

/// Completes when q is typed, or at Ctrl-C.
async fn is_left() {
    let (pass, quit) = oneshot::channel();
    // In a separate thread, since a read of the standard input cannot be cancelled, and would keep the runtime from ending.
    std::thread::spawn(move || {
        let keys = std::io::stdin().lock().bytes();
        if keys.map_while(Result::ok).any(|key| matches!(key, b'q' | b'Q')) {
            let _ = pass.send(());
        }
    });
    tokio::select! {
        // Without a terminal there is no keyboard.
        Ok(()) = quit => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Completes at a signal that ends the process, with its number: first the terminal is restored.
#[cfg(unix)]
async fn is_ended() -> u8 {
    use tokio::signal::unix::{SignalKind, signal};

    let ends = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()];
    let one = |kind: SignalKind| {
        Box::pin(async move {
            match signal(kind) {
                Ok(mut signal) => drop(signal.recv().await),
                Err(_) => std::future::pending().await,
            }
            kind.as_raw_value() as u8
        })
    };
    futures_util::future::select_all(ends.map(one)).await.0
}

#[cfg(not(unix))]
async fn is_ended() -> u8 {
    std::future::pending().await
}

/// Waits first, then near misses, then the rest.
fn lines(survey: &Survey) -> Vec<String> {
    let (near, rest): (Vec<_>, Vec<_>) = survey.rows.iter().partition(|row| row.holder.is_near_its_end());
    let mut lines = vec![format!(
        "{} held, {} known to wait, {} near their end",
        survey.rows.len(),
        survey.waits.len(),
        near.len()
    )];
    let mut part = |title: &str, rows: Vec<String>| {
        if !rows.is_empty() {
            lines.push(String::new());
            lines.push(title.to_owned());
            lines.extend(rows.into_iter().map(|row| format!("  {row}")));
        }
    };
    let waits = survey.waits.iter().map(|(client, wait)| wait_line(client, wait));
    part("waited for", waits.collect());
    part("near their end", near.iter().map(|row| row.line()).collect());
    part("held", rest.iter().map(|row| row.line()).collect());
    lines
}

fn all_json(survey: &Survey) -> Value {
    let locks: Vec<_> = survey.rows.iter().map(super::survey::Row::json).collect();
    let waits: Vec<_> = survey
        .waits
        .iter()
        .map(|(client, wait)| wait_json(client, wait))
        .collect();
    json!({ "locks": locks, "waits": waits })
}

/// The alternate screen of the terminal, which is restored afterwards.
struct Screen {
    painter: Painter,
    #[cfg(unix)]
    before: Option<Termios>,
}

impl Screen {
    fn enter() -> Screen {
        // A line that is wider than its number of characters must not wrap.
        let mut painter = Painter::new(std::io::stdout());
        painter.show_now("\x1b[?1049h\x1b[?7l\x1b[?25l", SCREEN_WITHIN);
        Screen {
            painter,
            #[cfg(unix)]
            before: keys_at_once(),
        }
    }

    /// As many lines as fit on the screen.
    fn show(&mut self, lines: &[String]) {
        let (width, height) = terminal_size(std::io::stdout());
        let mut out = String::from("\x1b[H");
        for line in lines.iter().take(height.saturating_sub(1)) {
            out.extend(line.chars().take(width));
            out.push_str("\x1b[K\r\n");
        }
        out.push_str("\x1b[J");
        out.extend("q: quit".chars().take(width));
        self.painter.show(out);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        #[cfg(unix)]
        let set = |to: &Termios| tcsetattr(std::io::stdin(), SetArg::TCSANOW, to);
        #[cfg(unix)]
        if let Some(before) = &self.before {
            // Where Ctrl-S holds the screen it could not be left: without flow control the terminal goes on.
            let mut flowing = before.clone();
            flowing.input_flags.remove(InputFlags::IXON);
            let _ = set(&flowing);
        }
        self.painter
            .show_now("\x1b[?25h\x1b[?7h\x1b[?1049l", SCREEN_WITHIN);
        #[cfg(unix)]
        if let Some(before) = &self.before {
            let _ = set(before);
        }
    }
}

/// Delivers keys at once and without echo; returns the previous settings.
#[cfg(unix)]
fn keys_at_once() -> Option<Termios> {
    let before = tcgetattr(std::io::stdin()).ok()?;
    let mut raw = before.clone();
    raw.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO);
    // Ctrl-Z would leave the shell with this screen.
    raw.control_chars[SpecialCharacterIndices::VSUSP as usize] = _POSIX_VDISABLE;
    tcsetattr(std::io::stdin(), SetArg::TCSANOW, &raw).ok()?;
    Some(before)
}
