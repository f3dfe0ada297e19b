//! Replies from the server: where one ends, and its value.
//!
//! The `redis` crate parses them, except for the most common ones, a number, `OK`, `QUEUED`, or an array of these: its parser
//! takes longer for these than everything else that a call needs here (docs/performance.md).

use redis::{ErrorKind, RedisError, Value};

/// Returns the first value of the input, and its length; `None` if it is incomplete. Then `looked_at` stores how far it
/// was scanned: a large one is not rescanned with each new part.
pub(super) fn first_value(
    input: &[u8],
    looked_at: &mut LookedAt,
) -> Result<Option<(Value, usize)>, RedisError> {
    if looked_at.end == 0
        && let Some(found) = common(input)
    {
        return Ok(Some(found));
    }
    if !looked_at.look(input)? {
        return Ok(None);
    }
    let end = std::mem::take(looked_at).end;
    redis::parse_redis_value(&input[..end]).map(|value| Some((value, end)))
}

/// Space reserved for an array before its values arrive.
const ROOM: usize = 1024;

/// Parses a common reply, or an array of them, if that comes first and is complete.
fn common(input: &[u8]) -> Option<(Value, usize)> {
    if *input.first()? != b'*' {
        return common_one(input);
    }
    let (count, mut at) = number(input, 1)?;
    let count = usize::try_from(count).ok()?;
    let mut all = Vec::with_capacity(count.min(ROOM));
    for _ in 0..count {
        let (value, length) = common_one(input.get(at..)?)?;
        all.push(value);
        at += length;
    }
    Some((Value::Array(all), at))
}

fn common_one(input: &[u8]) -> Option<(Value, usize)> {
    const OK: &[u8] = b"+OK\r\n";
    const QUEUED: &[u8] = b"+QUEUED\r\n";
    match input.first()? {
        b':' => number(input, 1).map(|(number, end)| (Value::Int(number), end)),
        b'+' if input.starts_with(OK) => Some((Value::Okay, OK.len())),
        // Without its text, which takes an allocation, and nobody reads.
        b'+' if input.starts_with(QUEUED) => Some((Value::SimpleString(String::new()), QUEUED.len())),
        _ => None,
    }
}

/// Parses a number, and returns where the next line begins.
fn number(input: &[u8], at: usize) -> Option<(i64, usize)> {
    let is_negative = *input.get(at)? == b'-';
    let begin = at + usize::from(is_negative);
    let (mut number, mut at) = (0_i64, begin);
    loop {
        match *input.get(at)? {
            digit @ b'0'..=b'9' => {
                number = number.checked_mul(10)?.checked_add(i64::from(digit - b'0'))?;
                at += 1;
            }
            b'\r' if at > begin && *input.get(at + 1)? == b'\n' => {
                return Some((if is_negative { -number } else { number }, at + 2));
            }
            _ => return None,
        }
    }
}

/// The maximum length of a line, in bytes; a longer one is not a reply. Servers accept no longer ones either.
const LONGEST_LINE: usize = 64 * 1024;

/// How far the first value of the input was scanned.
pub(super) struct LookedAt {
    /// Where the last value ends that was seen.
    end: usize,
    /// How many values must follow.
    missing: usize,
}

impl Default for LookedAt {
    fn default() -> LookedAt {
        LookedAt { end: 0, missing: 1 }
    }
}

impl LookedAt {
    /// Continues the scan. Returns whether the value is complete.
    fn look(&mut self, input: &[u8]) -> Result<bool, RedisError> {
        while self.missing > 0 {
            let rest = input.get(self.end..).unwrap_or_default();
            let Some(line) = line(rest) else {
                return match rest.len() <= LONGEST_LINE {
                    true => Ok(false),
                    false => Err(malformed()),
                };
            };
            // Null has the length -1.
            let length = number(input, self.end + 1).map(|(length, _)| usize::try_from(length).ok());
            let (mut end, mut more) = (self.end + line.len() + 2, 0);
            match line.first() {
                Some(b'$' | b'!' | b'=') => {
                    if let Some(length) = length.ok_or_else(malformed)? {
                        end = end.saturating_add(length).saturating_add(2);
                    }
                }
                Some(kind @ (b'*' | b'~' | b'>' | b'%' | b'|')) => {
                    let length = length.ok_or_else(malformed)?.unwrap_or(0);
                    more = match kind {
                        b'%' => length.saturating_mul(2),
                        // An attribute describes the value after it.
                        b'|' => length.saturating_mul(2).saturating_add(1),
                        _ => length,
                    };
                }
                Some(_) => {}
                None => return Err(malformed()),
            }
            self.end = end;
            self.missing = (self.missing - 1).saturating_add(more);
        }
        Ok(self.end <= input.len())
    }
}

