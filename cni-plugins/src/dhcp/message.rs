//! The wire format of DHCP messages (RFC 2131, section 2; RFC 2132; RFC 3396).

use std::net::Ipv4Addr;

/// The option codes that this client uses.
pub mod option {
    pub const SUBNET_MASK: u8 = 1;
    pub const ROUTERS: u8 = 3;
    pub const HOST_NAME: u8 = 12;
    pub const STATIC_ROUTES: u8 = 33;
    pub const REQUESTED_ADDRESS: u8 = 50;
    pub const LEASE_TIME: u8 = 51;
    pub const MESSAGE_TYPE: u8 = 53;
    pub const SERVER: u8 = 54;
    pub const REQUESTED_OPTIONS: u8 = 55;
    pub const MESSAGE: u8 = 56;
    pub const RENEWAL_TIME: u8 = 58;
    pub const REBINDING_TIME: u8 = 59;
    pub const VENDOR_CLASS: u8 = 60;
    pub const CLIENT_ID: u8 = 61;
    pub const USER_CLASS: u8 = 77;
    pub const CLASSLESS_ROUTES: u8 = 121;
}

/// The message types (option 53).
pub mod kind {
    pub const DISCOVER: u8 = 1;
    pub const OFFER: u8 = 2;
    pub const REQUEST: u8 = 3;
    pub const ACK: u8 = 5;
    pub const NAK: u8 = 6;
    pub const RELEASE: u8 = 7;
}

const COOKIE: [u8; 4] = [99, 130, 83, 99];
const FIXED: usize = 236;
const TO_SERVER: u8 = 1;
const TO_CLIENT: u8 = 2;
/// The minimum size of a message in bytes (RFC 951).
const MIN_SIZE: usize = 300;

/// A message from or to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Whether a server sent the message.
    pub answer: bool,
    /// The transaction id, equal in a request and its answers.
    pub id: u32,
    /// Whether the server must broadcast its answer.
    pub broadcast: bool,
    /// The current address of the client (`ciaddr`).
    pub client: Ipv4Addr,
    /// The address that the server assigns (`yiaddr`).
    pub yours: Ipv4Addr,
    /// The hardware address of the client.
    pub mac: [u8; 6],
    /// All options as code and value.
    pub options: Vec<(u8, Vec<u8>)>,
}

impl Message {
    /// A client's message of this kind.
    #[must_use]
    pub fn new(kind: u8, id: u32, mac: [u8; 6]) -> Message {
        let none = Ipv4Addr::UNSPECIFIED;
        Message {
            answer: false,
            id,
            broadcast: true,
            client: none,
            yours: none,
            mac,
            options: vec![(option::MESSAGE_TYPE, vec![kind])],
        }
    }

    /// Adds an option, unless the message already has it.
    #[must_use]
    pub fn with(mut self, code: u8, value: &[u8]) -> Message {
        if self.get(code).is_none() {
            self.options.push((code, value.to_vec()));
        }
        self
    }

    /// The value of an option.
    #[must_use]
    pub fn get(&self, code: u8) -> Option<&[u8]> {
        self.options
            .iter()
            .find(|(c, _)| *c == code)
            .map(|(_, v)| v.as_slice())
    }

    /// The message type; 0 if missing.
    #[must_use]
    pub fn kind(&self) -> u8 {
        self.get(option::MESSAGE_TYPE)
            .and_then(|v| v.first().copied())
            .unwrap_or(0)
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![if self.answer { TO_CLIENT } else { TO_SERVER }, 1, 6, 0];
        bytes.extend_from_slice(&self.id.to_be_bytes());
        bytes.extend_from_slice(&[0, 0, if self.broadcast { 0x80 } else { 0 }, 0]);
        bytes.extend_from_slice(&self.client.octets());
        bytes.extend_from_slice(&self.yours.octets());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&self.mac);
        bytes.resize(FIXED, 0);
        bytes.extend_from_slice(&COOKIE);
        for (code, value) in &self.options {
            // A long value is split into several options of the same code (RFC 3396).
            for part in value.chunks(255) {
                bytes.extend_from_slice(&[*code, u8::try_from(part.len()).unwrap_or(255)]);
                bytes.extend_from_slice(part);
            }
        }
        bytes.push(255);
        if bytes.len() < MIN_SIZE {
            bytes.resize(MIN_SIZE, 0);
        }
        bytes
    }

    /// Decodes a message; `None` if it is not a DHCP message for Ethernet.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Message> {
        let four = |at: usize| {
            bytes
                .get(at..at + 4)
                .and_then(|b| <[u8; 4]>::try_from(b).ok())
        };
        if bytes.get(FIXED..FIXED + 4)? != COOKIE || bytes.get(1..3)? != [1, 6] {
            return None;
        }
        let mut options: Vec<(u8, Vec<u8>)> = vec![];
        let mut rest = bytes.get(FIXED + 4..)?;
        loop {
            match rest {
                [] | [255, ..] => break,
                [0, after @ ..] => rest = after,
                [code, length, after @ ..] => {
                    let value = after.get(..usize::from(*length))?;
                    match options.iter_mut().find(|(c, _)| c == code) {
                        Some((_, whole)) => whole.extend_from_slice(value),
                        None => options.push((*code, value.to_vec())),
                    }
                    rest = after.get(usize::from(*length)..)?;
                }
                [_] => return None,
            }
        }
        Some(Message {
            answer: bytes.first() == Some(&TO_CLIENT),
            id: u32::from_be_bytes(four(4)?),
            broadcast: bytes.get(10)? & 0x80 != 0,
            client: four(12)?.into(),
            yours: four(16)?.into(),
            mac: bytes.get(28..34)?.try_into().ok()?,
            options,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_round_trip(id in any::<u32>(), mac in any::<[u8; 6]>(), long in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut message = Message::new(kind::DISCOVER, id, mac).with(option::CLIENT_ID, b"\0abc");
            if !long.is_empty() {
                message = message.with(option::HOST_NAME, &long);
            }
            prop_assert_eq!(Message::parse(&message.encode()), Some(message));
        }

        #[test]
        fn any_bytes_are_decoded_or_rejected_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..700), cut in 0usize..300) {
            let _ = Message::parse(&bytes);
            let whole = Message::new(kind::OFFER, 1, [1; 6]).with(option::ROUTERS, &[1, 2, 3, 4]).encode();
            let _ = Message::parse(&whole[..cut]);
        }
    }
}
