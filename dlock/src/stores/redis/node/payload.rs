//! The hash of a hold as `RESTORE` takes it: a value in the format of an RDB file, its version, and a checksum of both.
//!
//! The format is that of `DUMP`. Servers accept the versions before their own, so the oldest one with a checksum is used
//! (Redis 2.6).

use crc::{CRC_64_REDIS, Crc};

/// `RDB_TYPE_HASH`: the number of fields, then each field and its value.
const HASH: u8 = 4;
/// `RDB_VERSION`, little-endian.
const VERSION: [u8; 2] = [6, 0];
/// A length below 64 is one byte.
const LONGEST_TEXT: usize = 63;
pub(super) const LONGEST: usize = 2 + 1 + LONGEST_TEXT + 2 + VERSION.len() + 8;

static CRC: Crc<u64> = Crc::<u64>::new(&CRC_64_REDIS);

/// Room for a payload.
pub(super) struct Payload([u8; LONGEST]);

impl Payload {
    pub(super) fn new() -> Payload {
        Payload([0; LONGEST])
    }

    /// The hash with this field, whose value is 1: one hold. The field has at most 63 bytes.
    pub(super) fn of_hold(&mut self, field: &[u8]) -> &[u8] {
        let Payload(bytes) = self;
        assert!(field.len() <= LONGEST_TEXT, "{field:?}");
        bytes[..3].copy_from_slice(&[HASH, 1, field.len() as u8]);
        let mut at = 3;
        for piece in [field, &[1, b'1'], &VERSION] {
            bytes[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        let sum = CRC.checksum(&bytes[..at]).to_le_bytes();
        bytes[at..at + sum.len()].copy_from_slice(&sum);
        &bytes[..at + sum.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_has_the_bytes_that_redis_7_accepts() {
        let mut payload = Payload::new();
        let payload = payload.of_hold(b"8d2f6c1e-9b5a-4f0e-9a53-4f0f8a6b7c1d:123");
        let mut expected = b"\x04\x01\x288d2f6c1e-9b5a-4f0e-9a53-4f0f8a6b7c1d:123\x011\x06\x00".to_vec();
        expected.extend([58, 4, 99, 89, 13, 198, 249, 248]);
        assert_eq!(payload, expected);
    }

    #[test]
    fn longest_field_fits() {
        let mut payload = Payload::new();
        assert_eq!(payload.of_hold(&[b'x'; LONGEST_TEXT]).len(), LONGEST);
    }
}
