//! The simulated world: runtime, API and machine over one shared state, steered by a seed.

mod api;
mod ends;
mod far;
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
mod removal;
mod rest;
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
use holdfast::agent::{
    Agent, Context, Events, Images, Journals, Metrics, Network, OwnNode, Statics,
};
use holdfast::config::{self, Overrides};
use holdfast::core::image::gc::Filesystem;
use holdfast::core::node::shutdown::Periods;
use holdfast::core::pod;
use holdfast::core::pod::cri_config::label;
use holdfast::core::pod::explain::{self, Fetching};
use holdfast::core::pod::observed::{
    Container, ContainerState, EventKind, ObservedPod, RuntimeEvent, Sandbox,
};
use holdfast::core::pod::probe::{Http, Reply};
use holdfast::core::pod::record::Record;
use holdfast::core::serving::Streams;
use holdfast::core::volume::payload::Files;
use holdfast::core::volume::resolved::{Problem, ResolvedVolume};
use holdfast::cri::{
    Credentials, Exec, Image, ListedPod, RunningContainer, Runtime, RuntimeError, RuntimeErrorKind,
    RuntimeStatus, Stock,
};
use holdfast::host::{HostError, Log, OnTakenAway, PodHost, SubPath};
use holdfast::kubeapi::answers::{Answers, Recovery};
use holdfast::kubeapi::cache::{Cache, Writer};
use holdfast::kubeapi::objects::{Following, OnChange};
use holdfast::kubeapi::pods::{
    ApiFailure, Attachment, Binding, CertificateFor, PodApi, Token, TokenFor,
};
use holdfast::probes::{Dialer, HttpError};
use holdfast::sys::clock::Clock;
use holdfast::sys::machine::Machine;
use holdfast_proto::cri as pb;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1beta1::{ClusterTrustBundle, PodCertificateRequest};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// A run makes fewer calls than this, unless something goes round in circles.
const LONGEST_TRACE: usize = 300_000;

struct Box_ {
    uid: String,
    name: String,
    sandbox: Sandbox,
}

struct Ctr {
    uid: String,
    /// What it has of the processors, in the kernel's unit.
    shares: i64,
    container: Container,
}

