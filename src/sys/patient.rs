//! Calls that the kernel may never answer: a server behind a mount is gone, a device hangs. Each runs in a thread
//! of its own and is waited for only so long, and never made twice at once: what hangs holds up nobody else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::failure::{HostError, doing};
use crate::core::lock::lock;

/// One call under way, as the work sees it.
#[derive(Debug)]
pub struct Call {
    since: Instant,
    doing: Mutex<String>,
    cancelled: AtomicBool,
}

impl Call {
    /// Says what is being done, for whoever asks why it takes so long.
    pub fn doing(&self, what: impl Into<String>) {
        *lock(&self.doing) = what.into();
    }

    /// Whether nobody wants the result any more. What was done so far has to be undone then.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn progress(&self) -> HostError {
        let seconds = self.since.elapsed().as_secs();
        HostError::under_way(match lock(&self.doing).as_str() {
            "" => format!("the kernel has not answered for {seconds}s"),
            what => format!("{what} has been running for {seconds}s; it is waited for"),
        })
    }
}

/// Calls under way, by key.
#[derive(Clone, Default)]
pub struct Patient(Arc<Calls>);

#[derive(Default)]
struct Calls {
    under_way: Mutex<HashMap<String, Arc<Call>>>,
    ended: Notify,
}

/// Frees the key when the call has ended, however it ended.
struct Slot(Patient, String);

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.0.0.under_way).remove(&self.1);
        self.0.0.ended.notify_waiters();
    }
}

impl Patient {
    /// Does `work` and waits for it, at most so long. If an earlier call under the same key is still under way,
    /// that is the answer, and nothing is begun. What is given up goes on; its result is lost, and its end is what
    /// [`Patient::one_ends`] waits for.
    ///
    /// # Errors
    ///
    /// What `work` says; [`HostErrorKind::UnderWay`](super::failure::HostErrorKind) where it has not ended.
    pub async fn call<T: Send + 'static, E: From<HostError> + Send + 'static>(
        &self,
        key: &str,
        wait: Duration,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        self.call_with(key, wait, |_| work()).await
    }

    /// The same for work that says what it is doing, or that looks at whether it is still wanted.
    ///
    /// # Errors
    ///
    /// As [`Patient::call`].
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
            let mut calls = lock(&self.0.under_way);
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
                // Whoever asked may have given up.
                let _ = sender.send(result);
            });
        thread.map_err(doing("no thread can be made"))?;
        match tokio::time::timeout(wait, receiver).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(HostError::failed("the call ended unexpectedly").into()),
            Err(_) => Err(call.progress().into()),
        }
    }

    /// Tells all calls whose key begins with `prefix` that nobody wants their results, and waits until they have
    /// ended, at most so long. The error says what is still under way.
    ///
    /// # Errors
    ///
    /// One of them has not ended.
    pub async fn cancel(&self, prefix: &str, wait: Duration) -> Result<(), HostError> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let mut ended = std::pin::pin!(self.0.ended.notified());
            // From here on no end is missed.
            ended.as_mut().enable();
            let mut progress = None;
            for call in self.beginning(prefix) {
                call.cancelled.store(true, Ordering::Relaxed);
                progress = Some(call.progress());
            }
            let Some(progress) = progress else {
                return Ok(());
            };
            if tokio::time::timeout_at(deadline, ended).await.is_err() {
                return Err(progress);
            }
        }
    }

    /// Waits until one of the calls whose key begins with `prefix`, and that are under way now, has ended. Where none is under
    /// way, it waits for ever.
    pub async fn one_ends(&self, prefix: &str) {
        let before = self.beginning(prefix);
        loop {
            let mut ended = std::pin::pin!(self.0.ended.notified());
            ended.as_mut().enable();
            let now = self.beginning(prefix);
            let has_ended = |call| !now.iter().any(|other| Arc::ptr_eq(call, other));
            if before.iter().any(has_ended) {
                return;
            }
            ended.await;
        }
    }

    /// The calls under way whose key begins with `prefix`.
    fn beginning(&self, prefix: &str) -> Vec<Arc<Call>> {
        let calls = lock(&self.0.under_way);
        let of_prefix = calls.iter().filter(|(key, _)| key.starts_with(prefix));
        of_prefix.map(|(_, call)| Arc::clone(call)).collect()
    }

    /// How many calls are under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        lock(&self.0.under_way).len()
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
    async fn what_hangs_is_made_once_and_holds_up_no_other() {
        let patient = Patient::default();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let hang = move || held.recv().map_err(disconnected);
        let done = |value: u32| move || Ok::<_, HostError>(value);
        let hangs = |e: &HostError| e.is_under_way() && e.message.contains("not answered");
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(60));
        let first = patient.call("a", short, hang).await;
        assert!(first.is_err_and(|e| hangs(&e)));
        let again = patient.call("a", short, done(1)).await;
        assert!(again.is_err_and(|e| hangs(&e)), "it is not begun twice");
        assert_eq!(patient.call("b", long, done(7)).await, Ok(7));
        assert_eq!(patient.under_way(), 1);
        let (mut ends, mut never) = (pin!(patient.one_ends("a")), pin!(patient.one_ends("b")));
        assert!(futures::poll!(&mut ends).is_pending() && futures::poll!(&mut never).is_pending());
        release.send(()).expect("it waits");
        ends.await;
        assert!(
            futures::poll!(&mut never).is_pending(),
            "none was under way"
        );
        assert_eq!(patient.call("a", long, done(1)).await, Ok(1));
        let broken = || -> Result<(), HostError> { panic!("broken") };
        let broken = patient.call("c", long, broken).await;
        assert!(broken.is_err_and(|e| !e.is_under_way() && e.message.contains("unexpectedly")));
        while patient.under_way() > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_was_given_up_is_told_and_waited_for() {
        let patient = Patient::default();
        let (short, long) = (Duration::from_millis(500), Duration::from_secs(60));
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (began, begun) = std::sync::mpsc::channel::<()>();
        let until_cancelled = move |call: &Call| {
            call.doing("mkfs of a disk");
            began.send(()).expect("it is waited for");
            while !call.is_cancelled() {
                std::thread::sleep(Duration::from_millis(5));
            }
            held.recv().map_err(disconnected)
        };
        let calling = patient.call_with("u/v", short, until_cancelled);
        // While a thread of tokio's waits, the clock stands: it is not given up before its thread has begun.
        tokio::time::pause();
        let begun = tokio::task::spawn_blocking(move || begun.recv());
        let (given_up, begun) = tokio::join!(calling, begun);
        tokio::time::resume();
        begun.expect("waited for").expect("it has begun");
        assert!(given_up.is_err_and(|e| e.message.contains("mkfs of a disk has been running")));
        assert_eq!(patient.cancel("other/", long).await, Ok(()));
        let waiting = patient.cancel("u/", short).await;
        assert!(waiting.is_err_and(|e| e.message.contains("mkfs of a disk")));
        release.send(()).expect("it waits");
        assert_eq!(patient.cancel("u/", long).await, Ok(()));
        assert_eq!(patient.under_way(), 0);
    }
}
