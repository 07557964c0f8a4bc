//! What the node, its pods and their containers use: read when somebody asks, from cgroup files, the pods' network
//! namespaces and the filesystems. Those who ask at the same time share one reading.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use super::Known;
use super::Server;
use super::logs;
use crate::agent::volume::csi;
use crate::core::serving::cgroup_stats::{Interface, Usage};
use crate::core::{
    pod,
    volume::{claims, local_storage},
};
use crate::cri::{Layer, RuntimeError};
use crate::host::blocking;
use crate::sys::machine::Room;
use crate::sys::meter::{self, Whole};

/// For how long a reading counts.
const FRESH: Duration = Duration::from_secs(1);
/// For how long what a pod has on the disk counts: counting costs more.
const COUNTED: Duration = Duration::from_secs(60);
/// How long it is waited for such a count; what takes longer is there the next time.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// A container that runs.
#[derive(Debug, Clone)]
pub struct ContainerFigures {
    /// Its name.
    pub name: String,
    /// The runtime's id.
    pub id: String,
    /// The image that its pod names.
    pub image: String,
    /// Its cgroup.
    pub cgroup: String,
    /// What it used.
    pub usage: Usage,
    /// Processor time a second since the reading before, in nanoseconds.
    pub rate: Option<u64>,
    /// When it began.
    pub started: Option<Timestamp>,
}

/// A pod with a container that runs.
#[derive(Debug, Clone)]
pub struct PodFigures {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its cgroup.
    pub cgroup: String,
    /// What it used.
    pub usage: Usage,
    /// As for a container.
    pub rate: Option<u64>,
    /// Its interfaces; none on the node's network.
    pub interfaces: Vec<Interface>,
    /// When it was taken.
    pub started: Option<Timestamp>,
    /// Its containers.
    pub containers: Vec<ContainerFigures>,
}

/// One reading.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// When.
    pub at: Timestamp,
    /// The machine.
    pub machine: Whole,
    /// As for a container.
    pub rate: Option<u64>,
    /// The agent's filesystem.
    pub root: Room,
    /// The pods.
    pub pods: Vec<PodFigures>,
    /// All pods' cgroup together.
    pub tier: (String, Usage),
}

/// How full something on the disk is.
#[derive(Debug, Clone, Default)]
pub struct VolumeFigures {
    /// The volume's name in its pod.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// Its claim.
    pub claim: Option<String>,
    /// Bytes: used, all, free.
    pub bytes: (u64, u64, u64),
    /// Inodes: used, all, free.
    pub inodes: (u64, u64, u64),
    /// What its driver says is wrong with it.
    pub abnormal: Option<bool>,
}

/// What a pod has on the disk.
#[derive(Debug, Clone, Default)]
pub struct DiskFigures {
    /// Its volumes.
    pub volumes: Vec<VolumeFigures>,
    /// Bytes of logs, by container.
    pub logs: BTreeMap<String, u64>,
    /// Bytes of writable layers, by container.
    pub layers: BTreeMap<String, u64>,
    /// Bytes of all this that counts as the node's own disk.
    pub ephemeral: u64,
}

/// The readings that are kept.
#[derive(Default)]
pub struct Figures {
    last: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    /// By uid; each pod's own turn.
    disks: std::sync::Mutex<HashMap<String, Disk>>,
}

impl Figures {
    /// The volumes of claims that have been counted. Nothing is counted for it.
    pub fn known_volumes(&self) -> Vec<VolumeFigures> {
        let all = self
            .disks
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let known = all.values().filter_map(|disk| {
            disk.try_lock()
                .ok()?
                .as_ref()
                .map(|(_, figures)| figures.volumes.clone())
        });
        known.flatten().filter(|v| v.claim.is_some()).collect()
    }
}

/// Writable layers, by pod and container.
type Layers = BTreeMap<(String, String), Layer>;
type Disk = Arc<Mutex<Option<(Instant, DiskFigures)>>>;

/// Processor time a second between two readings.
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

/// The present reading.
pub async fn snapshot(server: &Arc<Server>) -> Result<Arc<Snapshot>, RuntimeError> {
    let mut last = server.figures.last.lock().await;
    if let Some((_, known)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(Arc::clone(known));
    }
    let fresh = Arc::new(
        read(
            server,
            last.as_ref()
                .map(|(at, known)| (at.elapsed(), Arc::clone(known))),
        )
        .await?,
    );
    *last = Some((Instant::now(), Arc::clone(&fresh)));
    Ok(fresh)
}

