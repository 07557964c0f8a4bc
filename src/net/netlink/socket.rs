//! A netlink socket.
//!
//! The kernel processes messages inside `send`, so its answers are available when `send` returns.

use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send,
    setsockopt, socket, sockopt,
};

use super::message::{MESSAGE_HEADER, Message, attributes, text};
use super::options::shorten_errors;
use super::{ACK, DUMP};

const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `NLM_F_DUMP_INTR`: the objects changed during the dump, so some may be missing.
const INTERRUPTED: u16 = 0x10;
/// `NLM_F_ACK_TLVS`: attributes follow the error.
const EXPLAINED: u16 = 0x200;
/// `NLMSGERR_ATTR_MSG`: the kernel's explanation of an error.
const EXPLANATION: u16 = 1;

/// Bytes of the receive buffer of a call: larger than any message of the kernel.
const RECEIVED: usize = 64 << 10;
/// Maximum number of attempts for a dump during which the objects change.
const DUMP_ATTEMPTS: usize = 20;
/// Bytes that the kernel's default send buffer takes on every machine.
const DEFAULT_SEND_BUFFER: usize = 64 << 10;

/// An answer: its type, and the bytes after the netlink header.
pub type Answer = (u16, Vec<u8>);

/// The kernel's rejection of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The position of the message in its batch; `None` if the kernel rejected the batch as a whole.
    pub index: Option<usize>,
    /// The error number, for instance `ENOENT`.
    pub errno: i32,
    /// The kernel's explanation; may be empty.
    pub reason: String,
}

/// Why a batch has failed.
#[derive(Debug)]
pub enum BatchError {
    /// The batch was not sent; nothing has changed.
    Unsent(io::Error),
    /// The kernel rejected a message, the first one if there are several. nftables has changed nothing.
    Rejected(Rejection),
    /// The kernel's answer is lost. The caller must read the objects to learn whether they have changed.
    Unknown(io::Error),
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchError::Unsent(error) => write!(f, "sending the batch failed: {error}"),
            BatchError::Unknown(error) => {
                write!(f, "the outcome of the batch is unknown: {error}")
            }
            BatchError::Rejected(rejection) => {
                match rejection.index {
                    Some(index) => write!(f, "the kernel rejected message {index} of the batch")?,
                    None => write!(f, "the kernel rejected the batch")?,
                }
                write!(f, ": {}", io::Error::from_raw_os_error(rejection.errno))?;
                match rejection.reason.as_str() {
                    "" => Ok(()),
                    reason => write!(f, " ({reason})"),
                }
            }
        }
    }
}

impl std::error::Error for BatchError {}

impl From<BatchError> for io::Error {
    fn from(error: BatchError) -> io::Error {
        match error {
            BatchError::Unsent(error) | BatchError::Unknown(error) => error,
            BatchError::Rejected(rejection) => io::Error::from_raw_os_error(rejection.errno),
        }
    }
}

/// A message of the kernel within the receive buffer.
struct Received<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// The messages in a received buffer. Stops at the first one that exceeds the buffer.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Received<'_>> {
    std::iter::from_fn(move || {
        let header = bytes.get(..MESSAGE_HEADER)?;
        let word = |at: usize| header.get(at..at + 4)?.try_into().ok();
        let half = |at: usize| header.get(at..at + 2)?.try_into().ok();
        let size = usize::try_from(u32::from_ne_bytes(word(0)?)).ok()?;
        let received = Received {
            kind: u16::from_ne_bytes(half(4)?),
            flags: u16::from_ne_bytes(half(6)?),
            sequence: u32::from_ne_bytes(word(8)?),
            body: bytes.get(MESSAGE_HEADER..size)?,
        };
        let next = size.checked_next_multiple_of(4)?;
        bytes = bytes.get(next..).unwrap_or_default();
        Some(received)
    })
}

impl Received<'_> {
    /// The error number of an error message, positive; zero means success.
    fn errno(&self) -> i32 {
        self.body
            .get(..4)
            .and_then(|b| b.try_into().ok())
            .map_or(Errno::EIO as i32, |b| {
                i32::from_ne_bytes(b).saturating_neg()
            })
    }

    /// The kernel's explanation of an error; may be empty.
    fn reason(&self) -> String {
        if self.flags & EXPLAINED == 0 {
            return String::new();
        }
        // The error number and the header of the rejected message precede the attributes.
        let explained = self.body.get(4 + MESSAGE_HEADER..).unwrap_or_default();
        attributes(explained)
            .find(|(kind, _)| *kind == EXPLANATION)
            .map(|(_, value)| text(value))
            .unwrap_or_default()
    }
}

