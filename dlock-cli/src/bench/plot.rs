//! Draws the distribution of times as a self-contained SVG.
//!
//! Above: how many took about that long. Below: how many took longer, down to one in a million. Both share one
//! logarithmic time axis.

use std::fmt::Write as _;

use super::figures::time_of;
use super::tally::Times;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 30.0;
/// Top and bottom of the two pictures.
const ABOVE: (f64, f64) = (92.0, 300.0);
const BELOW: (f64, f64) = (340.0, 500.0);
/// The resolution of times: this many steps for a factor of ten.
const STEPS: f64 = 24.0;
const COLORS: &[&str] = &["#1f6feb", "#d1642a", "#2a8c4a", "#8250df"];

/// Draws the picture; each line has a name.
pub(super) fn draw(title: &str, lines: &[(String, &Times)]) -> String {
    let lines: Vec<_> = lines.iter().filter(|(_, times)| times.len() > 0).collect();
    let axis = Axis::around(
        lines
            .iter()
            .flat_map(|(_, times)| times.each().map(|(nanos, _)| nanos)),
    );
    let mut svg = String::new();
    head(&mut svg, title);
    axis.draw(&mut svg);
    below_scale(&mut svg);
    for (at, (name, times)) in lines.iter().enumerate() {
        let color = COLORS[at % COLORS.len()];
        density(&mut svg, &axis, times, color);
        longer(&mut svg, &axis, times, color);
        legend(&mut svg, at, name, times, color);
    }
    if let Some((_, times)) = lines.first() {
        marks(&mut svg, &axis, times);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Nanoseconds from left to right, whole decades.
struct Axis {
    from: f64,
    to: f64,
}

impl Axis {
    fn around(nanos: impl Iterator<Item = u64>) -> Axis {
        let (mut from, mut to) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in nanos {
            let value = (value.max(1) as f64).log10();
            (from, to) = (from.min(value), to.max(value));
        }
        if from > to {
            (from, to) = (3.0, 6.0);
        }
        // A little margin, and no picture narrower than one decade.
        let from = (from * 10.0).floor() / 10.0 - 0.1;
        let to = ((to * 10.0).ceil() / 10.0 + 0.1).max(from + 1.0);
        Axis { from, to }
    }

    fn x(&self, log: f64) -> f64 {
        LEFT + (log - self.from) / (self.to - self.from) * (RIGHT - LEFT)
    }

    fn draw(&self, svg: &mut String) {
        let wide = self.to - self.from > 2.5;
        for decade in self.from.floor() as i32..=self.to.ceil() as i32 {
            for digit in 1..10 {
                let log = f64::from(decade) + f64::from(digit).log10();
                if log < self.from || log > self.to {
                    continue;
                }
                let x = self.x(log);
                let named = digit == 1 || (!wide && matches!(digit, 2 | 5));
                let class = if digit == 1 { "decade" } else { "grid" };
                for (top, bottom) in [ABOVE, BELOW] {
                    let _ = writeln!(svg, r#"<path class="{class}" d="M{x:.1} {top}V{bottom}"/>"#);
                }
                if named {
                    let label = tick(10f64.powi(decade) * f64::from(digit));
                    let y = BELOW.1 + 18.0;
                    let _ = writeln!(svg, r#"<text class="tick" x="{x:.1}" y="{y}">{label}</text>"#);
                }
            }
        }
    }
}

/// A round number of nanoseconds, as text.
fn tick(nanos: f64) -> String {
    let (value, unit) = match nanos {
        n if n < 999.0 => (n, "ns"),
        n if n < 999e3 => (n / 1e3, "µs"),
        n if n < 999e6 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    format!("{value:.0} {unit}")
}

fn head(svg: &mut String, title: &str) {
    let title = escaped(title);
    let _ = writeln!(
        svg,
        r##"<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">
<title>{title}</title>
<style>
text {{ font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }}
.title {{ font-size: 16px; font-weight: 600 }}
.tick {{ text-anchor: middle; fill: #57606a }}
.side {{ text-anchor: end; fill: #57606a }}
.caption {{ fill: #57606a }}
.mark {{ font-size: 12px; fill: #57606a }}
.grid {{ stroke: #f0f2f4; fill: none }}
.decade {{ stroke: #d0d7de; fill: none }}
.quantile {{ stroke: #57606a; stroke-dasharray: 3 3; fill: none }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
<text class="title" x="{LEFT}" y="28">{title}</text>
<text class="caption" x="{LEFT}" y="{above}">how many took about this long</text>
<text class="caption" x="{LEFT}" y="{below}">how many took longer</text>"##,
        above = ABOVE.0 - 10.0,
        below = BELOW.0 - 10.0,
    );
}

/// The position of a share of longer times: each step down is a tenth, down to one in a million.
const DECADES: f64 = 6.0;

fn y_of(share: f64) -> f64 {
    let depth = (-share.log10()).clamp(0.0, DECADES);
    BELOW.0 + depth / DECADES * (BELOW.1 - BELOW.0)
}

fn below_scale(svg: &mut String) {
    for (depth, label) in ["100 %", "10 %", "1 %", "0.1 %", "0.01 %", "10 ppm", "1 ppm"]
        .iter()
        .enumerate()
    {
        let y = y_of(10f64.powi(-(depth as i32)));
        let _ = writeln!(svg, r#"<path class="decade" d="M{LEFT} {y:.1}H{RIGHT}"/>"#);
        let _ = writeln!(
            svg,
            r#"<text class="side" x="{:.1}" y="{:.1}">{label}</text>"#,
            LEFT - 10.0,
            y + 4.0
        );
    }
    let _ = writeln!(svg, r#"<path class="decade" d="M{LEFT} {}H{RIGHT}"/>"#, ABOVE.1);
}

fn density(svg: &mut String, axis: &Axis, times: &Times, color: &str) {
    let bins = ((axis.to - axis.from) * STEPS).ceil() as usize + 1;
    let mut counts = vec![0u64; bins];
    for (nanos, count) in times.each() {
        let bin = (((nanos.max(1) as f64).log10() - axis.from) * STEPS) as usize;
        counts[bin.min(bins - 1)] += count;
    }
    let most = counts.iter().copied().max().unwrap_or(1).max(1) as f64;
    let mut path = format!("M{LEFT} {}", ABOVE.1);
    for (bin, count) in counts.iter().enumerate() {
        let y = ABOVE.1 - *count as f64 / most * (ABOVE.1 - ABOVE.0 - 14.0);
        let end = axis.x(axis.from + (bin + 1) as f64 / STEPS).min(RIGHT);
        let _ = write!(path, "V{y:.1}H{end:.1}");
    }
    let _ = writeln!(
        svg,
        r#"<path d="{path}V{}Z" fill="{color}" fill-opacity="0.25" stroke="{color}" stroke-width="1.2"/>"#,
        ABOVE.1
    );
}

fn longer(svg: &mut String, axis: &Axis, times: &Times, color: &str) {
    let all = times.len() as f64;
    let (mut left, mut path) = (times.len(), format!("M{LEFT} {}", BELOW.0));
    for (nanos, count) in times.each() {
        let x = axis.x((nanos.max(1) as f64).log10());
        left -= count;
        let y = if left == 0 {
            BELOW.1
        } else {
            y_of(left as f64 / all)
        };
        let _ = write!(path, "H{x:.1}V{y:.1}");
    }
    let _ = writeln!(
        svg,
        r#"<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>"#
    );
}

/// Median and tail of the first line, which the figures describe.
fn marks(svg: &mut String, axis: &Axis, times: &Times) {
    let mut last = f64::NEG_INFINITY;
    for (name, share) in [("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999)] {
        let Some(micros) = times.quantile(share) else {
            continue;
        };
        let x = axis.x((micros * 1000.0).max(1.0).log10());
        let _ = writeln!(
            svg,
            r#"<path class="quantile" d="M{x:.1} {}V{}"/>"#,
            ABOVE.0 - 6.0,
            ABOVE.1
        );
        // Overlapping names are left out: the legend has the figures.
        if x - last > 60.0 {
            let y = ABOVE.0 + 10.0;
            let _ = writeln!(
                svg,
                r#"<text class="mark" x="{:.1}" y="{y}">{name}</text>"#,
                x + 4.0
            );
            last = x;
        }
    }
}

fn legend(svg: &mut String, at: usize, name: &str, times: &Times, color: &str) {
    let y = 50.0 + 15.0 * at as f64;
    let (y, x) = match at {
        0 => (y, LEFT),
        _ => (HEIGHT - 20.0, LEFT + 380.0 * (at - 1) as f64),
    };
    let of = |share| times.quantile(share).map_or_else(String::new, time_of);
    let text = format!(
        "{name}: median {}, 99 % {}, 99.9 % {}",
        of(0.5),
        of(0.99),
        of(0.999)
    );
    let _ = writeln!(
        svg,
        r#"<rect x="{x}" y="{:.1}" width="11" height="11" fill="{color}" fill-opacity="0.6"/><text x="{:.1}" y="{y}">{}</text>"#,
        y - 10.0,
        x + 17.0,
        escaped(&text)
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
