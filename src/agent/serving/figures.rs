//! Resource usage of the node, its pods and their containers. Read on request, from cgroup files, the pods' network
//! namespaces and the filesystems. Concurrent requests share one measurement.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use super::Server;
use super::logs;
use crate::pod::table::Known;
use crate::volume::csi;
use crate::volume::figures::VolumeFigures;
use holdfast_config::OwnCgroups;
use holdfast_core::lock::lock;
use holdfast_core::node::topology::Topology;
use holdfast_core::serving::cgroup_stats::{self, Depth, Texts, Usage};
use holdfast_core::{
    pod,
    volume::{claims, local_storage},
};
use holdfast_cri::{Layer, RunningContainer, RuntimeError, RuntimeErrorKind};
use holdfast_host::blocking;
use holdfast_sys::machine::Room;
use holdfast_sys::meter::{self, Processes, Whole};

/// How long a measurement is reused.
const SNAPSHOT_TTL: Duration = Duration::from_secs(1);
/// How long a cgroup's settings are reused, at least and at most: spread, so that they are not all read at once.
const SETTINGS_TTL: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(60));
/// How long a pod's disk usage is reused, as it is expensive to measure.
const DISK_USAGE_TTL: Duration = Duration::from_secs(60);
/// Maximum time to wait for a measurement of disk usage; a later result is available to the next request.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to wait for the runtime's list of containers if an earlier list is available.
pub(crate) const RUNTIME_TIMEOUT: Duration = Duration::from_secs(2);

/// A running container.
#[derive(Debug, Clone)]
pub struct ContainerFigures {
    /// The container's name.
    pub name: String,
    /// The runtime's id.
    pub id: String,
    /// The image in the container's status.
    pub image: String,
    /// The container's cgroup.
    pub cgroup: String,
    /// The usage of the cgroup.
    pub usage: Usage,
    /// Data of its processes; only with [`Depth::All`].
    pub processes: Processes,
    /// CPU time per second since the previous measurement, in nanoseconds.
    pub rate: Option<u64>,
    /// The container's start time.
    pub started: Option<Timestamp>,
}

/// A pod's sandbox.
#[derive(Debug, Clone)]
pub(crate) struct SandboxFigures {
    /// The runtime's id.
    pub id: String,
    /// The sandbox's cgroup, if it is known.
    pub cgroup: Option<String>,
    /// The usage of the cgroup; only with [`Depth::All`].
    pub usage: Usage,
    /// Data of its processes: the pod's network interfaces, unless the pod is on the host network.
    pub processes: Processes,
}

/// A pod with a running container.
#[derive(Debug, Clone)]
pub struct PodFigures {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The pod's cgroup. `None` if pods have no cgroups; the usage is then the sum of its containers.
    pub cgroup: Option<String>,
    /// The usage of the pod.
    pub usage: Usage,
    /// As in [`ContainerFigures`].
    pub rate: Option<u64>,
    /// The pod's sandbox.
    pub sandbox: SandboxFigures,
    /// The time of the pod's admission (`status.startTime`).
    pub started: Option<Timestamp>,
    /// The pod's containers.
    pub containers: Vec<ContainerFigures>,
}

/// A separately measured part of the node.
#[derive(Debug, Clone)]
pub(crate) struct SystemFigures {
    /// The name in the summary: `pods`, `kubelet`, `runtime`, `misc`; empty for a QoS class.
    pub name: &'static str,
    /// The part's cgroup.
    pub cgroup: String,
    /// The usage of the cgroup.
    pub usage: Usage,
    /// As in [`ContainerFigures`].
    pub rate: Option<u64>,
    /// The start time; `None` if unknown, then the machine's boot time applies.
    pub started: Option<Timestamp>,
    /// Data of its processes.
    pub processes: Processes,
}

/// One measurement.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The time of the measurement.
    pub at: Timestamp,
    /// How much was measured.
    pub depth: Depth,
    /// The machine.
    pub machine: Whole,
    /// As in [`ContainerFigures`].
    pub rate: Option<u64>,
    /// The filesystem of the root directory.
    pub root: Room,
    /// The pods.
    pub pods: Vec<PodFigures>,
    /// All pods together, QoS classes, the agent, the runtime and system processes, as far as they have cgroups.
    pub systems: Vec<SystemFigures>,
}

