//! Calls that the kernel may never answer: a server behind a mount is gone, a device hangs. Each runs in a thread
//! of its own and is waited for only so long, and never made twice at once: what hangs holds up nobody else.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Calls under way, by key.
#[derive(Clone, Default)]
pub struct Patient(Arc<Mutex<HashMap<String, Instant>>>);

/// Frees the key when the call has ended, however it ended.
struct Slot(Patient, String);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.1);
    }
}

impl Patient {
    /// Does `work` and waits for it, at most so long. If an earlier call under the same key is still under way,
    /// that is the answer, and nothing is begun. What is given up goes on; its result is lost.
    pub async fn call<T: Send + 'static>(
        &self,
        key: &str,
        wait: Duration,
        work: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        {
            let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(since) = calls.get(key) {
                return Err(format!(
                    "the kernel has not answered for {}s",
                    since.elapsed().as_secs()
                ));
            }
            calls.insert(key.to_owned(), Instant::now());
        }
        let slot = Slot(self.clone(), key.to_owned());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("patient".into())
            .stack_size(256 << 10)
            .spawn(move || {
                let result = work();
                drop(slot);
                // Whoever asked may have given up.
                let _ = sender.send(result);
            });
        thread.map_err(|e| format!("no thread can be made: {e}"))?;
        match tokio::time::timeout(wait, receiver).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err("the call ended unexpectedly".into()),
            Err(_) => Err(format!(
                "the kernel has not answered for {}s",
                wait.as_secs()
            )),
        }
    }

    /// How many calls are under way.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_hangs_is_made_once_and_holds_up_no_other() {
        let patient = Patient::default();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let hang = move || held.recv().map_err(|e| e.to_string());
        let short = Duration::from_millis(50);
        assert!(
            patient
                .call("a", short, hang)
                .await
                .is_err_and(|e| e.contains("not answered"))
        );
        let again = patient.call("a", short, || Ok(())).await;
        assert!(
            again.is_err_and(|e| e.contains("not answered")),
            "it is not begun twice"
        );
        assert_eq!(patient.call("b", short, || Ok(7)).await, Ok(7));
        assert_eq!(patient.under_way(), 1);
        release.send(()).expect("it waits");
        while patient.under_way() > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(patient.call("a", short, || Ok(1)).await, Ok(1));
        assert!(
            patient
                .call("c", Duration::from_secs(60), || -> Result<(), String> {
                    panic!("broken")
                })
                .await
                .is_err_and(|e| e.contains("unexpectedly"))
        );
        while patient.under_way() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
