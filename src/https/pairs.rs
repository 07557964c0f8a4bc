//! Keeps a session of forwarded ports alive when a program in the pod resets one of its connections.
//!
//! A runtime reports the end of a forwarded connection on the error stream of its stream pair. kubectl closes the whole
//! session when any error stream reports anything (client-go, `tools/portforward/portforward.go`). A connection that is
//! reset is no failure of the session: its report is removed, and both streams of the pair end as usual.
//!
//! The report is kept if the runtime may have data of the client that it has not written. One unread frame blocks all
//! streams of a session in containerd's streaming server (moby/spdystream, `handleDataFrame`), so the session would
//! hang.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use flate2::{Decompress, FlushDecompress};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::spdy::{FIN, SYN_STREAM};

/// Number of bytes that are read from the runtime at once.
const PIECE: usize = 32 << 10;
/// Maximum size of a frame that is examined, and of a header block. Larger ones pass unexamined.
const EXAMINED: usize = 64 << 10;
/// Maximum number of streams of a session whose kind is recorded. Further ones pass unexamined.
const MAX_STREAMS: usize = 100_000;
/// If a frame of the client was sent this long before a report, it has been written to the connection.
const WRITTEN: Duration = Duration::from_secs(1);
/// Endings of reports about a connection that one side reset, in the words of Go's `syscall` package.
const RESETS: [&[u8]; 2] = [b"connection reset by peer", b"broken pipe"];

/// The words of the dictionary for compressed header blocks (SPDY/3.1, 2.6.10.1). In the dictionary, each follows its
/// length. An underscore stands for a space.
const WORDS: &str = "\
    options head post put delete trace accept accept-charset accept-encoding accept-language \
    accept-ranges age allow authorization cache-control connection content-base content-encoding \
    content-language content-length content-location content-md5 content-range content-type date etag \
    expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since \
    last-modified location max-forwards pragma proxy-authenticate proxy-authorization range referer \
    retry-after server te trailer transfer-encoding upgrade user-agent vary via warning www-authenticate \
    method get status 200_OK version HTTP/1.1 url public set-cookie keep-alive origin";
/// The text after the words.
const TEXT: &str = "\
    100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Au\
    thoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidd\
    en404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr Ma\
    y Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,imag\
    e/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,publicpri\
    vatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

fn dictionary() -> Vec<u8> {
    let mut all = vec![];
    for word in WORDS.split(' ') {
        all.extend(u32::try_from(word.len()).unwrap_or(0).to_be_bytes());
        all.extend(word.replace('_', " ").bytes());
    }
    all.extend(TEXT.bytes());
    all
}

/// Decodes the header blocks of one side, which form a single zlib stream.
pub(super) struct Headers {
    inflate: Decompress,
    begun: bool,
}

impl Headers {
    /// Creates a decoder whose window holds the dictionary: raw deflate has no preset dictionary, but a stored block
    /// fills the window as well.
    pub(super) fn new() -> Headers {
        let words = dictionary();
        let length = u16::try_from(words.len()).unwrap_or(0);
        let mut block = vec![0];
        block.extend(length.to_le_bytes());
        block.extend((!length).to_le_bytes());
        block.extend(&words);
        let mut headers = Headers {
            inflate: Decompress::new(false),
            begun: false,
        };
        headers.inflated(&block);
        headers
    }

    /// Decompresses a block. `None` if the block is invalid or too large; the stream cannot be decoded any further
    /// then.
    fn inflated(&mut self, block: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(EXAMINED);
        let before = self.inflate.total_in();
        self.inflate
            .decompress_vec(block, &mut out, FlushDecompress::Sync)
            .ok()?;
        (self.inflate.total_in() - before == block.len() as u64).then_some(out)
    }

    /// Returns the value of a name in a block.
    pub(super) fn value(&mut self, block: &[u8], wanted: &[u8]) -> Option<Vec<u8>> {
        let mut all = self.decoded(block)?.into_iter();
        all.find_map(|(name, value)| (name == wanted).then_some(value))
    }

