//! The node: its size, addresses, labels and taints, all of which change, and pods that ran on it before this agent.

use super::*;

/// The node's default number of CPUs.
const CPUS: u32 = 64;
/// An extended resource in the Node's status that no device plugin provides.
pub(super) const LANE: &str = "sim.example/lane";
/// Reasons with which the node rejects a pod at admission.
pub(super) const REFUSALS: [&str; 4] = [
    "NodeAffinity",
    "TaintToleration",
    "OutOfcpu",
    "OutOfsim.example/lane",
];

/// The content of the Node object from a time on.
#[derive(Debug, Clone)]
struct NodeContent {
    since: Instant,
    zone: &'static str,
    no_schedule: bool,
    no_execute: bool,
    lanes: u64,
}

impl NodeContent {
    fn selected_by(&self, pod: &Value) -> bool {
        let zone = &pod["spec"]["nodeSelector"]["zone"];
        zone.is_null() || *zone == self.zone
    }

    fn tolerated_by(&self, pod: &Value) -> bool {
        !self.no_execute || !pod["spec"]["tolerations"].is_null()
    }
}

/// The node, its current state and its history.
pub(super) struct NodeState {
    pub object: Node,
    /// The Node in the API; `None` after its deletion.
    pub feed: watch::Sender<Option<Node>>,
    /// When the API begins to answer requests about the Node, and whether it has answered the running agent.
    pub answers_at: Option<Instant>,
    pub answered: bool,
    /// How often the agent has registered the node.
    pub registered: usize,
    /// How often the agent has written the Node's status.
    pub status_writes: usize,
    history: Vec<NodeContent>,
    /// The node's addresses.
    pub ips: Vec<String>,
    /// The machine's number of CPUs, and the number that the agent found at its start.
    cpus: u32,
    cpus_at_start: u32,
    /// When the running agent started.
    began: Option<Instant>,
    /// Pods that the running agent has started.
    started_pods: BTreeSet<String>,
    /// When pods were created in the API.
    created_at: BTreeMap<String, Instant>,
}

impl Default for NodeState {
    fn default() -> NodeState {
        NodeState {
            object: Node::default(),
            feed: watch::Sender::default(),
            answers_at: None,
            answered: false,
            registered: 0,
            status_writes: 0,
            history: vec![],
            ips: vec!["192.0.2.1".into()],
            cpus: CPUS,
            cpus_at_start: CPUS,
            began: None,
            started_pods: BTreeSet::new(),
            created_at: BTreeMap::new(),
        }
    }
}

impl NodeState {
    /// An agent starts and reads the number of CPUs.
    pub(super) fn begin_agent(&mut self) {
        self.started_pods.clear();
        self.began = Some(Instant::now());
        self.cpus_at_start = self.cpus;
    }

    /// The capacity for pods in millicores, as the agent found it.
    pub(super) fn milli(&self) -> i64 {
        i64::from(self.cpus_at_start) * 1000
    }

    /// A pod exists in the API.
    pub(super) fn note_created(&mut self, uid: &str) {
        self.created_at
            .entry(uid.to_owned())
            .or_insert_with(Instant::now);
    }

    /// Every Node content that the agent may have seen since it knows a pod.
    fn possible_contents(&self, uid: &str) -> impl Iterator<Item = &NodeContent> {
        let since = self.created_at.get(uid).copied().max(self.began);
        let until = self
            .history
            .iter()
            .skip(1)
            .map(|content| Some(content.since));
        let until = until.chain([None]);
        let both = self.history.iter().zip(until);
        both.filter(move |(_, until)| until.is_none() || *until >= since)
            .map(|(content, _)| content)
    }
}

/// The number of lanes that a pod requests.
fn lanes(pod: &Value) -> u64 {
    let requests = pod["spec"]["containers"][0]["resources"]["requests"][LANE].as_str();
    requests.map_or(0, |lanes| lanes.parse().unwrap())
}

