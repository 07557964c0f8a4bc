//! A worker's inbox: the one place where everything that can happen to a pod arrives. Sending never
//! waits. What says the same twice lies in it once, so it is bounded by what there is to say.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::sync::Asset;
use crate::core::lock::lock;
use crate::core::pod::worker::{Input, Key, Outcome};

/// What lies in an inbox.
pub enum Message {
    /// Something has happened.
    Input(Input),
    /// An operation has ended.
    Done(Report),
}

/// How an operation ended.
pub struct Report {
    /// Which beginning of it: one that was cancelled reports to nobody.
    pub serial: u64,
    /// What it was about.
    pub key: Key,
    /// What came of it.
    pub outcome: Outcome,
    /// What it made for later operations.
    pub asset: Option<Asset>,
}

#[derive(Default)]
struct Shared {
    messages: Mutex<VecDeque<Message>>,
    arrived: Notify,
}

/// An inbox; clones are the same one.
#[derive(Clone, Default)]
pub struct Inbox(Arc<Shared>);

impl Inbox {
    fn messages(&self) -> MutexGuard<'_, VecDeque<Message>> {
        lock(&self.0.messages)
    }

    /// Something has happened. An older input that this one supersedes is replaced.
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

    /// An operation has ended.
    pub fn report(&self, report: Report) {
        self.messages().push_back(Message::Done(report));
        self.0.arrived.notify_one();
    }

    /// The next message; at `wake_at` a tick if none has come. Only the worker takes from its inbox.
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
                // In this order, so that a simulated run replays exactly.
                biased;
                // A permit that is stored makes this return at once: no arrival is missed.
                () = self.0.arrived.notified() => {}
                () = due => return Message::Input(Input::Tick),
            }
        }
    }
}

/// Whether `new` says all that `old` said.
fn supersedes(new: &Input, old: &Input) -> bool {
    match (new, old) {
        // That a pod was removed is not taken back (its source may list a successor).
        (Input::Update(_), Input::Update(old)) => !old.removed,
        (
            Input::Probed { id, kind, .. },
            Input::Probed {
                id: before,
                kind: which,
                ..
            },
        ) => id == before && kind == which,
        // What happens to one thing happens in this order, and the last says most.
        (Input::Happened(new), Input::Happened(old)) => new.id == old.id && new.kind >= old.kind,
        (Input::Hint, Input::Hint)
        | (Input::VolumesChanged, Input::VolumesChanged)
        | (Input::DriversChanged, Input::DriversChanged)
        | (Input::Devices(_), Input::Devices(_))
        | (Input::RoomFreed, Input::RoomFreed)
        | (Input::Network(_), Input::Network(_))
        | (Input::RuntimeBack, Input::RuntimeBack)
        | (Input::Tick, Input::Tick) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::pod::observed::{EventKind, RuntimeEvent};
    use crate::core::pod::probe::Kind;
    use crate::core::pod::worker::Network;

    #[test]
    fn of_events_about_one_container_the_last_is_kept() {
        let inbox = Inbox::default();
        let happened = |id: &str, kind| {
            Input::Happened(RuntimeEvent {
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
        // What comes out of order takes nothing away.
        inbox.send(happened("b", EventKind::Started));
        let messages = inbox.messages();
        let kept = messages.iter().map(|message| match message {
            Message::Input(Input::Happened(event)) => (event.id.as_str(), event.kind),
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
    fn what_says_the_same_lies_there_once_and_nothing_else_is_lost() {
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
            "the newest result counts"
        );
    }
}
