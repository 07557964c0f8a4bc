//! Messages and attributes: written and read.
//!
//! The length of an attribute is a field of 16 bits. An attribute that does not fit marks its message as too long, and no
//! function of the socket sends such a message, so callers cannot forget the check while they build a message.

use std::fmt;
use std::io;

use super::NESTED;

/// Bytes of an attribute's header.
const HEADER: usize = 4;
/// Bytes of a message's header.
pub(super) const MESSAGE_HEADER: usize = 16;
/// `NLA_F_NET_BYTEORDER`, a flag of the attribute's type like [`NESTED`].
const NETWORK_ORDER: u16 = 0x4000;

/// The content of an attribute exceeds the 65,531 bytes that its length field can express.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLong {
    /// The type of the attribute, without flags.
    pub kind: u16,
    /// The bytes of its content.
    pub length: usize,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TooLong { kind, length } = self;
        let most = Attributes::MAX_CONTENT;
        write!(
            f,
            "netlink attribute {kind} has {length} bytes, and at most {most} are possible; split the message"
        )
    }
}

impl std::error::Error for TooLong {}

impl From<TooLong> for io::Error {
    fn from(error: TooLong) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidInput, error)
    }
}

/// Encoded bytes, and the first attribute that did not fit.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Buffer {
    bytes: Vec<u8>,
    too_long: Option<TooLong>,
}

impl Buffer {
    fn put(&mut self, kind: u16, value: &[u8]) {
        let length = value.len().saturating_add(HEADER);
        let Ok(length) = u16::try_from(length) else {
            self.too_long.get_or_insert(TooLong {
                kind: kind & !NESTED,
                length: value.len(),
            });
            return;
        };
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.put(kind, &bytes);
    }

    fn nest(&mut self, kind: u16, inner: &Attributes) {
        if let Some(too_long) = inner.0.too_long {
            self.too_long.get_or_insert(too_long);
        }
        self.put(kind | NESTED, &inner.0.bytes);
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}

/// A message under construction.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Message(Buffer);

impl Message {
    /// Starts a message with its type, flags and family-specific header.
    #[must_use]
    pub fn new(kind: u16, flags: u16, header: &[u8]) -> Message {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(header);
        Message(Buffer {
            bytes,
            too_long: None,
        })
    }

    /// Adds an attribute.
    #[must_use]
    pub fn put(mut self, kind: u16, value: &[u8]) -> Message {
        self.0.put(kind, value);
        self
    }

    /// Adds an attribute with a zero-terminated string.
    #[must_use]
    pub fn text(mut self, kind: u16, value: &str) -> Message {
        self.0.text(kind, value);
        self
    }

    /// Adds an attribute with a number in native byte order.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Message {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute with a number in network byte order, which nfnetlink uses.
    #[must_use]
    pub fn big(self, kind: u16, value: u32) -> Message {
        self.put(kind, &value.to_be_bytes())
    }

    /// Adds a nested attribute.
    #[must_use]
    pub fn nest(mut self, kind: u16, inner: &Attributes) -> Message {
        self.0.nest(kind, inner);
        self
    }

    /// The flags of the header.
    pub(super) fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.0.bytes[6], self.0.bytes[7]])
    }

    /// Removes flags from the header.
    pub(crate) fn without_flags(mut self, flags: u16) -> Message {
        let flags = self.flags() & !flags;
        self.0.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        self
    }

    /// The bytes after the netlink header, for tests that read what was written.
    #[cfg(test)]
    pub(crate) fn body(&self) -> &[u8] {
        &self.0.bytes[MESSAGE_HEADER..]
    }

    /// Whether every attribute fits.
    #[cfg(test)]
    pub(crate) fn is_complete(&mut self) -> bool {
        self.finish(0).is_ok()
    }

    /// The encoded message with its length and sequence number.
    ///
    /// # Errors
    ///
    /// An attribute does not fit, or the message exceeds the 32 bits of its length.
    pub(super) fn finish(&mut self, sequence: u32) -> Result<&[u8], TooLong> {
        if let Some(too_long) = self.0.too_long {
            return Err(too_long);
        }
        let length = u32::try_from(self.0.bytes.len()).map_err(|_| TooLong {
            kind: 0,
            length: self.0.bytes.len(),
        })?;
        self.0.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.0.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0.pad();
        Ok(&self.0.bytes)
    }
}

/// The contents of a nested attribute.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Attributes(Buffer);

