//! The picture of the results of one server: a panel for each workload, a bar for each library.
//!
//! Its texts have one colour that is readable on white and on black: a page that shows the picture does not tell it
//! which of them it has.

use std::fmt::Write as _;

use crate::entrant::Entrant;
use crate::figures::{count, time};
use crate::peer::Peer;
use crate::results::{Median, Results};
use crate::workload::Workload;

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 24.0;
const GAP: f64 = 40.0;
const HEAD: f64 = 76.0;
const PANEL_HEAD: f64 = 44.0;
const ROW: f64 = 24.0;
const BAR: f64 = 14.0;
const LABELS: f64 = 152.0;
const VALUES: f64 = 68.0;

const TEXT: &str = "#747c87";
const OTHERS: &str = "#8b95a5";
const DLOCK: &str = "#e8590c";
const DLOCK_UNAWAITED: &str = "#f2a36b";

struct Panel {
    title: &'static str,
    unit: &'static str,
    bars: Vec<(Peer, Median)>,
    show: fn(f64) -> String,
}

/// The text alternative of the picture.
#[must_use]
pub fn title(results: &Results) -> String {
    format!("Locks on {}, {} cores", results.server, results.cores)
}

/// Draws the picture as SVG.
#[must_use]
pub fn draw(results: &Results) -> String {
    let panels: Vec<Panel> = [
        Workload::Sequential,
        Workload::Parallel,
        Workload::Contended,
        Workload::Processes,
        Workload::Wakeup,
        Workload::Fair,
    ]
    .into_iter()
    .map(|workload| panel(results, workload))
    .filter(|panel| panel.bars.len() > 1 && panel.bars.iter().any(|(peer, _)| peer.is_dlock()))
    .collect();

    let width = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
    let mut body = String::new();
    let mut top = HEAD;
    for pair in panels.chunks(2) {
        for (column, panel) in pair.iter().enumerate() {
            body.push_str(&panel.draw(MARGIN + column as f64 * (width + GAP), top, width));
        }
        top += pair.iter().map(Panel::height).fold(0.0, f64::max);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', \
         sans-serif\" fill=\"{TEXT}\">\n<title>{title}</title>\n\
         <text x=\"{MARGIN}\" y=\"34\" font-size=\"20\" font-weight=\"600\">{title}</text>\n\
         <text x=\"{MARGIN}\" y=\"56\" font-size=\"13\">medians of {rounds}; the thin line goes from the lowest to the \
         highest; server and clients share the cores</text>\n{body}</svg>\n",
        height = top + 8.0,
        title = title(results),
        rounds = match results.rounds {
            1 => "one round".to_owned(),
            rounds => format!("{rounds} rounds"),
        },
    )
}

fn panel(results: &Results, workload: Workload) -> Panel {
    let is_time = workload == Workload::Wakeup;
    let value = |peer: Peer| {
        results.median(workload.name(), peer.name(), |run| match is_time {
            true => run.p50_us,
            false => run.pairs_per_s,
        })
    };
    let entrants = Entrant::all_of(workload).into_iter();
    let mut bars: Vec<_> = entrants
        .filter(|entrant| entrant.peer != Peer::RedissonDefaults)
        .filter_map(|entrant| Some((entrant.peer, value(entrant.peer)?)))
        .collect();
    bars.sort_by(|(_, one), (_, other)| match is_time {
        true => one.value.total_cmp(&other.value),
        false => other.value.total_cmp(&one.value),
    });
    Panel {
        title: workload.title(),
        unit: match is_time {
            true => "from release to the waiter's acquisition, median; less is better",
            false => "acquisitions with releases per second; more is better",
        },
        bars,
        show: if is_time { time } else { count },
    }
}

impl Panel {
    fn height(&self) -> f64 {
        PANEL_HEAD + self.bars.len() as f64 * ROW + 26.0
    }

    fn draw(&self, left: f64, top: f64, width: f64) -> String {
        let mut text = format!(
            "<text x=\"{left}\" y=\"{}\" font-size=\"15\" font-weight=\"600\">{}</text>\n\
             <text x=\"{left}\" y=\"{}\" font-size=\"11.5\">{}</text>\n",
            top + 14.0,
            self.title,
            top + 31.0,
            self.unit
        );
        let begin = left + LABELS;
        let longest = width - LABELS - VALUES;
        let most = self.bars.iter().map(|(_, bar)| bar.highest).fold(0.0, f64::max);
        let scale = |value: f64| value / most * longest;
        for (row, (peer, bar)) in self.bars.iter().enumerate() {
            let y = top + PANEL_HEAD + row as f64 * ROW;
            let middle = y + BAR / 2.0;
            let (color, weight) = match peer {
                Peer::Dlock => (DLOCK, "600"),
                Peer::DlockUnawaited => (DLOCK_UNAWAITED, "600"),
                _ => (OTHERS, "400"),
            };
            let label = match peer {
                Peer::DlockUnawaited => "dlock, not awaited",
                peer => peer.title(),
            };
            let (lowest, highest) = (begin + scale(bar.lowest), begin + scale(bar.highest));
            let _ = write!(
                text,
                "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12.5\" font-weight=\"{weight}\" \
                 text-anchor=\"end\">{label}</text>\n\
                 <rect x=\"{begin:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"2\" fill=\"{color}\"/>\n\
                 <path d=\"M{lowest:.1} {middle:.1}H{highest:.1}\" stroke=\"{TEXT}\" stroke-width=\"1.5\"/>\n\
                 <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12.5\" font-weight=\"{weight}\">{}</text>\n",
                begin - 8.0,
                middle + 4.5,
                scale(bar.value).max(1.0),
                highest.max(begin + 1.0) + 7.0,
                middle + 4.5,
                (self.show)(bar.value),
            );
        }
        text
    }
}
