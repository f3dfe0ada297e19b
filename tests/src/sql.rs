//! What a proxy before a database knows.

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The SQL, of each statement one line; of a prepared one what was prepared.
    pub sql: String,
    /// Whether something is executed, and not only prepared or closed.
    pub executes: bool,
}

impl Request {
    /// Whether it executes a statement with this text in it.
    pub fn runs(&self, text: &str) -> bool {
        self.executes && self.sql.contains(text)
    }
}
