//! Pods whose object is removed: what the watch shows of it, and how long their containers may run afterwards.

use super::*;

/// An event of the pod watch.
enum PodEvent {
    Apply(Box<Pod>),
    Delete(Box<Pod>),
}

/// One agent's watch of pods. Events arrive in the order in which they were sent.
#[derive(Clone)]
pub(super) struct PodWatch {
    writer: Arc<Writer<Pod>>,
    late: Arc<Mutex<VecDeque<PodEvent>>>,
}

impl PodWatch {
    pub(super) fn new(writer: Writer<Pod>) -> PodWatch {
        PodWatch {
            writer: Arc::new(writer),
            late: Arc::default(),
        }
    }

    fn write(&self, event: PodEvent) {
        match event {
            PodEvent::Apply(pod) => self.writer.apply(*pod),
            PodEvent::Delete(pod) => self.writer.delete(*pod),
        }
    }

    fn send(&self, event: PodEvent) {
        let mut late = self.late.lock().unwrap();
        match late.is_empty() {
            true => self.write(event),
            false => late.push_back(event),
        }
    }

    pub(super) fn apply(&self, pod: Pod) {
        self.send(PodEvent::Apply(Box::new(pod)));
    }

    fn delete(&self, pod: Pod) {
        self.send(PodEvent::Delete(Box::new(pod)));
    }

    /// Delivers a deletion after a delay. Events that are sent meanwhile arrive after it.
    fn delete_late(&self, pod: Pod, after: Duration) {
        let mut late = self.late.lock().unwrap();
        late.push_back(PodEvent::Delete(Box::new(pod)));
        if late.len() > 1 {
            return;
        }
        let watch = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let events = std::mem::take(&mut *watch.late.lock().unwrap());
            events.into_iter().for_each(|event| watch.write(event));
        });
    }

    /// The watch restarts with a list.
    pub(super) fn replace(&self, pods: Vec<Pod>) {
        self.late.lock().unwrap().clear();
        self.writer.replace(pods);
    }
}

/// The minimum grace period of a container that is stopped, in seconds (upstream's `minimumGracePeriodInSeconds`).
const FLOOR: i64 = 2;
/// How long a container of a removed pod may run beyond its grace period if nothing fails: an
/// observation and a stop take less than 100 ms.
pub const SLACK: Duration = Duration::from_secs(1);
/// The same while calls fail: two of them may hang for 120 s each, after pauses of up to 10 s.
pub const SLACK_WITH_FAULTS: Duration = Duration::from_secs(300);

/// How long a pod's containers may run when its object is removed.
#[derive(Clone, Copy)]
pub(super) struct Removal {
    /// When the watch has shown the removal.
    at: Instant,
    /// The grace period in seconds.
    grace: i64,
}

impl State {
    /// Removes a pod's object, as a kube-apiserver does: the grace period of 0 and the removal are two
    /// revisions within a few milliseconds. The watch may deliver only the second one.
    pub(super) fn remove(&mut self, uid: &str) {
        let Some(mut pod) = self.pods.remove(uid) else {
            return;
        };
        if let Some(grace) = pod["spec"]["terminationGracePeriodSeconds"].as_i64() {
            self.graces.insert(uid.to_owned(), grace);
        }
        self.undelivered_removals.insert(uid.to_owned());
        self.external_terminal_statuses.remove(uid);
        self.disrupted.remove(uid);
        let is_marked = pod["metadata"]["deletionGracePeriodSeconds"] == 0;
        if pod["metadata"]["deletionTimestamp"].is_null() {
            let created = pod["metadata"]["creationTimestamp"].clone();
            pod["metadata"]["deletionTimestamp"] = created;
        }
        pod["metadata"]["deletionGracePeriodSeconds"] = 0.into();
        let mut revised = || {
            self.revision += 1;
            pod["metadata"]["resourceVersion"] = self.revision.to_string().into();
            faults::object(&pod)
        };
        let (marked, last) = (revised(), revised());
        let shown = if is_marked { 0 } else { self.draw(3) };
        let late = Duration::from_millis(1 + self.draw(4));
        let Some(watch) = self.watcher.clone().filter(|_| self.watch_delivers()) else {
            return;
        };
        self.zero_grace_removals.insert(uid.to_owned());
        self.all_is_seen();
        if shown > 0 {
            watch.apply(marked);
        }
        match shown {
            2 => watch.delete_late(last, late),
            _ => watch.delete(last),
        }
    }

