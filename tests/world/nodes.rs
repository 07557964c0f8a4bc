//! How large the node is, and pods that ran on it before this agent.

use super::*;

/// How many processors a node has, if nothing else is said.
pub(super) const CPUS: u32 = 64;

impl World {
    pub(super) fn machine_now(&self) -> Machine {
        let cpus = self.state().cpus.unwrap_or(CPUS);
        Machine {
            cpus,
            memory: 1 << 40,
            storage: 1 << 40,
            ..Machine::default()
        }
    }

    /// From its next start on the agent has so many processors for pods.
    pub fn resize_node(&self, cpus: u32) {
        self.state().cpus = Some(cpus);
    }

    /// A pod that an earlier agent has started at `started`; it asks for a processor.
    pub fn create_pod_of_before(&self, name: &str, created: Timestamp, started: Timestamp) {
        let one = json!({"requests": {"cpu": "1"}});
        self.create_pod_of(name, "Always", &one);
        let uid = self.uid(name);
        let mut state = self.state();
        let pod = state.pods.get_mut(&uid).unwrap();
        pod["metadata"]["creationTimestamp"] = created.to_string().into();
        pod["status"] = json!({"phase": "Running", "startTime": started.to_string()});
        state.publish(&uid);
    }

    /// Names of pods that are in this phase.
    pub fn in_phase(&self, phase: &str) -> Vec<String> {
        let state = self.state();
        let pods = state.pods.values();
        let names = pods.filter(|p| p["status"]["phase"] == phase);
        names
            .map(|p| p["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// How many sandboxes there are.
    pub fn sandboxes(&self) -> usize {
        self.state().boxes.len()
    }

    /// How often a sandbox was asked for, by the pods that the API has.
    pub fn asked_for_sandboxes(&self) -> BTreeMap<String, usize> {
        let state = self.state();
        let asked = |uid: &String| {
            let spent = state.spent.get(&(uid.clone(), "run_sandbox"));
            spent.map_or(0, VecDeque::len)
        };
        let pods = state.pods.keys();
        pods.map(|uid| (uid.clone(), asked(uid))).collect()
    }

    /// How often a sandbox was asked for, for a pod that may be gone.
    pub fn asked_for_sandbox(&self, uid: &str) -> usize {
        let state = self.state();
        let spent = state.spent.get(&(uid.to_owned(), "run_sandbox"));
        spent.map_or(0, VecDeque::len)
    }

    /// A pod is deleted in the API.
    pub fn delete_uid(&self, uid: &str) {
        self.mark_deleted(uid);
    }

    /// The time of day.
    pub fn now(&self) -> Timestamp {
        self.1.now()
    }
}
