//! Whether the apiserver answers, for work that waits until it does again.

use tokio::sync::watch;

#[derive(Debug, Default, PartialEq, Eq)]
struct State {
    /// The last request had no answer.
    is_silent: bool,
    /// How often an answer followed silence.
    recoveries: u64,
}

/// Follows the outcome of every request of the agent; clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Answers(watch::Sender<State>);

impl Answers {
    /// Notes a request's outcome: the code of its answer. Without one, or with one of a proxy that does not reach the apiserver,
    /// the apiserver is silent.
    pub fn note(&self, code: Option<u16>) {
        let is_silent = matches!(code, None | Some(502..=504));
        self.0.send_if_modified(|state| {
            let was_silent = std::mem::replace(&mut state.is_silent, is_silent);
            let recovered = was_silent && !is_silent;
            state.recoveries += u64::from(recovered);
            recovered
        });
    }

    /// What waits for the next answer after silence.
    #[must_use]
    pub fn subscribe(&self) -> Recovery {
        Recovery(Some(self.0.subscribe()))
    }
}

/// Waits until the apiserver answers again.
#[derive(Debug)]
pub struct Recovery(Option<watch::Receiver<State>>);

impl Recovery {
    /// Of an API that does not report its answers.
    #[must_use]
    pub fn never() -> Recovery {
        Recovery(None)
    }

    /// Returns when the apiserver has begun to answer since the subscription or the last call. Cancel-safe.
    pub async fn next(&mut self) {
        // The sender lives as long as the connections.
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
    async fn the_first_answer_after_silence_is_reported_once() {
        let answers = Answers::default();
        let mut recovery = answers.subscribe();
        let mut recovered = async |codes: &[Option<u16>]| {
            codes.iter().for_each(|code| answers.note(*code));
            let soon = std::time::Duration::from_millis(1);
            tokio::time::timeout(soon, recovery.next()).await.is_ok()
        };
        assert!(
            !recovered(&[Some(200), Some(404)]).await,
            "it always answered"
        );
        assert!(!recovered(&[None, None, Some(503)]).await);
        assert!(recovered(&[Some(403)]).await, "a refusal is an answer");
        assert!(!recovered(&[Some(200)]).await);
        assert!(
            recovered(&[None, Some(200), None]).await,
            "also if it is silent again"
        );
    }
}
