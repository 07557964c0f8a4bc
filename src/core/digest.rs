//! Digests: SHA-256, the CRC of checkpoints, and FNV-1a for names and fingerprints that need no resistance to
//! deliberate collisions.

use aws_lc_rs::digest;

/// SHA-256 as 64 lower-case hexadecimal digits.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    digest::digest(&digest::SHA256, bytes)
        .as_ref()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// CRC-32 (IEEE 802.3), as in Ethernet and zip.
#[must_use]
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg());
    let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc));
    !bytes.iter().fold(u32::MAX, byte)
}

macro_rules! fnv1a {
    ($name:ident, $from:ident, $number:ty, $offset:literal, $prime:literal) => {
        /// FNV-1a of this width.
        #[must_use]
        pub fn $name(bytes: impl IntoIterator<Item = u8>) -> $number {
            $from($offset, bytes)
        }

        fn $from(hash: $number, bytes: impl IntoIterator<Item = u8>) -> $number {
            let step = |hash: $number, byte| (hash ^ <$number>::from(byte)).wrapping_mul($prime);
            bytes.into_iter().fold(hash, step)
        }
    };
}

fnv1a!(fnv32, fnv32_from, u32, 0x811c_9dc5, 0x0100_0193);
fnv1a!(
    fnv64,
    fnv64_from,
    u64,
    0xcbf2_9ce4_8422_2325,
    0x0100_0000_01b3
);
fnv1a!(
    fnv128,
    fnv128_from,
    u128,
    0x6c62_272e_07bb_0142_62b8_2175_6295_c58d,
    0x0100_0000_0000_0000_0000_013b
);

/// FNV-1a as a `Hasher`. Unlike the standard library's, it is equal in every process, so that stored values remain
/// comparable.
pub struct Fnv64(u64);

impl Default for Fnv64 {
    fn default() -> Fnv64 {
        Fnv64(fnv64([]))
    }
}

impl std::hash::Hasher for Fnv64 {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = fnv64_from(self.0, bytes.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_matches_published_test_values() {
        let bytes = || b"foobar".iter().copied();
        assert_eq!(fnv32(bytes()), 0xbf9c_f968);
        assert_eq!(fnv64(bytes()), 0x8594_4171_f739_67e8);
        assert_eq!(fnv128(bytes()), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }

    #[test]
    fn crc_matches_the_published_check_value() {
        assert_eq!((crc32(b"123456789"), crc32(b"")), (0xcbf4_3926, 0));
    }

    #[test]
    fn sha256_of_the_empty_string_is_correct() {
        assert_eq!(
            sha256(b""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }
}
