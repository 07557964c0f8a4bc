//! Containers that must not run again or not in this sandbox, and calls that are cancelled or blocked.

use super::*;
use holdfast_core::pod::container_hash;

/// The sandbox that a call is stopping, until this is dropped.
pub(super) struct Stopping(World, String);

impl Drop for Stopping {
    fn drop(&mut self) {
        let key = (self.0.2, self.1.clone());
        self.0.state().stopping.remove(&key);
    }
}

/// The sandbox that a call requests.
#[derive(Clone)]
pub(super) struct SandboxRequest {
    pub uid: String,
    pub name: String,
    pub attempt: u32,
    pub host_network: bool,
}

/// A call that creates a sandbox. If the call is cancelled, the runtime may complete it seconds later.
pub(super) struct SandboxCreation {
    pub world: World,
    pub wanted: SandboxRequest,
    pub is_done: bool,
}

impl Drop for SandboxCreation {
    fn drop(&mut self) {
        let (world, wanted) = (self.world.clone(), self.wanted.clone());
        let late = {
            let mut state = world.state();
            let is_carried_out = !self.is_done && state.draw(2) == 0;
            is_carried_out.then(|| Duration::from_millis(state.draw(4000)))
        };
        if let (Some(late), Ok(runtime)) = (late, tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move {
                tokio::time::sleep(late).await;
                let now = world.1.now();
                let mut state = world.state();
                if let Ok(id) = state.insert_sandbox(wanted, now) {
                    state.late_sandboxes.insert(id);
                }
            });
        }
    }
}

impl State {
    /// Creates a sandbox, unless its name is taken.
    pub(super) fn insert_sandbox(
        &mut self,
        wanted: SandboxRequest,
        now: Timestamp,
    ) -> Result<String, RuntimeError> {
        let SandboxRequest {
            uid,
            name,
            attempt,
            host_network,
        } = wanted;
        let mut boxes = self.sandboxes.values();
        if boxes.any(|b| b.uid == uid && b.sandbox.attempt == attempt) {
            return Err(RuntimeError {
                kind: RuntimeErrorKind::Failed,
                code: None,
                message: format!("failed to reserve sandbox name {name}"),
            });
        }
        let id = self.id("box");
        self.outage.set_up_network(&id)?;
        let ips = match host_network {
            true => vec![],
            false => vec![format!("10.0.0.{}", self.next % 250)],
        };
        let sandbox = Sandbox {
            id: id.clone(),
            attempt,
            ready: true,
            created_at: now,
            ips,
            host_network,
            handler: String::new(),
        };
        let made = SandboxEntry {
            uid: uid.clone(),
            name,
            sandbox,
        };
        self.sandboxes.insert(id.clone(), made);
        self.send_event(&uid, &id, EventKind::Created);
        self.send_event(&uid, &id, EventKind::Started);
        Ok(id)
    }

    /// Records the final exit of a regular container: with `Never` any exit, with `OnFailure` a success that the agent
    /// did not cause. With `OnFailure`, containers that the agent may stop in order to restart them are left out.
    pub(super) fn note_end(&mut self, id: &str, uid: &str, name: &str, code: i32) {
        let mut statics = self.statics.values();
        let pod = self.pods.get(uid);
        let pod = pod.or_else(|| statics.find(|pod| pod["metadata"]["uid"] == *uid));
        let Some(spec) = pod
            .map(|pod| &pod["spec"])
            .filter(|_| name.starts_with('c'))
        else {
            return;
        };
        let mut containers = spec["containers"].as_array().unwrap().iter();
        let Some(container) = containers.find(|c| c["name"] == *name) else {
            return;
        };
        let may_be_stopped = container["livenessProbe"].is_object()
            || container["lifecycle"].is_object()
            || container["resizePolicy"].is_array()
            || self.stop_requested.contains(id);
        // Another image requires another instance, whatever the policy and exit code.
        let hash = container_hash(&serde_json::from_value(container.clone()).unwrap());
        if self.containers[id].container.hash != Some(hash) {
            return;
        }
        let is_final = match spec["restartPolicy"].as_str() {
            // Whatever the policy, a resize may require another instance.
            Some("Never") => !container["resizePolicy"].is_array(),
            Some("OnFailure") => code == 0 && !may_be_stopped,
            _ => false,
        };
        if is_final {
            let key = (uid.to_owned(), name.to_owned());
            self.finished.insert(key, id.to_owned());
        }
    }

