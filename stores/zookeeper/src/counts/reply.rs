//! The reply of a step, as the node of the step keeps it.

use dlock::store::counter::CounterReply;

/// Encodes the reply.
pub(super) fn encode(reply: CounterReply) -> Vec<u8> {
    let text = match reply {
        CounterReply::Permits { free, held } => format!("permits {} {held}", free.unwrap_or_default()),
        CounterReply::Done(done) => format!("done {}", u8::from(done)),
        CounterReply::Number(number) => format!("number {number}"),
        // Nothing was changed.
        _ => String::new(),
    };
    text.into_bytes()
}

/// Decodes a reply; `None` if it is none.
pub(super) fn decode(data: &[u8]) -> Option<CounterReply> {
    let words: Vec<&str> = std::str::from_utf8(data).ok()?.split(' ').collect();
    match words[..] {
        ["permits", free, held] => Some(CounterReply::Permits {
            free: Some(free.parse().ok()?),
            held: held.parse().ok()?,
        }),
        ["done", done] => Some(CounterReply::Done(done == "1")),
        ["number", number] => Some(CounterReply::Number(number.parse().ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_of_a_change_is_read_as_it_was_written() {
        for reply in [
            CounterReply::Permits {
                free: Some(-3),
                held: 7,
            },
            CounterReply::Done(true),
            CounterReply::Number(u64::MAX),
        ] {
            assert_eq!(decode(&encode(reply)), Some(reply));
        }
        assert_eq!(decode(b"done"), None);
        assert_eq!(decode(b"\xff"), None);
    }
}