/// xorshift64*: the same seed gives the same run.
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
    /// What the troubles are drawn from, so that a seed's other choices are the same with and without them.
    draws: Random,
    troubles: troubles::Troubles,
    outage: outage::Outage,
    life: u64,
    faults: bool,
    next: u64,
    boxes: BTreeMap<String, Box_>,
    containers: BTreeMap<String, Ctr>,
    pods: BTreeMap<String, Value>,
    revision: u64,
    volumes: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    dirs: BTreeSet<String>,
    /// Containers that were started, by pod, name and attempt.
    started: BTreeSet<(String, String, u32)>,
    /// Phases that a pod's status has shown.
    final_phase: BTreeMap<String, String>,
    broken: Vec<String>,
    /// Every call as it ended: a seed gives the same list every time.
    trace: Vec<String>,
    /// Containers whose readiness or startup probe has succeeded at least once.
    probed: BTreeSet<String>,
    /// Hooks that ran, by container.
    hooks: BTreeMap<String, Vec<String>>,
    /// preStop hooks that run: whose agent has begun them, and in which container.
    hooking: BTreeSet<(u64, String)>,
    /// Whose every container is or was.
    owners: BTreeMap<String, String>,
    /// Pods that have a container that was started or has ended, until their directories go; those that came to their end since.
    ran: BTreeSet<String>,
    ended: BTreeSet<String>,
    /// Pods whose removal the watch has shown, and objects of which it has not yet.
    gone_at: BTreeMap<String, removal::Removal>,
    unseen: BTreeSet<String>,
    /// Of those objects, the ones whose last grace period is 0.
    hurried: BTreeSet<String>,
    /// Grace periods of pods whose object is gone.
    graces: BTreeMap<String, i64>,
    /// Static pods of which nothing was left since their mirrors were written.
    anew: BTreeSet<String>,
    /// Manifests that were taken away last, by name.
    parked: BTreeMap<String, Value>,
    /// Calls about this pod never return.
    hung: Option<String>,
    /// Pulls under way, and the most at once.
    pulls: (usize, usize),
    watcher: Option<removal::PodWatch>,
    /// The present agent.
    context: Option<Arc<Context>>,
    /// The API answers nothing.
    frozen: bool,
    /// Connections to the API are refused.
    refuses: bool,
    /// What the agent's requests show of that.
    answers: Answers,
    /// The watch of pods brings nothing.
    deaf: bool,
    /// The runtime answers nothing but that it is not there.
    down: bool,
    /// Whether the runtime has events.
    has_events: bool,
    /// Who listens to them.
    hinted: Option<mpsc::Sender<RuntimeEvent>>,
    /// Manifests of static pods by name, and all uids that such pods had.
    statics: BTreeMap<String, Value>,
    static_uids: BTreeSet<String>,
    statics_sender: Option<watch::Sender<Statics>>,
    /// How often each manifest was written again right after it was removed, by uid.
    appearances: BTreeMap<String, u64>,
    /// The newest attempt that the logs show of a static pod that starts again, by uid and container.
    kept_logs: BTreeMap<(String, String), u32>,
    node: nodes::OfNode,
    /// Ends of pods that somebody else has told, and what others have said of pods that they delete, by uid.
    told: BTreeMap<String, ends::Told>,
    disrupted: BTreeMap<String, Value>,
    /// A volume that another machine serves.
    far: far::Far,
    /// Versions of ConfigMaps that are not the first.
    maps: BTreeMap<String, u64>,
    /// Who is told of changes of which ConfigMaps.
    followers: BTreeMap<u64, (BTreeSet<String>, OnChange)>,
    /// What pods' volumes show, by pod and volume.
    shown: BTreeMap<(String, String), String>,
    /// When requests and calls were made, by pod and kind, within the last minute.
    spent: BTreeMap<(String, &'static str), VecDeque<Instant>>,
    /// The root directory of a node that gives containers processors of their own.
    processors: Option<PathBuf>,
    /// Who announces shutdowns, and what they wait for.
    logind: Option<(shutdown::Logind, Periods)>,
    /// Regular containers in their final state, by pod and name, with the id of the instance.
    over: BTreeMap<(String, String), String>,
    /// The number of StopContainer calls during which the container's preStop hook ran.
    hooked_stops: usize,
    /// The number of HTTP requests by path.
    asked: BTreeMap<String, usize>,
    /// Sandboxes that the runtime has made after the call for them was cut off: no agent can wait for them.
    late_boxes: BTreeSet<String>,
    /// Containers for which an agent has called StopContainer.
    told_to_stop: BTreeSet<String>,
    /// Sandboxes that calls of an agent are stopping.
    stopping: BTreeSet<(u64, String)>,
    /// Nothing can be looked up or kept in order for pods that run.
    fails_upkeep: bool,
    /// No call that makes a sandbox is answered.
    stalls_network: bool,
    /// Reasons of the events that were posted, by pod.
    reasons: BTreeSet<(String, String)>,
    /// Logs that grow, by container.
    logs: BTreeMap<String, logs::GrowingLog>,
    /// The most of each kind within a minute.
    most: BTreeMap<&'static str, usize>,
}