    /// Rule: a container in its final state never runs again, even in a new sandbox.
    pub(super) fn check_not_over(&mut self, uid: &str, name: &str) {
        let key = (uid.to_owned(), name.to_owned());
        if let Some(before) = self.finished.get(&key).cloned() {
            self.report_violation(format!(
                "{uid}/{name}: restarted although {before} was final"
            ));
        }
    }

    /// Whether the upkeep of a pod fails: the pod has a ready sandbox with a container, and the world fails upkeep. A
    /// pod with an empty sandbox may wait for its directories, like a new one.
    pub(super) fn upkeep_fails(&self, uid: &str) -> bool {
        let has_started = |sandbox: &String| {
            let mut containers = self.containers.values();
            containers.any(|c| c.container.sandbox == *sandbox)
        };
        self.is_upkeep_failing
            && self
                .sandboxes
                .iter()
                .any(|(id, b)| b.uid == uid && b.sandbox.ready && has_started(id))
    }
}

impl State {
    /// `kubectl set image`: gives a container of a pod another image.
    ///
    /// If the agent does not know yet that the container ended, it may replace the container like a running one.
    fn change_image(&mut self, uid: &str, container: usize) {
        let image = format!("i:{}", self.revision + 2);
        let pod = self.pods.get_mut(uid).unwrap();
        let name = pod["spec"]["containers"][container]["name"].as_str();
        let key = (uid.to_owned(), name.unwrap().to_owned());
        let mut statuses = pod["status"]["containerStatuses"]
            .as_array()
            .into_iter()
            .flatten();
        let is_known =
            statuses.any(|s| s["name"] == *key.1 && s["state"]["terminated"].is_object());
        if !is_known {
            self.finished.remove(&key);
        }
        pod["spec"]["containers"][container]["image"] = image.into();
        let generation = pod["metadata"]["generation"].as_i64().unwrap();
        pod["metadata"]["generation"] = (generation + 1).into();
        self.publish(uid);
    }
}

impl World {
    /// Changes the image of the first container of a pod.
    pub fn change_image(&self, name: &str) {
        let uid = self.uid(name);
        self.state().change_image(&uid, 0);
    }

    /// Changes the image of a regular container of some pod.
    pub fn change_some_image(&self) {
        let Some(uid) = self.some_uid() else {
            return;
        };
        let mut state = self.state();
        let containers = state.pods[&uid]["spec"]["containers"].as_array().unwrap();
        let count = containers.len() as u64;
        let container = usize::try_from(state.pick(count)).unwrap();
        state.change_image(&uid, container);
    }

    pub(super) fn stopping(&self, sandbox: &str) -> Stopping {
        let key = (self.2, sandbox.to_owned());
        self.state().stopping.insert(key);
        Stopping(self.clone(), sandbox.to_owned())
    }

    /// Rule: the agent creates or starts nothing in a sandbox that it is stopping.
    pub(super) fn check_not_stopping(&self, what: &str, sandbox: &str) {
        let mut state = self.state();
        if state.stopping.contains(&(self.2, sandbox.to_owned())) {
            state.report_violation(format!(
                "{sandbox}: {what} while the sandbox is being stopped"
            ));
        }
    }

    pub(super) fn sandbox_of(&self, id: &str) -> String {
        let state = self.state();
        let container = state.containers.get(id);
        container.map_or_else(String::new, |c| c.container.sandbox.clone())
    }

    /// Makes the upkeep of pods with a sandbox fail: no directory can be created, and no RuntimeClass is found.
    pub fn fail_upkeep(&self, fails: bool) {
        self.state().is_upkeep_failing = fails;
    }

