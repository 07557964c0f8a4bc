//! Accepts requests of clients that name a Unix socket by its path.
//!
//! Most device plugins dial a socket by its path, without the scheme `unix:`. gRPC's clients in Go and C then send this
//! path as `:authority`: `%2Fvar%2Flib%2Fkubelet%2Fdevice-plugins%2Fkubelet.sock`, or with slashes. That is not an
//! authority (RFC 3986). h2 resets such a request with `PROTOCOL_ERROR`, while a kubelet accepts it. The agent does not
//! use the authority, so its invalid characters are replaced before h2 reads them.
//!
//! The replacement happens in place. `%`, `-` and `/` have codes of one length in HPACK's Huffman code (RFC 7541,
//! appendix B). So no frame, string or entry of the dynamic table changes its size. Both sides agree on the table
//! without a copy of it here.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Length of the preface that a client sends first.
const PREFACE: usize = 24;
/// Length of a frame's header.
const HEADER: usize = 9;
/// Maximum size of a HEADERS frame that is examined. h2 allows a client no larger one unless it announces another size.
const LARGEST: usize = 16_384;
/// Number of bytes that are read at once.
const PIECE: usize = 4096;

/// The frame type HEADERS, and its flags that shift the header block (RFC 9113, 6.2).
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// The index of `:authority` in HPACK's static table.
const AUTHORITY: usize = 1;
/// Lengths of HPACK's Huffman codes in bits, with the number of codes of each length. The code is canonical: within a
/// length the codes are consecutive, and those of the next length continue from there.
const CODES: [(usize, u32); 21] = [
    (5, 10),
    (6, 26),
    (7, 32),
    (8, 6),
    (10, 5),
    (11, 3),
    (12, 2),
    (13, 6),
    (14, 2),
    (15, 3),
    (19, 3),
    (20, 8),
    (21, 13),
    (22, 26),
    (23, 29),
    (24, 12),
    (25, 4),
    (26, 15),
    (27, 19),
    (28, 29),
    (30, 4),
];
/// The codes of `%`, `-` and `/`, and their length in bits.
const PERCENT: u32 = 0x15;
const HYPHEN: u32 = 0x16;
const SLASH: u32 = 0x18;
const LENGTH: usize = 6;

/// The connection of a client, with authorities that h2 accepts.
pub(super) struct Lenient<S> {
    inner: S,
    /// Bytes of the client that were not passed on yet.
    pending: Vec<u8>,
    /// Number of these bytes that may be passed on.
    done: usize,
    /// Number of bytes that pass unexamined before the next frame begins.
    unexamined: usize,
    has_ended: bool,
}

impl<S> Lenient<S> {
    pub(super) fn new(inner: S) -> Lenient<S> {
        Lenient {
            inner,
            pending: Vec::new(),
            done: 0,
            unexamined: PREFACE,
            has_ended: false,
        }
    }

    /// Examines the frames that have arrived completely.
    fn examine_frames(&mut self) {
        loop {
            let passed = self.unexamined.min(self.pending.len() - self.done);
            self.done += passed;
            self.unexamined -= passed;
            let Some(&[a, b, c, kind, flags, ..]) = self
                .pending
                .get(self.done..self.done + HEADER)
                .filter(|_| self.unexamined == 0)
            else {
                break;
            };
            let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
            if kind != HEADERS || length > LARGEST {
                self.unexamined = HEADER + length;
                continue;
            }
            let begins = self.done + HEADER;
            let Some(payload) = self.pending.get_mut(begins..begins + length) else {
                break;
            };
            if let Some(block) = block(payload, flags) {
                // h2 refuses a block that cannot be parsed.
                let _ = repair(block);
            }
            self.done = begins + length;
        }
        if self.has_ended {
            self.done = self.pending.len();
        }
    }
}

/// Returns the header block of a HEADERS frame, without padding and priority.
fn block(payload: &mut [u8], flags: u8) -> Option<&mut [u8]> {
    let (mut begins, mut ends) = (0, payload.len());
    if flags & PADDED != 0 {
        begins += 1;
        ends = ends.checked_sub(usize::from(*payload.first()?))?;
    }
    if flags & PRIORITY != 0 {
        begins += 5;
    }
    payload.get_mut(begins..ends)
}

