//! Sizes of pods, the capacity of the node, and the results of resizes (KEP-1287).

use super::*;

/// The CPU quantity of a resource list, in millicores.
fn milli(list: &Value) -> Option<i64> {
    let text = list["cpu"].as_str()?;
    match text.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => text.parse().ok().map(|cpus: i64| cpus * 1000),
    }
}

/// CPU shares, the kernel's unit.
fn shares(milli: i64) -> i64 {
    (milli * 1024 / 1000).max(2)
}

fn is_over(pod: &Value) -> bool {
    let phase = &pod["status"]["phase"];
    phase == "Failed" || phase == "Succeeded" || !pod["metadata"]["deletionTimestamp"].is_null()
}

/// The CPU request of the first container, in millicores.
fn asked(pod: &Value) -> Option<i64> {
    milli(&pod["spec"]["containers"][0]["resources"]["requests"])
}

/// The CPU request of the first container in the status, in millicores.
fn told(pod: &Value) -> Option<i64> {
    let mut all = pod["status"]["containerStatuses"].as_array()?.iter();
    milli(&all.find(|status| status["name"] == "c0")?["resources"]["requests"])
}

/// The CPU that counts against the node, in millicores: what was allocated, even for an exited container
/// that never gets it. The kubelet counts the allocation too (`canAdmitPod` in `allocation_manager.go`).
fn granted_to(pod: &Value) -> Option<i64> {
    milli(&pod["status"]["allocatedResources"]).or_else(|| asked(pod))
}

impl State {
    fn resize(&mut self, uid: &str, cpu: &str) {
        let pod = self.pods.get_mut(uid).unwrap();
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu.into();
        let generation = pod["metadata"]["generation"].as_i64().unwrap();
        pod["metadata"]["generation"] = (generation + 1).into();
        self.publish(uid);
    }

    /// Makes some pods request CPUs, few of them many.
    pub(super) fn size(&mut self, container: &mut Value) {
        let cpu = match self.pick(8) {
            0 => "16",
            1 => "8",
            2..=4 => "250m",
            _ => return,
        };
        container["resources"] = json!({"requests": {"cpu": cpu}});
        if self.pick(4) == 0 {
            container["resizePolicy"] =
                json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
        }
    }

    /// Rule: the running pods do not exceed the node's capacity. Pods that are being deleted do not count.
    /// While sizes change, a pod may start with CPU that another pod is about to release, as with the kubelet.
    pub(super) fn has_room(&self) -> Result<(), String> {
        let counts = |c: &&Ctr| {
            c.container.state == ContainerState::Running
                && c.container.name == "c0"
                && self.pods.get(&c.uid).is_some_and(|pod| !is_over(pod))
        };
        let counted = self.containers.values().filter(counts);
        let used: Vec<(&str, i64)> = counted
            .filter(|c| c.shares > 2)
            .map(|c| (c.uid.as_str(), c.shares))
            .collect();
        match used.iter().map(|(_, shares)| shares).sum::<i64>() > shares(self.node.milli()) {
            true => Err(format!("{used:?} exceed {} m", self.node.milli())),
            false => Ok(()),
        }
    }

    /// Rule: every pod has the size that was allocated to it, and its status shows this size. It is the
    /// size in the spec, unless the node has no capacity for that.
    pub(super) fn has_its_size(&self, uid: &str) -> Result<(), String> {
        let pod = &self.pods[uid];
        let (Some(requested), Some(granted)) = (asked(pod), granted_to(pod)) else {
            return Ok(());
        };
        if is_over(pod) {
            return Ok(());
        }
        if let Some(running) = self.live(uid).iter().find(|c| c.name == "c0") {
            let (has, published) = (self.containers[&running.id].shares, told(pod));
            if has != shares(granted) || published != Some(granted) {
                return Err(format!(
                    "granted {granted}m, but it has {has} shares and a status of {published:?} m: {}",
                    pod["status"]
                ));
            }
        }
        let conditions = pod["status"]["conditions"].as_array();
        let condition = |kind: &str| conditions.into_iter().flatten().find(|c| c["type"] == kind);
        if let Some(resizing) = condition("PodResizeInProgress") {
            return Err(format!("its resize does not complete: {resizing}"));
        }
        let reason = condition("PodResizePending").map(|c| c["reason"].as_str().unwrap());
        let others = self.pods.iter().filter(|(other, _)| *other != uid);
        let others = others.filter(|(_, pod)| !is_over(pod));
        let of_others: i64 = others.filter_map(|(_, pod)| granted_to(pod)).sum();
        let node = self.node.milli();
        let right = match reason {
            None => requested == granted,
            Some("Infeasible") => requested > node,
            Some("Deferred") => requested <= node && requested + of_others > node,
            Some(_) => false,
        };
        match right {
            true => Ok(()),
            false => Err(format!(
                "requested {requested}m, granted {granted}m, others {of_others}m, and its resize is {reason:?}"
            )),
        }
    }
}

impl World {
    /// Resizes some pod: to a size that fits, that may have to wait, or that exceeds the node.
    pub fn resize_some_pod(&self) {
        let mut state = self.state();
        let sized: Vec<String> = state
            .pods
            .iter()
            .filter(|(_, pod)| asked(pod).is_some() && !is_over(pod))
            .map(|(uid, _)| uid.clone())
            .collect();
        let place = usize::try_from(state.pick(sized.len() as u64)).unwrap();
        let cpu = ["250m", "1", "8", "16", "48", "100"][usize::try_from(state.pick(6)).unwrap()];
        if let Some(uid) = sized.get(place) {
            state.resize(uid, cpu);
        }
    }

    /// A pod with two containers. The first one requests CPU and is not restarted after it succeeds.
    pub fn create_pod_that_does_a_part(&self, name: &str, cpu: &str) {
        let sizes = json!({"requests": {"cpu": cpu}});
        self.create_pod_of(name, "OnFailure", &sizes);
        let uid = self.uid(name);
        let mut state = self.state();
        let containers = &mut state.pods.get_mut(&uid).unwrap()["spec"]["containers"];
        let containers = containers.as_array_mut().unwrap();
        containers.push(json!({"name": "c1", "image": "i:1"}));
        state.publish(&uid);
    }

    /// One container of a pod exits with code 0.
    pub fn complete_container(&self, name: &str, container: &str) {
        let (uid, now) = (self.uid(name), self.1.now());
        let mut state = self.state();
        let live = state.live(&uid).into_iter().find(|c| c.name == container);
        let id = live.unwrap().id.clone();
        end(&mut state, &id, 0, now);
    }

    /// Resizes the first container of a pod.
    pub fn resize_pod(&self, name: &str, cpu: &str) {
        let uid = self.uid(name);
        self.state().resize(&uid, cpu);
    }
}