impl Attributes {
    /// The maximum number of bytes in an attribute.
    pub(crate) const MAX_CONTENT: usize = u16::MAX as usize - HEADER;

    /// Starts without attributes.
    #[must_use]
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// Starts with a header, which some nested attributes have before their attributes.
    #[must_use]
    pub fn after(header: Vec<u8>) -> Attributes {
        Attributes(Buffer {
            bytes: header,
            too_long: None,
        })
    }

    /// Whether there are neither a header nor attributes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.bytes.is_empty()
    }

    /// The encoded length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.bytes.len()
    }

    /// Adds an attribute.
    #[must_use]
    pub fn put(mut self, kind: u16, value: &[u8]) -> Attributes {
        self.0.put(kind, value);
        self
    }

    /// Adds an attribute with a zero-terminated string.
    #[must_use]
    pub fn text(mut self, kind: u16, value: &str) -> Attributes {
        self.0.text(kind, value);
        self
    }

    /// Adds an attribute with a number in native byte order.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Attributes {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute with a number in network byte order, which nfnetlink uses.
    #[must_use]
    pub fn big(self, kind: u16, value: u32) -> Attributes {
        self.put(kind, &value.to_be_bytes())
    }

    /// Adds a nested attribute.
    #[must_use]
    pub fn nest(mut self, kind: u16, inner: &Attributes) -> Attributes {
        self.0.nest(kind, inner);
        self
    }
}

/// Iterates over attributes. Stops at the first one that exceeds the buffer.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..HEADER)?.try_into().ok()?);
        let value = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !NESTED & !NETWORK_ORDER, value))
    })
}

/// The content of the first attribute of this type.
#[must_use]
pub fn nested(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, v)| v)
}

/// The text of a zero-terminated string. Bytes that are not UTF-8 are replaced.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .trim_end_matches('\0')
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// Attributes never exceed their buffer, whatever its bytes. Encoded
        /// attributes decode to the same values; truncated input stays in bounds.
        #[test]
        fn any_attributes_end_within_their_bytes(bytes in vec(any::<u8>(), 0..200), values in vec((0_u16..0x3fff, vec(any::<u8>(), 0..20)), 0..8), cut in 0_usize..200) {
            prop_assert!(attributes(&bytes).map(|(_, v)| v.len() + 4).sum::<usize>() <= bytes.len());
            let written = values.iter().fold(Attributes::new(), |all, (kind, value)| all.put(*kind, value)).0.bytes;
            let read: Vec<(u16, Vec<u8>)> = attributes(&written).map(|(k, v)| (k, v.to_vec())).collect();
            prop_assert_eq!(&read, &values);
            let cut = &written[..cut.min(written.len())];
            prop_assert!(attributes(cut).count() <= values.len());
        }

        /// A message is either complete or an error, wherever the long attribute is.
        #[test]
        fn any_attribute_that_is_too_long_is_an_error(length in 65_400_usize..65_600, depth in 0_usize..4) {
            let inner = (0..depth).fold(Attributes::new().put(9, &vec![7; length]), |inner, _| Attributes::new().nest(1, &inner));
            let mut message = Message::new(1, 0, &[0; 4]).nest(2, &inner).number(3, 4);
            // Each level adds a header and pads its content.
            let innermost = HEADER + length;
            let outer = innermost.next_multiple_of(4) + depth * HEADER;
            let fits = innermost <= usize::from(u16::MAX) && outer + HEADER <= usize::from(u16::MAX);
            let finished = message.finish(1).map(<[u8]>::to_vec);
            prop_assert_eq!(finished.is_ok(), fits);
            if let Ok(bytes) = finished {
                let mut content = nested(&bytes[20..], 2).expect("the attribute is in the message");
                for _ in 0..depth {
                    content = nested(content, 1).expect("each level contains the next");
                }
                prop_assert_eq!(nested(content, 9).map(<[u8]>::len), Some(length));
            }
        }
    }

    #[test]
    fn the_error_names_the_attribute_that_is_too_long() {
        let long = Attributes::new().put(9, &[0; 70_000]);
        let error = Message::new(1, 0, &[])
            .nest(2, &long)
            .finish(1)
            .expect_err("the attribute does not fit");
        assert_eq!(
            error.to_string(),
            "netlink attribute 9 has 70000 bytes, and at most 65531 are possible; split the message"
        );
    }
}
