//! The parts of the DNS wire format that the server reads itself (RFC 1035 section 4): names, questions and the frames of
//! records. Every function takes bytes from outside and returns `None` if they are not well-formed.

use std::ops::Range;

/// Bytes of a message's header.
pub(crate) const HEADER: usize = 12;
/// Longest name on the wire, with the root label (RFC 1035 section 2.3.4).
pub(crate) const MAX_NAME: usize = 255;
/// Longest label (RFC 1035 section 2.3.4).
pub(crate) const MAX_LABEL: usize = 63;

/// Record and query types.
pub(crate) mod kind {
    pub(crate) const A: u16 = 1;
    pub(crate) const NS: u16 = 2;
    pub(crate) const CNAME: u16 = 5;
    pub(crate) const SOA: u16 = 6;
    pub(crate) const PTR: u16 = 12;
    pub(crate) const HINFO: u16 = 13;
    pub(crate) const TXT: u16 = 16;
    pub(crate) const AAAA: u16 = 28;
    pub(crate) const SRV: u16 = 33;
    pub(crate) const OPT: u16 = 41;
    pub(crate) const ANY: u16 = 255;
}

/// The class Internet.
pub(crate) const CLASS_IN: u16 = 1;

/// Response codes.
pub(crate) mod code {
    pub(crate) const NOERROR: u16 = 0;
    pub(crate) const FORMERR: u16 = 1;
    pub(crate) const SERVFAIL: u16 = 2;
    pub(crate) const NXDOMAIN: u16 = 3;
    pub(crate) const NOTIMP: u16 = 4;
    pub(crate) const REFUSED: u16 = 5;
    /// Needs an OPT record in the response (RFC 6891 section 9).
    pub(crate) const BADVERS: u16 = 16;
}

/// Bits of the header's second 16-bit word.
pub(crate) mod flag {
    pub(crate) const RESPONSE: u16 = 0x8000;
    pub(crate) const OPCODE: u16 = 0x7800;
    pub(crate) const TRUNCATED: u16 = 0x0200;
    pub(crate) const RECURSION_DESIRED: u16 = 0x0100;
    pub(crate) const RECURSION_AVAILABLE: u16 = 0x0080;
    pub(crate) const AUTHENTIC_DATA: u16 = 0x0020;
    pub(crate) const CHECKING_DISABLED: u16 = 0x0010;
    pub(crate) const CODE: u16 = 0x000f;
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes([pair[0], pair[1]]))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes([four[0], four[1], four[2], four[3]]))
}

/// Replaces two bytes; nothing if they are outside of the buffer.
pub(crate) fn set_u16(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(pair) = bytes.get_mut(at..at.saturating_add(2)) {
        pair.copy_from_slice(&value.to_be_bytes());
    }
}

/// An uncompressed name on the wire, with the root label. The case is that of the source.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    bytes: [u8; MAX_NAME],
    length: u8,
}

impl Name {
    /// Reads an uncompressed name at the start of `bytes`. Compression pointers are refused: a name that nothing precedes has
    /// nothing to point to.
    pub(crate) fn read(bytes: &[u8]) -> Option<Name> {
        let mut at = 0;
        loop {
            let length = usize::from(*bytes.get(at)?);
            if length > MAX_LABEL {
                return None;
            }
            at += 1 + length;
            if at > MAX_NAME {
                return None;
            }
            if length == 0 {
                return Name::from_wire(bytes.get(..at)?);
            }
        }
    }

    fn from_wire(wire: &[u8]) -> Option<Name> {
        let mut bytes = [0; MAX_NAME];
        bytes.get_mut(..wire.len())?.copy_from_slice(wire);
        let length = u8::try_from(wire.len()).ok()?;
        Some(Name { bytes, length })
    }

    /// Parses dotted text; the last dot is optional. Escapes are not supported: names of a cluster have none.
    pub(crate) fn parse(text: &str) -> Option<Name> {
        let mut wire = Vec::with_capacity(text.len() + 2);
        for label in text
            .strip_suffix('.')
            .unwrap_or(text)
            .split('.')
            .filter(|_| text != "." && !text.is_empty())
        {
            if label.is_empty() || label.len() > MAX_LABEL {
                return None;
            }
            wire.push(u8::try_from(label.len()).ok()?);
            wire.extend_from_slice(label.as_bytes());
        }
        wire.push(0);
        Name::from_wire(&wire)
    }

    pub(crate) fn wire(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The name in lower case (RFC 4343: only ASCII letters have a case). Lengths of labels are below 64 and stay the same.
    pub(crate) fn lowercase(&self) -> Name {
        let mut lower = *self;
        lower.bytes.make_ascii_lowercase();
        lower
    }

    /// The labels from left to right, without the root.
    pub(crate) fn labels(&self) -> Labels<'_> {
        labels(self.wire())
    }

