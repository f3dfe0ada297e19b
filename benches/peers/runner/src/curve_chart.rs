//! The picture of the curves on one server: a panel for each runtime.
//!
//! Its colours are readable on white and on black, as those of the other charts.

use std::fmt::Write as _;

use crate::curve::{Curve, Line, TASKS};
use crate::figures::{count, runtime};
use crate::results::Median;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 440.0;
const MARGIN: f64 = 24.0;
const GAP: f64 = 28.0;
/// Room for the numbers beside a panel.
const LABELS: f64 = 58.0;
const TOP: f64 = 128.0;
const BOTTOM: f64 = 396.0;

const TEXT: &str = "#747c87";
const GRID: &str = "#8b95a5";

fn color(line: Line) -> &'static str {
    match line {
        Line::Rslock => "#3987c9",
        Line::Scripts => "#8b95a5",
        Line::Dlock => "#e8590c",
        Line::DlockUnawaited => "#c99a2e",
    }
}

/// What tells the lines apart where colours do not.
fn dashes(line: Line) -> &'static str {
    match line {
        Line::Rslock | Line::Dlock => "",
        Line::Scripts => " stroke-dasharray=\"2 4\"",
        Line::DlockUnawaited => " stroke-dasharray=\"8 4\"",
    }
}

/// The text alternative of the picture.
#[must_use]
pub fn title(curve: &Curve) -> String {
    format!(
        "Pairs a second from one task to 256 on {}, {} cores",
        curve.server, curve.cores
    )
}

/// Draws the picture as SVG.
#[must_use]
pub fn draw(curve: &Curve) -> String {
    let title = title(curve);
    let mut body = legend();
    let runtimes = curve.runtimes();
    let each = (WIDTH - 2.0 * MARGIN - GAP) / runtimes.len().max(1) as f64;
    let scale = Scale::of(curve);
    for (at, threads) in runtimes.iter().enumerate() {
        let left = MARGIN + at as f64 * (each + GAP / 2.0) + LABELS;
        panel(
            &mut body,
            curve,
            *threads,
            &scale,
            (left, each - LABELS - GAP / 2.0),
        );
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', \
         sans-serif\" fill=\"{TEXT}\">\n<title>{title}</title>\n\
         <text x=\"{MARGIN}\" y=\"34\" font-size=\"20\" font-weight=\"600\">{title}</text>\n\
         <text x=\"{MARGIN}\" y=\"56\" font-size=\"13\">medians of {} rounds, both axes logarithmic; server and clients \
         share the cores; more is better</text>\n{body}</svg>\n",
        curve.rounds
    )
}

fn legend() -> String {
    let mut text = String::new();
    let mut x = MARGIN;
    for line in Line::ALL {
        let (color, dashes, title) = (color(line), dashes(line), line.title());
        let _ = write!(
            text,
            "<path d=\"M{x} 80h28\" stroke=\"{color}\" stroke-width=\"2.5\"{dashes}/>\n\
             <text x=\"{}\" y=\"84\" font-size=\"12.5\">{title}</text>\n",
            x + 36.0
        );
        x += 66.0 + 7.0 * title.len() as f64;
    }
    text
}

/// From the lowest rate to the highest.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn of(curve: &Curve) -> Scale {
        let rates = || curve.points.iter().map(|point| point.pairs_per_s.max(1.0));
        Scale {
            least: rates().fold(f64::INFINITY, f64::min).min(1e6),
            most: rates().fold(1.0, f64::max),
        }
    }

    fn y(&self, rate: f64) -> f64 {
        let part = (rate.max(1.0) / self.least).ln() / (self.most / self.least).ln().max(f64::MIN_POSITIVE);
        BOTTOM - part * (BOTTOM - TOP)
    }

    /// Round numbers within it.
    fn marks(&self) -> impl Iterator<Item = f64> {
        let all = (0..7).flat_map(|decade| [1.0, 2.0, 5.0].map(|first| first * 10_f64.powi(decade)));
        all.filter(|rate| *rate >= self.least && *rate <= self.most)
    }
}

fn panel(text: &mut String, curve: &Curve, threads: usize, scale: &Scale, (left, width): (f64, f64)) {
    let last = (TASKS[TASKS.len() - 1] as f64).log2();
    let x = |tasks: usize| left + (tasks as f64).log2() / last * width;
    let _ = writeln!(
        text,
        "<text x=\"{left:.1}\" y=\"112\" font-size=\"15\" font-weight=\"600\">{}</text>",
        runtime(threads)
    );
    for rate in scale.marks() {
        let y = scale.y(rate);
        let _ = write!(
            text,
            "<path d=\"M{left:.1} {y:.1}h{width:.1}\" stroke=\"{GRID}\" stroke-width=\"0.5\" opacity=\"0.5\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11.5\" text-anchor=\"end\">{}</text>\n",
            left - 8.0,
            y + 4.0,
            count(rate)
        );
    }
    for tasks in TASKS {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" font-size=\"11.5\" text-anchor=\"middle\">{tasks}</text>",
            x(tasks),
            BOTTOM + 20.0
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{}\" font-size=\"11.5\" text-anchor=\"middle\">tasks</text>",
        left + width / 2.0,
        BOTTOM + 38.0
    );
    for line in Line::ALL {
        let median = |tasks| curve.median(line, threads, tasks, |point| point.pairs_per_s);
        let points: Vec<(usize, Median)> = TASKS
            .into_iter()
            .filter_map(|tasks| Some((tasks, median(tasks)?)))
            .collect();
        let mut path = String::new();
        for (at, (tasks, rate)) in points.iter().enumerate() {
            let command = if at == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", x(*tasks), scale.y(rate.value));
        }
        let (color, dashes) = (color(line), dashes(line));
        let _ = writeln!(
            text,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2.5\" \
             stroke-linejoin=\"round\"{dashes}/>"
        );
        for (tasks, rate) in points {
            let _ = writeln!(
                text,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{color}\"><title>{}, {tasks} tasks, {}: {} to \
                 {} pairs/s</title></circle>",
                x(tasks),
                scale.y(rate.value),
                line.title(),
                runtime(threads),
                count(rate.lowest),
                count(rate.highest)
            );
        }
    }
}
