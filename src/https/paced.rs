//! Large bodies are sent in pieces, and a client that takes none for a while loses its connection: what it does not read
//! would stay in memory as long as it likes.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use hyper::body::{Bytes, Frame, SizeHint};
use tokio::sync::oneshot;

use super::{Body, BoxError, Place, full};

/// The size of a piece: what is taken of a body at a time, and what counts as progress.
const PIECE: usize = 64 << 10;

/// Bytes, and a sign that they are no longer in memory.
struct Watched {
    bytes: Bytes,
    _gone: oneshot::Sender<()>,
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

/// A body whose connection is closed when the client takes nothing of it for `patience`. A body of one piece is sent as it
/// is: the kernel's buffers take it.
#[must_use]
pub fn paced(bytes: Bytes, place: Option<&Place>, patience: Duration) -> Body {
    let Some(place) = place.filter(|_| bytes.len() > PIECE).cloned() else {
        return full(bytes);
    };
    let (sign, gone) = oneshot::channel();
    let taken = Arc::new(AtomicU64::new(0));
    let rest = Bytes::from_owner(Watched { bytes, _gone: sign });
    tokio::spawn(watch(gone, Arc::clone(&taken), place, patience));
    Pieces { rest, taken }.boxed_unsync()
}

/// Closes a connection when nothing was taken for `patience`; ends when all of the body has gone.
async fn watch(
    mut gone: oneshot::Receiver<()>,
    taken: Arc<AtomicU64>,
    place: Place,
    patience: Duration,
) {
    let mut before = taken.load(Ordering::Relaxed);
    // An answer is an error: nothing is ever sent, the sender is dropped with the bytes.
    while tokio::time::timeout(patience, &mut gone).await.is_err() {
        let now = taken.load(Ordering::Relaxed);
        if now == before {
            tracing::debug!("a client has stopped reading an answer; its connection is closed");
            place.close();
            return;
        }
        before = now;
    }
}
