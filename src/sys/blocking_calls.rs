//! Runs calls that may block in the kernel indefinitely, for instance on an unreachable
//! server or a hanging device. Each call runs in a separate thread, and callers wait with a
//! timeout. There is at most one call per key, so that a hanging object blocks no others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::failure::{HostError, doing};
use holdfast_core::lock::lock;

/// A pending call, as seen by its work.
#[derive(Debug)]
pub struct Call {
    since: Instant,
    doing: Mutex<String>,
    cancelled: AtomicBool,
}

impl Call {
    /// Sets a description of the current step, for messages about the delay.
    pub fn doing(&self, what: impl Into<String>) {
        *lock(&self.doing) = what.into();
    }

    /// Whether the result is no longer needed. The work must then undo what it has done.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn progress(&self) -> HostError {
        let seconds = self.since.elapsed().as_secs();
        HostError::under_way(match lock(&self.doing).as_str() {
            "" => format!("the kernel has not answered for {seconds}s"),
            what => format!("{what} has been running for {seconds}s; waiting for it"),
        })
    }
}

/// Runs calls and tracks pending ones by key.
#[derive(Clone, Default)]
pub struct BlockingCalls(Arc<Inner>);

#[derive(Default)]
struct Inner {
    pending: Mutex<HashMap<String, Arc<Call>>>,
    completed: Notify,
}

/// Frees the key when the call completes or panics.
struct Slot(BlockingCalls, String);

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.0.0.pending).remove(&self.1);
        self.0.0.completed.notify_waiters();
    }
}

impl BlockingCalls {
    /// Runs `work` and waits for at most `wait`. If a call with the same key is pending, returns
    /// its progress as the error and does not start another. After a timeout, `work` continues in
    /// the background and its result is dropped. [`BlockingCalls::wait_for_any`] waits for its completion.
    ///
    /// # Errors
    ///
    /// The error of `work`, or [`HostErrorKind::UnderWay`](super::failure::HostErrorKind) if a call is pending.
    pub async fn call<T: Send + 'static, E: From<HostError> + Send + 'static>(
        &self,
        key: &str,
        wait: Duration,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        self.call_with(key, wait, |_| work()).await
    }

