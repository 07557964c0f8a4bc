//! The part of SPDY/3.1 that runtimes use for commands: opening streams and moving their data.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Flag of a stream's last frame.
pub(super) const FIN: u8 = 1;
/// Type of a frame that opens a stream.
pub(super) const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
/// Maximum size of an accepted frame. Runtimes write what they have read, a few pages at most.
const LARGEST: usize = 1 << 20;

/// A frame of the peer.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// Opens a stream, with a compressed header block.
    Open(u32, Vec<u8>),
    /// Data of a stream, and whether they are the stream's last.
    Data(u32, Vec<u8>, bool),
    /// A stream was aborted.
    Reset(u32),
    /// A ping, which must be answered with the same number.
    Ping(u32),
    /// The peer has closed the connection.
    End,
    /// Any other frame; needs no answer.
    Other,
}

/// Reads the peer's frames.
pub struct Reader<R>(pub R);

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads the next frame.
    pub async fn next(&mut self) -> io::Result<Frame> {
        let mut head = [0; 8];
        match self.0.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Frame::End),
            result => result?,
        };
        let length = usize::try_from(u32::from_be_bytes([0, head[5], head[6], head[7]]))
            .unwrap_or(usize::MAX);
        if length > LARGEST {
            return Err(io::Error::other(format!(
                "a frame of {length} bytes is too large"
            )));
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).await?;
        let first = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
        if first >> 31 == 0 {
            return Ok(Frame::Data(first, body, head[4] & FIN != 0));
        }
        let number = body
            .get(..4)
            .map_or(0, |n| u32::from_be_bytes([n[0], n[1], n[2], n[3]]));
        Ok(match u16::from_be_bytes([head[2], head[3]]) {
            SYN_STREAM => Frame::Open(number, body.get(10..).unwrap_or_default().to_vec()),
            RST_STREAM => Frame::Reset(number),
            PING => Frame::Ping(number),
            GOAWAY => Frame::End,
            _ => Frame::Other,
        })
    }
}

/// Writes our frames.
pub struct Writer<W> {
    to: W,
    streams: u32,
}

