//! Tracks whether the apiserver answers, so that blocked work resumes as soon as it does.

use tokio::sync::watch;

#[derive(Debug, Default, PartialEq, Eq)]
struct State {
    /// Whether the last request got no answer.
    is_silent: bool,
    /// Number of times that the apiserver answered after silence.
    recoveries: u64,
}

/// Records the outcome of every request of the agent. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct Answers(watch::Sender<State>);

impl Answers {
    /// Records the outcome of a request; `code` is the HTTP status of its answer. The apiserver counts as silent if
    /// there is no answer, or if a proxy answers that it cannot reach the apiserver (502 to 504).
    pub fn record(&self, code: Option<u16>) {
        let is_silent = matches!(code, None | Some(502..=504));
        self.0.send_if_modified(|state| {
            let was_silent = std::mem::replace(&mut state.is_silent, is_silent);
            let recovered = was_silent && !is_silent;
            state.recoveries += u64::from(recovered);
            recovered
        });
    }

    /// Subscribes to the next answer after silence.
    #[must_use]
    pub fn subscribe(&self) -> Recovery {
        Recovery(Some(self.0.subscribe()))
    }
}

/// Waits until the apiserver answers again.
#[derive(Debug)]
pub struct Recovery(Option<watch::Receiver<State>>);

impl Recovery {
    /// Never completes; for an API that does not record its answers.
    #[must_use]
    pub fn never() -> Recovery {
        Recovery(None)
    }

    /// Waits until the apiserver answers again after silence. A recovery since the subscription or the last call
    /// counts. Cancel-safe.
    pub async fn next(&mut self) {
        // If the sender was dropped, the connections are closed and no recovery can follow.
        if let Some(changes) = &mut self.0
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_response_after_an_outage_is_reported_once() {
        let answers = Answers::default();
        let mut recovery = answers.subscribe();
        let mut recovered = async |codes: &[Option<u16>]| {
            codes.iter().for_each(|code| answers.record(*code));
            let soon = std::time::Duration::from_millis(1);
            tokio::time::timeout(soon, recovery.next()).await.is_ok()
        };
        assert!(
            !recovered(&[Some(200), Some(404)]).await,
            "no outage, nothing to report"
        );
        assert!(!recovered(&[None, None, Some(503)]).await);
        assert!(recovered(&[Some(403)]).await, "a rejection is a response");
        assert!(!recovered(&[Some(200)]).await);
        assert!(
            recovered(&[None, Some(200), None]).await,
            "also if the apiserver fails to respond again"
        );
    }
}