/// Reads an integer that begins with the last `bits` of a byte (RFC 7541, 5.1).
fn integer(block: &[u8], at: &mut usize, bits: u32) -> Option<usize> {
    let most = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(*at)?) & most;
    *at += 1;
    if value < most {
        return Some(value);
    }
    for shift in [0, 7, 14] {
        let byte = *block.get(*at)?;
        *at += 1;
        value += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a string (RFC 7541, 5.2), and whether it is Huffman-coded.
fn string<'a>(block: &'a mut [u8], at: &mut usize) -> Option<(&'a mut [u8], bool)> {
    let has_code = block.get(*at)? & 0x80 != 0;
    let length = integer(block, at, 7)?;
    let string = block.get_mut(*at..at.checked_add(length)?)?;
    *at += length;
    Some((string, has_code))
}

/// Replaces the invalid characters of the authorities in a header block. Stops early if the block is cut off.
fn repair(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while let Some(first) = block.get(at) {
        let bits = match first {
            0x80.. => {
                integer(block, &mut at, 7)?;
                continue;
            }
            0x20..0x40 => {
                integer(block, &mut at, 5)?;
                continue;
            }
            0x40.. => 6,
            _ => 4,
        };
        let is_authority = match integer(block, &mut at, bits)? {
            0 => *string(block, &mut at)?.0 == *b":authority",
            index => index == AUTHORITY,
        };
        let (value, has_code) = string(block, &mut at)?;
        match (is_authority, has_code) {
            (true, true) => repair_coded(value),
            (true, false) => value
                .iter_mut()
                .filter(|byte| matches!(byte, b'%' | b'/'))
                .for_each(|byte| *byte = b'-'),
            (false, _) => {}
        }
    }
    Some(())
}

/// Returns the code that begins at a bit, and its length in bits; `None` if only padding remains.
fn code(string: &[u8], begins: usize) -> Option<(u32, usize)> {
    let (mut code, mut first, mut read) = (0, 0, 0);
    for (length, count) in CODES {
        while read < length {
            let at = begins + read;
            let bit = string.get(at / 8)? >> (7 - at % 8) & 1;
            code = code << 1 | u32::from(bit);
            first <<= 1;
            read += 1;
        }
        if code - first < count {
            return Some((code, length));
        }
        first += count;
    }
    None
}

