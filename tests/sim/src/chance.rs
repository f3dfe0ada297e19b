//! Random streams, each with its own seed: drawing from one stream does not affect the others, so that a smaller plan
//! behaves as before where possible.

use fastrand::Rng;

/// The stream that these numbers name.
pub(crate) fn stream(seed: u64, of: &[u64]) -> Rng {
    Rng::with_seed(of.iter().fold(mix(seed), |so_far, part| mix(so_far ^ mix(*part))))
}

/// SplitMix64's last step.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub(crate) trait Draws {
    /// True so many times in a thousand.
    fn permille(&mut self, chance: u32) -> bool;

    /// From the first to the last, both included.
    fn between(&mut self, first: u64, last: u64) -> u64;
}

impl Draws for Rng {
    fn permille(&mut self, chance: u32) -> bool {
        chance > 0 && self.u32(..1000) < chance
    }

    fn between(&mut self, first: u64, last: u64) -> u64 {
        self.u64(first..=last.max(first))
    }
}