    /// The watch has shown all removals. If a pod was removed while the watch showed nothing, it is missing
    /// from the list and has the grace period of its spec.
    pub(super) fn all_is_seen(&mut self) {
        let at = Instant::now();
        for uid in std::mem::take(&mut self.undelivered_removals) {
            let grace = match self.zero_grace_removals.remove(&uid) {
                true => FLOOR,
                false => self.graces.get(&uid).copied().unwrap_or(30).max(FLOOR),
            };
            self.removed_at.insert(uid, Removal { at, grace });
        }
    }

    /// Whether the watch has shown a pod's removal a second ago or longer.
    pub(super) fn is_long_removed(&self, uid: &str) -> bool {
        let removal = self.removed_at.get(uid);
        removal.is_some_and(|removal| removal.at.elapsed() >= Duration::from_secs(1))
    }

    /// Whether the watch has just shown a pod's removal, or will show it.
    pub(super) fn is_just_removed(&self, uid: &str) -> bool {
        let is_known = self.removed_at.contains_key(uid);
        self.undelivered_removals.contains(uid) || (is_known && !self.is_long_removed(uid))
    }

    /// The grace period of a removed pod, if the agent has had a second to process the removal.
    pub(super) fn removed_grace(&self, uid: &str) -> Option<i64> {
        let removal = self.removed_at.get(uid);
        let removal = removal.filter(|_| self.is_long_removed(uid))?;
        Some(removal.grace)
    }
}

impl World {
    /// Rule: no container of a removed pod runs longer than its grace period and `slack`.
    pub fn check_removed(&self, slack: Duration) {
        let mut state = self.state();
        let is_late = |removal: &Removal| {
            let grace = Duration::from_secs(removal.grace.unsigned_abs());
            removal.at.elapsed() > grace + slack
        };
        let late = state
            .removed_at
            .iter()
            .filter(|(_, removal)| is_late(removal));
        let late: Vec<String> = late.map(|(uid, _)| uid.clone()).collect();
        for uid in late {
            let live = state.live(&uid);
            if !live.is_empty() {
                let live: Vec<String> = live.iter().map(|c| c.name.clone()).collect();
                let removal = state.removed_at[&uid];
                let (grace, past) = (removal.grace, removal.at.elapsed());
                state.report_violation(format!(
                    "{uid}: removed {past:?} ago with a grace period of {grace} s, but {live:?} still run"
                ));
            }
        }
    }

    /// A pod with a long grace period whose hooks never return.
    pub fn create_stubborn_pod(&self, name: &str) {
        self.create_plain_pod(name, "Always");
        let uid = self.uid(name);
        let mut state = self.state();
        let spec = &mut state.pods.get_mut(&uid).unwrap()["spec"];
        spec["terminationGracePeriodSeconds"] = 500.into();
        let hook = json!({"preStop": {"exec": {"command": ["pre", "hangs"]}}});
        spec["containers"][0]["lifecycle"] = hook.clone();
        spec["initContainers"] =
            json!([{"name": "s0", "image": "i:1", "restartPolicy": "Always", "lifecycle": hook}]);
        state.publish(&uid);
    }

    /// Force-deletes a pod, in some runs after a deletion with its whole grace period. Checks that its
    /// containers stop soon.
    pub async fn remove_stubborn_pod(&self, name: &str) {
        let (uid, is_deleted_first) = (self.uid(name), self.state().draw(2) == 0);
        if is_deleted_first {
            self.delete_uid(&uid);
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        self.remove_by_force(name);
        tokio::time::sleep(Duration::from_secs(FLOOR.unsigned_abs()) + 2 * SLACK).await;
        self.check_removed(SLACK);
    }
}
