//! The ids of grants.

use std::cell::Cell;
use std::fmt;

use uuid::Uuid;

use crate::base::chance;

/// The id of a grant on the store: `<client uuid>:<number>`, new for every acquire that is sent and never used again.
///
/// ```
/// use dlock::store::GrantId;
///
/// let grant = GrantId::from_parts(0x0192_f3a4_0000_7000_8000_0000_0000_0001, 7);
/// assert_eq!(grant.to_string(), "0192f3a4-0000-7000-8000-000000000001:7");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId {
    client: Uuid,
    number: u64,
}

impl GrantId {
    /// Creates the first part of the ids of a client: a random UUID of a version that distinguishes dlock's grants from
    /// other holders, whose ids are UUIDs of version 4.
    pub(crate) fn new_client() -> Uuid {
        uuid::Builder::from_custom_bytes(chance::uuid().into_bytes()).into_uuid()
    }

    pub(crate) fn new(client: Uuid, number: u64) -> GrantId {
        GrantId { client, number }
    }

    /// Creates the id of a grant, for direct callers of a store: the bits of a client's UUID, and a number that is
    /// unique in that client.
    #[must_use]
    pub const fn from_parts(client: u128, number: u64) -> GrantId {
        GrantId {
            client: Uuid::from_u128(client),
            number,
        }
    }

    /// Whether it is newer than the other, of the same client.
    pub(crate) fn came_after(self, other: GrantId) -> bool {
        self.client == other.client && self.number > other.number
    }

    /// Returns another id of the same client: for a store that keeps only the numbers of its waiters.
    ///
    /// ```
    /// use dlock::store::GrantId;
    ///
    /// assert_eq!(GrantId::from_parts(1, 7).with_number(8), GrantId::from_parts(1, 8));
    /// ```
    #[must_use]
    pub const fn with_number(self, number: u64) -> GrantId {
        GrantId { number, ..self }
    }

    /// Whether both belong to one client.
    pub(crate) fn is_of_client_of(self, other: GrantId) -> bool {
        self.client == other.client
    }

    /// Whether its client has a UUID as Redisson's clients have them, and dlock's never.
    pub(crate) fn is_of_redisson(self) -> bool {
        self.client.get_version_num() == 4
    }

    /// Returns the client.
    pub(crate) fn client(self) -> Uuid {
        self.client
    }

    /// Parses a displayed id; `None` for ids of others, such as those of permits.
    pub(crate) fn parse(text: &str) -> Option<GrantId> {
        let (client, number) = text.split_once(':')?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        Some(GrantId {
            client: Uuid::try_parse(client).ok()?,
            number: number.parse().ok().filter(|_| is_number)?,
        })
    }

    /// Returns the number, which is unique in its client.
    pub(crate) fn number(self) -> u64 {
        self.number
    }

    /// Returns the ids of this many permits, concatenated: 16 bytes each, in Redisson's form of a permit's id. They
    /// differ for all numbers of a client, and the first four bytes are the first group of its UUID.
    pub(crate) fn permits(self, amount: u32) -> Vec<u8> {
        let base = self.client.as_u128() ^ (u128::from(self.number) << 32);
        (0..amount)
            .flat_map(|index| (base ^ u128::from(index)).to_be_bytes())
            .collect()
    }

    /// Writes the id, in the form of the store, to the end of a buffer; returns where it begins. It is sent with every
    /// operation, and the cost of formatting shows.
    pub(crate) fn write(self, buffer: &mut [u8; 57]) -> usize {
        let (mut at, mut number) = (buffer.len(), self.number);
        loop {
            at -= 1;
            buffer[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        at -= 1;
        buffer[at] = b':';
        let begin = at - UUID_LENGTH;
        buffer[begin..at].copy_from_slice(&written(self.client));
        begin
    }
}

const UUID_LENGTH: usize = uuid::fmt::Hyphenated::LENGTH;

/// The text of a client's UUID: that of the last one is kept, as nearly always it is the same again.
fn written(client: Uuid) -> [u8; UUID_LENGTH] {
    thread_local! {
        static LAST: Cell<(Uuid, [u8; UUID_LENGTH])> = const { Cell::new((Uuid::nil(), [0; UUID_LENGTH])) };
    }
    let (last, mut text) = LAST.get();
    if last != client || client.is_nil() {
        client.hyphenated().encode_lower(&mut text);
        LAST.set((client, text));
    }
    text
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut buffer = [0; 57];
        let begin = self.write(&mut buffer);
        f.write_str(std::str::from_utf8(&buffer[begin..]).map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_written_as_it_is_displayed() {
        for number in [0, 7, 10, 1234, u64::MAX] {
            let id = GrantId::new(Uuid::new_v4(), number);
            let mut buffer = [0; 57];
            let begin = id.write(&mut buffer);
            let written = std::str::from_utf8(&buffer[begin..]).unwrap();
            assert_eq!(written, format!("{}:{number}", id.client));
            assert_eq!(id.to_string(), written);
        }
    }
}