impl State {
    /// Rule: when the agent starts a pod, the pod has matched some Node content that the agent may have seen.
    pub(super) fn check_started(&mut self, uid: &str, agent_number: u64) {
        if agent_number != self.agent_number || !self.pods.contains_key(uid) {
            return;
        }
        if !self.node.started_pods.insert(uid.to_owned()) {
            return;
        }
        self.node_is_known(uid);
        let pod = &self.pods[uid];
        let fits = |content: &NodeContent| content.selected_by(pod) && content.tolerated_by(pod);
        // Pods that still run keep the lanes that they requested, whatever their status says.
        let others = self.pods.iter().filter(|(other, _)| {
            *other != uid && self.node.started_pods.contains(*other) && !self.live(other).is_empty()
        });
        let used = others.map(|(_, pod)| lanes(pod)).sum::<u64>();
        let most = self
            .node
            .possible_contents(uid)
            .map(|content| content.lanes)
            .max();
        let mut wrong = vec![];
        if !self.node.possible_contents(uid).any(fits) {
            wrong.push(format!("{uid}: started on a node that it does not fit"));
        }
        if lanes(pod) > 0 && lanes(pod) + used > most.unwrap_or(0) {
            wrong.push(format!(
                "{uid}: started with {used} lanes in use of {most:?}"
            ));
        }
        wrong
            .into_iter()
            .for_each(|what| self.report_violation(what));
    }

    /// Rule: a status may reject a pod only if the agent has not started it and there was a reason.
    pub(super) fn check_rejected(&mut self, uid: &str, reason: &str) {
        if self.node.started_pods.contains(uid) {
            self.report_violation(format!("{uid}: rejected ({reason}) after it was admitted"));
        }
        let pod = &self.pods[uid];
        let mut seen = self.node.possible_contents(uid);
        let has_cause = match reason {
            "NodeAffinity" => seen.any(|content| !content.selected_by(pod)),
            "TaintToleration" => seen.any(|content| !content.tolerated_by(pod)),
            _ => true,
        };
        drop(seen);
        if !has_cause {
            self.report_violation(format!("{uid}: rejected ({reason}) without a cause"));
        }
    }

    /// Rule: the status of a running pod has the node's current addresses.
    pub(super) fn check_node_addresses(&self, pod: &Value) -> Result<(), String> {
        let (status, ips) = (&pod["status"], &self.node.ips);
        let of = |list: &Value| -> Vec<String> {
            let items = list.as_array().into_iter().flatten();
            items
                .map(|item| item["ip"].as_str().unwrap().to_owned())
                .collect()
        };
        let on_host = pod["spec"]["hostNetwork"] == true;
        let is_right = status["hostIP"] == ips[0]
            && of(&status["hostIPs"]) == *ips
            && (!on_host || of(&status["podIPs"]) == *ips);
        match is_right {
            true => Ok(()),
            false => Err(format!("the node has {ips:?}, but the status is {status}")),
        }
    }

    /// Changes the Node object.
    fn change_node_content(&mut self, change: impl FnOnce(&mut NodeContent)) {
        self.revision += 1;
        let mut content = self.node.history.last().cloned().unwrap_or(NodeContent {
            since: Instant::now(),
            zone: "a",
            no_schedule: false,
            no_execute: false,
            lanes: 2,
        });
        change(&mut content);
        content.since = Instant::now();
        let taint = |is_there: bool, effect: &str| {
            is_there.then(|| json!({"key": "sim", "effect": effect}))
        };
        let taints = [
            taint(content.no_schedule, "NoSchedule"),
            taint(content.no_execute, "NoExecute"),
        ];
        let taints: Vec<Value> = taints.into_iter().flatten().collect();
        let mut object = serde_json::to_value(&self.node.object).unwrap();
        json_patch::merge(
            &mut object,
            &json!({
                "metadata": {"name": "node", "uid": "node", "resourceVersion": self.revision.to_string(),
                    "labels": {"zone": content.zone}},
                "spec": {"taints": taints},
                "status": {"allocatable": {LANE: content.lanes.to_string()}, "capacity": {LANE: content.lanes.to_string()}},
            }),
        );
        self.node.history.push(content);
        self.node.object = serde_json::from_value(object).unwrap();
        self.publish_node();
    }