/// A netlink socket. It stays in the network namespace in which it was opened.
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
    /// Bytes that the send buffer takes.
    send_buffer: usize,
}

impl Socket {
    /// Opens a socket for links, addresses and routes.
    ///
    /// # Errors
    ///
    /// The kernel has no rtnetlink, or the process has too many open files.
    pub fn route() -> io::Result<Socket> {
        Self::open(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket for nftables and conntrack.
    ///
    /// # Errors
    ///
    /// The kernel has no nfnetlink, or the process has too many open files.
    pub(crate) fn netfilter() -> io::Result<Socket> {
        Self::open(SockProtocol::NetlinkNetFilter)
    }

    fn open(protocol: SockProtocol) -> io::Result<Socket> {
        let fd = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        // Best effort: only many errors at once need a larger buffer.
        let _ = setsockopt(&fd, sockopt::RcvBuf, &(1 << 20));
        shorten_errors(&fd)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Socket {
            fd,
            sequence: 1,
            send_buffer: DEFAULT_SEND_BUFFER,
        })
    }

    /// Sends a message and reads its acknowledgement.
    ///
    /// # Errors
    ///
    /// An attribute is too long, the kernel rejects the message, or its answer is lost.
    pub fn execute(&mut self, message: Message) -> io::Result<()> {
        self.batch(vec![message]).map_err(io::Error::from)
    }

    /// Sends messages with one system call, whatever their size, and reads the answers. The kernel reports an error for each
    /// rejected message, and success only for messages with [`ACK`]. For many messages, set the flag in the last one only.
    ///
    /// # Errors
    ///
    /// See [`BatchError`]. If the kernel rejects several messages, the error is about the first one.
    pub fn batch(&mut self, messages: Vec<Message>) -> Result<(), BatchError> {
        let first = self.sequence.wrapping_add(1);
        let mut awaited = None;
        let mut bytes = Vec::new();
        let count = messages.len();
        // Each message is freed once it is copied, because large batches take many megabytes.
        for mut message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            if message.flags() & ACK != 0 {
                awaited = Some(self.sequence);
            }
            let encoded = message.finish(self.sequence);
            bytes.extend_from_slice(encoded.map_err(|e| BatchError::Unsent(e.into()))?);
        }
        self.reserve(bytes.len());
        send(self.fd.as_raw_fd(), &bytes, MsgFlags::empty())
            .map_err(|e| BatchError::Unsent(e.into()))?;
        drop(bytes);
        self.outcome(first, count, awaited)
    }

