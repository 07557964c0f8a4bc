//! The simulated world: runtime, API and machine over one shared state, steered by a seed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use holdfast::agent::{Agent, Context, Events, Images, Latency, Network};
use holdfast::config::{self, Overrides};
use holdfast::core::config::label;
use holdfast::core::dns::Resolver;
use holdfast::core::observed::{Container, ContainerState, ObservedPod, Sandbox};
use holdfast::core::volumes::Files;
use holdfast::cri::{Credentials, Image, ListedPod, Runtime, RuntimeError, RuntimeErrorKind, RuntimeStatus};
use holdfast::host::PodHost;
use holdfast::kubeapi::cache::{Cache, Writer};
use holdfast::kubeapi::pods::{ApiFailure, PodApi, Token, TokenFor};
use holdfast::sys::clock::Clock;
use holdfast::sys::machine::Machine;
use holdfast_proto::cri as pb;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod, Secret, Service, Volume, VolumeMount};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

struct Box_ {
    uid: String,
    name: String,
    sandbox: Sandbox,
}

struct Ctr {
    uid: String,
    container: Container,
}

#[derive(Default)]
struct State {
    random: u64,
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
    watcher: Option<Arc<Writer<Pod>>>,
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
        // xorshift64*: the same seed gives the same run.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below.max(1)
    }

    fn id(&mut self, kind: &str) -> String {
        self.next += 1;
        format!("{kind}{:04}", self.next)
    }

    fn deny(&mut self, what: String) {
        self.broken.push(what);
    }

    fn live(&self, uid: &str) -> Vec<&Container> {
        self.containers.values().filter(|c| c.uid == uid && c.container.state == ContainerState::Running).map(|c| &c.container).collect()
    }

    fn publish(&mut self, uid: &str) {
        self.revision += 1;
        let revision = self.revision.to_string();
        let Some(writer) = self.watcher.clone() else { return };
        if let Some(pod) = self.pods.get_mut(uid) {
            pod["metadata"]["resourceVersion"] = revision.into();
            let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
            writer.apply(pod);
        }
    }
}

impl World {
    pub fn new(seed: u64) -> World {
        let clock = Clock::starting_at("2026-11-20T00:00:00Z".parse().unwrap());
        World(Arc::new(Mutex::new(State { random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, ..State::default() })), clock, 0)
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
        let current: Vec<Pod> = {
            let mut state = self.state();
            state.watcher = Some(Arc::new(writer));
            state.pods.values().map(|p| serde_json::from_value(p.clone()).unwrap()).collect()
        };
        self.state().watcher.as_ref().unwrap().replace(current);
        let mut config = config::load(None, &Overrides::default(), "node").unwrap();
        config.kubeconfig = Some("simulated".into());
        let (network, network_state) = watch::channel(Network::Ready);
        let (node, node_state) = watch::channel(None);
        let api: Arc<dyn PodApi> = Arc::new(self.clone());
        let events = Events::start(Arc::clone(&api), "node", self.1);
        let context = Arc::new(Context {
            runtime: Arc::new(self.clone()),
            api,
            host: Arc::new(self.clone()),
            clock: self.1,
            events,
            images: Images::new(4),
            machine: Machine { cpus: 64, memory: 1 << 40, storage: 1 << 40, ..Machine::default() },
            node_ips: vec!["192.0.2.1".into()],
            resolver: Resolver::default(),
            network: network_state,
            node: node_state,
            admitted: Mutex::default(),
            latency: Latency::default(),
            config,
        });
        let agent = Agent { context, nodes: None, pods: Some(pods), network, node };
        let world = self.clone();
        tokio::spawn(async move {
            let result = agent.run().await;
            world.state().deny(format!("the agent ended: {result:?}"));
        })
    }