async fn read(
    server: &Arc<Server>,
    before: Option<(Duration, Arc<Snapshot>)>,
) -> Result<Snapshot, RuntimeError> {
    let context = &server.context;
    let running = context.runtime.running().await?;
    let roster: Vec<Known> = context.roster.borrow().iter().cloned().collect();
    let mut pods = vec![];
    for known in &roster {
        let own: Vec<_> = running
            .iter()
            .filter(|c| c.uid == pod::uid(&known.pod))
            .cloned()
            .collect();
        if !own.is_empty() {
            let cgroup = context.host.cgroup_path(&known.pod, None);
            let places: Vec<_> = own
                .into_iter()
                .map(|c| (context.host.cgroup_path(&known.pod, Some(&c.id)), c))
                .collect();
            pods.push((known.clone(), cgroup, places));
        }
    }
    let (root_dir, at) = (context.config.root_dir.clone(), context.clock.now());
    let tier = context.host.cgroup_of_all();
    let read = move || {
        let old: HashMap<&str, u64> = before
            .iter()
            .flat_map(|(_, s)| s.pods.iter().map(|p| (p.cgroup.as_str(), p.usage.cpu)))
            .collect();
        let old_containers: HashMap<&str, u64> = before
            .iter()
            .flat_map(|(_, s)| s.pods.iter().flat_map(|p| &p.containers))
            .map(|c| (c.cgroup.as_str(), c.usage.cpu))
            .collect();
        let elapsed = before
            .as_ref()
            .map_or(Duration::ZERO, |(elapsed, _)| *elapsed);
        let mut figures = vec![];
        for (known, cgroup, places) in pods {
            let told = known.told();
            let mut containers = vec![];
            let mut interfaces = vec![];
            for (place, container) in places {
                let Some(usage) = meter::cgroup(&place) else {
                    continue;
                };
                if interfaces.is_empty() && !pod::host_network(&known.pod) {
                    interfaces = meter::interfaces(&place);
                }
                let image = pod::containers(&known.pod)
                    .iter()
                    .find(|(_, c)| c.name == container.name)
                    .and_then(|(_, c)| c.image.clone());
                containers.push(ContainerFigures {
                    rate: rate(
                        old_containers.get(place.as_str()).copied(),
                        usage.cpu,
                        elapsed,
                    ),
                    started: began(told, &container.name),
                    name: container.name,
                    id: container.id,
                    image: image.unwrap_or_default(),
                    cgroup: place,
                    usage,
                });
            }
            let usage = meter::cgroup(&cgroup).unwrap_or_default();
            figures.push(PodFigures {
                rate: rate(old.get(cgroup.as_str()).copied(), usage.cpu, elapsed),
                started: told
                    .status
                    .as_ref()
                    .and_then(|s| s.start_time.as_ref())
                    .map(|t| t.0),
                pod: known.pod,
                cgroup,
                usage,
                interfaces,
                containers,
            });
        }
        let machine = meter::machine();
        let rate = rate(
            before.as_ref().map(|(_, s)| s.machine.usage.cpu),
            machine.usage.cpu,
            elapsed,
        );
        let root = Room::of(&root_dir).map_err(|e| e.to_string())?;
        let whole = meter::cgroup(&tier).unwrap_or_default();
        Ok(Snapshot {
            at,
            machine,
            rate,
            root,
            pods: figures,
            tier: (tier, whole),
        })
    };
    blocking(read).await.map_err(|message| RuntimeError {
        kind: crate::cri::RuntimeErrorKind::Failed,
        message,
    })
}

/// What pods have on the disk, as far as it is known in time.
pub async fn disks(server: &Arc<Server>, pods: &[PodFigures]) -> HashMap<String, DiskFigures> {
    // Asked once, and only if something is counted: it costs the runtime a look at every container.
    let layers: Arc<OnceCell<Layers>> = Arc::default();
    let mut found = HashMap::new();
    let mut tasks = vec![];
    {
        let mut all = server
            .figures
            .disks
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
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
                if let Some((_, figures)) = known.as_ref().filter(|(at, _)| at.elapsed() < COUNTED)
                {
                    return (pod::uid(&pod).to_owned(), figures.clone());
                }
                let fresh = count(&server, &pod, &layers).await;
                *known = Some((Instant::now(), fresh.clone()));
                (pod::uid(&pod).to_owned(), fresh)
            }));
        }
    }
    let until = Instant::now() + COUNT_TIMEOUT;
    for task in tasks {
        // One that is late goes on, and is there the next time.
        if let Ok(Ok((uid, figures))) = tokio::time::timeout_at(until, task).await {
            found.insert(uid, figures);
        }
    }
    found
}

async fn count(server: &Arc<Server>, pod: &Arc<Pod>, layers: &OnceCell<Layers>) -> DiskFigures {
    let context = &server.context;
    let layers = layers
        .get_or_init(|| async { context.runtime.layers().await.unwrap_or_default() })
        .await;
    let mut figures = DiskFigures::default();
    for volume in local_storage::counted(pod) {
        match context.host.volume_usage(pod, &volume, u64::MAX).await {
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
            Err(error) => tracing::debug!(error, volume, "a volume could not be counted"),
        }
    }
    for (_, container) in pod::containers(pod) {
        let logs = context
            .host
            .log_usage(pod, &container.name)
            .await
            .unwrap_or(0);
        let layer = layers
            .get(&(pod::uid(pod).to_owned(), container.name.clone()))
            .map_or(0, |layer| layer.bytes);
        figures.ephemeral += logs + layer;
        figures.logs.insert(container.name.clone(), logs);
        figures.layers.insert(container.name.clone(), layer);
    }
    for mut volume in csi::figures(context, pod::uid(pod)).await {
        // What is published under the name of a persistent volume is known in the pod by its claim.
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