impl Snapshot {
    /// CPU time by cgroup; `/` is the machine.
    fn cpu(&self) -> HashMap<String, u64> {
        let pods = self.pods.iter().flat_map(|p| {
            let containers = p.containers.iter().map(|c| (&c.cgroup, &c.usage));
            containers.chain(p.cgroup.iter().map(|cgroup| (cgroup, &p.usage)))
        });
        let systems = self.systems.iter().map(|s| (&s.cgroup, &s.usage));
        let known = pods.chain(systems);
        let known = known.map(|(cgroup, usage)| (cgroup.clone(), usage.cpu));
        known
            .chain([("/".to_owned(), self.machine.usage.cpu)])
            .collect()
    }
}

/// The disk usage of a pod.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskFigures {
    /// The pod's volumes.
    pub volumes: Vec<VolumeFigures>,
    /// Bytes of logs, by container.
    pub logs: BTreeMap<String, u64>,
    /// Writable layers, by container.
    pub layers: BTreeMap<String, Layer>,
    /// Bytes that count as local ephemeral storage.
    pub ephemeral: u64,
}

/// The settings of a cgroup.
struct Settings {
    /// When they are read again.
    until: Instant,
    depth: Depth,
    texts: Texts,
}

/// A measurement with its monotonic time.
type Dated = (Instant, Arc<Snapshot>);

/// The stored measurements.
#[derive(Default)]
pub(crate) struct Measurements {
    /// The last measurement, and an earlier one that is old enough to compute a rate.
    last: Mutex<(Option<Dated>, Option<Dated>)>,
    /// The settings of cgroups.
    settings: std::sync::Mutex<HashMap<String, Settings>>,
    /// The runtime's cgroup, once it is known.
    runtime: OnceLock<String>,
    /// The CPU topology of the machine.
    pub topology: OnceCell<Topology>,
    /// By pod uid; each pod has its own lock.
    disks: std::sync::Mutex<HashMap<String, Disk>>,
    /// The runtime's last list of running containers.
    running: Running,
}

/// The last list of running containers.
#[derive(Default)]
struct Running(std::sync::Mutex<Option<Vec<RunningContainer>>>);

impl Running {
    /// Returns the runtime's current list. If the runtime fails or is slow, returns the previous list,
    /// as containers run independently of the runtime.
    async fn refresh(
        &self,
        request: impl Future<Output = Result<Vec<RunningContainer>, RuntimeError>>,
    ) -> Result<Vec<RunningContainer>, RuntimeError> {
        let answer = tokio::time::timeout(RUNTIME_TIMEOUT, request).await;
        let answer = answer.unwrap_or_else(|_| {
            Err(RuntimeError {
                kind: RuntimeErrorKind::Timeout,
                code: None,
                message: "the runtime does not answer".into(),
            })
        });
        let mut known = lock(&self.0);
        match answer {
            Ok(running) => Ok(known.insert(running).clone()),
            Err(error) => known.clone().ok_or(error),
        }
    }
}

/// The running containers, or those of the runtime's last answer.
pub async fn running(server: &Server) -> Result<Vec<RunningContainer>, RuntimeError> {
    let request = server.parts.runtime.running();
    server.figures.running.refresh(request).await
}

impl Measurements {
    /// The measured volumes of claims. Starts no measurement.
    pub(crate) fn known_volumes(&self) -> Vec<VolumeFigures> {
        let all = lock(&self.disks);
        let known = all.values().filter_map(|disk| {
            disk.try_lock()
                .ok()?
                .as_ref()
                .map(|(_, figures)| figures.volumes.clone())
        });
        known.flatten().filter(|v| v.claim.is_some()).collect()
    }

    /// The measured sizes of a pod's logs in bytes, by container. Starts no measurement.
    pub(crate) fn known_logs(&self, uid: &str) -> BTreeMap<String, u64> {
        let all = lock(&self.disks);
        let known = all.get(uid).and_then(|disk| {
            let figures = disk.try_lock().ok()?;
            Some(figures.as_ref()?.1.logs.clone())
        });
        known.unwrap_or_default()
    }
}

