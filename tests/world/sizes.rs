//! Sizes of pods, what the node has room for, and what resizes come to (KEP-1287).

use super::*;

/// What a resource list has of the processors, in thousandths.
fn milli(resources: &Value) -> Option<i64> {
    let text = resources["requests"]["cpu"].as_str()?;
    match text.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => text.parse().ok().map(|cpus: i64| cpus * 1000),
    }
}

/// The kernel's unit.
fn shares(milli: i64) -> i64 {
    (milli * 1024 / 1000).max(2)
}

fn is_over(pod: &Value) -> bool {
    let phase = &pod["status"]["phase"];
    phase == "Failed" || phase == "Succeeded" || !pod["metadata"]["deletionTimestamp"].is_null()
}

/// What the first container asks for, and has as the status tells it.
fn asked_and_told(pod: &Value) -> Option<(i64, Option<i64>)> {
    let asked = milli(&pod["spec"]["containers"][0]["resources"])?;
    let mut told = pod["status"]["containerStatuses"].as_array()?.iter();
    let told = told.find(|status| status["name"] == "c0");
    Some((asked, told.and_then(|status| milli(&status["resources"]))))
}

impl State {
    /// Some pods ask for processors, few of them for many.
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

    /// Nobody has more of the node than there is; what leaves it is not counted. While sizes change, one pod may have begun
    /// with what another is about to give back, as with a kubelet.
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
            true => Err(format!("{used:?} are in use of {} m", self.node.milli())),
            false => Ok(()),
        }
    }

    /// Every pod has the size that it is told to have. It is what its spec says, or the node has no room for that.
    pub(super) fn has_its_size(&self, uid: &str) -> Result<(), String> {
        let pod = &self.pods[uid];
        let live = self.live(uid);
        let Some(running) = live.iter().find(|c| c.name == "c0") else {
            return Ok(());
        };
        let Some((asked, told)) = asked_and_told(pod) else {
            return Ok(());
        };
        let told = told.ok_or_else(|| format!("no size is told: {}", pod["status"]))?;
        let has = self.containers[&running.id].shares;
        if has != shares(told) {
            return Err(format!("it has {has} shares, and {told}m are told"));
        }
        let conditions = pod["status"]["conditions"].as_array();
        let condition = |kind: &str| conditions.into_iter().flatten().find(|c| c["type"] == kind);
        if let Some(resizing) = condition("PodResizeInProgress") {
            return Err(format!("its resize does not end: {resizing}"));
        }
        let reason = condition("PodResizePending").map(|c| c["reason"].as_str().unwrap());
        let others = self.pods.iter().filter(|(other, _)| *other != uid);
        let of_others: i64 = others
            .filter(|(_, pod)| !is_over(pod))
            .filter_map(|(_, pod)| {
                let (asked, told) = asked_and_told(pod)?;
                Some(told.unwrap_or(asked))
            })
            .sum();
        let node = self.node.milli();
        let right = match reason {
            None => asked == told,
            Some("Infeasible") => asked > node,
            Some("Deferred") => asked <= node && asked + of_others > node,
            Some(_) => false,
        };
        match right {
            true => Ok(()),
            false => Err(format!(
                "it asks for {asked}m, has {told}m, others have {of_others}m, and its resize is {reason:?}"
            )),
        }
    }
}

impl World {
    /// A pod is to have another size: one that there is room for, one that it may have to wait for, or one that the node
    /// does not have.
    pub fn resize_some_pod(&self) {
        let mut state = self.state();
        let sized: Vec<String> = state
            .pods
            .iter()
            .filter(|(_, pod)| milli(&pod["spec"]["containers"][0]["resources"]).is_some())
            .filter(|(_, pod)| !is_over(pod))
            .map(|(uid, _)| uid.clone())
            .collect();
        let place = usize::try_from(state.pick(sized.len() as u64)).unwrap();
        let cpu = ["250m", "1", "8", "16", "48", "100"][usize::try_from(state.pick(6)).unwrap()];
        let Some(uid) = sized.get(place) else {
            return;
        };
        let pod = state.pods.get_mut(uid).unwrap();
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu.into();
        let generation = pod["metadata"]["generation"].as_i64().unwrap();
        pod["metadata"]["generation"] = (generation + 1).into();
        state.publish(uid);
    }
}