/// Replaces the codes of `%` and `/` with that of `-`.
fn repair_coded(string: &mut [u8]) {
    let mut begins = 0;
    while let Some((found, length)) = code(string, begins) {
        if length == LENGTH && matches!(found, PERCENT | SLASH) {
            let differs = |bit: &usize| (found ^ HYPHEN) >> (LENGTH - 1 - bit) & 1 == 1;
            for at in (0..LENGTH).filter(differs).map(|bit| begins + bit) {
                string[at / 8] ^= 0x80 >> (at % 8);
            }
        }
        begins += length;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lenient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.done == 0 {
            let mut piece = [0; PIECE];
            let mut piece = ReadBuf::new(&mut piece);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut piece))?;
            this.pending.extend_from_slice(piece.filled());
            this.has_ended = piece.filled().is_empty();
            this.examine_frames();
            if this.has_ended {
                break;
            }
        }
        let handed = this.done.min(buffer.remaining());
        buffer.put_slice(&this.pending[..handed]);
        this.pending.drain(..handed);
        this.done -= handed;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Lenient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use async_trait::async_trait;
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{UnixListener, UnixStream};

    use super::*;
    use crate::{Register, Registration, serve_registration};

    /// The request with which a plugin written with grpc-go registers `example.com/resource`: the header block of its
    /// HEADERS frame, and the content of its DATA frame.
    const BLOCK: &str = "8386459563b8632a4615f6966321360d263d4c6d2cc6424b6741a754587b8ec545868346a8b0f5b632d054aa2c3217b98855aba2d98d5215161eb6c65a0a95d072755f8b1d75d0620d263d4c4d65647a8b9acac8b4c7602bbafaecff40027465864d833505b11f";
    const MESSAGE: &str = "00000000300a0776316265746131120d64702e313739353735353037361a146578616d706c652e636f6d2f7265736f757263652200";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("two digits");
        (0..hex.len()).step_by(2).map(digits).collect()
    }

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("a small one");
        let mut frame = length.to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags, 0, 0, 0, stream]);
        frame.extend(payload);
        frame
    }

    fn request(block: &[u8]) -> Vec<u8> {
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        sent.extend(frame(4, 0, 0, &[]));
        sent.extend(frame(HEADERS, 4, 1, block));
        sent.extend(frame(0, 1, 1, &bytes(MESSAGE)));
        sent
    }

    #[derive(Default)]
    struct RecordingRegister(Mutex<Vec<Registration>>);

    #[async_trait]
    impl Register for RecordingRegister {
        async fn register(&self, registration: Registration) -> Result<(), String> {
            self.0.lock().expect("not poisoned").push(registration);
            Ok(())
        }
    }

    #[tokio::test]
    async fn plugins_that_send_the_socket_path_as_authority_are_registered() {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let registrations = Arc::new(RecordingRegister::default());
        let serving = tokio::spawn(serve_registration(
            listener,
            Arc::<RecordingRegister>::clone(&registrations) as _,
        ));
        let of_go = bytes(BLOCK);
        let path = b"/var/lib/kubelet/device-plugins/kubelet.sock";
        // The same without Huffman's code, with slashes in the path.
        let coded = of_go
            .windows(2)
            .position(|w| w == [0x41, 0xa7])
            .expect("it");
        let mut plain = of_go[..=coded].to_vec();
        plain.push(u8::try_from(path.len()).expect("a short one"));
        plain.extend(path);
        plain.extend(&of_go[coded + 2 + 0x27..]);
        for (count, block) in [of_go, plain].iter().enumerate() {
            let mut stream = UnixStream::connect(&socket).await.expect("served");
            // The bytes may arrive in any pieces.
            for piece in request(block).chunks(7) {
                stream.write_all(piece).await.expect("it reads");
                tokio::task::yield_now().await;
            }
            let answered = async {
                loop {
                    let mut header = [0; HEADER];
                    stream.read_exact(&mut header).await.expect("an answer");
                    let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
                    let mut payload = vec![0; usize::try_from(length).expect("a small one")];
                    stream.read_exact(&mut payload).await.expect("the rest");
                    assert_ne!(header[3], 3, "RST_STREAM");
                    if header[3] == HEADERS {
                        return;
                    }
                }
            };
            let answered = tokio::time::timeout(Duration::from_secs(10), answered);
            answered.await.expect("in time");
            let registrations = registrations.0.lock().expect("not poisoned");
            assert_eq!(registrations.len(), count + 1);
            assert_eq!(registrations[count].resource, "example.com/resource");
        }
        serving.abort();
    }

    #[test]
    fn only_invalid_characters_of_an_authority_are_replaced() {
        // `%/-a`, and one bit of padding.
        let mut coded = [0x55, 0x85, 0x87];
        repair_coded(&mut coded);
        assert_eq!(coded, [0x59, 0x65, 0x87]);
        for (before, after) in [
            // `:authority` by its index, and by its name.
            (b"\x41\x04a%/b".to_vec(), b"\x41\x04a--b".to_vec()),
            (
                b"\x00\x0a:authority\x02/x".to_vec(),
                b"\x00\x0a:authority\x02-x".to_vec(),
            ),
            // Another header, after a change of the table's size.
            (
                b"\x3f\xe1\x1f\x44\x04/a%b".to_vec(),
                b"\x3f\xe1\x1f\x44\x04/a%b".to_vec(),
            ),
            // A block that is cut off.
            (b"\x41\x05/a".to_vec(), b"\x41\x05/a".to_vec()),
        ] {
            let mut block = before.clone();
            let _ = repair(&mut block);
            assert_eq!(block, after, "{before:?}");
        }
    }

    proptest! {
        /// Whatever arrives, and in whatever pieces, the same number of bytes is passed on, and bytes outside HEADERS
        /// frames are unchanged.
        #[test]
        fn any_bytes_are_forwarded(
            block in prop::collection::vec(any::<u8>(), 0..200),
            flags in any::<u8>(),
            rest in prop::collection::vec(any::<u8>(), 0..100),
            size in 1..40_usize,
        ) {
            let mut sent = vec![b'x'; PREFACE];
            sent.extend(frame(0, flags, 1, &block));
            let unchanged = sent.len();
            sent.extend(frame(HEADERS, flags, 1, &block));
            sent.extend(&rest);
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let got = runtime.block_on(async {
                let (mut client, server) = tokio::io::duplex(size);
                let mut got = Vec::new();
                let mut server = Lenient::new(server);
                let read = server.read_to_end(&mut got);
                let write = async {
                    client.write_all(&sent).await.expect("it reads");
                    drop(client);
                };
                let (read, ()) = tokio::join!(read, write);
                read.expect("it ends");
                got
            });
            prop_assert_eq!(got.len(), sent.len());
            prop_assert_eq!(&got[..unchanged], &sent[..unchanged]);
        }
    }
}