    /// Sends the current Node to the watch.
    pub(super) fn publish_node(&mut self) -> Node {
        let node = self.node.object.clone();
        self.node.feed.send_replace(Some(node.clone()));
        node
    }
}

impl World {
    pub(super) fn machine_now(&self) -> Machine {
        Machine {
            cpus: self.state().node.cpus,
            memory: 1 << 40,
            storage: 1 << 40,
            ..Machine::default()
        }
    }

    /// Sets the number of CPUs, which the agent reads at its next start.
    pub fn resize_node(&self, cpus: u32) {
        self.state().node.cpus = cpus;
    }

    /// Changes the Node's label or taint.
    pub fn change_node(&self) {
        let mut state = self.state();
        let zone = ["a", "a", "b"][usize::try_from(state.pick(3)).unwrap()];
        let tainted = state.pick(2) == 0;
        state.change_node_content(|content| (content.zone, content.no_schedule) = (zone, tainted));
    }

    /// Changes the node's addresses, as after a DHCP lease that was not renewed.
    pub fn move_node(&self, addresses: &[&str]) {
        let ips: Vec<String> = addresses.iter().map(|ip| (*ip).to_owned()).collect();
        let mut state = self.state();
        state.node.ips.clone_from(&ips);
        if let Some((_, node_ips)) = &state.agent {
            node_ips.send_replace(ips);
        }
    }

    /// Gives the node one of its addresses, or both.
    pub(super) fn move_node_somewhere(&self) {
        let places: [&[&str]; 4] = [
            &["192.0.2.1"],
            &["192.0.2.2"],
            &["192.0.2.2", "2001:db8::2"],
            &["2001:db8::1", "192.0.2.1"],
        ];
        let place = self.state().draw(4);
        self.move_node(places[usize::try_from(place).unwrap()]);
    }

    /// Makes one more change to the node: a NoExecute taint, the number of lanes, its addresses, or its
    /// number of CPUs at the next start.
    pub(super) fn change_more_of_node(&self) {
        let kind = self.state().draw(4);
        match kind {
            0 => {
                let mut state = self.state();
                let tainted = state.draw(3) == 0;
                state.change_node_content(|content| content.no_execute = tainted);
            }
            1 => {
                let mut state = self.state();
                let lanes = [0, 1, 2, 4][usize::try_from(state.draw(4)).unwrap()];
                state.change_node_content(|content| content.lanes = lanes);
            }
            2 => self.move_node_somewhere(),
            _ => {
                let cpus = [16, 32, 64][usize::try_from(self.state().draw(3)).unwrap()];
                self.resize_node(cpus);
            }
        }
    }

    /// Removes the NoExecute taint, so that every pod may run.
    pub(super) fn tolerate_node(&self) {
        self.state()
            .change_node_content(|content| content.no_execute = false);
    }

    /// A pod that an earlier agent started at `started`; it requests one CPU.
    pub fn create_pod_of_earlier_agent(&self, name: &str, created: Timestamp, started: Timestamp) {
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

    /// The number of sandboxes.
    pub fn sandboxes(&self) -> usize {
        self.state().sandboxes.len()
    }

    /// The number of RunPodSandbox calls by pod, for the pods in the API.
    pub fn sandbox_requests_by_pod(&self) -> BTreeMap<String, usize> {
        let state = self.state();
        let requests = |uid: &String| {
            let spent = state.recent_calls.get(&(uid.clone(), "run_sandbox"));
            spent.map_or(0, VecDeque::len)
        };
        let pods = state.pods.keys();
        pods.map(|uid| (uid.clone(), requests(uid))).collect()
    }

    /// The number of RunPodSandbox calls for a pod, which may have been removed.
    pub fn sandbox_requests(&self, uid: &str) -> usize {
        let state = self.state();
        let spent = state.recent_calls.get(&(uid.to_owned(), "run_sandbox"));
        spent.map_or(0, VecDeque::len)
    }

    /// Deletes a pod in the API.
    pub fn delete_uid(&self, uid: &str) {
        self.mark_deleted(uid);
    }

    /// The time of day.
    pub fn now(&self) -> Timestamp {
        self.1.now()
    }
}
