//! A worker's inbox, the only input of a pod's worker. Sending never blocks. A message replaces a queued one that it
//! supersedes, so the length is bounded by the number of distinct subjects.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::asset::Asset;
use holdfast_core::lock::lock;
use holdfast_core::pod::worker::{Input, Key, Outcome};

/// A message in the inbox.
pub enum Message {
    /// An input for the worker.
    Input(Input),
    /// The result of an operation.
    Done(Report),
}

/// The result of an operation.
pub struct Report {
    /// The serial of this run: reports of cancelled runs are dropped.
    pub serial: u64,
    /// The key of the operation.
    pub key: Key,
    /// Its outcome.
    pub outcome: Outcome,
    /// The value that it produced for later operations.
    pub asset: Option<Asset>,
}

#[derive(Default)]
struct Shared {
    messages: Mutex<VecDeque<Message>>,
    arrived: Notify,
}

/// An inbox; clones share it.
#[derive(Clone, Default)]
pub struct Inbox(Arc<Shared>);

impl Inbox {
    fn messages(&self) -> MutexGuard<'_, VecDeque<Message>> {
        lock(&self.0.messages)
    }

    /// Adds an input, or replaces a queued input that it supersedes.
    pub fn send(&self, input: Input) {
        let mut messages = self.messages();
        let superseded = messages.iter_mut().find_map(|message| match message {
            Message::Input(old) if supersedes(&input, old) => Some(old),
            _ => None,
        });
        match superseded {
            Some(old) => *old = input,
            None => messages.push_back(Message::Input(input)),
        }
        drop(messages);
        self.0.arrived.notify_one();
    }

    /// Adds the result of an operation.
    pub fn report(&self, report: Report) {
        self.messages().push_back(Message::Done(report));
        self.0.arrived.notify_one();
    }

    /// Returns the next message, or a tick if none arrives by `wake_at`. Only the worker calls this.
    pub async fn next(&self, wake_at: Option<Instant>) -> Message {
        loop {
            if let Some(message) = self.messages().pop_front() {
                return message;
            }
            let due = async {
                match wake_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // The order is fixed, so that a simulated run replays exactly.
                biased;
                // `Notify` stores a permit, so an arrival before this wait is not missed.
                () = self.0.arrived.notified() => {}
                () = due => return Message::Input(Input::Tick),
            }
        }
    }
}

/// Whether `new` contains everything that `old` contains.
fn supersedes(new: &Input, old: &Input) -> bool {
    match (new, old) {
        // A removal is not revoked, even if the source lists a successor.
        (Input::Update(_), Input::Update(old)) => !old.removed,
        (
            Input::Probed { id, kind, .. },
            Input::Probed {
                id: before,
                kind: which,
                ..
            },
        ) => id == before && kind == which,
        // Events of one subject are ordered by kind; the highest contains the most.
        (Input::RuntimeEvent(new), Input::RuntimeEvent(old)) => {
            new.id == old.id && new.kind >= old.kind
        }
        (Input::Hint, Input::Hint)
        | (Input::VolumesChanged, Input::VolumesChanged)
        | (Input::DriversChanged, Input::DriversChanged)
        | (Input::Devices(_), Input::Devices(_))
        | (Input::ResourcesFreed, Input::ResourcesFreed)
        | (Input::Network(_), Input::Network(_))
        | (Input::RuntimeBack, Input::RuntimeBack)
        | (Input::Tick, Input::Tick) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_core::pod::observed::{EventKind, RuntimeEvent};
    use holdfast_core::pod::probe::Kind;
    use holdfast_core::pod::worker::Network;

    #[test]
    fn only_the_last_event_of_a_container_is_kept() {
        let inbox = Inbox::default();
        let happened = |id: &str, kind| {
            Input::RuntimeEvent(RuntimeEvent {
                pod: "u".into(),
                id: id.into(),
                kind,
            })
        };
        for _ in 0..1000 {
            inbox.send(happened("a", EventKind::Created));
            inbox.send(happened("b", EventKind::Created));
            inbox.send(happened("b", EventKind::Stopped));
        }
        // An event out of order replaces nothing.
        inbox.send(happened("b", EventKind::Started));
        let messages = inbox.messages();
        let kept = messages.iter().map(|message| match message {
            Message::Input(Input::RuntimeEvent(event)) => (event.id.as_str(), event.kind),
            _ => ("", EventKind::Deleted),
        });
        let kept: Vec<_> = kept.collect();
        assert!(kept.contains(&("b", EventKind::Stopped)), "{kept:?}");
        assert!(kept.len() <= 8, "{kept:?}");
    }

    fn names(inbox: &Inbox) -> Vec<&'static str> {
        let of = |message: &Message| match message {
            Message::Input(input) => input.name(),
            Message::Done(_) => "report",
        };
        inbox.messages().iter().map(of).collect()
    }

    #[test]
    fn equal_inputs_are_queued_once_and_no_other_is_lost() {
        let inbox = Inbox::default();
        let probed = |id: &str, result| Input::Probed {
            id: id.into(),
            kind: Kind::Readiness,
            result,
        };
        for _ in 0..1000 {
            inbox.send(Input::Hint);
            inbox.send(probed("a", true));
            inbox.send(probed("b", true));
            inbox.send(probed("a", false));
            inbox.send(Input::Network(Network::Ready));
        }
        assert_eq!(names(&inbox), ["hint", "probed", "probed", "network"]);
        let messages = inbox.messages();
        assert!(
            matches!(&messages[1], Message::Input(Input::Probed { id, result: false, .. }) if id == "a"),
            "the newest result is kept"
        );
    }
}