/// The text before the first end of a line.
fn line(input: &[u8]) -> Option<&[u8]> {
    let mut from = 0;
    loop {
        let end = from + input[from..].iter().position(|byte| *byte == b'\r')?;
        match input.get(end + 1)? {
            b'\n' => return Some(&input[..end]),
            _ => from = end + 1,
        }
    }
}

fn malformed() -> RedisError {
    RedisError::from((ErrorKind::Parse, "the server sends what is no reply"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_queued(value: Value) -> Value {
        match value {
            Value::SimpleString(text) if text == "QUEUED" => Value::SimpleString(String::new()),
            Value::Array(values) => Value::Array(values.into_iter().map(without_queued).collect()),
            value => value,
        }
    }

    #[test]
    fn whole_values_are_read_and_parts_wait_for_the_rest() {
        let long = format!("${}\r\n{}\r\n", 300, "x".repeat(300));
        for whole in [
            ":1\r\n",
            ":-12\r\n",
            "*0\r\n",
            "*3\r\n:1790000000000000\r\n:-1\r\n:9\r\n",
            "+OK\r\n",
            "+OKAY\r\n",
            "+QUEUED\r\n",
            "*3\r\n+OK\r\n+QUEUED\r\n:7\r\n",
            "*3\r\n+OK\r\n-BUSYKEY Target key name already exists.\r\n:7\r\n",
            "-ERR no\r\n",
            "$-1\r\n",
            "$0\r\n\r\n",
            "$4\r\n\r\n\r\n\r\n",
            &long,
            "*2\r\n:7\r\n*2\r\n$6\r\nfailed\r\n$3\r\nwhy\r\n",
            "_\r\n",
            "#t\r\n",
            ",1.5\r\n",
            "%1\r\n+a\r\n:1\r\n",
            "~2\r\n+a\r\n+b\r\n",
            "=6\r\ntxt:ab\r\n",
            ">2\r\n+message\r\n+b\r\n",
            "*1\r\n*1\r\n*1\r\n:1\r\n",
        ] {
            let expected = without_queued(redis::parse_redis_value(whole.as_bytes()).unwrap());
            let mut byte_by_byte = LookedAt::default();
            for cut in 0..whole.len() {
                for looked_at in [&mut byte_by_byte, &mut LookedAt::default()] {
                    let part = first_value(&whole.as_bytes()[..cut], looked_at).unwrap();
                    assert_eq!(part, None, "{cut} bytes of {whole:?}");
                }
            }
            for rest in ["", ":5\r\n", "\r\n"] {
                let input = [whole, rest].concat();
                let found = first_value(input.as_bytes(), &mut byte_by_byte).unwrap();
                let found = found.map(|(value, length)| (without_queued(value), length));
                assert_eq!(found, Some((expected.clone(), whole.len())), "{whole:?}");
            }
        }
    }

    #[test]
    fn large_value_is_not_looked_at_anew_with_each_part() {
        let whole = format!("*1000\r\n{}", "$4\r\nword\r\n".repeat(1000));
        let mut looked_at = LookedAt::default();
        for cut in (0..whole.len()).step_by(700) {
            assert_eq!(
                first_value(&whole.as_bytes()[..cut], &mut looked_at).unwrap(),
                None
            );
            assert!(looked_at.end + 10 >= cut, "{} of {cut}", looked_at.end);
        }
        assert!(first_value(whole.as_bytes(), &mut looked_at).unwrap().is_some());
        assert_eq!(looked_at.end, 0);
    }

    #[test]
    fn what_is_no_reply_is_an_error_and_asks_for_no_memory() {
        for strange in [
            "\r\n",
            "HTTP/1.1 200 OK\r\n",
            "$x\r\n",
            "*?\r\n",
            "*99999999999999999999\r\n",
        ] {
            let found = first_value(strange.as_bytes(), &mut LookedAt::default());
            assert!(found.is_err(), "{strange:?}");
        }
        for endless in [
            "*999999999999999999\r\n:1\r\n",
            "$999999999999999999\r\nx",
            "%9223372036854775807\r\n",
        ] {
            let found = first_value(endless.as_bytes(), &mut LookedAt::default());
            assert_eq!(found.unwrap(), None, "{endless:?}");
        }
        // More than 64 bits.
        assert!(first_value(b":99999999999999999999\r\n", &mut LookedAt::default()).is_err());
    }
}