/// Writable layers, by pod and container.
type Layers = BTreeMap<(String, String), Layer>;
type Disk = Arc<Mutex<Option<(Instant, DiskFigures)>>>;

/// CPU time per second between two measurements.
fn rate(before: Option<u64>, now: u64, elapsed: Duration) -> Option<u64> {
    let nanos = u128::from(now.checked_sub(before?)?);
    u64::try_from(nanos * 1_000_000_000 / elapsed.as_nanos().max(1)).ok()
}

fn began(pod: &Pod, container: &str) -> Option<Timestamp> {
    logs::status(pod, container)?
        .state
        .as_ref()?
        .running
        .as_ref()?
        .started_at
        .as_ref()
        .map(|t| t.0)
}

/// The current measurement.
pub async fn snapshot(server: &Arc<Server>, depth: Depth) -> Result<Arc<Snapshot>, RuntimeError> {
    let mut kept = server.figures.last.lock().await;
    if let Some((at, known)) = kept.0.clone() {
        if at.elapsed() >= SNAPSHOT_TTL {
            kept.1 = Some((at, known));
        } else if known.depth >= depth {
            return Ok(known);
        }
    }
    let fresh = Arc::new(read(server, depth, kept.1.as_ref()).await?);
    kept.0 = Some((Instant::now(), Arc::clone(&fresh)));
    Ok(fresh)
}

/// Reads cgroups, and computes rates since the previous measurement.
struct Meter {
    depth: Depth,
    before: HashMap<String, u64>,
    elapsed: Duration,
    /// The settings of earlier measurements, and those of this one.
    settings: (
        RefCell<HashMap<String, Settings>>,
        RefCell<HashMap<String, Settings>>,
    ),
}

impl Meter {
    /// Reads the usage of a cgroup.
    fn usage(&self, cgroup: &str) -> Option<Usage> {
        let (before, now) = (&self.settings.0, &self.settings.1);
        let known = before.borrow_mut().remove(cgroup);
        let known = known.filter(|s| s.until > Instant::now() && s.depth >= self.depth);
        let is_setting = |file: &str| cgroup_stats::SETTINGS.contains(&file);
        let mut texts = meter::texts(cgroup, |file, needed| {
            needed <= self.depth && (known.is_none() || !is_setting(file))
        })?;
        let mut now = now.borrow_mut();
        let settings = known.unwrap_or_else(|| {
            let turn = u32::try_from(now.len() % 16).unwrap_or(0);
            let settings = texts.iter().filter(|(file, _)| is_setting(file));
            Settings {
                until: Instant::now()
                    + SETTINGS_TTL.0
                    + (SETTINGS_TTL.1 - SETTINGS_TTL.0) * turn / 16,
                depth: self.depth,
                texts: settings.map(|(f, text)| (*f, text.clone())).collect(),
            }
        });
        texts.extend(settings.texts.iter().map(|(f, text)| (*f, text.clone())));
        now.insert(cgroup.to_owned(), settings);
        Some(meter::usage(&texts))
    }

    fn rate(&self, cgroup: &str, usage: &Usage) -> Option<u64> {
        rate(self.before.get(cgroup).copied(), usage.cpu, self.elapsed)
    }

    fn container(
        &self,
        status_object: &Pod,
        place: String,
        c: RunningContainer,
    ) -> Option<ContainerFigures> {
        let usage = self.usage(&place)?;
        let status = logs::status(status_object, &c.name).map(|s| s.image.clone());
        let status = status.filter(|image| !image.is_empty());
        let spec = || {
            let all = pod::containers(status_object);
            let of_spec = all.iter().find(|(_, known)| known.name == c.name);
            of_spec.and_then(|(_, known)| known.image.clone())
        };
        Some(ContainerFigures {
            rate: self.rate(&place, &usage),
            started: began(status_object, &c.name),
            processes: self.processes(&place),
            image: status.or_else(spec).unwrap_or_default(),
            name: c.name,
            id: c.id,
            cgroup: place,
            usage,
        })
    }

