//! The cause of an error.

use std::error::Error;
use std::sync::Arc;

/// The cause of an error, as the store's own client library reported it.
pub(crate) type Cause = Arc<dyn Error + Send + Sync + 'static>;

/// Returns the first of a cause and its own causes whose text the message does not have: whoever prints an error with
/// all its causes would read that text twice.
pub(crate) fn untold<'a>(cause: &'a Cause, message: &str) -> Option<&'a (dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = &**cause;
    std::iter::successors(Some(first), |&cause| cause.source())
        .find(|cause| !message.contains(&cause.to_string()))
}

/// Describes an error and its causes in one line, without saying a text twice.
#[must_use]
pub fn describe(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| {
        let more = cause.to_string();
        match text.contains(&more) {
            true => text,
            false => format!("{text}: {more}"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        source: Option<Box<Link>>,
    }

    #[test]
    fn causes_are_told_once_and_in_their_order() {
        let chain = ["no connection: refused", "refused", "by the firewall"];
        let chain = chain
            .into_iter()
            .rev()
            .fold(None, |source, text| Some(Box::new(Link { text, source })));
        assert_eq!(
            describe(&*chain.unwrap()),
            "no connection: refused: by the firewall"
        );
    }
}