    /// Returns the names of a block with their values.
    fn decoded(&mut self, block: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut block = block;
        if !std::mem::replace(&mut self.begun, true) {
            // Method and flags, and the dictionary's checksum if one is used (RFC 1950).
            let has_dictionary = block.get(1)? & 0x20 != 0;
            block = block.get(if has_dictionary { 6 } else { 2 }..)?;
        }
        let plain = self.inflated(block)?;
        let (count, mut rest) = plain.split_first_chunk()?;
        let mut next = || -> Option<Vec<u8>> {
            let (length, after) = rest.split_first_chunk()?;
            let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
            let text = after.get(..length)?;
            rest = after.get(length..)?;
            Some(text.to_vec())
        };
        (0..u32::from_be_bytes(*count))
            .map(|_| Some((next()?, next()?)))
            .collect()
    }
}

/// Splits one direction of a connection into frames.
#[derive(Default)]
struct Frames {
    /// The beginning of an incomplete frame: its head, or all of a frame that is examined.
    begun: Vec<u8>,
    /// Remaining bytes of the present frame, which pass unexamined.
    passing: usize,
}

fn head_of(frame: &[u8]) -> Option<(u32, u8, usize)> {
    let head = frame.first_chunk::<8>()?;
    let first = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
    let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
    Some((first, head[4], usize::try_from(length).ok()?))
}

impl Frames {
    /// Takes bytes and returns those that pass. `examined` selects frames by their first four bytes and their length;
    /// `examine` returns the bytes that pass of such a frame.
    fn push(
        &mut self,
        mut bytes: &[u8],
        mut examined: impl FnMut(u32, usize) -> bool,
        mut examine: impl FnMut(Vec<u8>) -> Vec<u8>,
    ) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        while !bytes.is_empty() {
            let length = self.passing.min(bytes.len());
            if length > 0 {
                out.extend(&bytes[..length]);
                self.passing -= length;
                bytes = &bytes[length..];
                continue;
            }
            let wanted = head_of(&self.begun).map_or(8, |(_, _, length)| 8 + length);
            let length = (wanted - self.begun.len()).min(bytes.len());
            self.begun.extend(&bytes[..length]);
            bytes = &bytes[length..];
            let Some((first, _, length)) = head_of(&self.begun) else {
                continue;
            };
            if !examined(first, length) || length > EXAMINED {
                out.append(&mut self.begun);
                self.passing = length;
            } else if self.begun.len() == 8 + length {
                out.extend(examine(std::mem::take(&mut self.begun)));
            }
        }
        out
    }
}

/// Both directions of a session of forwarded ports.
struct Session {
    from_client: Frames,
    from_runtime: Frames,
    /// `None` if a header block was invalid: nothing is removed from then on.
    headers: Option<Headers>,
    /// The error streams by number, with the request id of their pair.
    errors: BTreeMap<u32, Vec<u8>>,
    /// The data streams by the request id of their pair.
    data: BTreeMap<Vec<u8>, u32>,
    /// When the last two non-empty frames of a data stream were sent, the last one first.
    sent: BTreeMap<u32, [Option<Instant>; 2]>,
}

/// The first four bytes of a frame that opens a stream: the control bit, version 3 and the type.
const OPENS: u32 = 0x8003_0000 | SYN_STREAM as u32;

impl Session {
    fn new() -> Session {
        Session {
            from_client: Frames::default(),
            from_runtime: Frames::default(),
            headers: Some(Headers::new()),
            errors: BTreeMap::new(),
            data: BTreeMap::new(),
            sent: BTreeMap::new(),
        }
    }

    /// Records which streams are error streams, and when data is sent.
    fn sent(&mut self, bytes: &[u8], now: Instant) {
        let Session {
            from_client,
            headers,
            errors,
            data,
            sent,
            ..
        } = self;
        let examine = |frame: Vec<u8>| {
            let decoded = match (headers.as_mut(), frame.get(18..)) {
                (Some(headers), Some(block)) => headers.decoded(block),
                _ => None,
            };
            let (Some(decoded), Some(&[a, b, c, d])) = (decoded, frame.get(8..12)) else {
                *headers = None;
                return vec![];
            };
            let value = |wanted: &[u8]| {
                let mut found = decoded.iter().filter(|(name, _)| name == wanted);
                found.next().map(|(_, value)| value.clone())
            };
            let (id, request) = (u32::from_be_bytes([a, b, c, d]), value(b"requestid"));
            match value(b"streamtype") {
                Some(kind) if kind == b"error" && errors.len() < MAX_STREAMS => {
                    errors.insert(id, request.unwrap_or_default());
                }
                Some(kind) if kind == b"data" && data.len() < MAX_STREAMS => {
                    data.insert(request.unwrap_or_default(), id);
                }
                _ => {}
            }
            vec![]
        };
        let examined = |first: u32, length: usize| {
            if first >> 31 == 0 && length > 0 && sent.len() < MAX_STREAMS {
                let last = sent.entry(first).or_default();
                *last = [Some(now), last[0]];
            }
            first == OPENS
        };
        from_client.push(bytes, examined, examine);
    }