    /// Reads data of a cgroup's processes, if the depth includes them.
    fn processes(&self, place: &str) -> Processes {
        if self.depth < Depth::All {
            return Processes::default();
        }
        meter::processes_of(place, self.depth, false)
    }

    fn pod(&self, place: Placed) -> PodFigures {
        let status_object = place.known.status_object();
        let (id, cgroup) = place.sandbox;
        let own_network = !pod::host_network(&place.known.pod);
        let known = cgroup.as_deref();
        let usage = known.filter(|_| self.depth == Depth::All);
        let processes = known.map(|c| meter::processes_of(c, self.depth, own_network));
        let sandbox = SandboxFigures {
            usage: usage.and_then(|c| self.usage(c)).unwrap_or_default(),
            processes: processes.unwrap_or_default(),
            id,
            cgroup,
        };
        let containers = place.containers.into_iter();
        let containers =
            containers.filter_map(|(place, c)| self.container(status_object, place, c));
        let containers: Vec<ContainerFigures> = containers.collect();
        let (usage, rate) = match &place.cgroup {
            Some(cgroup) => {
                let usage = self.usage(cgroup).unwrap_or_default();
                let rate = self.rate(cgroup, &usage);
                (usage, rate)
            }
            None => (
                Usage::total(containers.iter().map(|c| &c.usage)),
                containers.iter().map(|c| c.rate).sum(),
            ),
        };
        PodFigures {
            rate,
            started: status_object
                .status
                .as_ref()
                .and_then(|s| s.start_time.as_ref())
                .map(|t| t.0),
            containers,
            pod: Arc::clone(&place.known.pod),
            cgroup: place.cgroup,
            usage,
            sandbox,
        }
    }

    fn system(&self, (name, cgroup, started): System, machine: &Usage) -> Option<SystemFigures> {
        let usage = match cgroup.as_str() {
            "/" => machine.clone(),
            _ => self.usage(&cgroup)?,
        };
        Some(SystemFigures {
            rate: self.rate(&cgroup, &usage),
            processes: self.processes(&cgroup),
            name,
            cgroup,
            usage,
            started,
        })
    }
}

/// The summary's name of a part of the node, its cgroup, and its start time.
type System = (&'static str, String, Option<Timestamp>);

/// The agent, the runtime and system processes, as far as they have cgroups. The agent's configured cgroup takes
/// precedence over its current one, as the agent is being moved there.
fn others(
    own: &OwnCgroups,
    agent: Option<String>,
    runtime: Option<String>,
    started: Timestamp,
) -> Vec<System> {
    let agent = own.agent.clone().or(agent);
    let all = [
        agent.map(|cgroup| ("kubelet", cgroup, Some(started))),
        runtime.map(|cgroup| ("runtime", cgroup, None)),
        own.system.clone().map(|cgroup| ("misc", cgroup, None)),
    ];
    all.into_iter().flatten().collect()
}

/// A pod with its cgroups.
struct Placed {
    known: Known,
    cgroup: Option<String>,
    /// The runtime's id of the sandbox, and its cgroup.
    sandbox: (String, Option<String>),
    containers: Vec<(String, RunningContainer)>,
}

/// The pods with a running container.
fn placed(server: &Server, running: Vec<RunningContainer>) -> Vec<Placed> {
    let parts = &server.parts;
    let mut by_pod: HashMap<String, Vec<RunningContainer>> = HashMap::new();
    for container in running {
        let own = by_pod.entry(container.uid.clone()).or_default();
        own.push(container);
    }
    let table = parts.table.borrow();
    let place = |known: &Known| {
        let own = by_pod.remove(pod::uid(&known.pod))?;
        let of = |id: Option<&str>| parts.host.cgroup_path(&known.pod, id);
        let id = own.first()?.sandbox.clone();
        let place = of(Some(&id));
        Some(Placed {
            known: known.clone(),
            cgroup: of(None),
            sandbox: (id, place),
            containers: own
                .into_iter()
                .filter_map(|c| Some((of(Some(&c.id))?, c)))
                .collect(),
        })
    };
    table.iter().filter_map(place).collect()
}

fn settings(server: &Server) -> std::sync::MutexGuard<'_, HashMap<String, Settings>> {
    let settings = server.figures.settings.lock();
    settings.unwrap_or_else(std::sync::PoisonError::into_inner)
}