    /// Makes network plugins hang: no call that creates a sandbox returns.
    pub fn hang_network(&self, stalls: bool) {
        self.state().is_network_hanging = stalls;
    }

    pub(super) async fn wait_for_network(&self) {
        while self.state().is_network_hanging {
            self.sleep(Duration::from_secs(1)).await;
        }
    }

    /// `crictl stopp`: all containers of a pod exit, and its sandbox stops a moment later.
    pub async fn stop_sandbox_by_hand(&self, name: &str) {
        let (uid, now) = (self.uid(name), self.1.now());
        {
            let mut state = self.state();
            let live: Vec<String> = state.live(&uid).iter().map(|c| c.id.clone()).collect();
            live.iter().for_each(|id| end(&mut state, id, 137, now));
        }
        tokio::time::sleep(Duration::from_millis(60)).await;
        let mut state = self.state();
        let mut boxes: Vec<(String, Sandbox)> = state
            .sandboxes
            .iter()
            .filter(|(_, b)| b.uid == uid)
            .map(|(id, b)| (id.clone(), b.sandbox.clone()))
            .collect();
        boxes.sort_by_key(|(_, sandbox)| sandbox.attempt);
        let (id, _) = boxes.pop().unwrap();
        // Containers that were started there meanwhile continue to run, without a network.
        state.sandboxes.get_mut(&id).unwrap().sandbox.ready = false;
        state.send_event(&uid, &id, EventKind::Stopped);
    }

    /// How often a container of a pod was started.
    pub fn starts_of(&self, name: &str, container: &str) -> usize {
        let of = format!(" started {}/{container} ", self.uid(name));
        self.state()
            .trace
            .iter()
            .filter(|line| line.contains(&of))
            .count()
    }

    /// The reasons of all events about a pod that were posted.
    pub fn event_reasons(&self, name: &str) -> BTreeSet<String> {
        let uid = self.uid(name);
        let state = self.state();
        let of = state.reasons.iter().filter(|(about, _)| *about == uid);
        of.map(|(_, reason)| reason.clone()).collect()
    }

    /// A pod that takes long to stop. Its container has a readiness probe and a preStop hook that never
    /// returns. Its sidecar has a liveness probe.
    pub fn create_pod_that_stops_slowly(&self, name: &str, grace: i64) {
        self.create_steady_pod(name);
        let uid = self.uid(name);
        let mut state = self.state();
        let spec = &mut state.pods.get_mut(&uid).unwrap()["spec"];
        spec["terminationGracePeriodSeconds"] = grace.into();
        let probe = |path: &str| json!({"httpGet": {"port": 80, "path": path}, "periodSeconds": 1});
        spec["initContainers"] = json!([{"name": "s0", "image": "i:1", "restartPolicy": "Always", "livenessProbe": probe("/s0")}]);
        let container = &mut spec["containers"][0];
        container["readinessProbe"] = probe("/c0");
        container["lifecycle"]["preStop"] = json!({"exec": {"command": ["pre", "hangs"]}});
        state.publish(&uid);
    }

    pub(super) fn is_running(&self, id: &str) -> bool {
        let state = self.state();
        let container = state.containers.get(id);
        container.is_some_and(|c| c.container.state == ContainerState::Running)
    }

    /// The number of HTTP requests for a path.
    pub fn http_requests(&self, path: &str) -> usize {
        self.state().http_requests.get(path).copied().unwrap_or(0)
    }

    /// The number of StopContainer calls during which the container's preStop hook ran.
    pub fn hooked_stops(&self) -> usize {
        self.state().hooked_stops
    }

    /// Gives a pod the RuntimeClass of a name.
    pub fn set_runtime_class(&self, name: &str, class: &str) {
        let uid = self.uid(name);
        let mut state = self.state();
        state.pods.get_mut(&uid).unwrap()["spec"]["runtimeClassName"] = class.into();
        state.publish(&uid);
    }

    /// The version of an object that a pod's volume shows.
    pub fn volume_version(&self, name: &str, volume: &str) -> Option<String> {
        let key = (self.uid(name), volume.to_owned());
        self.state().volume_versions.get(&key).cloned()
    }
}