    /// Returns the runtime's bytes that pass.
    fn received(&mut self, bytes: &[u8], now: Instant) -> Vec<u8> {
        let Session {
            from_runtime,
            errors,
            data,
            sent,
            ..
        } = self;
        // If two frames were sent within a second, the runtime may not have read the second one.
        let is_written = |id: u32| {
            let pair = errors.get(&id).and_then(|request| data.get(request));
            let last = pair.and_then(|data| sent.get(data)).copied();
            let before = last.unwrap_or_default()[1];
            before.is_none_or(|at| now.saturating_duration_since(at) >= WRITTEN)
        };
        let examine = |mut frame: Vec<u8>| {
            let id = frame.first_chunk().map_or(0, |id| u32::from_be_bytes(*id));
            let ends = |end: &&[u8]| frame.trim_ascii_end().ends_with(end);
            if !RESETS.iter().any(ends) || !is_written(id) {
                return frame;
            }
            tracing::debug!(report = %String::from_utf8_lossy(&frame[8..]), "a forwarded connection was reset");
            // The end of the stream is kept.
            let last = frame[4] & FIN != 0;
            frame.truncate(if last { 8 } else { 0 });
            frame.iter_mut().skip(5).for_each(|byte| *byte = 0);
            frame
        };
        from_runtime.push(bytes, |first, _| errors.contains_key(&first), examine)
    }
}

/// A runtime's connection that may carry forwarded ports.
pub(super) struct Pairs<S> {
    stream: S,
    /// `None` if the connection carries other data.
    session: Option<Session>,
    /// Bytes that pass and that were not read yet.
    ready: Vec<u8>,
    read: usize,
    piece: Vec<u8>,
}

impl<S> Pairs<S> {
    /// Wraps a connection after its upgrade to SPDY. Everything passes unless the connection carries forwarded ports.
    pub(super) fn new(stream: S, are_ports: bool) -> Pairs<S> {
        Pairs {
            stream,
            session: are_ports.then(Session::new),
            ready: vec![],
            read: 0,
            piece: vec![0; if are_ports { PIECE } else { 0 }],
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Pairs<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let Some(session) = &mut this.session else {
            return Pin::new(&mut this.stream).poll_read(cx, to);
        };
        while this.read == this.ready.len() {
            let mut piece = ReadBuf::new(&mut this.piece);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut piece))?;
            if piece.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            (this.ready, this.read) = (session.received(piece.filled(), Instant::now()), 0);
        }
        let rest = &this.ready[this.read..];
        let length = rest.len().min(to.remaining());
        to.put_slice(&rest[..length]);
        this.read += length;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Pairs<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let length = ready!(Pin::new(&mut this.stream).poll_write(cx, bytes))?;
        if let Some(session) = &mut this.session {
            session.sent(&bytes[..length], Instant::now());
        }
        Poll::Ready(Ok(length))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Header blocks as zlib compresses them with the dictionary: port 80, request ids 0 and 1, an error stream and a
    /// data stream each.
    const BLOCKS: [&str; 4] = [
        "78f9e3c6a7c202253a48f95b044aab4c16064092b308125b99a054cc68004e872545a989b9d0a2863515141100000000ffff",
        "224b2ba8944a04000000ffff",
        "2242a7210e4b01000000ffff",
        "224b2bd85200000000ffff",
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<char> = hex.chars().collect();
        let pairs = digits.chunks(2).map(|pair| pair.iter().collect::<String>());
        pairs
            .map(|pair| u8::from_str_radix(&pair, 16).expect("a byte"))
            .collect()
    }