    pub fn create_pod(&self, name: &str) {
        let mut state = self.state();
        let policy = ["Always", "Always", "OnFailure", "Never"][usize::try_from(state.pick(4)).unwrap()];
        let count = 1 + state.pick(2);
        let containers: Vec<Value> = (0..count).map(|i| json!({"name": format!("c{i}"), "image": "i:1"})).collect();
        let init: Vec<Value> = if state.pick(3) == 0 { vec![json!({"name": "i0", "image": "i:1"})] } else { vec![] };
        let grace = 1 + state.pick(20);
        let uid = state.id("uid");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "ns", "uid": uid, "creationTimestamp": self.1.now().to_string(), "generation": 1},
            "spec": {"nodeName": "node", "restartPolicy": policy, "terminationGracePeriodSeconds": grace, "containers": containers, "initContainers": init,
                     "volumes": [{"name": "v", "emptyDir": {}}]}, "status": {"phase": "Pending"}});
        state.pods.insert(uid.clone(), pod);
        state.publish(&uid);
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
        let running: Vec<String> =
            state.containers.iter().filter(|(_, c)| c.container.state == ContainerState::Running).map(|(id, _)| id.clone()).collect();
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
            let inside: Vec<String> = state.containers.iter().filter(|(_, c)| c.container.sandbox == *id).map(|(id, _)| id.clone()).collect();
            for container in inside {
                end(&mut state, &container, 137, now);
            }
            state.boxes.get_mut(id).unwrap().sandbox.ready = false;
        }
    }

    /// With no faults for a while every pod is what its spec says.
    pub fn check_at_rest(&self) -> Result<(), String> {
        let state = self.state();
        for (uid, pod) in &state.pods {
            let (name, policy, phase) =
                (&pod["metadata"]["name"], pod["spec"]["restartPolicy"].as_str().unwrap(), pod["status"]["phase"].as_str().unwrap());
            if !pod["metadata"]["deletionTimestamp"].is_null() {
                return Err(format!("{name} was deleted and is still there: {}", pod["status"]));
            }
            let wanted = pod["spec"]["containers"].as_array().unwrap().len();
            let live = state.live(uid).iter().filter(|c| c.name.starts_with('c')).count();
            match (policy, phase) {
                ("Always", "Running") if live == wanted => {}
                ("Always", _) => return Err(format!("{name} ({policy}) is {phase} with {live} of {wanted} running: {}", pod["status"])),
                (_, "Succeeded" | "Failed") if live == 0 => {}
                (_, "Running") if live > 0 => {}
                _ => return Err(format!("{name} ({policy}) is {phase} with {live} of {wanted} running")),
            }
        }
        Ok(())
    }

    pub fn check_empty(&self) -> Result<(), String> {
        let state = self.state();
        let left = (state.pods.len(), state.boxes.len(), state.containers.len(), state.volumes.len(), state.cgroups.len(), state.dirs.len());
        if left == (0, 0, 0, 0, 0, 0) {
            Ok(())
        } else {
            Err(format!("left behind (pods, sandboxes, containers, volumes, cgroups, directories): {left:?}"))
        }
    }

    pub fn broken(&self) -> Result<(), String> {
        let state = self.state();
        if state.broken.is_empty() { Ok(()) } else { Err(state.broken.join("; ")) }
    }

    /// The present agent is dead.
    pub fn kill_agent(&self) {
        self.state().life += 1;
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
        let (delay, fault) = {
            let mut state = self.state();
            let delay = 1 + state.pick(40);
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
    async fn call<T>(&self, act: impl FnOnce(&mut State) -> Result<T, RuntimeError>) -> Result<T, RuntimeError> {
        let timeout = || RuntimeError { kind: RuntimeErrorKind::Timeout, message: "deadline exceeded".into() };
        match self.fault().await {
            Fault::Before => Err(RuntimeError { kind: RuntimeErrorKind::Failed, message: "injected".into() }),
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
        c.container.state = ContainerState::Exited;
        c.container.exit_code = code;
        c.container.finished_at = Some(now);
    }
}

fn missing(what: &str) -> RuntimeError {
    RuntimeError { kind: RuntimeErrorKind::NotFound, message: format!("{what} not found") }
}

#[async_trait]
impl Runtime for World {
    async fn status(&self) -> Result<RuntimeStatus, RuntimeError> {
        self.call(|_| Ok(RuntimeStatus { version: "fake://1".into(), ..RuntimeStatus::default() })).await
    }

    async fn systemd_cgroups(&self) -> Result<Option<bool>, RuntimeError> {
        Ok(Some(false))
    }

    async fn list(&self) -> Result<Vec<ListedPod>, RuntimeError> {
        self.call(|state| {
            let mut pods: BTreeMap<String, ObservedPod> = BTreeMap::new();
            let mut names = BTreeMap::new();
            for b in state.boxes.values() {
                names.insert(b.uid.clone(), b.name.clone());
                pods.entry(b.uid.clone()).or_default().sandboxes.push(b.sandbox.clone());
            }
            for c in state.containers.values() {
                pods.entry(c.uid.clone()).or_default().containers.push(c.container.clone());
            }
            let listed = |(uid, pod): (String, ObservedPod)| ListedPod {
                name: names.get(&uid).cloned().unwrap_or_default(),
                namespace: "ns".into(),
                fingerprint: pod.fingerprint(),
                uid,
            };
            Ok(pods.into_iter().map(listed).collect())
        })
        .await
    }

    async fn observe(&self, uid: &str) -> Result<ObservedPod, RuntimeError> {
        self.call(|state| {
            let mut observed = ObservedPod {
                sandboxes: state.boxes.values().filter(|b| b.uid == uid).map(|b| b.sandbox.clone()).collect(),
                containers: state.containers.values().filter(|c| c.uid == uid).map(|c| c.container.clone()).collect(),
            };
            observed.sort();
            Ok(observed)
        })
        .await
    }

    async fn run_sandbox(&self, config: pb::PodSandboxConfig, _: &str) -> Result<String, RuntimeError> {
        let now = self.1.now();
        self.call(|state| {
            let metadata = config.metadata.clone().unwrap();
            if state.boxes.values().any(|b| b.uid == metadata.uid && b.sandbox.attempt == metadata.attempt) {
                return Err(RuntimeError { kind: RuntimeErrorKind::Failed, message: format!("failed to reserve sandbox name {}", metadata.name) });
            }
            if !state.cgroups.contains(&metadata.uid) {
                state.deny(format!("{}: a sandbox without a cgroup", metadata.name));
            }
            let id = state.id("box");
            let sandbox = Sandbox {
                id: id.clone(),
                attempt: metadata.attempt,
                ready: true,
                created_at: now,
                ips: vec![format!("10.0.0.{}", state.next % 250)],
                host_network: false,
            };
            state.boxes.insert(id.clone(), Box_ { uid: metadata.uid, name: metadata.name, sandbox });
            Ok(id)
        })
        .await
    }

    async fn sandbox_ips(&self, id: &str) -> Result<Vec<String>, RuntimeError> {
        self.call(|state| state.boxes.get(id).map(|b| b.sandbox.ips.clone()).ok_or_else(|| missing("sandbox"))).await
    }

    async fn stop_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        let now = self.1.now();
        self.call(|state| {
            let inside: Vec<String> = state.containers.iter().filter(|(_, c)| c.container.sandbox == id).map(|(id, _)| id.clone()).collect();
            for container in inside {
                end(state, &container, 137, now);
            }
            if let Some(b) = state.boxes.get_mut(id) {
                b.sandbox.ready = false;
            }
            Ok(())
        })
        .await
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), RuntimeError> {
        self.call(|state| {
            if state.containers.values().any(|c| c.container.sandbox == id && c.container.state == ContainerState::Running) {
                state.deny(format!("{id}: a sandbox was removed with a container running"));
            }
            state.containers.retain(|_, c| c.container.sandbox != id);
            state.boxes.remove(id);
            Ok(())
        })
        .await
    }

    async fn create_container(&self, sandbox: &str, config: pb::ContainerConfig, _: pb::PodSandboxConfig) -> Result<String, RuntimeError> {
        let now = self.1.now();
        self.call(|state| {
            let Some(b) = state.boxes.get(sandbox).filter(|b| b.sandbox.ready) else { return Err(missing("sandbox")) };
            let (uid, metadata) = (b.uid.clone(), config.metadata.clone().unwrap());
            if state.containers.values().any(|c| {
                c.uid == uid && c.container.name == metadata.name && c.container.attempt == metadata.attempt && c.container.sandbox == sandbox
            }) {
                return Err(RuntimeError { kind: RuntimeErrorKind::Failed, message: format!("failed to reserve container name {}", metadata.name) });
            }
            if !state.volumes.contains(&uid) {
                state.deny(format!("{}: a container without its volumes", metadata.name));
            }
            assert_eq!(config.labels[label::POD_UID], uid);
            let id = state.id("ctr");
            let container = Container {
                id: id.clone(),
                name: metadata.name,
                sandbox: sandbox.into(),
                attempt: metadata.attempt,
                state: ContainerState::Created,
                created_at: now,
                started_at: None,
                finished_at: None,
                exit_code: 0,
                reason: String::new(),
                message: String::new(),
                image: "i:1".into(),
                image_ref: "sha256:i".into(),
                hash: config.annotations.get(holdfast::core::config::annotation::HASH).cloned(),
            };
            state.containers.insert(id.clone(), Ctr { uid, container });
            Ok(id)
        })
        .await
    }

    async fn start_container(&self, id: &str) -> Result<(), RuntimeError> {
        let now = self.1.now();
        self.call(|state| {
            let Some(c) = state.containers.get(id) else { return Err(missing("container")) };
            let (uid, name, attempt) = (c.uid.clone(), c.container.name.clone(), c.container.attempt);
            if c.container.state != ContainerState::Created {
                return Err(RuntimeError { kind: RuntimeErrorKind::Failed, message: "already started".into() });
            }
            if state.live(&uid).iter().any(|other| other.name == name) {
                state.deny(format!("{uid}/{name}: two instances run at once"));
            }
            if !state.started.insert((uid.clone(), name.clone(), attempt)) && !state.boxes.values().any(|b| b.uid == uid && b.sandbox.attempt > 0) {
                state.deny(format!("{uid}/{name}: attempt {attempt} was started twice"));
            }
            if name.starts_with('c') && state.pods.get(&uid).is_some_and(|p| p["spec"]["initContainers"].as_array().is_some_and(|i| !i.is_empty())) {
                let sandbox = state.containers[id].container.sandbox.clone();
                let initialised = state.containers.values().any(|c| {
                    c.uid == uid
                        && c.container.name == "i0"
                        && c.container.sandbox == sandbox
                        && c.container.state == ContainerState::Exited
                        && c.container.exit_code == 0
                });
                let ran = state
                    .containers
                    .values()
                    .any(|c| c.uid == uid && c.container.name.starts_with('c') && c.container.sandbox == sandbox && c.container.started_at.is_some());
                if !initialised && !ran {
                    state.deny(format!("{uid}/{name}: started before its init container had succeeded"));
                }
            }
            let c = state.containers.get_mut(id).unwrap();
            c.container.state = ContainerState::Running;
            c.container.started_at = Some(now);
            if name.starts_with('i') {
                end(state, id, 0, now);
            }
            Ok(())
        })
        .await
    }

    async fn stop_container(&self, id: &str, grace: i64) -> Result<(), RuntimeError> {
        let now = self.1.now();
        // Some processes need their time.
        let (slow, limit) = {
            let mut state = self.state();
            let slow = state.pick(4) == 0;
            let uid = state.containers.get(id).map(|c| c.uid.clone()).unwrap_or_default();
            let limit = state.pods.get(&uid).and_then(|p| p["spec"]["terminationGracePeriodSeconds"].as_i64()).unwrap_or(1);
            (slow, limit)
        };
        if grace > limit.max(2) {
            self.state().deny(format!("{id}: stopped with {grace} s where {limit} s are allowed"));
        }
        if slow {
            self.sleep(Duration::from_secs(u64::try_from(grace).unwrap())).await;
        }
        self.call(|state| {
            end(state, id, if slow { 137 } else { 143 }, now);
            Ok(())
        })
        .await
    }

    async fn remove_container(&self, id: &str) -> Result<(), RuntimeError> {
        self.call(|state| {
            state.containers.remove(id);
            Ok(())
        })
        .await
    }

    async fn image(&self, _: &str) -> Result<Option<Image>, RuntimeError> {
        self.call(|_| Ok(Some(Image { id: "sha256:i".into(), ..Image::default() }))).await
    }

    async fn images(&self) -> Result<Vec<Image>, RuntimeError> {
        Ok(vec![])
    }

    async fn pull(&self, _: &str, _: Option<Credentials>) -> Result<String, RuntimeError> {
        self.call(|_| Ok("sha256:i".into())).await
    }

    async fn events(&self) -> Result<mpsc::Receiver<String>, RuntimeError> {
        Err(RuntimeError { kind: RuntimeErrorKind::Unimplemented, message: String::new() })
    }
}

#[async_trait]
impl PodApi for World {
    async fn patch_status(&self, _: &str, _: &str, patch: &Value) -> Result<Pod, ApiFailure> {
        let fault = self.fault().await;
        if matches!(fault, Fault::Before) {
            return Err(ApiFailure::Other("injected".into()));
        }
        let mut state = self.state();
        let uid = patch["metadata"]["uid"].as_str().unwrap().to_owned();
        let Some(pod) = state.pods.get_mut(&uid) else { return Err(ApiFailure::NotFound("gone".into())) };
        for (key, value) in patch["status"].as_object().unwrap().iter().filter(|(k, _)| !k.starts_with('$')) {
            if key == "conditions" {
                let mut list = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
                for condition in value.as_array().unwrap() {
                    list.retain(|c| c["type"] != condition["type"]);
                    let mut condition = condition.clone();
                    condition.as_object_mut().unwrap().retain(|_, v| !v.is_null());
                    list.push(condition);
                }
                pod["status"]["conditions"] = list.into();
            } else if value.is_null() {
                pod["status"].as_object_mut().unwrap().remove(key);
            } else {
                pod["status"][key] = value.clone();
            }
        }
        let phase = pod["status"]["phase"].as_str().unwrap().to_owned();
        let pod = pod.clone();
        let before = state.final_phase.get(&uid).cloned();
        if before.as_ref().is_some_and(|b| *b != phase) {
            state.deny(format!("{uid}: the final phase {before:?} became {phase}"));
        }
        if matches!(phase.as_str(), "Succeeded" | "Failed") {
            state.final_phase.insert(uid.clone(), phase);
        }
        state.publish(&uid);
        if matches!(fault, Fault::After | Fault::Hang) {
            return Err(ApiFailure::Other("the answer was lost".into()));
        }
        Ok(serde_json::from_value(pod).unwrap())
    }

    async fn delete(&self, _: &str, _: &str, uid: &str) -> Result<(), ApiFailure> {
        let fault = self.fault().await;
        if matches!(fault, Fault::Before) {
            return Err(ApiFailure::Other("injected".into()));
        }
        let mut state = self.state();
        let Some(pod) = state.pods.remove(uid) else { return Err(ApiFailure::NotFound("gone".into())) };
        if pod["metadata"]["deletionTimestamp"].is_null() {
            state.deny(format!("{uid}: nobody asked for this pod's deletion"));
        }
        let held =
            !state.live(uid).is_empty() || state.boxes.values().any(|b| b.uid == uid) || state.volumes.contains(uid) || state.cgroups.contains(uid);
        if held {
            state.deny(format!("{uid}: given back to the API before everything was released"));
        }
        state.revision += 1;
        if let Some(writer) = state.watcher.clone() {
            writer.delete(&serde_json::from_value(pod).unwrap());
        }
        if matches!(fault, Fault::After | Fault::Hang) { Err(ApiFailure::Other("the answer was lost".into())) } else { Ok(()) }
    }

    async fn create(&self, _: &Pod) -> Result<Pod, ApiFailure> {
        Err(ApiFailure::Other("no mirrors here".into()))
    }

    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<ConfigMap>, ApiFailure> {
        Err(ApiFailure::NotFound(name.into()))
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<Secret>, ApiFailure> {
        Err(ApiFailure::NotFound(name.into()))
    }

    async fn token(&self, _: TokenFor<'_>) -> Result<Token, ApiFailure> {
        Err(ApiFailure::Other("no tokens here".into()))
    }

    async fn post_event(&self, _: &Event) -> Result<(), ApiFailure> {
        Ok(())
    }

    async fn count_event(&self, _: &str, _: &str, _: &Value) -> Result<(), ApiFailure> {
        Ok(())
    }

    fn services(&self) -> Option<Vec<Arc<Service>>> {
        Some(vec![])
    }
}

impl World {
    /// A call to the machine: may fail before acting.
    async fn machine<T>(&self, act: impl FnOnce(&mut State) -> T) -> Result<T, String> {
        match self.fault().await {
            Fault::Before => Err("injected".into()),
            _ => Ok(act(&mut self.state())),
        }
    }
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap()
}

#[async_trait]
impl PodHost for World {
    async fn ensure_cgroup(&self, pod: &Pod) -> Result<String, String> {
        self.machine(|s| s.cgroups.insert(uid(pod))).await?;
        Ok("/kubepods".into())
    }

    async fn make_directories(&self, pod: &Pod) -> Result<(), String> {
        self.machine(|s| _ = s.dirs.insert(uid(pod))).await
    }

    async fn set_up_volume(&self, pod: &Pod, _: &Volume, _: Option<Files>) -> Result<(), String> {
        self.machine(|s| {
            if !s.dirs.contains(&uid(pod)) {
                s.deny(format!("{}: a volume without its directory", uid(pod)));
            }
            s.volumes.insert(uid(pod));
        })
        .await
    }

    async fn mount_source(&self, _: &Pod, _: &Volume, _: &VolumeMount) -> Result<PathBuf, String> {
        Ok("/v".into())
    }

    async fn write_hosts(&self, _: &Pod, _: String) -> Result<PathBuf, String> {
        self.machine(|_| "/h".into()).await
    }

    async fn termination_log(&self, _: &Pod, _: &str, _: u32) -> Result<PathBuf, String> {
        Ok("/t".into())
    }

    async fn termination_message(&self, _: &str, _: &str, _: u32) -> Option<String> {
        None
    }

    async fn tear_down_volumes(&self, uid: &str) -> Result<(), String> {
        self.machine(|s| {
            if !s.live(uid).is_empty() {
                s.deny(format!("{uid}: volumes were torn down under a running container"));
            }
            s.volumes.remove(uid);
        })
        .await
    }

    async fn remove_cgroup(&self, pod: &Pod) -> Result<(), String> {
        self.machine(|s| _ = s.cgroups.remove(&uid(pod))).await
    }

    async fn remove_directories(&self, pod: &Pod) -> Result<(), String> {
        self.machine(|s| {
            if s.volumes.contains(&uid(pod)) {
                s.deny(format!("{}: directories were removed with a volume mounted", uid(pod)));
            }
            s.dirs.remove(&uid(pod));
        })
        .await
    }

    fn log_directory(&self, _: &Pod) -> PathBuf {
        "/l".into()
    }

    async fn node_hosts(&self) -> String {
        String::new()
    }

    async fn leftovers(&self) -> Vec<String> {
        let state = self.state();
        state.dirs.union(&state.cgroups).cloned().collect()
    }

    async fn remove_leftovers(&self, uid: &str) -> Result<(), String> {
        self.machine(|s| {
            if s.pods.contains_key(uid) {
                s.deny(format!("{uid}: a pod's directories were taken for leftovers"));
            }
            s.volumes.remove(uid);
            s.dirs.remove(uid);
            s.cgroups.remove(uid);
        })
        .await
    }
}