/// The world; clones are the same one. An agent's clone carries the number of its life: calls of one
/// that has been killed never return and never act, as its process would be gone.
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

    fn deny(&mut self, what: String) {
        self.trace.push(format!("BROKEN {what}"));
        self.broken.push(what);
    }

    /// The longest time in seconds that a container of a pod may be given to stop.
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
        // That of a manifest that was replaced; orphans have less.
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
            draws: Random::new(!seed),
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

    /// A fresh agent over this world, as after a start of the process.
    pub fn start_agent(&self) -> tokio::task::JoinHandle<()> {
        let world = World(Arc::clone(&self.0), self.1, self.state().life);
        world.start()
    }

    fn start(&self) -> tokio::task::JoinHandle<()> {
        let (writer, pods) = Cache::by_hand();
        let (statics_sender, statics) = watch::channel(Statics::default());
        {
            let mut state = self.state();
            // Whoever listened, listens no more.
            (state.hinted, state.followers) = (None, BTreeMap::new());
            state.begin_lives();
            state.statics_sender = Some(statics_sender);
            state.watcher = Some(removal::PodWatch::new(writer));
            state.publish_statics();
            state.list_anew();
        }
        let mut config = config::load(None, &Overrides::default(), "node").unwrap();
        config.kubeconfig = Some("simulated".into());
        // Nothing of this machine is touched or looked at.
        config.eviction.thresholds.clear();
        config.enforcement.limits_pods = false;
        config.root_dir = "/nonexistent/holdfast-sim".into();
        // Directories are made there, but not below a file.
        config.device_plugin_dir = "/dev/null/device-plugins".into();
        let (logind, periods) = self.state().logind.clone().unzip();
        config.shutdown = periods.unwrap_or_default();
        let managers = self.managers(&mut config.root_dir);
        let (ledger, requests) = holdfast::agent::ledger::channel(managers);
        let (network, network_state) = watch::channel(Network::Ready);
        let api: Arc<dyn PodApi> = Arc::new(self.clone());
        let starts = holdfast::agent::Starts::for_processors(2);
        let unlimited = (0.0, 0.0);
        let events = Events::start(Arc::clone(&api), "node", self.1, unlimited, starts.lull());
        let context = Arc::new(Context {
            runtime: Arc::new(self.clone()),
            api,
            host: Arc::new(self.clone()),
            clock: self.1,
            events,
            images: Images::new(4),
            machine: self.machine_now(),
            node_ips: watch::channel(self.state().node.ips.clone()).0,
            node_addresses: watch::Sender::default(),
            resolver: watch::channel(Arc::default()).0,
            network: network_state,
            node: OwnNode::new(&config, Some(Arc::new(self.clone()))),
            pressures: watch::Sender::default(),
            shutting_down: watch::Sender::default(),
            unserved: holdfast::agent::Unserved::default(),
            ledger,
            features: watch::channel(holdfast::cri::Features::default()).0,
            metrics: Arc::new(Metrics::default()),
            dialer: Arc::new(self.clone()),
            journals: Journals::default(),
            pulse: holdfast::agent::Pulse::default(),
            starts,
            csi: holdfast::agent::Csi::new(&config.root_dir),
            disks: holdfast::agent::AttachedDisks::new(&config.root_dir),
            devices: holdfast::agent::DeviceManager::new(&config.device_plugin_dir, self.1.now()),
            claims: holdfast::agent::ClaimManager::new(&config.root_dir).unwrap(),
            roster: watch::Sender::default(),
            started: self.1.now(),
            config,
        });
        {
            let mut state = self.state();
            state.node.begin_life();
            state.forget_node();
            state.context = Some(Arc::clone(&context));
        }
        let agent = Agent {
            statics,
            ledger: requests,
            context,
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
            world.state().deny(format!("the agent ended: {result:?}"));
        })
    }

    /// Ends the world: it and its agent hold each other.
    pub fn end(&self) {
        let state = std::mem::take(&mut *self.state());
        drop(state);
    }

    /// One that has two processors for itself.
    pub fn create_pod_with_processors(&self, name: &str) {
        let sizes = json!({"cpu": "2", "memory": "1Mi"});
        self.create_pod_of(name, "Always", &json!({"limits": sizes, "requests": sizes}));
    }

    /// A pod that stays up by itself.
    pub fn create_steady_pod(&self, name: &str) {
        self.create_pod_of(name, "Always", &json!({}));
    }

    /// A pod with one container, which runs until it is told to end.
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

    /// A pod's object is removed at once, whatever still runs of it.
    pub fn remove_by_force(&self, name: &str) {
        let uid = self.uid(name);
        self.state().remove(&uid);
    }

    /// The containers of a pod end by themselves, well.
    pub fn complete(&self, name: &str) {
        let (uid, now) = (self.uid(name), self.1.now());
        let mut state = self.state();
        let uid = state.runtime_uid(&uid);
        let live: Vec<String> = state.live(&uid).iter().map(|c| c.id.clone()).collect();
        live.iter().for_each(|id| end(&mut state, id, 0, now));
    }

    /// A pod of the host network with probes of every kind.
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

    /// A pod's object as the API has it.
    pub fn object(&self, name: &str) -> Value {
        let uid = self.uid(name);
        self.state().pods[&uid].clone()
    }

    /// Somebody wants to see a pod's end.
    pub fn put_finalizer(&self, name: &str) {
        let uid = self.uid(name);
        let mut state = self.state();
        state.pods.get_mut(&uid).unwrap()["metadata"]["finalizers"] = json!(["sim.example/hold"]);
        state.publish(&uid);
    }

    /// How many requests or calls of a kind there were for a pod within the last minute before the latest.
    pub fn spent(&self, what: &'static str, name: &str) -> usize {
        let uid = self.uid(name);
        let state = self.state();
        state.spent.get(&(uid, what)).map_or(0, VecDeque::len)
    }

    /// What the worker of a pod has taken in lately, and decided.
    pub fn record(&self, name: &str) -> Option<Record> {
        let context = self.state().context.clone()?;
        context.journals.record("ns", name)
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

    /// The uid of a pod.
    pub fn uid(&self, name: &str) -> String {
        let state = self.state();
        state
            .pods
            .iter()
            .find(|(_, p)| p["metadata"]["name"] == name)
            .map(|(uid, _)| uid.clone())
            .unwrap()
    }

    /// The most requests and calls of each kind that one pod has caused within a minute.
    pub fn most(&self) -> BTreeMap<&'static str, usize> {
        self.state().most.clone()
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
        let ids: Vec<String> = state.boxes.keys().cloned().collect();
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
            let lost = state.boxes.get_mut(id).unwrap();
            lost.sandbox.ready = false;
            let uid = lost.uid.clone();
            state.hint(&uid, id, EventKind::Stopped);
        }
    }

    pub fn broken(&self) -> Result<(), String> {
        let mut state = self.state();
        if state.pulls.1 > 4 {
            let most = state.pulls.1;
            state.deny(format!("{most} images were pulled at once"));
        }
        if state.broken.is_empty() {
            Ok(())
        } else {
            Err(state.broken.join("; "))
        }
    }

    /// The present agent is dead.
    pub fn kill_agent(&self) {
        self.note("the agent is killed", true);
        let mut state = self.state();
        state.life += 1;
        World::nobody_waits_for_mounts(&mut state);
    }

    async fn only_alive(&self) {
        if self.state().life != self.2 {
            std::future::pending::<()>().await;
        }
    }

    async fn sleep(&self, time: Duration) {
        tokio::time::sleep(time).await;
        self.only_alive().await;
    }

    /// Waits as long as a call takes, and decides how it goes wrong.
    async fn fault(&self) -> Fault {
        self.only_alive().await;
        let at = self.1.now();
        let (delay, fault) = {
            let mut state = self.state();
            let delay = 1 + state.pick(40);
            state.trace.push(format!("{at} delay {delay}"));
            if state.trace.len() > LONGEST_TRACE {
                let last = &state.trace[LONGEST_TRACE - 40..];
                panic!("too much happens: {:?}\n{}", state.broken, last.join("\n"));
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

    /// A call to the runtime: may fail before acting, after acting, or hang and then fail after acting.
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
        let result = self.call_unseen(act).await;
        self.note(&what, result.is_ok());
        result
    }

    /// One more line of the trace.
    fn note(&self, what: &str, good: bool) {
        let at = self.1.now();
        self.state().trace.push(format!("{at} {what} {good}"));
    }

    /// The trace so far.
    pub fn trace(&self) -> Vec<String> {
        self.state().trace.clone()
    }

    /// From now on calls about this pod hang.
    pub fn hang(&self, uid: &str) {
        self.state().hung = Some(uid.to_owned());
    }

    /// Calls that hang are answered, and nothing hangs any more.
    pub fn answer(&self) {
        self.state().hung = None;
    }

    async fn hung(&self, uid: &str) {
        while self.state().hung.as_deref() == Some(uid) {
            self.sleep(Duration::from_secs(1)).await;
        }
    }

    async fn call_unseen<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        let timeout = || RuntimeError {
            kind: RuntimeErrorKind::Timeout,
            code: None,
            message: "deadline exceeded".into(),
        };
        let fault = self.fault().await;
        if self.state().down {
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
                // Acted, but the answer is lost.
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
        // One that was killed before it was started has ended as well: nobody has to start it again.
        state.ran.insert(uid.clone());
        state.hint(&uid, id, EventKind::Stopped);
    }
}

fn missing(what: &str) -> RuntimeError {
    RuntimeError {
        kind: RuntimeErrorKind::NotFound,
        code: None,
        message: format!("{what} not found"),
    }
}
