//! The client's key: a header, as a structured-field string or bare.

use std::convert::Infallible;

use http::header::HeaderName;
use http::{HeaderMap, HeaderValue};
use sfv::visitor::{Ignored, ItemVisitor, ParameterVisitor};
use sfv::{BareItemFromInput, Parser};

/// The maximum length of a key: 255 bytes, without the quotes.
pub const MAX_KEY_BYTES: usize = 255;

/// Returns the key of a request, or what is wrong with it; `None` when there is no such header.
pub(super) fn find(headers: &HeaderMap, name: &HeaderName) -> Result<Option<String>, String> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(format!("header {name} is given more than once"));
    }
    match parse(value) {
        Ok(key) if key.is_empty() => Err(format!("header {name} is empty")),
        Ok(key) if key.len() > MAX_KEY_BYTES => Err(format!(
            "header {name} has {} bytes, at most {MAX_KEY_BYTES} are allowed",
            key.len()
        )),
        Ok(key) => Ok(Some(key)),
        Err(reason) => Err(format!("header {name} {reason}")),
    }
}

fn parse(value: &HeaderValue) -> Result<String, &'static str> {
    let value = value.as_bytes().trim_ascii();
    if value.first() == Some(&b'"') {
        let mut key = Text(None);
        return match Parser::new(value).parse_item_with_visitor(&mut key) {
            Ok(()) => key.0.ok_or("is not a string"),
            Err(_) => Err("is not one quoted string"),
        };
    }
    // Characters of lists or parameters are not taken as part of the key.
    if !value
        .iter()
        .all(|byte| byte.is_ascii_graphic() && !b"\",;\\".contains(byte))
    {
        return Err("is neither a quoted string nor a plain one of visible ASCII without , ; \" and \\");
    }
    Ok(value.iter().copied().map(char::from).collect())
}

/// The text of a structured-field string. Its parameters, of which none are defined, are ignored.
struct Text(Option<String>);

impl<'a> ItemVisitor<'a> for &mut Text {
    type Error = Infallible;

    fn bare_item(self, item: BareItemFromInput<'a>) -> Result<impl ParameterVisitor<'a>, Infallible> {
        self.0 = match item {
            BareItemFromInput::String(text) => Some(text.as_str().to_owned()),
            _ => None,
        };
        Ok(Ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: HeaderName = HeaderName::from_static("idempotency-key");

    fn key(value: &[u8]) -> Option<String> {
        let value = HeaderValue::from_bytes(value).unwrap();
        find(&HeaderMap::from_iter([(NAME, value)]), &NAME)
            .ok()
            .map(Option::unwrap)
    }

    #[test]
    fn quoted_and_bare_spellings_are_one_key() {
        for spelling in ["\"a-1\"", "a-1", " a-1 ", "\t\"a-1\" ", "\"a-1\";v=2"] {
            assert_eq!(key(spelling.as_bytes()).as_deref(), Some("a-1"), "{spelling}");
        }
        assert_eq!(key(br#""a\"b\\c d,e""#).as_deref(), Some("a\"b\\c d,e"));
        assert_eq!(key(b"pay:42/x_y.z~=+").as_deref(), Some("pay:42/x_y.z~=+"));
    }

    #[test]
    fn what_is_not_one_string_is_refused() {
        let wrong: &[&[u8]] = &[
            b"",
            b"  ",
            b"\"\"",
            b"\"a",
            b"a\"",
            b"\"a\" \"b\"",
            b"\"a\", \"b\"",
            b"a, b",
            b"a,b",
            b"a b",
            b"a;b",
            b"a\\b",
            b"\"a\\n\"",
            b"\"a\";",
            "\u{e9}".as_bytes(),
            "\"\u{e9}\"".as_bytes(),
        ];
        for value in wrong {
            assert_eq!(key(value), None, "{:?}", String::from_utf8_lossy(value));
        }
    }

    #[test]
    fn a_key_has_at_most_255_bytes() {
        assert_eq!(key("k".repeat(255).as_bytes()).unwrap().len(), 255);
        assert!(key("k".repeat(256).as_bytes()).is_none());
        let escaped = format!("\"{}\"", "\\\"".repeat(255));
        assert_eq!(key(escaped.as_bytes()).unwrap().len(), 255);
        assert!(key(format!("\"{}\"", "k".repeat(256)).as_bytes()).is_none());
    }

    #[test]
    fn two_headers_are_refused_even_when_equal() {
        let mut headers = HeaderMap::new();
        headers.append(NAME, HeaderValue::from_static("a"));
        headers.append(NAME, HeaderValue::from_static("a"));
        assert!(find(&headers, &NAME).is_err());
        assert_eq!(find(&HeaderMap::new(), &NAME), Ok(None));
    }
}
