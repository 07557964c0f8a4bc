//! The simulated world: runtime, API and machine over one shared state, driven by a seed.

mod api;
mod convergence;
mod ends;
mod faults;
mod hooks;
mod invariants;
mod logs;
mod machine;
mod node_api;
mod nodes;
mod outage;
mod patch;
mod processors;
mod remote;
mod removal;
mod restarts;
mod runtime;
mod shutdown;
mod sizes;
mod troubles;
mod workload;

pub use removal::SLACK_WITH_FAULTS;
pub use shutdown::Logind;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use holdfast_agent::{
    Agent, AttachedDisks, ClaimManager, Csi, DeviceManager, Events, Images, Journals, Metrics,
    Network, OwnNode, Parts, Statics,
};
use holdfast_config as config;
use holdfast_config::Overrides;
use holdfast_core::image::gc::Filesystem;
use holdfast_core::node::shutdown::Periods;
use holdfast_core::pod;
use holdfast_core::pod::cri_config::label;
use holdfast_core::pod::explain::{self, Fetching};
use holdfast_core::pod::observed::{
    Container, ContainerState, EventKind, ObservedPod, RuntimeEvent, Sandbox,
};
use holdfast_core::pod::probe::{Http, Reply};
use holdfast_core::pod::record::Record;
use holdfast_core::serving::Streams;
use holdfast_core::volume::payload::Files;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume};
use holdfast_cri::{
    Credentials, Exec, Image, ImageInventory, ListedPod, RunningContainer, Runtime, RuntimeError,
    RuntimeErrorKind, RuntimeStatus,
};
use holdfast_host::{HostError, Log, OnRemoval, PodHost, SubPath};
use holdfast_kubeapi::answers::{Answers, Recovery};
use holdfast_kubeapi::cache::{Cache, Writer};
use holdfast_kubeapi::objects::{Following, OnChange};
use holdfast_kubeapi::pods::{
    ApiFailure, Attachment, Binding, CertificateFor, PodApi, Token, TokenFor,
};
use holdfast_probes::{Dialer, HttpError};
use holdfast_proto::cri as pb;
use holdfast_sys::clock::Clock;
use holdfast_sys::machine::Machine;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequest};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// The maximum number of trace lines of a run. A run that exceeds it contains a hot loop.
const LONGEST_TRACE: usize = 300_000;

struct SandboxEntry {
    uid: String,
    name: String,
    sandbox: Sandbox,
}

struct ContainerEntry {
    uid: String,
    /// CPU shares, in the kernel's unit.
    shares: i64,
    container: Container,
}

/// xorshift64*: the same seed produces the same run.
#[derive(Default)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn pick(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below.max(1)
    }
}

