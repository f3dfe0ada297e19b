//! What is measured.

/// One of the measurements of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// One task takes one lock over and over.
    Sequential,
    /// 64 tasks, each with a lock of its own.
    Parallel,
    /// 16 tasks of one process want one lock.
    Contended,
    /// The same with a fair lock.
    Fair,
    /// Two processes with 8 tasks each want one lock.
    Processes,
    /// 16 tasks of one process want one lock, and so does one task of another process.
    Lone,
    /// One client waits for a lock that another one releases.
    Wakeup,
    /// 100,000 locks are held and renewed.
    Held,
}

/// How many locks are held in [`Workload::Held`].
pub const HOLDS: u32 = 100_000;
/// The lease that they are renewed with is 30 s, so each is renewed once in this many seconds.
pub const PERIOD: f64 = 10.0;

impl Workload {
    /// All, in the order in which they are measured and shown.
    pub const ALL: [Workload; 8] = [
        Workload::Sequential,
        Workload::Parallel,
        Workload::Contended,
        Workload::Fair,
        Workload::Processes,
        Workload::Lone,
        Workload::Wakeup,
        Workload::Held,
    ];

    /// As it is written in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Workload::Sequential => "sequential",
            Workload::Parallel => "parallel",
            Workload::Contended => "contended",
            Workload::Fair => "fair",
            Workload::Processes => "processes",
            Workload::Lone => "lone",
            Workload::Wakeup => "wakeup",
            Workload::Held => "held",
        }
    }

    /// As people read it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Workload::Sequential => "One task, one lock",
            Workload::Parallel => "64 tasks, each its own lock",
            Workload::Contended => "16 tasks of one process, one lock",
            Workload::Fair => "16 tasks of one process, one fair lock",
            Workload::Processes => "Two processes with 8 tasks each, one lock",
            Workload::Lone => "16 tasks of one process and a lone one of another, one lock",
            Workload::Wakeup => "Wake-up",
            Workload::Held => "100,000 locks held and renewed",
        }
    }

    /// Tasks in each process.
    #[must_use]
    pub fn tasks(self) -> usize {
        match self {
            Workload::Parallel => 64,
            Workload::Contended | Workload::Fair | Workload::Lone => 16,
            Workload::Processes => 8,
            Workload::Sequential | Workload::Wakeup | Workload::Held => 1,
        }
    }

    /// For how many seconds it is measured when rates are measured for `seconds`.
    #[must_use]
    pub fn seconds(self, seconds: f64) -> f64 {
        match self {
            // Pollers give no more than six wake-ups a second.
            Workload::Wakeup => seconds * 2.0,
            // Two whole periods of renewal, however short the rest is.
            Workload::Held => 2.0 * PERIOD,
            _ => seconds,
        }
    }
}
