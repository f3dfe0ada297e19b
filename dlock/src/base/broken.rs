//! Rules that the simulation breaks, to see how soon it detects the consequences.

/// Whether a rule of the library is broken: never, except in a simulation that asks for it. See `sim::breaks`.
macro_rules! broken {
    ($rule:ident) => {{
        #[cfg(dlock_sim)]
        let is_broken = $crate::base::sim::breaks::is_broken($crate::base::sim::breaks::Broken::$rule);
        #[cfg(not(dlock_sim))]
        let is_broken = false;
        is_broken
    }};
}

pub(crate) use broken;