#[derive(Default)]
struct State {
    random: Random,
    /// A separate generator for troubles, so that a seed's other choices are the same with and without them.
    trouble_random: Random,
    troubles: troubles::Troubles,
    outage: outage::Outage,
    agent_number: u64,
    faults: bool,
    next: u64,
    sandboxes: BTreeMap<String, SandboxEntry>,
    containers: BTreeMap<String, ContainerEntry>,
    pods: BTreeMap<String, Value>,
    revision: u64,
    volumes: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    dirs: BTreeSet<String>,
    /// Containers that were started, by pod, name and attempt.
    started: BTreeSet<(String, String, u32)>,
    /// Terminal phases that pods' statuses have shown.
    final_phase: BTreeMap<String, String>,
    broken: Vec<String>,
    /// Every call with its result, in order. A seed always produces the same list.
    trace: Vec<String>,
    /// Containers whose readiness or startup probe has succeeded at least once.
    probed: BTreeSet<String>,
    /// Hooks that ran, by container.
    hooks: BTreeMap<String, Vec<String>>,
    /// Running preStop hooks, by the number of the agent that started them and the container.
    running_hooks: BTreeSet<(u64, String)>,
    /// The pod of every container, including removed ones.
    owners: BTreeMap<String, String>,
    /// Pods with a container that was started or has exited, until their directories are removed; and those
    /// of them that reached a terminal phase.
    ran: BTreeSet<String>,
    ended: BTreeSet<String>,
    /// Pods whose removal the watch has delivered, and removed pods whose removal it has not delivered yet.
    removed_at: BTreeMap<String, removal::Removal>,
    undelivered_removals: BTreeSet<String>,
    /// The part of `undelivered_removals` whose last revision has a grace period of 0.
    zero_grace_removals: BTreeSet<String>,
    /// Grace periods of pods whose object was removed.
    graces: BTreeMap<String, i64>,
    /// Static pods whose state was dropped after their mirror pods were written.
    dropped_statics: BTreeSet<String>,
    /// Manifests that were removed and may be restored, by name.
    parked: BTreeMap<String, Value>,
    /// Calls for this pod never return.
    hung_pod: Option<String>,
    /// Image pulls in progress, and the maximum number at once.
    pulls: (usize, usize),
    watcher: Option<removal::PodWatch>,
    /// The journals and the node's addresses of the running agent.
    agent: Option<(Arc<Journals>, watch::Sender<Vec<String>>)>,
    /// The API does not answer.
    frozen: bool,
    /// The API refuses connections.
    refuses: bool,
    /// What the agent learns from the responses: whether the API can be reached.
    answers: Answers,
    /// The pod watch delivers nothing.
    is_watch_stalled: bool,
    /// The runtime cannot be reached.
    is_runtime_down: bool,
    /// Whether the runtime supports container events.
    has_events: bool,
    /// The subscriber of these events.
    event_subscriber: Option<mpsc::Sender<RuntimeEvent>>,
    /// Manifests of static pods by name, and all UIDs that such pods had.
    statics: BTreeMap<String, Value>,
    static_uids: BTreeSet<String>,
    statics_sender: Option<watch::Sender<Statics>>,
    /// How often each manifest was written again right after its removal, by UID.
    appearances: BTreeMap<String, u64>,
    /// The newest attempt in the logs of a static pod that starts again, by UID and container.
    kept_logs: BTreeMap<(String, String), u32>,
    node: nodes::NodeState,
    /// Terminal statuses, and `DisruptionTarget` conditions, that other clients have written, by UID.
    external_terminal_statuses: BTreeMap<String, ends::ExternalTerminalStatus>,
    disrupted: BTreeMap<String, Value>,
    /// A volume on a remote server.
    remote: remote::RemoteVolume,
    /// Versions of ConfigMaps and Secrets that have changed.
    maps: BTreeMap<String, u64>,
    /// Subscriptions to changes of ConfigMaps and Secrets, by ID.
    subscriptions: BTreeMap<u64, (BTreeSet<String>, OnChange)>,
    /// The version that a pod's volume shows, by pod and volume.
    volume_versions: BTreeMap<(String, String), String>,
    /// Times of requests and calls within the last minute, by pod and kind.
    recent_calls: BTreeMap<(String, &'static str), VecDeque<Instant>>,
    /// The agent's root directory if the CPU manager uses the static policy.
    processors: Option<PathBuf>,
    /// The simulated logind, and the grace periods for shutdowns.
    logind: Option<(shutdown::Logind, Periods)>,
    /// Regular containers in their final state, by pod and name, with the ID of the instance.
    finished: BTreeMap<(String, String), String>,
    /// The number of StopContainer calls during which the container's preStop hook ran.
    hooked_stops: usize,
    /// The number of HTTP requests by path.
    http_requests: BTreeMap<String, usize>,
    /// Sandboxes that the runtime created after the call for them was cancelled: no agent can wait for them.
    late_sandboxes: BTreeSet<String>,
    /// Containers for which an agent has called StopContainer.
    stop_requested: BTreeSet<String>,
    /// Sandboxes that calls of an agent are stopping.
    stopping: BTreeSet<(u64, String)>,
    /// The upkeep of running pods fails: no directory can be created for them, and no RuntimeClass is found.
    is_upkeep_failing: bool,
    /// Calls that create a sandbox do not return.
    is_network_hanging: bool,
    /// Reasons of the events that were posted, by pod.
    reasons: BTreeSet<(String, String)>,
    /// Logs that grow, by container.
    logs: BTreeMap<String, logs::GrowingLog>,
    /// The maximum number of calls of each kind within a minute.
    max_calls: BTreeMap<&'static str, usize>,
}

/// The world; all clones share one state. An agent's clone carries the number of this agent. After a
/// kill, calls with its number neither return nor take effect, as if its process had exited.
#[derive(Clone)]
pub struct World(Arc<Mutex<State>>, Clock, u64);

enum Fault {
    None,
    Before,
    After,
    Hang,
}

impl State {
    fn pick(&mut self, below: u64) -> u64 {
        self.random.pick(below)
    }

