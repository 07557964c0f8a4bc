//! A logind that announces shutdowns when the test requests it, and pods with priorities.

use holdfast_core::node::shutdown::{Period, ShutdownSettings};
use holdfast_sys::logind::{Announcements, Announcer, Inhibitor, LogindError};

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Shared by all agents of a world: there is one logind per machine.
#[derive(Clone, Default)]
pub struct Logind(Arc<Shared>);

#[derive(Default)]
struct Shared {
    shutting_down: watch::Sender<bool>,
    /// The shutdown is announced right after the next query of `is_shutting_down` has returned false.
    announced_late: AtomicBool,
    /// How often logind was restarted.
    starts: watch::Sender<u32>,
    /// The number of inhibitor locks held now, and the number taken in total.
    inhibitors: Mutex<(usize, usize)>,
}

struct Listening {
    logind: Logind,
    shutting_down: watch::Receiver<bool>,
    starts: watch::Receiver<u32>,
}

struct Held(Logind);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.inhibitors.lock().unwrap().0 -= 1;
    }
}

impl Logind {
    /// Announces a shutdown, or cancels it.
    pub fn announce(&self, shutting_down: bool) {
        self.0.shutting_down.send_replace(shutting_down);
    }

    /// Announces a shutdown right after the next query has returned that there is none.
    pub fn announce_late(&self) {
        self.0.announced_late.store(true, Ordering::Relaxed);
    }

    /// Restarts logind: subscribers have to subscribe again.
    pub fn restart(&self) {
        self.0.starts.send_modify(|starts| *starts += 1);
    }

    /// The number of inhibitor locks held now, and the number taken in total.
    pub fn inhibitors(&self) -> (usize, usize) {
        *self.0.inhibitors.lock().unwrap()
    }
}

#[async_trait]
impl Announcer for Logind {
    async fn listen(&self, _: Duration) -> Result<Box<dyn Announcements>, LogindError> {
        Ok(Box::new(Listening {
            logind: self.clone(),
            shutting_down: self.0.shutting_down.subscribe(),
            starts: self.0.starts.subscribe(),
        }))
    }
}

#[async_trait]
impl Announcements for Listening {
    async fn inhibit(&mut self) -> Result<Inhibitor, LogindError> {
        if *self.shutting_down.borrow() {
            return Err(LogindError::InProgress);
        }
        let mut inhibitors = self.logind.0.inhibitors.lock().unwrap();
        *inhibitors = (inhibitors.0 + 1, inhibitors.1 + 1);
        Ok(Box::new(Held(self.logind.clone())))
    }

    async fn is_shutting_down(&mut self) -> Result<bool, LogindError> {
        let announced = *self.shutting_down.borrow_and_update();
        if self.logind.0.announced_late.swap(false, Ordering::Relaxed) {
            self.logind.announce(true);
        }
        Ok(announced)
    }

    async fn next(&mut self) -> Option<bool> {
        tokio::select! {
            biased;
            changed = self.shutting_down.changed() => {
                changed.unwrap();
                Some(*self.shutting_down.borrow_and_update())
            }
            _ = self.starts.changed() => None,
        }
    }
}

impl World {
    /// Sets the seconds that a shutdown waits for pods, by priority. Call it before an agent starts.
    pub fn wait_for_pods(&self, periods: &[(i32, i64)]) -> Logind {
        let period = |(priority, seconds): &(i32, i64)| Period {
            priority: *priority,
            shutdown_grace_period_seconds: *seconds,
        };
        let settings = ShutdownSettings {
            by_priority: periods.iter().map(period).collect(),
            ..ShutdownSettings::default()
        };
        let logind = Logind::default();
        let periods = Periods::new(&settings).unwrap();
        self.state().logind = Some((logind.clone(), periods));
        logind
    }

    /// A long-running pod with a priority and a grace period.
    pub fn create_ranked_pod(&self, name: &str, priority: i32, grace: i64) {
        self.create_steady_pod(name);
        let uid = self.uid(name);
        let mut state = self.state();
        let spec = &mut state.pods.get_mut(&uid).unwrap()["spec"];
        spec["priority"] = priority.into();
        spec["terminationGracePeriodSeconds"] = grace.into();
        state.publish(&uid);
    }

    /// Deletes a pod in the API, with its own grace period.
    pub fn delete_pod(&self, name: &str) {
        self.mark_deleted(&self.uid(name));
    }

    /// Adds a static pod; its mirror pod is `steady-node`.
    pub fn add_manifest(&self) {
        self.set_manifest(1, "Always");
    }

    /// Writes a version of that static pod's manifest.
    pub fn set_manifest(&self, version: u32, policy: &str) {
        let mut state = self.state();
        let uid = format!("steady-v{version}");
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "steady-node", "namespace": "ns", "uid": uid, "annotations": {pod::SOURCE: "file", pod::HASH: uid}},
            "spec": {"nodeName": "node", "restartPolicy": policy, "terminationGracePeriodSeconds": 8,
                     "containers": [{"name": "c0", "image": "i:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}], "volumes": [{"name": "v", "emptyDir": {}}]}});
        state.static_uids.insert(uid);
        state.statics.insert("steady".into(), pod);
        state.publish_statics();
    }

    /// Phase and reason of a pod in the API; `None` if there is no such pod.
    pub fn phase(&self, name: &str) -> Option<(String, String)> {
        let state = self.state();
        let pod = state
            .pods
            .values()
            .find(|p| p["metadata"]["name"] == name)?;
        let text = |key: &str| pod["status"][key].as_str().unwrap_or_default().to_owned();
        Some((text("phase"), text("reason")))
    }

    /// When the first container of this pod was created, and when the last one exited if all have.
    pub fn lifetime_of(&self, uid: &str) -> (Option<Timestamp>, Option<Timestamp>) {
        let state = self.state();
        let own = || {
            let all = state.containers.values().filter(|c| c.uid == uid);
            all.map(|c| &c.container)
        };
        let ended = own().all(|c| c.finished_at.is_some());
        let last = own().filter_map(|c| c.finished_at).max();
        (own().map(|c| c.created_at).min(), last.filter(|_| ended))
    }

    /// Powers the machine off: all containers exit.
    pub fn power_off(&self) {
        self.kill_agent();
        let now = self.1.now();
        let mut state = self.state();
        let all: Vec<String> = state.containers.keys().cloned().collect();
        for id in all {
            end(&mut state, &id, 255, now);
        }
        for sandbox in state.sandboxes.values_mut() {
            sandbox.sandbox.ready = false;
        }
    }

    /// Powers the machine off, and the runtime loses its state. The pods' directories remain.
    pub fn power_off_and_lose_runtime(&self) {
        self.power_off();
        let mut state = self.state();
        state.sandboxes.clear();
        state.containers.clear();
    }
}
