//! The locks that a page asks for.

use std::collections::HashMap;

use dlock::operations::SurveyedLock;

use super::survey::is_near;

/// Locks of a sort that contain a text.
#[derive(Default)]
pub(super) struct Filter {
    only: Only,
    /// In lower case.
    text: String,
}

/// The sorts of locks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Only {
    #[default]
    All,
    Held,
    Waited,
    Near,
    Unknown,
}

impl Filter {
    /// Parses `only` and `find` in the query; unknown values mean all.
    pub(super) fn of(query: &HashMap<String, String>) -> Filter {
        let asked = |only: &Only| query.get("only").is_some_and(|name| name == only.name());
        Filter {
            only: Only::ALL.into_iter().find(asked).unwrap_or_default(),
            text: query
                .get("find")
                .map(|text| text.trim().to_lowercase())
                .unwrap_or_default(),
        }
    }

    /// Whether every lock matches.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.only, Only::All) && self.text.is_empty()
    }

    pub(super) fn fits(&self, lock: &SurveyedLock) -> bool {
        self.only.fits(lock) && (self.text.is_empty() || self.occurs(lock))
    }

    /// Whether the text occurs in the name, or in what is known about a holder or waiter.
    fn occurs(&self, lock: &SurveyedLock) -> bool {
        let is_in = |text: &str| text.to_lowercase().contains(&self.text);
        let is_in_some = |text: &Option<String>| text.as_deref().is_some_and(is_in);
        is_in(lock.key.as_str())
            || lock.holders.iter().any(|holder| {
                let (client, hold) = (&holder.client, &holder.hold);
                is_in(&holder.id)
                    || is_in(&holder.known_kind().to_string())
                    || client
                        .as_ref()
                        .is_some_and(|client| is_in(&client.service) || is_in(&client.host))
                    || hold
                        .as_ref()
                        .is_some_and(|hold| is_in(&hold.location) || is_in_some(&hold.note))
            })
            || lock.waits.iter().any(|(client, wait)| {
                is_in(&client.service)
                    || is_in(&client.host)
                    || is_in(&wait.location)
                    || is_in_some(&wait.note)
            })
    }
}

impl Only {
    pub(super) const ALL: [Only; 5] = [Only::All, Only::Held, Only::Waited, Only::Near, Only::Unknown];

    /// Its name on the page.
    pub(super) fn name(self) -> &'static str {
        match self {
            Only::All => "all",
            Only::Held => "held",
            Only::Waited => "waited",
            Only::Near => "near",
            Only::Unknown => "unknown",
        }
    }

    pub(super) fn fits(self, lock: &SurveyedLock) -> bool {
        match self {
            Only::All => true,
            Only::Held => !lock.holders.is_empty(),
            Only::Waited => !lock.waits.is_empty(),
            Only::Near => is_near(lock),
            Only::Unknown => {
                let mut held = lock.holders.iter().filter(|holder| holder.holds > 0);
                held.any(|holder| holder.unknown().is_some())
            }
        }
    }
}
