use http::HeaderValue;

/// What it took to get a response, in its extensions; or to get none, in the [`SendError`](super::SendError).
///
/// ```
/// use dlock_tower::retry::Sent;
///
/// fn log(response: &http::Response<String>) {
///     if let Some(Sent { key, attempts, .. }) = response.extensions().get() {
///         println!("{attempts} attempts under key {key:?}");
///     }
/// }
/// # log(&http::Response::new(String::new()));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// The value of the header with the key.
    pub key: HeaderValue,
    /// How often the request was sent, whatever the answers were.
    pub attempts: u32,
}
