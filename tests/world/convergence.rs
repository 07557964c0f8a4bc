//! Rules that must hold when no fault has occurred for a while.

use super::*;

/// A pod's name, and the rule that it violates.
type Wrong = (String, String);

impl World {
    /// The last decisions about a pod, for messages.
    pub fn last_decisions(&self, name: &str) -> String {
        let Some((journals, _)) = self.state().agent.clone() else {
            return String::new();
        };
        let Some(record) = journals.record("ns", name) else {
            return "no record".into();
        };
        let skipped = record.entries.len().saturating_sub(12);
        let lines = record.entries.iter().skip(skipped).map(ToString::to_string);
        let lines = lines.collect::<Vec<_>>().join("\n  ");
        format!("{lines}\n  {:?}", record.latest().observed())
    }

    /// Rule: after a while without faults, every pod matches its spec.
    pub fn check_converged(&self) -> Result<(), String> {
        let state = self.state();
        let mut wrong = state.pods.keys().map(|uid| state.is_converged(uid));
        let result = wrong
            .find(Result::is_err)
            .unwrap_or(Ok(()))
            .and_then(|()| state.statics_are_converged())
            .and_then(|()| state.has_room().map_err(|why| ("node".to_owned(), why)));
        drop(state);
        result.map_err(|(name, why)| format!("{name}: {why}\n  {}", self.last_decisions(&name)))
    }

    /// Checks that the explanation of a pod contains a text.
    pub fn check_explanation(&self, name: &str, what: &str) -> Result<(), String> {
        let (journals, _) = self.state().agent.clone().unwrap();
        let known = journals.find("ns", name);
        let explanations = known
            .into_iter()
            .map(|(uid, journal)| explain::explain("ns", name, &uid, journal, None).sentence);
        let explanations: Vec<String> = explanations.collect();
        match explanations.iter().any(|sentence| sentence.contains(what)) {
            true => Ok(()),
            false => Err(format!(
                "{name}: {explanations:?} does not contain {what:?}"
            )),
        }
    }

    /// Starts the period that `check_no_writes` checks.
    pub fn begin_idle_period(&self) {
        self.state().recent_calls.clear();
    }

    /// Rule: while nothing changes, the agent writes nothing.
    pub fn check_no_writes(&self) -> Result<(), String> {
        let state = self.state();
        for ((uid, what), times) in &state.recent_calls {
            let writes = [
                "patch_status",
                "delete",
                "create",
                "post_event",
                "count_event",
            ];
            if writes.contains(what) && times.len() > 2 {
                return Err(format!(
                    "{uid}: {} times {what} although nothing changes",
                    times.len()
                ));
            }
        }
        Ok(())
    }

    /// Rule: no container runs any more.
    pub fn check_stopped(&self) -> Result<(), String> {
        let state = self.state();
        let mut all = state.containers.values();
        match all.find(|c| c.container.state == ContainerState::Running) {
            None => Ok(()),
            Some(c) => Err(format!(
                "{} is still running after its grace period: {:?}",
                c.uid, c.container
            )),
        }
    }

    /// Rule: no explanation reports a pod as healthy while a container neither runs nor is in its final state.
    pub fn check_explained(&self) -> Result<(), String> {
        let state = self.state();
        let Some((journals, _)) = state.agent.clone() else {
            return Ok(());
        };
        for (uid, pod) in &state.pods {
            let (uid, name) = (state.runtime_uid(uid), pod["metadata"]["name"].as_str());
            let name = name.unwrap();
            let known = journals.find("ns", name);
            let Some((_, journal)) = known.into_iter().find(|(of, _)| *of == uid) else {
                continue;
            };
            let explanation = explain::explain("ns", name, &uid, journal, None).sentence;
            let stands = |c: &&Value| state.matches_spec(&uid, pod, &c["name"]);
            let mut all = pod["spec"]["containers"].as_array().unwrap().iter();
            if explanation.contains("Running as specified") && !all.all(|c| stands(&c)) {
                return Err(format!("{name}: {explanation} {:?}", pod["status"]));
            }
        }
        Ok(())
    }

    pub fn check_empty(&self) -> Result<(), String> {
        let state = self.state();
        let left = (
            state.pods.keys().collect::<Vec<_>>(),
            state.sandboxes.len(),
            state.containers.len(),
            &state.volumes,
            &state.cgroups,
            &state.dirs,
        );
        let count = left.0.len() + left.1 + left.2 + left.3.len() + left.4.len() + left.5.len();
        match count {
            0 => Ok(()),
            _ => Err(format!(
                "leftover (pods, sandboxes, containers, volumes, cgroups, directories): {left:?}"
            )),
        }
    }

    /// Rule: pods that only their finalizers keep in the API have no resources on this node.
    pub fn check_released(&self) -> Result<(), String> {
        let state = self.state();
        let left = (
            state.sandboxes.len(),
            state.containers.len(),
            &state.volumes,
            &state.cgroups,
        );
        match left.0 + left.1 + left.2.len() + left.3.len() {
            0 => Ok(()),
            _ => Err(format!(
                "leftover (sandboxes, containers, volumes, cgroups): {left:?}"
            )),
        }
    }
}