    /// The part before `zone`, without a root label, if the name is `zone` or below it. Both are in lower case.
    pub(crate) fn below(&self, zone: &Name) -> Option<&[u8]> {
        let own = self.wire();
        let start = own.len().checked_sub(zone.wire().len())?;
        if &own[start..] != zone.wire() {
            return None;
        }
        // The bytes could also match in the middle of a label.
        let mut at = 0;
        while at < start {
            at += 1 + usize::from(own[at]);
        }
        (at == start).then(|| &own[..start])
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for label in self.labels() {
            write!(f, "{}.", label.escape_ascii())?;
        }
        if self.length == 1 {
            write!(f, ".")
        } else {
            Ok(())
        }
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// The labels of an uncompressed name.
pub(crate) fn labels(wire: &[u8]) -> Labels<'_> {
    Labels { rest: wire }
}

/// Iterator of [`labels`].
#[derive(Clone)]
pub(crate) struct Labels<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Labels<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.rest.split_first()?;
        let length = usize::from(*length);
        if length == 0 {
            return None;
        }
        let label = rest.get(..length)?;
        self.rest = &rest[length..];
        Some(label)
    }
}

/// The end of the name at `at`, which may be compressed. A pointer must point to before the name, so that no chain of pointers
/// is a loop.
pub(crate) fn skip_name(message: &[u8], at: usize) -> Option<usize> {
    let mut end = at;
    loop {
        let length = usize::from(*message.get(end)?);
        match length {
            0 => return Some(end + 1),
            1..=MAX_LABEL => end += 1 + length,
            0xc0.. => {
                let target = usize::from(u16_at(message, end)? & 0x3fff);
                return (HEADER..at).contains(&target).then_some(end + 2);
            }
            _ => return None,
        }
        if end - at >= MAX_NAME {
            return None;
        }
    }
}

/// The frame of a resource record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    /// Whether the owner is the root, as an OPT record's must be.
    pub(crate) is_root: bool,
    pub(crate) kind: u16,
    /// For OPT: the sender's UDP payload in bytes.
    pub(crate) class: u16,
    pub(crate) ttl: u32,
    /// Offset of the TTL's four bytes.
    pub(crate) ttl_at: usize,
    /// The data; its end is the record's end.
    pub(crate) data: Range<usize>,
}

/// Reads the frame of the record at `at`.
pub(crate) fn frame(message: &[u8], at: usize) -> Option<Frame> {
    let name = skip_name(message, at)?;
    let length = usize::from(u16_at(message, name + 8)?);
    let data = name + 10..name + 10 + length;
    if data.end > message.len() {
        return None;
    }
    Some(Frame {
        is_root: name == at + 1,
        kind: u16_at(message, name)?,
        class: u16_at(message, name + 2)?,
        ttl: u32_at(message, name + 4)?,
        ttl_at: name + 4,
        data,
    })
}

/// The number of records in the question, answer, authority and additional sections.
pub(crate) fn counts(message: &[u8]) -> Option<[u16; 4]> {
    Some([
        u16_at(message, 4)?,
        u16_at(message, 6)?,
        u16_at(message, 8)?,
        u16_at(message, 10)?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn names_are_parsed_and_displayed() {
        for (text, displayed) in [("a.Bc", "a.Bc."), ("a.bc.", "a.bc."), (".", "."), ("", ".")] {
            assert_eq!(Name::parse(text).unwrap().to_string(), displayed);
        }
        for text in [
            "a..b".to_owned(),
            "x".repeat(64),
            format!("{}a", "a.".repeat(127)) + "a",
        ] {
            assert!(Name::parse(&text).is_none(), "{text}");
        }
        assert!(Name::parse(&"a.".repeat(127)).is_some());
    }

    #[test]
    fn a_name_is_below_a_zone_only_at_a_label() {
        let zone = Name::parse("b.c").unwrap();
        let below = |text: &str| {
            Name::parse(text)
                .unwrap()
                .below(&zone)
                .map(<[u8]>::to_owned)
        };
        assert_eq!(below("b.c"), Some(vec![]));
        assert_eq!(below("a.b.c"), Some(b"\x01a".to_vec()));
        assert_eq!(below("ab.c"), None);
        assert_eq!(below("c"), None);
        // A label whose bytes look like the zone.
        let trap = Name::read(b"\x05x\x01b\x01c\x00").unwrap();
        assert!(trap.below(&zone).is_none());
    }

    #[test]
    fn compression_pointers_go_backwards() {
        let mut message = vec![0; HEADER];
        message.extend(b"\x01a\x00");
        let pointer = message.len();
        message.extend([0xc0, 12]);
        assert_eq!(skip_name(&message, pointer), Some(pointer + 2));
        for target in [0, pointer, pointer + 1, 0x3fff] {
            message[pointer] = 0xc0 | (target >> 8) as u8;
            message[pointer + 1] = target as u8;
            assert_eq!(skip_name(&message, pointer), None, "{target}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_framed_within_their_bounds(bytes in vec(any::<u8>(), 0..400), at in 0_usize..400) {
            if let Some(frame) = frame(&bytes, at) {
                prop_assert!(frame.data.end <= bytes.len() && frame.data.start > at);
            }
            if let Some(name) = Name::read(&bytes) {
                prop_assert_eq!(name.wire(), &bytes[..name.wire().len()]);
                prop_assert_eq!(name.labels().map(|l| l.len() + 1).sum::<usize>() + 1, name.wire().len());
            }
        }
    }
}