/// Encodes a header block. SPDY requires zlib compression; stored blocks satisfy it, and of the preset dictionary they
/// need only its checksum, once.
fn headers(pairs: &[(&str, &str)], first: bool) -> Vec<u8> {
    let mut plain = u32::try_from(pairs.len())
        .unwrap_or(0)
        .to_be_bytes()
        .to_vec();
    for text in pairs.iter().flat_map(|(name, value)| [name, value]) {
        plain.extend(u32::try_from(text.len()).unwrap_or(0).to_be_bytes());
        plain.extend(text.bytes());
    }
    let mut block = if first {
        vec![0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2]
    } else {
        vec![]
    };
    for stored in [plain.as_slice(), &[]] {
        // The empty block after it flushes the peer's decompressor.
        let length = u16::try_from(stored.len()).unwrap_or(u16::MAX);
        block.push(0);
        block.extend(length.to_le_bytes());
        block.extend((!length).to_le_bytes());
        block.extend(stored);
    }
    block
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    /// Writes to a connection that has just been upgraded.
    pub fn new(to: W) -> Writer<W> {
        Writer { to, streams: 0 }
    }

    async fn control(&mut self, kind: u16, body: &[u8]) -> io::Result<()> {
        let mut frame = vec![0x80, 3];
        frame.extend(kind.to_be_bytes());
        frame.extend(u32::try_from(body.len()).unwrap_or(0).to_be_bytes());
        frame.extend(body);
        self.to.write_all(&frame).await
    }

    /// Opens a stream; returns its number.
    pub async fn open(&mut self, pairs: &[(&str, &str)]) -> io::Result<u32> {
        let id = self.streams * 2 + 1;
        let mut body = id.to_be_bytes().to_vec();
        body.extend([0; 6]);
        body.extend(headers(pairs, self.streams == 0));
        self.streams += 1;
        self.control(SYN_STREAM, &body).await?;
        Ok(id)
    }

    /// Accepts a stream that the peer has opened.
    pub async fn reply(&mut self, stream: u32) -> io::Result<()> {
        let mut body = stream.to_be_bytes().to_vec();
        body.extend(headers(&[], self.streams == 0));
        self.streams += 1;
        self.control(SYN_REPLY, &body).await
    }

    /// Writes to a stream; `last` ends our side of it.
    pub async fn data(&mut self, stream: u32, data: &[u8], last: bool) -> io::Result<()> {
        let mut head = stream.to_be_bytes().to_vec();
        head.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
        head[4] = if last { FIN } else { 0 };
        self.to.write_all(&head).await?;
        self.to.write_all(data).await
    }

    /// Answers a ping.
    pub(crate) async fn pong(&mut self, number: u32) -> io::Result<()> {
        self.control(PING, &number.to_be_bytes()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        /// Any bytes yield frames, an end or an error, in no more steps than there are frames.
        #[test]
        fn any_bytes_are_read_to_their_end(bytes in vec(any::<u8>(), 0..300), short in vec(0_u8..12, 0..20)) {
            // Small numbers in the place of the length, so that some lengths fit.
            let mut stream = vec![];
            for (i, length) in short.iter().enumerate() {
                let head = bytes.get(i * 5..i * 5 + 5).unwrap_or(&[0x80, 3, 0, 6, 0]);
                stream.extend_from_slice(head);
                stream.extend_from_slice(&[0, 0, *length]);
                stream.extend(bytes.iter().take(usize::from(*length)));
            }
            stream.extend(&bytes);
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let frames = runtime.block_on(async {
                let mut reader = Reader(stream.as_slice());
                let mut frames = 0;
                while let Ok(frame) = reader.next().await {
                    frames += 1;
                    if frame == Frame::End {
                        break;
                    }
                }
                frames
            });
            prop_assert!(frames <= stream.len() / 8 + 1);
        }
    }

    #[test]
    fn header_blocks_are_stored_and_flushed() {
        let block = headers(&[("streamtype", "error")], true);
        assert_eq!(block[..6], [0x78, 0xbb, 0xe3, 0xc6, 0xa7, 0xc2]);
        let plain = b"\0\0\0\x01\0\0\0\x0astreamtype\0\0\0\x05error";
        assert_eq!(block[6..11], [0, 27, 0, 0xe4, 0xff]);
        assert_eq!(&block[11..38], plain);
        assert_eq!(block[38..], [0, 0, 0, 0xff, 0xff]);
        assert_eq!(
            headers(&[("streamtype", "error")], false),
            block[6..],
            "only the first block has the dictionary's id"
        );
    }

    #[tokio::test]
    async fn frames_are_written_and_read() {
        let mut bytes = vec![];
        let mut writer = Writer::new(&mut bytes);
        assert_eq!(
            (
                writer.open(&[("a", "b")]).await.expect("opened"),
                writer.open(&[]).await.expect("opened")
            ),
            (1, 3)
        );
        writer.data(3, b"hello", true).await.expect("written");
        writer.pong(2).await.expect("written");
        let mut reader = Reader(bytes.as_slice());
        let mut next = async || reader.next().await.expect("a frame");
        assert!(
            matches!(next().await, Frame::Open(1, block) if block == headers(&[("a", "b")], true))
        );
        assert!(matches!(next().await, Frame::Open(3, block) if block == headers(&[], false)));
        assert_eq!(next().await, Frame::Data(3, b"hello".to_vec(), true));
        assert_eq!((next().await, next().await), (Frame::Ping(2), Frame::End));
        let huge = [0_u8, 0, 0, 1, 0, 0xff, 0xff, 0xff];
        assert!(Reader(huge.as_slice()).next().await.is_err());
    }
}
