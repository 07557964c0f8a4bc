//! Sends large bodies in pieces, and closes the connection of a client that takes no piece for a while. Otherwise the
//! unread part would stay in memory for as long as the client likes.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::sync::oneshot;

use super::{Body, BoxError, ConnectionSlot, full};

/// The size of a piece: how much of a body is taken at a time, and the least progress that counts.
const PIECE: usize = 64 << 10;

/// Bytes, with a signal that they have left memory.
struct Watched {
    bytes: Bytes,
    _dropped: oneshot::Sender<()>,
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A body in pieces.
struct Pieces {
    rest: Bytes,
    taken: Arc<AtomicU64>,
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let size = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(size);
        self.taken.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// Returns a body whose connection is closed when the client takes nothing of it for `timeout`. A body of one piece is
/// sent without this limit, because it fits into the kernel's buffers.
#[must_use]
pub fn paced(bytes: Bytes, slot: Option<&ConnectionSlot>, timeout: Duration) -> Body {
    let Some(slot) = slot.filter(|_| bytes.len() > PIECE).cloned() else {
        return full(bytes);
    };
    let (sign, dropped) = oneshot::channel();
    let taken = Arc::new(AtomicU64::new(0));
    let rest = Bytes::from_owner(Watched {
        bytes,
        _dropped: sign,
    });
    tokio::spawn(watch(dropped, Arc::clone(&taken), slot, timeout));
    Pieces { rest, taken }.boxed_unsync()
}

/// Closes a connection when nothing was taken for `timeout`; returns when the whole body is sent.
async fn watch(
    mut dropped: oneshot::Receiver<()>,
    taken: Arc<AtomicU64>,
    slot: ConnectionSlot,
    timeout: Duration,
) {
    let mut before = taken.load(Ordering::Relaxed);
    // The receiver returns an error when the bytes are dropped: nothing is ever sent.
    while tokio::time::timeout(timeout, &mut dropped).await.is_err() {
        let now = taken.load(Ordering::Relaxed);
        if now == before {
            tracing::debug!("a client stopped reading a response; closing its connection");
            slot.close();
            return;
        }
        before = now;
    }
}