    /// Like [`BlockingCalls::call`], for work that describes its current step or checks for cancellation.
    ///
    /// # Errors
    ///
    /// As [`BlockingCalls::call`].
    pub async fn call_with<T: Send + 'static, E: From<HostError> + Send + 'static>(
        &self,
        key: &str,
        wait: Duration,
        work: impl FnOnce(&Call) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let call = Arc::new(Call {
            since: Instant::now(),
            doing: Mutex::default(),
            cancelled: AtomicBool::new(false),
        });
        {
            let mut calls = lock(&self.0.pending);
            if let Some(earlier) = calls.get(key) {
                return Err(earlier.progress().into());
            }
            calls.insert(key.to_owned(), Arc::clone(&call));
        }
        let slot = Slot(self.clone(), key.to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let own = Arc::clone(&call);
        let thread = std::thread::Builder::new()
            .name("patient".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let result = work(&own);
                drop(slot);
                // The caller may have timed out.
                let _ = sender.send(result);
            });
        thread.map_err(doing("spawning a thread failed"))?;
        match tokio::time::timeout(wait, receiver).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(HostError::failed("the call stopped unexpectedly").into()),
            Err(_) => Err(call.progress().into()),
        }
    }

    /// Cancels all calls whose key begins with `prefix`, and waits for at most `wait` until they complete.
    ///
    /// # Errors
    ///
    /// The progress of a call that is still pending.
    pub async fn cancel(&self, prefix: &str, wait: Duration) -> Result<(), HostError> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let mut completed = std::pin::pin!(self.0.completed.notified());
            // From here on, no completion is missed.
            completed.as_mut().enable();
            let mut progress = None;
            for call in self.with_prefix(prefix) {
                call.cancelled.store(true, Ordering::Relaxed);
                progress = Some(call.progress());
            }
            let Some(progress) = progress else {
                return Ok(());
            };
            if tokio::time::timeout_at(deadline, completed).await.is_err() {
                return Err(progress);
            }
        }
    }

    /// Waits until one of the calls that are now pending and whose key
    /// begins with `prefix` completes. If none is pending, never returns.
    pub async fn wait_for_any(&self, prefix: &str) {
        let before = self.with_prefix(prefix);
        loop {
            let mut completed = std::pin::pin!(self.0.completed.notified());
            completed.as_mut().enable();
            let now = self.with_prefix(prefix);
            let has_ended = |call| !now.iter().any(|other| Arc::ptr_eq(call, other));
            if before.iter().any(has_ended) {
                return;
            }
            completed.await;
        }
    }

    /// The pending calls whose key begins with `prefix`.
    fn with_prefix(&self, prefix: &str) -> Vec<Arc<Call>> {
        let calls = lock(&self.0.pending);
        let of_prefix = calls.iter().filter(|(key, _)| key.starts_with(prefix));
        of_prefix.map(|(_, call)| Arc::clone(call)).collect()
    }

    /// The number of pending calls.
    #[must_use]
    pub fn pending(&self) -> usize {
        lock(&self.0.pending).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn disconnected(error: std::sync::mpsc::RecvError) -> HostError {
        HostError::failed(error.to_string())
    }

    #[tokio::test]
    async fn a_hanging_call_is_started_once_and_does_not_block_others() {
        let calls = BlockingCalls::default();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let hang = move || held.recv().map_err(disconnected);
        let done = |value: u32| move || Ok::<_, HostError>(value);
        let hangs = |e: &HostError| e.is_under_way() && e.message.contains("not answered");
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(60));
        let first = calls.call("a", short, hang).await;
        assert!(first.is_err_and(|e| hangs(&e)));
        let again = calls.call("a", short, done(1)).await;
        assert!(
            again.is_err_and(|e| hangs(&e)),
            "the call is not started twice"
        );
        assert_eq!(calls.call("b", long, done(7)).await, Ok(7));
        assert_eq!(calls.pending(), 1);
        let (mut ends, mut never) = (pin!(calls.wait_for_any("a")), pin!(calls.wait_for_any("b")));
        assert!(futures::poll!(&mut ends).is_pending() && futures::poll!(&mut never).is_pending());
        release.send(()).expect("it waits");
        ends.await;
        assert!(
            futures::poll!(&mut never).is_pending(),
            "no call was pending"
        );
        assert_eq!(calls.call("a", long, done(1)).await, Ok(1));
        let broken = || -> Result<(), HostError> { panic!("broken") };
        let broken = calls.call("c", long, broken).await;
        assert!(broken.is_err_and(|e| !e.is_under_way() && e.message.contains("unexpectedly")));
        while calls.pending() > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_timed_out_call_reports_its_step_and_can_be_awaited() {
        let calls = BlockingCalls::default();
        let (short, long) = (Duration::from_millis(500), Duration::from_secs(60));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (began, begun) = std::sync::mpsc::channel::<()>();
        let until_cancelled = move |call: &Call| {
            call.doing("mkfs of a disk");
            began.send(()).expect("the receiver is alive");
            while !call.is_cancelled() {
                std::thread::sleep(Duration::from_millis(5));
            }
            held.recv().map_err(disconnected)
        };
        let calling = calls.call_with("u/v", short, until_cancelled);
        // While a blocking thread of tokio runs, the paused clock does not
        // advance, so the call cannot time out before its thread has started.
        tokio::time::pause();
        let begun = tokio::task::spawn_blocking(move || begun.recv());
        let (given_up, begun) = tokio::join!(calling, begun);
        tokio::time::resume();
        begun.expect("waited for").expect("it has begun");
        assert!(given_up.is_err_and(|e| e.message.contains("mkfs of a disk has been running")));
        assert_eq!(calls.cancel("other/", long).await, Ok(()));
        let waiting = calls.cancel("u/", short).await;
        assert!(waiting.is_err_and(|e| e.message.contains("mkfs of a disk")));
        release.send(()).expect("it waits");
        assert_eq!(calls.cancel("u/", long).await, Ok(()));
        assert_eq!(calls.pending(), 0);
    }
}