async fn read(
    server: &Arc<Server>,
    depth: Depth,
    before: Option<&Dated>,
) -> Result<Snapshot, RuntimeError> {
    let parts = &server.parts;
    let placed = placed(server, running(server).await?);
    let (root_dir, at) = (parts.config.root_dir.clone(), parts.clock.now());
    let mut systems = vec![("pods", parts.host.cgroup_of_all(), Some(parts.started))];
    if depth == Depth::All {
        let classes = parts.host.cgroups_of_classes().into_iter();
        systems.extend(classes.map(|cgroup| ("", cgroup, None)));
    }
    let of_meter = Meter {
        depth,
        before: before.map(|(_, s)| s.cpu()).unwrap_or_default(),
        elapsed: before.map_or(Duration::ZERO, |(at, _)| at.elapsed()),
        settings: (
            std::mem::take(&mut *settings(server)).into(),
            RefCell::default(),
        ),
    };
    let server = Arc::clone(server);
    let read = move || {
        let parts = &server.parts;
        let known = server.figures.runtime.get().cloned().or_else(|| {
            let found = meter::cgroup_of_server(&parts.config.runtime_endpoint)?;
            Some(server.figures.runtime.get_or_init(|| found).clone())
        });
        let own = &parts.config.own_cgroups;
        systems.extend(others(own, meter::own_cgroup(), known, parts.started));
        let machine = meter::machine(depth, &root_dir.to_string_lossy());
        let snapshot = Snapshot {
            at,
            depth,
            rate: of_meter.rate("/", &machine.usage),
            root: Room::of(&root_dir)?,
            pods: placed.into_iter().map(|p| of_meter.pod(p)).collect(),
            systems: systems
                .into_iter()
                .filter_map(|s| of_meter.system(s, &machine.usage))
                .collect(),
            machine,
        };
        // Settings of cgroups that were not measured are dropped when they expire.
        let (before, now) = of_meter.settings;
        let mut kept = before.into_inner();
        kept.retain(|_, settings| settings.until > Instant::now());
        kept.extend(now.into_inner());
        *settings(&server) = kept;
        Ok(snapshot)
    };
    blocking(read).await.map_err(|error| RuntimeError {
        kind: RuntimeErrorKind::Failed,
        code: None,
        message: error.message,
    })
}

/// The disk usage of pods, as far as it can be measured in time.
pub async fn disks(server: &Arc<Server>, pods: &[PodFigures]) -> HashMap<String, DiskFigures> {
    // Requested once, and only if a pod is measured: the runtime has to inspect every container.
    let layers: Arc<OnceCell<Layers>> = Arc::default();
    let mut found = HashMap::new();
    let mut tasks = vec![];
    {
        let mut all = lock(&server.figures.disks);
        all.retain(|uid, _| pods.iter().any(|p| pod::uid(&p.pod) == uid));
        for figures in pods {
            let disk = Arc::clone(all.entry(pod::uid(&figures.pod).to_owned()).or_default());
            let (server, pod, layers) = (
                Arc::clone(server),
                Arc::clone(&figures.pod),
                Arc::clone(&layers),
            );
            tasks.push(tokio::spawn(async move {
                let mut known = disk.lock().await;
                if let Some((_, figures)) = known
                    .as_ref()
                    .filter(|(at, _)| at.elapsed() < DISK_USAGE_TTL)
                {
                    return (pod::uid(&pod).to_owned(), figures.clone());
                }
                let fresh = measure_disk(&server, &pod, &layers).await;
                *known = Some((Instant::now(), fresh.clone()));
                (pod::uid(&pod).to_owned(), fresh)
            }));
        }
    }
    let until = Instant::now() + COUNT_TIMEOUT;
    for task in tasks {
        // A late measurement continues, and is available to the next request.
        if let Ok(Ok((uid, figures))) = tokio::time::timeout_at(until, task).await {
            found.insert(uid, figures);
        }
    }
    found
}

