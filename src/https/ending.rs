//! Closes a client's connection that has left HTTP so that the bytes that were written arrive first.
//!
//! The kernel resets a connection that is closed while bytes of the peer are unread or still arrive, as the pings of
//! kubectl do. A reset discards every byte that the peer has not received (RFC 1122, 4.2.2.13). The side that finishes
//! first therefore shuts down its write side and keeps reading until the peer closes, too.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Bytes;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;

use holdfast_sys::unsent::SendQueue;

/// If a client neither receives nor sends anything for this long, its connection is closed with bytes undelivered.
pub(super) const STALL: Duration = Duration::from_secs(60);
/// Number of times that progress is checked within a limit.
const CHECKS: u32 = 8;
/// Number of bytes that are read at once.
const PIECE: usize = 32 << 10;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A client's connection after the response that leaves HTTP.
pub(super) struct Client {
    /// Bytes that hyper read beyond the request.
    early: Bytes,
    stream: Box<dyn Stream>,
}

impl Client {
    fn of(upgraded: Upgraded) -> (Client, Option<SendQueue>) {
        let client = |early, stream| Client { early, stream };
        let upgraded = match downcast::<TokioIo<TlsStream<TcpStream>>>(upgraded) {
            Ok(parts) => {
                let stream = parts.io.into_inner();
                let queue = SendQueue::of(stream.get_ref().0).ok();
                return (client(parts.read_buf, Box::new(stream)), queue);
            }
            Err(upgraded) => upgraded,
        };
        match downcast::<TokioIo<TcpStream>>(upgraded) {
            Ok(parts) => {
                let stream = parts.io.into_inner();
                let queue = SendQueue::of(&stream).ok();
                (client(parts.read_buf, Box::new(stream)), queue)
            }
            Err(upgraded) => (client(Bytes::new(), Box::new(TokioIo::new(upgraded))), None),
        }
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.early.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, to);
        }
        let length = self.early.len().min(to.remaining());
        to.put_slice(&self.early.split_to(length));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Returns the client's connection after the response that leaves HTTP, and its progress; `None` if the connection has
/// closed. TLS may still buffer a part of that response when hyper hands the connection over, so it is flushed here.
pub(super) async fn take_over(inner: OnUpgrade) -> Option<(Client, Progress)> {
    let (mut client, queue) = Client::of(inner.await.ok()?);
    client.flush().await.ok()?;
    let progress = Progress {
        queue,
        ..Progress::default()
    };
    Some((client, progress))
}

/// The progress of a client's connection.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Bytes that were moved in either direction.
    moved: AtomicU64,
    /// The connection's send queue. `None` if there is no socket, as in tests.
    queue: Option<SendQueue>,
}

impl Progress {
    /// Counts bytes that were received or sent.
    pub(super) fn add(&self, bytes: usize) {
        self.moved.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns when no byte was moved, and the client has received none, for `limit`.
    pub(super) async fn stall(&self, limit: Duration) {
        let now = || {
            (
                self.moved.load(Relaxed),
                self.queue.as_ref().and_then(SendQueue::bytes),
            )
        };
        let (mut last, mut since) = (now(), Instant::now());
        while since.elapsed() < limit {
            tokio::time::sleep(limit / CHECKS).await;
            let seen = now();
            if seen != last {
                (last, since) = (seen, Instant::now());
            }
        }
    }

    /// Runs `work` until it completes or the connection stalls for `limit`. Returns whether `work` completed.
    pub(super) async fn bounds(&self, limit: Duration, work: impl Future<Output = ()>) -> bool {
        tokio::select! {
            biased;
            () = work => true,
            () = self.stall(limit) => false,
        }
    }
}

/// Copies bytes until `from` ends or either side fails.
pub(super) async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    progress: &Progress,
) -> Copied {
    let mut piece = vec![0; PIECE];
    loop {
        let length = match from.read(&mut piece).await {
            Ok(0) => return Copied::Whole,
            Ok(length) => length,
            Err(error) => return Copied::ReadFailed(error),
        };
        progress.add(length);
        let written = async {
            to.write_all(&piece[..length]).await?;
            to.flush().await
        };
        if let Err(error) = written.await {
            return Copied::WriteFailed(error);
        }
        progress.add(length);
    }
}

/// The outcome of a copy.
#[derive(Debug)]
pub(super) enum Copied {
    /// The source ended, and all its bytes were written.
    Whole,
    /// The source failed.
    ReadFailed(io::Error),
    /// The destination failed.
    WriteFailed(io::Error),
}

/// Reads and discards until the peer closes.
pub(super) async fn discard(from: &mut (impl AsyncRead + Unpin), progress: &Progress) {
    let mut piece = vec![0; PIECE];
    while let Ok(length @ 1..) = from.read(&mut piece).await {
        progress.add(length);
    }
}