impl State {
    /// Whether a container runs or is in its final state.
    fn matches_spec(&self, uid: &str, pod: &Value, name: &Value) -> bool {
        let own = self.containers.values().map(|c| (&c.uid, &c.container));
        let own = own.filter(|(of, c)| *of == uid && *name == *c.name);
        let Some((_, newest)) = own.max_by_key(|(_, c)| c.attempt) else {
            return false;
        };
        match newest.state {
            ContainerState::Running => true,
            ContainerState::Exited if pod["spec"]["restartPolicy"] == "OnFailure" => {
                newest.exit_code == 0
            }
            ContainerState::Exited => pod["spec"]["restartPolicy"] == "Never",
            _ => false,
        }
    }

    fn is_converged(&self, uid: &str) -> Result<(), Wrong> {
        let pod = &self.pods[uid];
        let name = pod["metadata"]["name"].as_str().unwrap();
        let wrong = |why: String| Err((name.to_owned(), why));
        let runtime_uid = self.runtime_uid(uid);
        let live = self.live(&runtime_uid);
        if !pod["metadata"]["deletionTimestamp"].is_null() {
            let held = !pod["metadata"]["finalizers"].is_null()
                && pod["metadata"]["deletionGracePeriodSeconds"] == 0
                && live.is_empty();
            return match held {
                true => Ok(()),
                false => wrong(format!("deleted and still existing: {}", pod["status"])),
            };
        }
        if let Some(result) = self.check_external_terminal_status(uid) {
            return result.or_else(wrong);
        }
        let refused = nodes::REFUSALS.map(Value::from);
        if refused.contains(&pod["status"]["reason"]) && live.is_empty() {
            return Ok(());
        }
        let policy = pod["spec"]["restartPolicy"].as_str().unwrap();
        let phase = pod["status"]["phase"].as_str().unwrap();
        let wanted = pod["spec"]["containers"].as_array().unwrap().len();
        let running = live.iter().filter(|c| c.name.starts_with('c')).count();
        match (policy, phase) {
            ("Always", "Running") if running == wanted => {}
            (_, "Succeeded" | "Failed") if policy != "Always" && live.is_empty() => {}
            (_, "Running") if policy != "Always" && running > 0 => {}
            _ => {
                return wrong(format!(
                    "{policy}, {phase}, {running} of {wanted} running: {}",
                    pod["status"]
                ));
            }
        }
        check_statuses(pod, &live).or_else(wrong)?;
        if let Err(why) = self.has_its_size(uid) {
            return wrong(why);
        }
        if running > 0 {
            self.check_node_addresses(pod).or_else(wrong)?;
            self.check_newest_versions(pod, &runtime_uid)?;
        }
        Ok(())
    }

    fn check_newest_versions(&self, pod: &Value, uid: &str) -> Result<(), Wrong> {
        for volume in pod["spec"]["volumes"].as_array().unwrap() {
            let named = [
                &volume["configMap"]["name"],
                &volume["secret"]["secretName"],
            ];
            let Some(map) = named.into_iter().find_map(Value::as_str) else {
                continue;
            };
            let newest = self.maps.get(map).copied().unwrap_or(1).to_string();
            let shown = self.volume_versions.get(&(uid.to_owned(), map.to_owned()));
            if shown != Some(&newest) {
                let name = pod["metadata"]["name"].as_str().unwrap();
                let why = format!("volume {map} shows {shown:?} instead of {newest}");
                return Err((name.to_owned(), why));
            }
        }
        Ok(())
    }

    /// Rule: exactly the newest manifests run, and each has a mirror pod.
    fn statics_are_converged(&self) -> Result<(), Wrong> {
        let newest: BTreeSet<&str> = self
            .statics
            .values()
            .map(|pod| pod["metadata"]["uid"].as_str().unwrap())
            .collect();
        for uid in &self.static_uids {
            let mirror = self.pods.keys().find(|api| self.runtime_uid(api) == *uid);
            let sandboxes = self.sandboxes.values().filter(|b| b.uid == *uid).count();
            let name = uid.split_once("-v").map_or(uid.as_str(), |(name, _)| name);
            let wrong = |why: &str| Err((format!("{name}-node"), format!("{uid} {why}")));
            match newest.contains(uid.as_str()) {
                true if mirror.is_none() => return wrong("has no mirror"),
                true if !self.ran.contains(uid) => {
                    let shown = mirror.map(|api| &self.pods[api]["status"]);
                    return wrong(&format!("has never run: {shown:?}"));
                }
                false if mirror.is_some() => return wrong("was removed, but its mirror was not"),
                false if sandboxes > 0 => return wrong("was removed, but its sandbox was not"),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Rule: the status shows each running container correctly.
fn check_statuses(pod: &Value, live: &[&Container]) -> Result<(), String> {
    for container in live {
        let statuses = ["containerStatuses", "initContainerStatuses"];
        let shown = statuses
            .iter()
            .flat_map(|list| pod["status"][list].as_array().into_iter().flatten())
            .find(|status| status["name"] == *container.name);
        let is_correct = shown.is_some_and(|status| {
            status["restartCount"] == container.attempt
                && status["containerID"]
                    .as_str()
                    .is_some_and(|id| id.ends_with(&container.id))
                && status["state"]["running"].is_object()
        });
        if !is_correct {
            return Err(format!("the status of {container:?} is {shown:?}"));
        }
    }
    Ok(())
}
