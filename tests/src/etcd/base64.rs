//! Bytes as etcd's gateway has them in JSON.

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().enumerate().fold(0u32, |group, (at, byte)| {
            group | u32::from(*byte) << (16 - 8 * at)
        });
        for at in 0..4 {
            let letter = LETTERS[(group >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() { letter.into() } else { '=' });
        }
    }
    text
}

pub(super) fn decode(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut group, mut bits) = (0u32, 0);
    for letter in text.bytes() {
        let Some(value) = LETTERS.iter().position(|one| *one == letter) else {
            break;
        };
        group = group << 6 | u32::try_from(value).unwrap_or(0);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((group >> bits) as u8);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn bytes_are_read_as_they_were_written() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (&[0, 255, 128], "AP+A"),
        ] {
            assert_eq!(super::encode(bytes), text);
            assert_eq!(super::decode(text), bytes);
        }
    }
}