    fn frame(first: u32, flags: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len()).expect("a length");
        let mut frame = first.to_be_bytes().to_vec();
        frame.extend(length.to_be_bytes());
        frame[4] = flags;
        frame.extend(body);
        frame
    }

    /// The frames of a client that opens two pairs of streams: 1 and 5 are error streams.
    fn opened() -> Vec<u8> {
        let mut all = vec![];
        for (n, block) in BLOCKS.iter().enumerate() {
            let id = u32::try_from(2 * n + 1).expect("a number");
            let body = [&id.to_be_bytes()[..], &[0; 6], &bytes(block)].concat();
            all.extend(frame(OPENS, 0, &body));
            all.extend(frame(id, 0, b"data of the client"));
        }
        all
    }

    /// The checksum is Adler-32; header blocks begin with it.
    #[test]
    fn the_dictionary_equals_that_of_spdy_3_1() {
        let (a, b) = dictionary().iter().fold((1_u32, 0), |(a, b), byte| {
            let a = (a + u32::from(*byte)) % 65_521;
            (a, (b + a) % 65_521)
        });
        assert_eq!(b << 16 | a, 0xe3c6_a7c2);
    }

    #[test]
    fn error_frames_about_resets_are_removed_and_others_are_forwarded() {
        let reset = b"error forwarding port 80 to pod x, uid : read: connection reset by peer";
        let pipe = b"error forwarding port 80 to pod x, uid : write: broken pipe\n";
        let refused = b"error forwarding port 80 to pod x, uid : connection refused";
        let passes = [
            frame(0x8003_0002, 0, b"a reply"),
            frame(5, 0, refused),
            // A program's own data.
            frame(3, 1, reset),
            frame(1, 1, b""),
            frame(7, 0, &vec![b'x'; EXAMINED + 1]),
        ];
        let all = [
            passes[0].clone(),
            frame(1, 0, reset),
            passes[1].clone(),
            passes[2].clone(),
            frame(1, 1, pipe),
            passes[4].clone(),
        ];
        for size in [1, 7, 100_000] {
            let (mut session, now) = (Session::new(), Instant::now());
            let opened = opened();
            opened
                .chunks(size)
                .for_each(|piece| session.sent(piece, now));
            let errors: Vec<u32> = session.errors.keys().copied().collect();
            assert_eq!(errors, [1, 5], "pieces of {size}");
            let data: Vec<u32> = session.data.values().copied().collect();
            assert_eq!(data, [3, 7], "pieces of {size}");
            let all = all.concat();
            let out: Vec<u8> = all
                .chunks(size)
                .flat_map(|piece| session.received(piece, now))
                .collect();
            assert!(out == passes.concat(), "pieces of {size}");
        }
    }

    /// If a connection is reset after one of two frames, the runtime never reads the other one, and the session would
    /// hang.
    #[test]
    fn a_reset_is_forwarded_while_the_runtime_may_have_buffered_data() {
        let report = frame(1, 0, b"read: connection reset by peer");
        let after = |pauses: &[u64]| {
            let (mut session, mut now) = (Session::new(), Instant::now());
            session.sent(&opened(), now);
            for pause in pauses {
                now += Duration::from_millis(*pause);
                session.sent(&frame(3, 0, b"more"), now);
            }
            session.received(&report, now + Duration::from_millis(1)) == report
        };
        assert!(!after(&[]), "one frame");
        assert!(after(&[0]), "two at once");
        assert!(!after(&[2000]), "the previous frame was written long ago");
        assert!(after(&[2000, 10]), "two at once, later");
    }

    proptest! {
        /// No bytes cause a panic, and the runtime's bytes pass when no error stream is known.
        #[test]
        fn any_bytes_are_passed_on(client in vec(any::<u8>(), 0..200), flips in vec((0_usize..400, any::<u8>()), 0..4), runtime in vec(any::<u8>(), 0..300)) {
            let mut session = Session::new();
            let now = Instant::now();
            session.sent(&client, now);
            let mut whole = [session.received(&runtime, now), session.from_runtime.begun.clone()].concat();
            prop_assert_eq!(&whole, &runtime);
            // Frames with a few wrong bytes.
            let mut session = Session::new();
            let mut frames = opened();
            for (at, byte) in flips {
                let at = at % frames.len();
                frames[at] ^= byte;
            }
            session.sent(&frames, now);
            whole = session.received(&runtime, now);
            prop_assert!(whole.len() <= runtime.len() + session.from_runtime.begun.len());
        }
    }
}