    fn id(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}{:04}", self.next)
    }

    fn report_violation(&mut self, what: String) {
        self.trace.push(format!("BROKEN {what}"));
        self.broken.push(what);
    }

    /// The maximum grace period, in seconds, with which a container of a pod may be stopped.
    fn grace_limit(&self, uid: &str) -> i64 {
        if let Some(grace) = self.removed_grace(uid) {
            return grace;
        }
        let mut statics = self.statics.values();
        let pod = self
            .pods
            .get(uid)
            .or_else(|| statics.find(|pod| pod["metadata"]["uid"] == *uid));
        let own = pod.and_then(|p| p["spec"]["terminationGracePeriodSeconds"].as_i64());
        // A replaced manifest may have had up to 8 s; other orphans have less.
        let orphaned = if self.static_uids.contains(uid) { 8 } else { 1 };
        let gone = self.graces.get(uid).copied();
        own.or(gone).unwrap_or(orphaned).max(2)
    }

    fn live(&self, uid: &str) -> Vec<&Container> {
        self.containers
            .values()
            .filter(|c| c.uid == uid && c.container.state == ContainerState::Running)
            .map(|c| &c.container)
            .collect()
    }
}

impl World {
    pub fn new(seed: u64) -> World {
        let clock = Clock::starting_at("2026-11-20T00:00:00Z".parse().unwrap());
        let state = State {
            random: Random::new(seed),
            trouble_random: Random::new(!seed),
            has_events: !seed.is_multiple_of(3),
            ..State::default()
        };
        let world = World(Arc::new(Mutex::new(state)), clock, 0);
        world.change_node();
        world
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn pick(&self, below: u64) -> u64 {
        self.state().pick(below)
    }

    pub fn set_faults(&self, on: bool) {
        self.state().faults = on;
    }

    /// Starts a new agent over this world, as after a start of the process.
    pub fn start_agent(&self) -> tokio::task::JoinHandle<()> {
        let world = World(Arc::clone(&self.0), self.1, self.state().agent_number);
        world.start()
    }

    fn start(&self) -> tokio::task::JoinHandle<()> {
        let (writer, pods) = Cache::without_watch();
        let (statics_sender, statics) = watch::channel(Statics::default());
        {
            let mut state = self.state();
            // The previous agent's subscriptions end.
            (state.event_subscriber, state.subscriptions) = (None, BTreeMap::new());
            state.begin_agent();
            state.statics_sender = Some(statics_sender);
            state.watcher = Some(removal::PodWatch::new(writer));
            state.publish_statics();
            state.relist();
        }
        let mut config = config::load(None, &Overrides::default(), "node").unwrap();
        config.kubeconfig = Some("simulated".into());
        // The agent must not touch or read this machine.
        config.eviction.thresholds.clear();
        config.enforcement.limits_pods = false;
        config.root_dir = "/nonexistent/holdfast-sim".into();
        // The agent would create missing directories; below a file it cannot.
        config.device_plugin_dir = "/dev/null/device-plugins".into();
        let (logind, periods) = self.state().logind.clone().unzip();
        config.shutdown = periods.unwrap_or_default();
        let managers = self.managers(&mut config.root_dir);
        let (ledger, requests) = holdfast_agent::ledger::channel(managers);
        let (network, network_state) = watch::channel(Network::Ready);
        let api: Arc<dyn PodApi> = Arc::new(self.clone());
        let starts = holdfast_agent::Starts::for_processors(2);
        let unlimited = (0.0, 0.0);
        let events = Events::start(
            Arc::clone(&api),
            "node",
            self.1,
            unlimited,
            starts.idle_gate(),
        );
        let parts = Parts {
            runtime: Arc::new(self.clone()),
            api,
            host: Arc::new(self.clone()),
            clock: self.1,
            events,
            images: Arc::new(Images::new(4)),
            machine: Arc::new(self.machine_now()),
            node_ips: watch::channel(self.state().node.ips.clone()).0,
            node_addresses: watch::Sender::default(),
            resolver: watch::channel(Arc::default()).0,
            network: network_state,
            node: Arc::new(OwnNode::new(&config, Some(Arc::new(self.clone())))),
            ledger,
            metrics: Arc::new(Metrics::default()),
            dialer: Arc::new(self.clone()),
            journals: Arc::default(),
            starts: Arc::new(starts),
            csi: Arc::new(Csi::new(&config.root_dir)),
            disks: Arc::new(AttachedDisks::new(&config.root_dir)),
            devices: Arc::new(DeviceManager::new(&config.device_plugin_dir, self.1.now())),
            claims: Arc::new(ClaimManager::new(&config.root_dir).unwrap()),
            started: self.1.now(),
            config: Arc::new(config),
        };
        {
            let mut state = self.state();
            state.node.begin_agent();
            state.forget_node();
            state.agent = Some((Arc::clone(&parts.journals), parts.node_ips.clone()));
        }
        let agent = Agent {
            statics,
            ledger: requests,
            parts,
            reviews: None,
            serves: false,
            pods: Some(pods),
            keeper: None,
            network,
            kernel_log: None,
            announcer: logind.map(|logind| Arc::new(logind) as _),
            renewal: None,
        };
        let world = self.clone();
        tokio::spawn(async move {
            let result = Box::pin(agent.run()).await;
            world
                .state()
                .report_violation(format!("the agent exited: {result:?}"));
        })
    }

    /// Drops the state: the world and its agent reference each other.
    pub fn end(&self) {
        let state = std::mem::take(&mut *self.state());
        drop(state);
    }

    /// A pod with two exclusive CPUs.
    pub fn create_pod_with_processors(&self, name: &str) {
        let sizes = json!({"cpu": "2", "memory": "1Mi"});
        self.create_pod_of(name, "Always", &json!({"limits": sizes, "requests": sizes}));
    }

    /// A long-running pod.
    pub fn create_steady_pod(&self, name: &str) {
        self.create_pod_of(name, "Always", &json!({}));
    }

    /// A pod with one container, which runs until it is stopped.
    pub fn create_plain_pod(&self, name: &str, policy: &str) {
        self.create_pod_of(name, policy, &json!({}));
    }

    fn create_pod_of(&self, name: &str, policy: &str, resources: &Value) {
        let mut state = self.state();
        let uid = state.id("uid");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns", "uid": uid, "creationTimestamp": self.1.now().to_string(), "generation": 1},
            "spec": {"nodeName": "node", "restartPolicy": policy, "terminationGracePeriodSeconds": 1, "containers": [{"name": "c0", "image": "i:1", "resources": resources, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
                     "volumes": [{"name": "v", "emptyDir": {}}]}, "status": {"phase": "Pending"}});
        state.pods.insert(uid.clone(), pod);
        state.publish(&uid);
    }

    /// Removes a pod's object immediately, even if its containers still run.
    pub fn remove_by_force(&self, name: &str) {
        let uid = self.uid(name);
        self.state().remove(&uid);
    }

    /// The containers of a pod exit with code 0.
    pub fn complete(&self, name: &str) {
        let (uid, now) = (self.uid(name), self.1.now());
        let mut state = self.state();
        let uid = state.runtime_uid(&uid);
        let live: Vec<String> = state.live(&uid).iter().map(|c| c.id.clone()).collect();
        live.iter().for_each(|id| end(&mut state, id, 0, now));
    }

    /// A pod with host networking and every kind of probe.
    pub fn create_host_pod(&self, name: &str) {
        self.create_plain_pod(name, "Always");
        let uid = self.uid(name);
        let mut state = self.state();
        let spec = &mut state.pods.get_mut(&uid).unwrap()["spec"];
        spec["hostNetwork"] = true.into();
        let probe = json!({"httpGet": {"port": 80, "path": "/c0"}, "periodSeconds": 1});
        for kind in ["startupProbe", "readinessProbe", "livenessProbe"] {
            spec["containers"][0][kind] = probe.clone();
        }
        state.publish(&uid);
    }

    /// A pod's object as stored in the API.
    pub fn object(&self, name: &str) -> Value {
        let uid = self.uid(name);
        self.state().pods[&uid].clone()
    }

    /// Adds a finalizer to a pod.
    pub fn put_finalizer(&self, name: &str) {
        let uid = self.uid(name);
        let mut state = self.state();
        state.pods.get_mut(&uid).unwrap()["metadata"]["finalizers"] = json!(["sim.example/hold"]);
        state.publish(&uid);
    }

    /// The number of requests or calls of a kind for a pod within the last minute.
    pub fn recent_calls(&self, what: &'static str, name: &str) -> usize {
        let uid = self.uid(name);
        let state = self.state();
        state
            .recent_calls
            .get(&(uid, what))
            .map_or(0, VecDeque::len)
    }

    /// The recent inputs and decisions of a pod's worker.
    pub fn record(&self, name: &str) -> Option<Record> {
        let (journals, _) = self.state().agent.clone()?;
        journals.record("ns", name)
    }

    fn mark_deleted(&self, uid: &str) {
        let mut state = self.state();
        let now = self.1.now();
        if let Some(pod) = state.pods.get_mut(uid)
            && pod["metadata"]["deletionTimestamp"].is_null()
        {
            let grace = pod["spec"]["terminationGracePeriodSeconds"].clone();
            pod["metadata"]["deletionTimestamp"] = now.to_string().into();
            pod["metadata"]["deletionGracePeriodSeconds"] = grace;
        }
        state.publish(uid);
    }

    fn some_uid(&self) -> Option<String> {
        let mut state = self.state();
        let uids: Vec<String> = state.pods.keys().cloned().collect();
        let place = state.pick(uids.len() as u64);
        uids.get(usize::try_from(place).unwrap()).cloned()
    }

    /// The UID of a pod.
    pub fn uid(&self, name: &str) -> String {
        let state = self.state();
        state
            .pods
            .iter()
            .find(|(_, p)| p["metadata"]["name"] == name)
            .map(|(uid, _)| uid.clone())
            .unwrap()
    }

    /// The maximum number of requests and calls of each kind that one pod has caused within a minute.
    pub fn max_calls(&self) -> BTreeMap<&'static str, usize> {
        self.state().max_calls.clone()
    }

