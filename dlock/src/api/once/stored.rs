//! What is stored for work that was done: its result, or why there is none.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::OnceError;

/// The maximum length of a kept result, in bytes.
pub(super) const LONGEST: usize = 1024 * 1024;

/// The prefix of every record in this format.
const FORM: &[u8] = b"dlock-once/1 ";

/// What a later call finds.
#[derive(Debug, PartialEq)]
pub(super) enum Stored<T> {
    Result(T),
    /// It failed this many times, and is not tried again.
    Failed {
        attempts: u32,
    },
    /// It was done, but its result was too large, or the store refused it.
    Unavailable,
}

/// Converts a result to its stored form; `Err` says why it cannot be kept.
pub(super) fn result<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    let mut bytes = [FORM, b"result "].concat();
    serde_json::to_writer(&mut bytes, value).map_err(|error| error.to_string())?;
    match bytes.len() {
        ..=LONGEST => Ok(bytes),
        length => Err(format!("it has {length} bytes, and at most {LONGEST} are kept")),
    }
}

pub(super) fn failed(attempts: u32) -> Vec<u8> {
    [FORM, b"failed ", attempts.to_string().as_bytes()].concat()
}

pub(super) fn unavailable() -> Vec<u8> {
    [FORM, b"unavailable"].concat()
}

/// Reads a stored value; `Err` says why that is not possible.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<Stored<T>, String> {
    let text = bytes
        .strip_prefix(FORM)
        .ok_or("it is no result of `once`, or of a newer version")?;
    if let Some(json) = text.strip_prefix(b"result ") {
        return serde_json::from_slice(json).map(Stored::Result).map_err(why);
    }
    if let Some(attempts) = text.strip_prefix(b"failed ") {
        let attempts = std::str::from_utf8(attempts).map_err(why)?;
        let attempts = attempts.parse().map_err(why)?;
        return Ok(Stored::Failed { attempts });
    }
    match text {
        b"unavailable" => Ok(Stored::Unavailable),
        _ => Err("it has a form that this version does not know".to_owned()),
    }
}

/// Returns the result to a call that finds the work done.
pub(super) fn earlier<T: DeserializeOwned, E>(bytes: &[u8]) -> Result<T, OnceError<E>> {
    match read(bytes) {
        Ok(Stored::Result(value)) => Ok(value),
        Ok(Stored::Failed { attempts }) => Err(OnceError::Failed { attempts }),
        Ok(Stored::Unavailable) => Err(OnceError::ResultUnavailable),
        Err(why) => Err(OnceError::Unreadable { why }),
    }
}

fn why(error: impl Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_stored_is_read_again() {
        let stored = result(&("a", 1)).unwrap();
        assert_eq!(
            read::<(String, u8)>(&stored),
            Ok(Stored::Result(("a".to_owned(), 1)))
        );
        assert_eq!(read::<()>(&failed(3)), Ok(Stored::Failed { attempts: 3 }));
        assert_eq!(read::<()>(&unavailable()), Ok(Stored::Unavailable));
    }

    #[test]
    fn what_cannot_be_read_is_no_result() {
        for bytes in [
            &b""[..],
            b"{}",
            b"dlock-once/2 result 1",
            b"dlock-once/1 result ",
            b"dlock-once/1 result \"x\"",
            b"dlock-once/1 failed x",
            b"dlock-once/1 later",
        ] {
            assert!(read::<u8>(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn result_beyond_the_limit_is_not_kept() {
        let value = "x".repeat(LONGEST);
        assert!(result(&value).unwrap_err().contains("at most"));
        assert!(result(&&value[..LONGEST - 100]).is_ok());
    }
}
