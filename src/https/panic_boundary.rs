//! A boundary for panics: a panic inside it fails the request and not the process.
//!
//! Elsewhere a panic aborts the process ([`abort_on_panic`]), because a task that silently stopped would be worse
//! than a restart. Release builds unwind on panics, so that a boundary can catch them.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

thread_local! {
    /// Number of boundaries around the code that this thread runs.
    static BOUNDARY_DEPTH: Cell<u32> = const { Cell::new(0) };
}

static PANICS: AtomicU64 = AtomicU64::new(0);

/// The work panicked; the log has the panic with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an internal error occurred; the server's log has it as panic {number}")]
pub struct Panicked {
    /// Number of the panic in this process, counted from 1.
    pub number: u64,
}

/// From now on a panic outside a boundary aborts the process, after the installed hook has logged it.
pub fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        if BOUNDARY_DEPTH.get() == 0 {
            std::process::abort();
        }
    }));
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
        .unwrap_or("a payload that is not text")
}

/// Runs `work`. If it panics, its state is dropped, and the panic is logged with a number.
pub async fn guard<F: Future>(work: F) -> Result<F::Output, Panicked> {
    Guarded(Box::pin(work)).await
}

struct Guarded<F>(Pin<Box<F>>);

impl<F: Future> Future for Guarded<F> {
    type Output = Result<F::Output, Panicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        BOUNDARY_DEPTH.set(BOUNDARY_DEPTH.get() + 1);
        let polled = catch_unwind(AssertUnwindSafe(|| self.0.as_mut().poll(cx)));
        BOUNDARY_DEPTH.set(BOUNDARY_DEPTH.get() - 1);
        match polled {
            Ok(polled) => polled.map(Ok),
            Err(payload) => {
                let number = PANICS.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::error!(number, panic = panic_text(&*payload), "a request panicked");
                Poll::Ready(Err(Panicked { number }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_fails_only_the_guarded_future() {
        assert_eq!(guard(async { 7 }).await, Ok(7));
        let first = guard(async {
            tokio::task::yield_now().await;
            assert_eq!(BOUNDARY_DEPTH.get(), 1);
            panic!("on purpose")
        });
        let first: Result<(), Panicked> = first.await;
        let number = first.expect_err("it panicked").number;
        let second: Result<(), Panicked> = guard(async { panic!("again") }).await;
        assert!(second.expect_err("it panicked").number > number);
        assert_eq!(BOUNDARY_DEPTH.get(), 0);
    }
}
