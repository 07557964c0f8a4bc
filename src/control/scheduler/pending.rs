//! The pods that need a node. Pure: the time is an argument.
//!
//! An unschedulable pod waits for a change that may let it fit, or that changes why it does not fit: upstream's queueing
//! hints (`pkg/scheduler/backend/queue/scheduling_queue.go`, KEP-4247). It costs nothing while nothing changes.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use tokio::time::Instant;

use holdfast_kubeapi::cache::Key;

/// Minimum time between evaluations of a pod, even if the cluster has changed. It limits the work for many pending pods to
/// one evaluation per second.
const MIN_RETRY: Duration = Duration::from_secs(1);

/// Maximum time between evaluations, in case that a hint is missing (upstream's `podMaxInUnschedulablePodsDuration`).
const MAX_WAIT: Duration = Duration::from_secs(300);

/// A change of the cluster that pending pods may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// A node was added or deleted, or its labels, taints or capacity have changed.
    Nodes,
    /// Resources of a node became free.
    Resources,
    /// A claim, volume or class has changed.
    Storage,
}

/// The changes that a pod waits for, in addition to those of nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hints {
    /// Some node lacks free resources.
    pub resources: bool,
    /// The pod has claims.
    pub storage: bool,
}

impl Hints {
    fn has(self, hint: Hint) -> bool {
        match hint {
            Hint::Nodes => true,
            Hint::Resources => self.resources,
            Hint::Storage => self.storage,
        }
    }
}

/// The order of evaluation: by descending priority, then by age and name.
type Rank = (Reverse<i32>, Option<Timestamp>, String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// To be evaluated.
    Ready,
    /// Waits until this time, or for a change.
    Waiting { due: Instant, hints: Hints },
    /// Being bound.
    Assumed,
}

#[derive(Debug)]
struct Entry {
    pod: Arc<Pod>,
    place: Place,
    /// When the pod was last evaluated, and the message of its refusal.
    refused: Option<(Instant, String)>,
}

/// The pods that need a node.
#[derive(Debug, Default)]
pub struct Pending {
    pods: HashMap<Key, Entry>,
    ready: BTreeSet<(Rank, Key)>,
    /// When waiting pods are due.
    timers: BTreeSet<(Instant, Key)>,
    /// The pods that wait for a hint, by index of [`set_of`].
    parked: [BTreeSet<Key>; 4],
}

fn set_of(hints: Hints) -> usize {
    usize::from(hints.resources) + 2 * usize::from(hints.storage)
}

fn rank(pod: &Pod) -> Rank {
    let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
    let created = pod.metadata.creation_timestamp.as_ref().map(|t| t.0);
    (Reverse(priority), created, pod.name_any())
}

impl Pending {
    /// Records a pod that needs a node, or that a key has no such pod.
    pub fn observe(&mut self, key: &Key, pod: Option<&Arc<Pod>>) {
        let known = self.pods.get_mut(key);
        let (Some(pod), Some(entry)) = (pod, known) else {
            self.remove(key);
            if let Some(pod) = pod {
                self.insert(key, pod);
            }
            return;
        };
        if entry.pod.metadata.uid != pod.metadata.uid {
            self.remove(key);
            self.insert(key, pod);
            return;
        }
        let spec_changed = entry.pod.metadata.generation != pod.metadata.generation;
        let (old, place) = (rank(&entry.pod), entry.place);
        entry.pod = Arc::clone(pod);
        match place {
            Place::Ready => {
                self.ready.remove(&(old, key.clone()));
                self.ready.insert((rank(pod), key.clone()));
            }
            // A changed spec is evaluated immediately.
            Place::Waiting { .. } if spec_changed => self.make_ready(key),
            Place::Waiting { .. } | Place::Assumed => {}
        }
    }

    fn insert(&mut self, key: &Key, pod: &Arc<Pod>) {
        let entry = Entry {
            pod: Arc::clone(pod),
            place: Place::Ready,
            refused: None,
        };
        self.ready.insert((rank(pod), key.clone()));
        self.pods.insert(key.clone(), entry);
    }

    fn remove(&mut self, key: &Key) {
        self.leave(key);
        self.pods.remove(key);
    }

