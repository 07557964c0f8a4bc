//! Netlink messages, and a socket for both families (rtnetlink and nfnetlink).
//!
//! The kernel processes a message inside `send`, so its answers are available when `send` returns.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};

pub const REQUEST: u16 = 0x1;
pub const ACK: u16 = 0x4;
pub const DUMP: u16 = 0x300;
pub const EXCL: u16 = 0x200;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;

const ERROR: u16 = 2;
const DONE: u16 = 3;
pub const NESTED: u16 = 0x8000;

/// A message under construction.
#[derive(Debug, Default, Clone)]
pub struct Message {
    bytes: Vec<u8>,
}

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
        Message { bytes }
    }

    /// Adds an attribute.
    #[must_use]
    pub fn put(mut self, kind: u16, value: &[u8]) -> Message {
        attribute(&mut self.bytes, kind, value);
        self
    }

    /// Adds an attribute with a zero-terminated string.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Message {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.put(kind, &bytes)
    }

    /// Adds an attribute with a number in native byte order.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Message {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a nested attribute.
    #[must_use]
    pub fn nest(self, kind: u16, inner: &Attributes) -> Message {
        self.put(kind | NESTED, &inner.0)
    }

    fn finish(&mut self, sequence: u32) {
        let length = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

/// The contents of a nested attribute.
#[derive(Debug, Default, Clone)]
pub struct Attributes(pub Vec<u8>);

impl Attributes {
    /// Starts without attributes.
    #[must_use]
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// Adds an attribute.
    #[must_use]
    pub fn put(mut self, kind: u16, value: &[u8]) -> Attributes {
        attribute(&mut self.0, kind, value);
        self
    }

    /// Adds an attribute with a zero-terminated string.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Attributes {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.put(kind, &bytes)
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
    pub fn nest(self, kind: u16, inner: &Attributes) -> Attributes {
        self.put(kind | NESTED, &inner.0)
    }
}

fn attribute(into: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    into.extend_from_slice(&length.to_ne_bytes());
    into.extend_from_slice(&kind.to_ne_bytes());
    into.extend_from_slice(value);
    while !into.len().is_multiple_of(4) {
        into.push(0);
    }
}

/// Iterates over attributes. Stops at the first one that exceeds the buffer.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & !NESTED & !0x4000;
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The text of a zero-terminated string. Bytes that are not UTF-8 are replaced.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .trim_end_matches('\0')
        .to_owned()
}

/// An answer: its type, and the bytes after the netlink header.
pub type Answer = (u16, Vec<u8>);

/// A netlink socket. It stays in the network namespace in which it was opened.
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    /// Opens a socket for links, addresses and routes.
    pub fn route() -> io::Result<Socket> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket for nftables and conntrack.
    pub fn netfilter() -> io::Result<Socket> {
        Self::open(SockProtocol::NetlinkNetFilter)
    }

    fn open(protocol: SockProtocol) -> io::Result<Socket> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        // Best effort: only large dumps need a larger buffer.
        let _ = setsockopt(&fd, sockopt::RcvBuf, &(1 << 20));
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Socket { fd, sequence: 1 })
    }

    /// Sends a message and waits for its acknowledgement.
    pub fn execute(&mut self, message: Message) -> io::Result<()> {
        self.batch(vec![message])
    }

    /// Sends messages with one system call. Returns the first error.
    pub fn batch(&mut self, mut messages: Vec<Message>) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut waiting = 0;
        for message in &mut messages {
            self.sequence += 1;
            message.finish(self.sequence);
            waiting +=
                usize::from(u16::from_ne_bytes([message.bytes[6], message.bytes[7]]) & ACK != 0);
            bytes.extend_from_slice(&message.bytes);
        }
        send(self.fd.as_raw_fd(), &bytes, MsgFlags::empty())?;
        let mut result = Ok(());
        // The kernel does not acknowledge all messages of a rejected
        // batch. After an error, read only the answers already available.
        while waiting > 0 || result.is_err() {
            let flags = if result.is_err() {
                MsgFlags::MSG_DONTWAIT
            } else {
                MsgFlags::empty()
            };
            let Some(answers) = self.receive(flags)? else {
                break;
            };
            for (kind, body) in answers {
                if kind == ERROR {
                    waiting = usize::saturating_sub(waiting, 1);
                    let code = error_code(&body);
                    if code != 0 && result.is_ok() {
                        result = Err(io::Error::from_raw_os_error(-code));
                    }
                }
            }
        }
        result
    }

    /// Sends a request and collects the answers: one object, or all objects of a dump.
    pub fn query(&mut self, mut message: Message) -> io::Result<Vec<Answer>> {
        self.sequence += 1;
        message.finish(self.sequence);
        let flags = u16::from_ne_bytes([message.bytes[6], message.bytes[7]]);
        let dump = flags & DUMP == DUMP;
        send(self.fd.as_raw_fd(), &message.bytes, MsgFlags::empty())?;
        let mut all = Vec::new();
        while let Some(answers) = self.receive(MsgFlags::empty())? {
            for (kind, body) in answers {
                match kind {
                    DONE => return Ok(all),
                    ERROR => {
                        let code = error_code(&body);
                        return if code == 0 {
                            Ok(all)
                        } else {
                            Err(io::Error::from_raw_os_error(-code))
                        };
                    }
                    _ => all.push((kind, body)),
                }
            }
            if !dump {
                return Ok(all);
            }
        }
        Ok(all)
    }

    fn receive(&self, flags: MsgFlags) -> io::Result<Option<Vec<Answer>>> {
        let mut buffer = vec![0u8; 64 << 10];
        let length = match recv(self.fd.as_raw_fd(), &mut buffer, flags) {
            Ok(length) => length,
            Err(nix::errno::Errno::EAGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut bytes = &buffer[..length];
        let mut answers = Vec::new();
        while let Some(header) = bytes.get(..16) {
            let size = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
            let Some(body) = bytes.get(16..size) else {
                break;
            };
            answers.push((u16::from_ne_bytes([header[4], header[5]]), body.to_vec()));
            bytes = bytes.get(size.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(Some(answers))
    }
}

fn error_code(body: &[u8]) -> i32 {
    body.get(..4)
        .and_then(|b| b.try_into().ok())
        .map_or(-5, i32::from_ne_bytes)
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
            let mut written = vec![];
            for (kind, value) in &values {
                attribute(&mut written, *kind, value);
            }
            let read: Vec<(u16, Vec<u8>)> = attributes(&written).map(|(k, v)| (k, v.to_vec())).collect();
            prop_assert_eq!(&read, &values);
            let cut = &written[..cut.min(written.len())];
            prop_assert!(attributes(cut).count() <= values.len());
        }
    }
}