    /// Reads the answers to a batch of `count` messages from the sequence number `first` on.
    fn outcome(
        &mut self,
        first: u32,
        count: usize,
        awaited: Option<u32>,
    ) -> Result<(), BatchError> {
        let mut buffer = vec![0; RECEIVED];
        let mut rejection: Option<Rejection> = None;
        let mut lost = None;
        let mut acknowledged = awaited.is_none();
        loop {
            let length = match self.receive(&mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The kernel drops answers if the receive buffer is full (ENOBUFS), and reports the loss once.
                Err(error) if error.raw_os_error() == Some(Errno::ENOBUFS as i32) => {
                    lost = Some(error);
                    continue;
                }
                Err(error) => return Err(BatchError::Unknown(error)),
            };
            for received in messages(buffer.get(..length).unwrap_or_default()) {
                let index = received.sequence.wrapping_sub(first);
                let index = usize::try_from(index).ok().filter(|i| *i < count);
                let (Some(index), ERROR) = (index, received.kind) else {
                    continue;
                };
                let errno = received.errno();
                acknowledged |= errno == 0 && Some(received.sequence) == awaited;
                // An error about the whole batch arrives before those of its messages.
                if errno != 0 && rejection.as_ref().is_none_or(|r| Some(index) < r.index) {
                    rejection = Some(Rejection {
                        index: Some(index),
                        errno,
                        reason: received.reason(),
                    });
                }
            }
        }
        match (rejection, lost) {
            (Some(rejection), _) => Err(BatchError::Rejected(rejection)),
            (None, Some(error)) => Err(BatchError::Unknown(error)),
            (None, None) if !acknowledged => Err(BatchError::Unknown(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the kernel has not acknowledged the last message",
            ))),
            (None, None) => Ok(()),
        }
    }

    /// Enlarges the send buffer, because the kernel takes a batch only as a whole. Processes without `CAP_NET_ADMIN` get at
    /// most `net.core.wmem_max`; if that is too small, `send` fails with `EMSGSIZE`.
    fn reserve(&mut self, length: usize) {
        if length <= self.send_buffer {
            return;
        }
        let enlarged = setsockopt(&self.fd, sockopt::SndBufForce, &length)
            .or_else(|_| setsockopt(&self.fd, sockopt::SndBuf, &length));
        if enlarged.is_ok() {
            self.send_buffer = length;
        }
    }

    /// Sends a request and collects the answers: one object, or all objects of a dump. If the objects change during the dump,
    /// repeats it.
    ///
    /// # Errors
    ///
    /// The request is too long, the kernel rejects it, or the objects changed during each of 20 dumps.
    pub fn query(&mut self, message: Message) -> io::Result<Vec<Answer>> {
        for _ in 0..DUMP_ATTEMPTS {
            let mut all = Vec::new();
            let is_whole = self.stream(message.clone(), |kind, body| {
                all.push((kind, body.to_vec()));
                ControlFlow::Continue(())
            })?;
            if is_whole {
                return Ok(all);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("the objects changed during each of {DUMP_ATTEMPTS} listings; try again"),
        ))
    }

    /// Sends a request and passes each answer to `each`, without keeping them, until `each` breaks. Returns whether the
    /// answers are all objects: false if `each` breaks, or if the objects changed in between.
    ///
    /// # Errors
    ///
    /// The request is too long, or the kernel rejects it.
    pub fn stream(
        &mut self,
        mut message: Message,
        mut each: impl FnMut(u16, &[u8]) -> ControlFlow<()>,
    ) -> io::Result<bool> {
        self.sequence = self.sequence.wrapping_add(1);
        let is_dump = message.flags() & DUMP == DUMP;
        let bytes = message.finish(self.sequence)?;
        send(self.fd.as_raw_fd(), bytes, MsgFlags::empty())?;
        let mut buffer = vec![0; RECEIVED];
        let (mut is_whole, mut is_wanted) = (true, true);
        loop {
            let length = self.receive(&mut buffer, MsgFlags::empty())?;
            let mut has_answer = false;
            for received in messages(buffer.get(..length).unwrap_or_default()) {
                if received.sequence != self.sequence {
                    continue;
                }
                has_answer = true;
                is_whole &= received.flags & INTERRUPTED == 0;
                match received.kind {
                    // The end of a dump may have no error number.
                    DONE if received.body.is_empty() => return Ok(is_whole && is_wanted),
                    DONE | ERROR if received.errno() != 0 => {
                        return Err(io::Error::from_raw_os_error(received.errno()));
                    }
                    DONE | ERROR => return Ok(is_whole && is_wanted),
                    // An unread rest of a dump would block the next request.
                    kind if is_wanted => is_wanted = each(kind, received.body).is_continue(),
                    _ => {}
                }
            }
            if has_answer && !is_dump {
                return Ok(is_whole && is_wanted);
            }
        }
    }

    fn receive(&self, buffer: &mut [u8], flags: MsgFlags) -> io::Result<usize> {
        // With MSG_TRUNC, `recv` returns the length of the message, even if the buffer is shorter.
        let length = recv(self.fd.as_raw_fd(), buffer, flags | MsgFlags::MSG_TRUNC)?;
        if length > buffer.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the kernel sent a netlink message of {length} bytes; at most {RECEIVED} are expected"
                ),
            ));
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_received_messages_end_within_their_bytes(bytes in vec(any::<u8>(), 0..300)) {
            let length: usize = messages(&bytes).map(|m| { let _ = (m.errno(), m.reason()); m.body.len() + MESSAGE_HEADER }).sum();
            prop_assert!(length <= bytes.len());
        }
    }

    #[test]
    fn a_rejection_names_the_message_and_the_reason() {
        let error = BatchError::Rejected(Rejection {
            index: Some(3),
            errno: Errno::ENOENT as i32,
            reason: "no such chain".to_owned(),
        });
        assert_eq!(
            error.to_string(),
            "the kernel rejected message 3 of the batch: No such file or directory (os error 2) (no such chain)"
        );
        let error = io::Error::from(error);
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