    /// Removes a pod from the set of its place.
    fn leave(&mut self, key: &Key) {
        match self.pods.get(key).map(|entry| (entry.place, &entry.pod)) {
            Some((Place::Ready, pod)) => {
                self.ready.remove(&(rank(pod), key.clone()));
            }
            Some((Place::Waiting { due, hints }, _)) => {
                self.timers.remove(&(due, key.clone()));
                self.parked[set_of(hints)].remove(key);
            }
            Some((Place::Assumed, _)) | None => {}
        }
    }

    fn make_ready(&mut self, key: &Key) {
        self.leave(key);
        if let Some(entry) = self.pods.get_mut(key) {
            entry.place = Place::Ready;
            self.ready.insert((rank(&entry.pod), key.clone()));
        }
    }

    fn wait(&mut self, key: &Key, due: Instant, hints: Option<Hints>) {
        self.leave(key);
        if let Some(entry) = self.pods.get_mut(key) {
            entry.place = Place::Waiting {
                due,
                hints: hints.unwrap_or_default(),
            };
            self.timers.insert((due, key.clone()));
            if let Some(hints) = hints {
                self.parked[set_of(hints)].insert(key.clone());
            }
        }
    }

    /// The pods to evaluate now, in the order of their rank.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<(Key, Arc<Pod>)> {
        while let Some((due, key)) = self.timers.first().cloned()
            && due <= now
        {
            self.make_ready(&key);
        }
        let due = std::mem::take(&mut self.ready).into_iter();
        let with_pod = |(_, key): (Rank, Key)| {
            let pod = Arc::clone(&self.pods.get(&key)?.pod);
            Some((key, pod))
        };
        due.filter_map(with_pod).collect()
    }

    /// Records that a pod is being bound.
    pub fn assume(&mut self, key: &Key) {
        self.leave(key);
        if let Some(entry) = self.pods.get_mut(key) {
            entry.place = Place::Assumed;
            entry.refused = None;
        }
    }

    /// Whether a pod is being bound.
    #[must_use]
    pub fn is_assumed(&self, key: &Key) -> bool {
        let entry = self.pods.get(key);
        entry.is_some_and(|entry| entry.place == Place::Assumed)
    }

    /// Whether the pod with this uid needs a node.
    #[must_use]
    pub fn has(&self, key: &Key, uid: Option<&str>) -> bool {
        let entry = self.pods.get(key);
        entry.is_some_and(|entry| entry.pod.metadata.uid.as_deref() == uid)
    }

    /// Evaluates a pod again soon: a write for it failed.
    pub fn retry(&mut self, key: &Key, now: Instant) {
        self.wait(key, now + MIN_RETRY, None);
    }

    /// Waits until the claims of a pod are bound.
    pub(crate) fn wait_for_storage(&mut self, key: &Key, now: Instant) {
        let hints = Hints {
            resources: false,
            storage: true,
        };
        self.wait(key, now + MAX_WAIT, Some(hints));
        if let Some(entry) = self.pods.get_mut(key) {
            // An evaluation follows as soon as the claims change.
            entry.refused = None;
        }
    }

    /// Records that a pod fits on no node. Returns whether the message is new.
    pub fn refuse(&mut self, key: &Key, message: &str, hints: Hints, now: Instant) -> bool {
        self.wait(key, now + MAX_WAIT, Some(hints));
        let Some(entry) = self.pods.get_mut(key) else {
            return false;
        };
        let before = entry.refused.replace((now, message.to_owned()));
        before.is_none_or(|(_, before)| before != message)
    }

    /// Makes the pods due that wait for a change.
    pub fn hint(&mut self, hint: Hint, now: Instant) {
        for resources in [false, true] {
            for storage in [false, true] {
                let hints = Hints { resources, storage };
                if !hints.has(hint) {
                    continue;
                }
                for key in std::mem::take(&mut self.parked[set_of(hints)]) {
                    let refused = self.pods.get(&key).and_then(|entry| entry.refused.as_ref());
                    let due = refused.map_or(now, |(tried, _)| now.max(*tried + MIN_RETRY));
                    self.wait(&key, due, None);
                }
            }
        }
    }

    /// When the next waiting pod is due.
    #[must_use]
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, generation: i64, priority: i32) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": uid, "uid": uid, "generation": generation}, "spec": {"priority": priority, "containers": []}});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    fn key(name: &str) -> Key {
        ("n".to_owned(), name.to_owned())
    }

    fn names(due: Vec<(Key, Arc<Pod>)>) -> Vec<String> {
        due.into_iter().map(|((_, name), _)| name).collect()
    }

    #[test]
    fn pods_are_evaluated_by_priority_and_once() {
        let (mut pending, now) = (Pending::default(), Instant::now());
        for (name, priority) in [("b", 0), ("a", 0), ("c", 9)] {
            pending.observe(&key(name), Some(&pod(name, 1, priority)));
        }
        pending.observe(&key("a"), Some(&pod("a", 1, 3)));
        assert_eq!(names(pending.take_due(now)), ["c", "a", "b"]);
        for name in ["a", "b", "c"] {
            pending.assume(&key(name));
            pending.observe(&key(name), Some(&pod(name, 2, 0)));
        }
        assert_eq!(names(pending.take_due(now)), [""; 0], "being bound");
        pending.retry(&key("a"), now);
        assert_eq!(names(pending.take_due(now + MIN_RETRY)), ["a"]);
        pending.observe(&key("b"), Some(&pod("another", 1, 0)));
        assert_eq!(
            names(pending.take_due(now)),
            ["b"],
            "a new pod of this name"
        );
        for name in ["a", "b", "c"] {
            pending.observe(&key(name), None);
        }
        assert!(pending.pods.is_empty() && pending.timers.is_empty());
    }

    #[test]
    fn an_unschedulable_pod_is_evaluated_when_a_change_may_help() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let (resources, storage) = (true, true);
        let (full, claims) = (
            Hints {
                resources,
                storage: false,
            },
            Hints {
                resources: false,
                storage,
            },
        );
        let due = |hints, changes: &[Hint]| {
            let mut pending = Pending::default();
            pending.observe(&key("w"), Some(&pod("w", 1, 0)));
            pending.take_due(start);
            assert!(pending.refuse(&key("w"), "why", hints, at(100)));
            for change in changes {
                pending.hint(*change, at(200));
            }
            let due = pending.next_due();
            let due = due.expect("a time").duration_since(start).as_millis();
            assert_eq!(names(pending.take_due(at(99 + 1000))), [""; 0]);
            assert!(pending.take_due(at(300_100)).len() == 1);
            assert!(!pending.refuse(&key("w"), "why", hints, at(300_100)));
            pending.hint(Hint::Nodes, at(400_000));
            let late = pending.take_due(at(400_000));
            assert_eq!(names(late), ["w"], "the last evaluation was long ago");
            due
        };
        let (soon, rarely) = (1100, 300_100);
        for (hints, changes, expected) in [
            (Hints::default(), vec![], rarely),
            (
                Hints::default(),
                vec![Hint::Resources, Hint::Storage],
                rarely,
            ),
            (Hints::default(), vec![Hint::Nodes], soon),
            (full, vec![Hint::Storage], rarely),
            (full, vec![Hint::Resources], soon),
            (claims, vec![Hint::Resources], rarely),
            (claims, vec![Hint::Storage, Hint::Storage], soon),
        ] {
            assert_eq!(due(hints, &changes), expected, "{hints:?} {changes:?}");
        }
    }

    #[test]
    fn a_changed_spec_is_evaluated_immediately() {
        let (mut pending, now) = (Pending::default(), Instant::now());
        pending.observe(&key("w"), Some(&pod("w", 1, 0)));
        pending.take_due(now);
        pending.refuse(&key("w"), "why", Hints::default(), now);
        pending.observe(&key("w"), Some(&pod("w", 1, 5)));
        assert_eq!(names(pending.take_due(now)), [""; 0]);
        pending.observe(&key("w"), Some(&pod("w", 2, 0)));
        assert_eq!(names(pending.take_due(now)), ["w"]);
        pending.wait_for_storage(&key("w"), now);
        pending.hint(Hint::Storage, now);
        assert_eq!(names(pending.take_due(now)), ["w"], "its claims are bound");
    }
}