    /// Names of pods that are not in this phase.
    pub fn not_in_phase(&self, phase: &str) -> Vec<String> {
        let state = self.state();
        state
            .pods
            .values()
            .filter(|p| p["status"]["phase"] != phase)
            .map(|p| p["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    pub fn delete_some_pod(&self) {
        if let Some(uid) = self.some_uid() {
            self.mark_deleted(&uid);
        }
    }

    pub fn delete_all_pods(&self) {
        let uids: Vec<String> = self.state().pods.keys().cloned().collect();
        for uid in uids {
            self.mark_deleted(&uid);
        }
    }

    pub fn exit_some_container(&self) {
        let now = self.1.now();
        let mut state = self.state();
        let running: Vec<String> = state
            .containers
            .iter()
            .filter(|(_, c)| c.container.state == ContainerState::Running)
            .map(|(id, _)| id.clone())
            .collect();
        let place = state.pick(running.len() as u64);
        let code = i32::try_from(state.pick(2)).unwrap();
        if let Some(id) = running.get(usize::try_from(place).unwrap()) {
            end(&mut state, id, code, now);
        }
    }

    pub fn lose_some_sandbox(&self) {
        let now = self.1.now();
        let mut state = self.state();
        let ids: Vec<String> = state.sandboxes.keys().cloned().collect();
        let place = state.pick(ids.len() as u64);
        if let Some(id) = ids.get(usize::try_from(place).unwrap()) {
            let inside: Vec<String> = state
                .containers
                .iter()
                .filter(|(_, c)| c.container.sandbox == *id)
                .map(|(id, _)| id.clone())
                .collect();
            for container in inside {
                end(&mut state, &container, 137, now);
            }
            let lost = state.sandboxes.get_mut(id).unwrap();
            lost.sandbox.ready = false;
            let uid = lost.uid.clone();
            state.send_event(&uid, id, EventKind::Stopped);
        }
    }

    pub fn broken(&self) -> Result<(), String> {
        let mut state = self.state();
        if state.pulls.1 > 4 {
            let most = state.pulls.1;
            state.report_violation(format!("{most} images were pulled concurrently"));
        }
        if state.broken.is_empty() {
            Ok(())
        } else {
            Err(state.broken.join("; "))
        }
    }

    /// Kills the running agent.
    pub fn kill_agent(&self) {
        self.trace_line("the agent is killed", true);
        let mut state = self.state();
        state.agent_number += 1;
        World::drop_pending_mounts(&mut state);
    }

    async fn hang_if_killed(&self) {
        if self.state().agent_number != self.2 {
            std::future::pending::<()>().await;
        }
    }

    async fn sleep(&self, time: Duration) {
        tokio::time::sleep(time).await;
        self.hang_if_killed().await;
    }

    /// Waits for the duration of a call and chooses its fault.
    async fn fault(&self) -> Fault {
        self.hang_if_killed().await;
        let at = self.1.now();
        let (delay, fault) = {
            let mut state = self.state();
            let delay = 1 + state.pick(40);
            state.trace.push(format!("{at} delay {delay}"));
            if state.trace.len() > LONGEST_TRACE {
                let last = &state.trace[LONGEST_TRACE - 40..];
                panic!(
                    "the trace is too long: {:?}\n{}",
                    state.broken,
                    last.join("\n")
                );
            }
            let fault = if state.faults { state.pick(24) } else { 99 };
            (delay, fault)
        };
        self.sleep(Duration::from_millis(delay)).await;
        match fault {
            0 | 1 => Fault::Before,
            2 => Fault::After,
            3 => Fault::Hang,
            _ => Fault::None,
        }
    }

    /// A call to the runtime. With faults it fails before or after it takes effect, or hangs and takes effect late.
    async fn call<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        let what = std::any::type_name_of_val(&act)
            .trim_end_matches("::{{closure}}")
            .rsplit("::")
            .next()
            .unwrap_or_default()
            .to_owned();
        let result = self.call_untraced(act).await;
        self.trace_line(&what, result.is_ok());
        result
    }

    /// Adds a line to the trace.
    fn trace_line(&self, what: &str, good: bool) {
        let at = self.1.now();
        self.state().trace.push(format!("{at} {what} {good}"));
    }

    /// The trace so far.
    pub fn trace(&self) -> Vec<String> {
        self.state().trace.clone()
    }

    /// Makes all calls about this pod hang.
    pub fn hang_calls_of(&self, uid: &str) {
        self.state().hung_pod = Some(uid.to_owned());
    }

    /// Makes hanging calls return; new calls do not hang.
    pub fn release_calls(&self) {
        self.state().hung_pod = None;
    }

    async fn wait_while_hung(&self, uid: &str) {
        while self.state().hung_pod.as_deref() == Some(uid) {
            self.sleep(Duration::from_secs(1)).await;
        }
    }

    async fn call_untraced<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        let timeout = || RuntimeError {
            kind: RuntimeErrorKind::Timeout,
            code: None,
            message: "deadline exceeded".into(),
        };
        let fault = self.fault().await;
        if self.state().is_runtime_down {
            return Err(RuntimeError {
                kind: RuntimeErrorKind::Unavailable,
                code: None,
                message: "connection refused".into(),
            });
        }
        match fault {
            Fault::Before => Err(RuntimeError {
                kind: RuntimeErrorKind::Failed,
                code: None,
                message: "injected".into(),
            }),
            Fault::After => {
                // The call took effect, but its response is lost.
                let _ = act(&mut self.state());
                Err(timeout())
            }
            Fault::Hang => {
                self.sleep(Duration::from_secs(120)).await;
                let _ = act(&mut self.state());
                Err(timeout())
            }
            Fault::None => act(&mut self.state()),
        }
    }
}

fn end(state: &mut State, id: &str, code: i32, now: Timestamp) {
    if let Some(c) = state.containers.get_mut(id)
        && c.container.state != ContainerState::Exited
    {
        let has_run = c.container.state == ContainerState::Running;
        c.container.state = ContainerState::Exited;
        c.container.exit_code = code;
        c.container.finished_at = Some(now);
        let (uid, name) = (c.uid.clone(), c.container.name.clone());
        let line = format!("{now} ended {uid}/{} {id} {code}", c.container.name);
        state.trace.push(line);
        if has_run {
            state.note_end(id, &uid, &name, code);
        }
        // A container that was killed before it was started counts as exited too: it need not be started again.
        state.ran.insert(uid.clone());
        state.send_event(&uid, id, EventKind::Stopped);
    }
}

fn missing(what: &str) -> RuntimeError {
    RuntimeError {
        kind: RuntimeErrorKind::NotFound,
        code: None,
        message: format!("{what} not found"),
    }
}
