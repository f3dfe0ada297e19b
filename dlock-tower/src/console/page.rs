//! The page: one file, which loads nothing else and may run only its own script.

use std::sync::LazyLock;

use axum::response::{Html, IntoResponse, Response};
use http::header::CONTENT_SECURITY_POLICY;

/// The page with its style and its script, and with placeholders for the nonce.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    include_str!("page/page.html")
        .replace("{{style}}", include_str!("page/page.css"))
        .replace("{{script}}", include_str!("page/page.js"))
});
const NONCE: &str = "{{nonce}}";

/// Returns the page, with a policy that names the two elements of this very answer: an injected script does not run.
pub(super) fn page() -> Response {
    let nonce = uuid::Uuid::new_v4().simple().to_string();
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    );
    (
        [(CONTENT_SECURITY_POLICY, policy)],
        Html(PAGE.replace(NONCE, &nonce)),
    )
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_loads_nothing_and_writes_no_markup() {
        for foreign in [
            "http:", "https:", "src=", "@import", "url(", "style=\"", "onclick",
        ] {
            assert!(!PAGE.contains(foreign), "{foreign}");
        }
        for sink in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ] {
            assert!(!PAGE.contains(sink), "{sink}");
        }
        assert_eq!(PAGE.matches(NONCE).count(), 2);
        assert_eq!(PAGE.matches("{{").count(), 2);
    }
}