async fn measure_disk(
    server: &Arc<Server>,
    pod: &Arc<Pod>,
    layers: &OnceCell<Layers>,
) -> DiskFigures {
    let parts = &server.parts;
    let layers = layers
        .get_or_init(|| async { parts.runtime.layers().await.unwrap_or_default() })
        .await;
    let mut figures = DiskFigures::default();
    for volume in local_storage::volumes_on_disk(pod) {
        match parts.host.volume_usage(pod, &volume, u64::MAX).await {
            Ok(used) => {
                figures.ephemeral += used.bytes;
                let own = VolumeFigures {
                    name: volume,
                    bytes: (used.bytes, 0, 0),
                    inodes: (used.inodes, 0, 0),
                    ..VolumeFigures::default()
                };
                figures.volumes.push(own);
            }
            Err(error) => tracing::debug!(%error, volume, "measuring a volume failed"),
        }
    }
    for (_, container) in pod::containers(pod) {
        let logs = parts
            .host
            .log_usage(pod, &container.name)
            .await
            .unwrap_or(0);
        let layer = layers
            .get(&(pod::uid(pod).to_owned(), container.name.clone()))
            .cloned()
            .unwrap_or_default();
        figures.ephemeral += logs + layer.bytes;
        figures.logs.insert(container.name.clone(), logs);
        figures.layers.insert(container.name.clone(), layer);
    }
    for mut volume in csi::figures(&parts.csi, pod::uid(pod)).await {
        // A CSI volume is stored under its persistent volume's name; in the pod it has the name of the claim's volume.
        if let Some(claim) = &volume.claim {
            let named = claims::of_pod(pod)
                .into_iter()
                .find(|(_, name)| name == claim);
            volume.name = named.map_or(volume.name, |(of_pod, _)| of_pod.name.clone());
        }
        figures.volumes.push(volume);
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_containers_are_those_with_a_known_cgroup() {
        let own = |agent: Option<&str>, system: Option<&str>| OwnCgroups {
            agent: agent.map(Into::into),
            system: system.map(Into::into),
        };
        let at = Timestamp::UNIX_EPOCH;
        let kubelet = |cgroup: &str| ("kubelet", cgroup.to_owned(), Some(at));
        let unset = others(&own(None, None), None, None, at);
        assert_eq!(unset, []);
        let found = others(&own(None, None), Some("/a".into()), Some("/r".into()), at);
        assert_eq!(found, [kubelet("/a"), ("runtime", "/r".into(), None)]);
        let set = own(Some("/agent"), Some("/system"));
        let found = others(&set, Some("/a".into()), None, at);
        assert_eq!(found, [kubelet("/agent"), ("misc", "/system".into(), None)]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_list_is_valid_while_the_runtime_does_not_answer() {
        let failed = || RuntimeError {
            kind: RuntimeErrorKind::Unavailable,
            code: None,
            message: "gone".into(),
        };
        let one = RunningContainer {
            id: "1".into(),
            namespace: "n".into(),
            pod: "p".into(),
            uid: "u".into(),
            name: "c".into(),
            attempt: 0,
            sandbox: "s".into(),
        };
        let running = Running::default();
        assert_eq!(
            running.refresh(async { Err(failed()) }).await,
            Err(failed())
        );
        let silent = running.refresh(std::future::pending()).await;
        assert!(silent.is_err_and(|e| e.kind == RuntimeErrorKind::Timeout));
        let listed: Result<_, RuntimeError> = Ok(vec![one]);
        assert_eq!(running.refresh(async { listed.clone() }).await, listed);
        assert_eq!(running.refresh(async { Err(failed()) }).await, listed);
        assert_eq!(running.refresh(std::future::pending()).await, listed);
        assert_eq!(running.refresh(async { Ok(vec![]) }).await, Ok(vec![]));
        assert_eq!(running.refresh(async { Err(failed()) }).await, Ok(vec![]));
    }
}
