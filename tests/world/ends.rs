//! Terminal phases and deletions that other clients of the API cause. The pod garbage collector, an
//! earlier agent of the node or `kubectl` write terminal phases. The taint manager and the eviction API
//! delete pods and record the cause in the `DisruptionTarget` condition.

use super::*;

/// The fields of a terminal status. The agent must not change any of them.
const TERMINAL_FIELDS: [&str; 3] = ["phase", "reason", "message"];

/// A terminal status that another client has written.
pub(super) struct ExternalTerminalStatus {
    end: [Value; 3],
    /// When the watch delivered it; `None` before that.
    known: Option<Instant>,
}

fn terminal_fields(pod: &Value) -> [Value; 3] {
    TERMINAL_FIELDS.map(|key| pod["status"][key].clone())
}

fn is_final(pod: &Value) -> bool {
    pod["status"]["phase"] == "Failed" || pod["status"]["phase"] == "Succeeded"
}

fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().find(|c| c["type"] == kind)
}

/// Sets the `DisruptionTarget` condition, as a client does before it deletes a pod.
fn disrupt(pod: &mut Value, reason: &str) -> Value {
    let target = json!({"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "set by another client"});
    let status = &mut pod["status"];
    if status["conditions"].is_null() {
        status["conditions"] = json!([]);
    }
    let conditions = status["conditions"].as_array_mut().unwrap();
    conditions.retain(|c| c["type"] != "DisruptionTarget");
    conditions.push(target.clone());
    target
}

/// Sets every container in the status to terminated.
fn terminate_containers(pod: &mut Value, now: Timestamp) {
    let statuses = pod["status"]["containerStatuses"].as_array_mut();
    for status in statuses.into_iter().flatten() {
        let ended = json!({"exitCode": 7, "reason": "Error", "finishedAt": now.to_string(), "containerID": status["containerID"]});
        status["state"] = json!({"terminated": ended});
        status["ready"] = false.into();
        status["started"] = false.into();
    }
}

impl State {
    /// The watch has delivered the current object of a pod.
    pub(super) fn note_terminal_status_delivered(&mut self, uid: &str) {
        if let Some(written) = self.external_terminal_statuses.get_mut(uid) {
            written.known.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn note_all_terminal_statuses_delivered(&mut self) {
        let uids: Vec<String> = self.external_terminal_statuses.keys().cloned().collect();
        uids.iter()
            .for_each(|uid| self.note_terminal_status_delivered(uid));
    }

    /// Whether the agent has known a pod's terminal status for at least a second. From then on it must not
    /// start anything for it.
    pub(super) fn has_external_terminal_status(&self, uid: &str) -> bool {
        let known = self
            .external_terminal_statuses
            .get(uid)
            .and_then(|written| written.known);
        known.is_some_and(|at| at.elapsed() >= Duration::from_secs(1))
    }

    /// Checks after a status write that the agent preserved what other clients had written.
    pub(super) fn check_external_status_preserved(&mut self, uid: &str, pod: &Value) {
        if let Some(written) = self.external_terminal_statuses.get(uid)
            && written.end != terminal_fields(pod)
        {
            let what = format!(
                "{uid}: its terminal phase was reverted: {:?} became {:?}",
                written.end,
                terminal_fields(pod)
            );
            self.report_violation(what);
        }
        // The node's own eviction replaces the condition, as the kubelet's does.
        let cause = condition(pod, "DisruptionTarget");
        let is_own = cause.is_some_and(|c| c["reason"] == "TerminationByKubelet");
        if let Some(target) = self.disrupted.get(uid)
            && cause != Some(target)
            && !is_own
        {
            let what = format!("{uid}: its DisruptionTarget condition was overwritten: {target}");
            self.report_violation(what);
        }
    }

    /// Checks a pod whose terminal status another client has written: its containers are stopped, its
    /// resources released. `None` if there is no such status.
    pub(super) fn check_external_terminal_status(&self, uid: &str) -> Option<Result<(), String>> {
        let written = self.external_terminal_statuses.get(uid)?;
        let pod = &self.pods[uid];
        let statuses = pod["status"]["containerStatuses"].as_array();
        let mut statuses = statuses.into_iter().flatten();
        let runs = statuses.any(|s| s["ready"] == true || !s["state"]["running"].is_null());
        let is_ready = condition(pod, "Ready").is_some_and(|c| c["status"] == "True");
        let holds = !self.live(uid).is_empty()
            || self
                .sandboxes
                .values()
                .any(|b| b.uid == uid && b.sandbox.ready)
            || self.volumes.contains(uid)
            || self.cgroups.contains(uid);
        let result = match written.end == terminal_fields(pod) && !runs && !is_ready && !holds {
            true => Ok(()),
            false => Err(format!(
                "another client has written a terminal phase ({:?}); runs, ready, holds: {:?}: {}",
                written.end,
                (runs, is_ready, holds),
                pod["status"]
            )),
        };
        Some(result)
    }

    /// Picks a pod of the API, or a mirror pod, that has no terminal phase.
    fn pick_unfinished_pod(&mut self, mirrors: bool) -> Option<String> {
        let lives = |uid: &&String| {
            (self.runtime_uid(uid) != **uid) == mirrors && !is_final(&self.pods[*uid])
        };
        let all: Vec<String> = self.pods.keys().filter(lives).cloned().collect();
        let place = self.draw(all.len() as u64);
        all.get(usize::try_from(place).unwrap()).cloned()
    }

    fn write_terminal_status(&mut self, uid: &str, change: impl FnOnce(&mut Value)) {
        let pod = self.pods.get_mut(uid).unwrap();
        change(pod);
        let end = terminal_fields(pod);
        let line = format!("another client writes the terminal phase of {uid}: {end:?}");
        self.trace.push(line);
        self.external_terminal_statuses
            .insert(uid.to_owned(), ExternalTerminalStatus { end, known: None });
        self.publish(uid);
    }
}

impl World {
    /// Writes a terminal status into some pod, as another client would.
    pub(super) fn write_some_terminal_status(&self) {
        let now = self.1.now();
        let mut state = self.state();
        let Some(uid) = state.pick_unfinished_pod(false) else {
            return;
        };
        match state.draw(4) {
            0 => {
                // The pod garbage collector, because the node was lost for too long.
                let mut target = Value::Null;
                state.write_terminal_status(&uid, |pod| {
                    target = disrupt(pod, "DeletionByPodGC");
                    pod["status"]["phase"] = "Failed".into();
                });
                state.disrupted.insert(uid.clone(), target);
                if state.draw(2) == 0 {
                    state.remove(&uid);
                }
            }
            1 => state.write_terminal_status(&uid, |pod| {
                // Evicted by a kubelet that ran on this node earlier.
                pod["status"]["phase"] = "Failed".into();
                pod["status"]["reason"] = "Evicted".into();
                pod["status"]["message"] = "The node was low on resource: memory.".into();
                pod["status"]["containerStatuses"] = json!([]);
            }),
            2 => state.write_terminal_status(&uid, |pod| {
                pod["status"]["phase"] = "Failed".into();
                pod["status"]["reason"] = "NodeLost".into();
                terminate_containers(pod, now);
            }),
            _ => {
                state.write_terminal_status(&uid, |pod| pod["status"]["phase"] = "Succeeded".into())
            }
        }
    }

    /// Writes a terminal status into some mirror pod. The agent must ignore it.
    pub(super) fn write_some_mirror_status(&self) {
        let mut state = self.state();
        if let Some(uid) = state.pick_unfinished_pod(true) {
            state.pods.get_mut(&uid).unwrap()["status"]["phase"] = "Failed".into();
            state.publish(&uid);
        }
    }

    /// Deletes some pod as the taint manager or the eviction API does: with a `DisruptionTarget` condition.
    pub(super) fn disrupt_some_pod(&self) {
        let uid = {
            let mut state = self.state();
            let Some(uid) = state.pick_unfinished_pod(false) else {
                return;
            };
            let reasons = ["DeletionByTaintManager", "EvictionByEvictionAPI"];
            let reason = reasons[usize::try_from(state.draw(2)).unwrap()];
            let target = disrupt(state.pods.get_mut(&uid).unwrap(), reason);
            state.disrupted.insert(uid.clone(), target);
            state.publish(&uid);
            uid
        };
        self.mark_deleted(&uid);
    }

    /// Marks a pod as evicted, as another client would.
    pub fn evict_externally(&self, name: &str) {
        let uid = self.uid(name);
        let mut state = self.state();
        state.write_terminal_status(&uid, |pod| {
            pod["status"]["phase"] = "Failed".into();
            pod["status"]["reason"] = "Evicted".into();
        });
    }
}
