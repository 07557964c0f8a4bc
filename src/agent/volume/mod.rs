//! A pod's volumes. They are set up in parallel; the objects that they are made from are watched, and changes are
//! applied to running containers immediately (`pkg/kubelet/volumemanager`).

pub(crate) mod attached;
pub mod csi;
pub(crate) mod figures;
pub(crate) mod growth;
mod labels;
pub mod objects;
mod permissions;
pub mod projected;
mod reported;
pub(crate) mod storage_limits;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use kube::ResourceExt as _;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

pub use attached::AttachedDisks;

use self::csi::VolumeError;
use self::objects::Fetched;
use self::permissions::PermissionEvents;
use self::projected::PodCredentials;
use super::events::{Events, Kind};
use super::metrics::{Metrics, PodVolumes, VolumeOperation};
use super::node::OwnNode;
use super::node::ledger::LedgerHandle;
use super::pod::journal::Log;
use holdfast_config::Config;
use holdfast_core::fault::Fault;
use holdfast_core::pod::env::FieldContext;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::references::{self, References};
use holdfast_core::pod::resources::Amounts;
use holdfast_core::volume::attachment::{self, Unattached};
use holdfast_core::volume::disks::{Chap, Disk, Iscsi};
use holdfast_core::volume::resolved::{self, Problem, ResolvedVolume, Source};
use holdfast_core::{
    pod,
    volume::{claims, payload},
};
use holdfast_host::{PodHost, VolumeRemoval};
use holdfast_kubeapi::objects::{Following, OnChange};
use holdfast_kubeapi::pods::{ApiFailure, PodApi};
use holdfast_sys::machine::Machine;

/// What setting up and tearing down the volumes of all pods uses.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub api: Arc<dyn PodApi>,
    pub host: Arc<dyn PodHost>,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    pub machine: Arc<Machine>,
    pub node: Arc<OwnNode>,
    pub node_ips: watch::Sender<Vec<String>>,
    /// The resources that pods may use on this node.
    pub allocatable: Amounts,
    pub ledger: LedgerHandle,
    pub csi: csi::Parts,
    pub disks: attached::Parts,
    pub credentials: projected::Parts,
}

/// The volumes of one pod.
pub struct Volumes {
    credentials: PodCredentials,
    /// When they were first requested.
    begun: Option<Instant>,
    /// Whether all volumes have been set up at least once.
    set_up: bool,
    /// The watched references to ConfigMaps and Secrets; dropping the value ends the watch.
    following: Option<(References, Following)>,
    /// The resolved volumes that are set up, by name.
    resolved: BTreeMap<String, Arc<ResolvedVolume>>,
    /// Called when a watched object has changed.
    changed: OnChange,
    /// Volumes whose files are being changed to the pod's group.
    permission_events: PermissionEvents,
    /// Waits for operations in progress, and then calls `changed`.
    waiting: Option<AbortOnDropHandle<()>>,
}

/// The volumes of a pod, set up.
pub struct SetUp {
    /// The objects for volumes and environments.
    pub fetched: Fetched,
    /// Why volumes that were set up before could not be refreshed; `None` after success.
    pub outdated: Option<String>,
    /// The time of the next attempt for an operation that blocks nothing.
    pub again: Option<Timestamp>,
}

/// The inputs of volumes, in addition to their spec.
struct Inputs<'a> {
    around: FieldContext<'a>,
    fetched: &'a Fetched,
    /// The allocatable memory of the node, in bytes.
    memory: u64,
    /// Whether the volumes were set up before.
    known: bool,
}

/// A volume that is set up.
struct VolumeSetUp {
    /// Whether the runtime must not relabel the files: they are mounted with a label, or do not support labels.
    labelled: bool,
    /// See [`SetUp::again`].
    again: Option<Timestamp>,
}

/// Why a pod's volumes are not set up.
pub(crate) enum NotSetUp {
    /// A failure that is retried.
    Failed(Fault),
    /// The node's limit of attached volumes is reached: the pod is rejected.
    LimitExceeded(String),
}

impl From<ApiFailure> for NotSetUp {
    fn from(failure: ApiFailure) -> NotSetUp {
        NotSetUp::Failed(Fault::later(failure.to_string()))
    }
}

/// A problem that was reported to the pod.
struct ReportedProblem {
    fault: Fault,
    is_under_way: bool,
    /// Set if the volume is not attached.
    unattached: Option<Unattached>,
}

impl Volumes {
    /// Creates volumes that are not set up; `changed` is called when a watched object has changed.
    #[must_use]
    pub fn new(changed: OnChange) -> Volumes {
        Volumes {
            credentials: PodCredentials::default(),
            begun: None,
            set_up: false,
            following: None,
            resolved: BTreeMap::new(),
            changed,
            permission_events: PermissionEvents::default(),
            waiting: None,
        }
    }

    /// Watches exactly the objects that the pod refers to.
    fn follow(&mut self, parts: &Parts, pod: &Pod) {
        let wanted = references::of(pod);
        if self
            .following
            .as_ref()
            .is_some_and(|(known, _)| *known == wanted)
        {
            return;
        }
        // The new watch starts before the old one ends, so that shared objects stay cached.
        let following = parts.api.follow(
            &pod.namespace().unwrap_or_default(),
            &wanted.config_maps,
            &wanted.secrets,
            &self.changed,
        );
        self.following = Some((wanted, following));
    }

    /// Records a volume that is set up.
    fn record_set_up(&mut self, parts: &Parts, resolved: ResolvedVolume) {
        if !self.resolved.contains_key(&resolved.volume)
            && let Some(begun) = self.begun
        {
            let plugin = resolved.qualified_plugin();
            parts.metrics.volume_ready(&plugin, begun.elapsed());
        }
        let name = resolved.volume.clone();
        self.resolved.insert(name, Arc::new(resolved));
    }

    /// Publishes the pod's desired and actual volumes as metrics.
    fn count(&self, parts: &Parts, pod: &Pod) {
        let used = pod::used_volumes(pod);
        let wanted = pod::spec(pod).volumes.iter().flatten();
        let wanted = wanted.filter(|volume| used.contains(&volume.name));
        let plugin = |volume: &Volume| match self.resolved.get(&volume.name) {
            Some(resolved) => resolved.qualified_plugin(),
            None => resolved::resolve(pod, volume, None, resolved::NodeProperties::default())
                .map_or_else(|_| "N/A".into(), |resolved| resolved.qualified_plugin()),
        };
        let actual = self.resolved.values();
        let counted = PodVolumes {
            desired: wanted.map(plugin).collect(),
            actual: actual.map(|resolved| resolved.qualified_plugin()).collect(),
        };
        parts.metrics.pod_has_volumes(pod::uid(pod), counted);
    }

    /// Sets up missing volumes and refreshes the others. If `known`, they were set up before,
    /// and a failed refresh leaves a volume unchanged.
    pub async fn set_up(
        &mut self,
        parts: &Parts,
        pod: &Pod,
        pod_ips: &[String],
        known: bool,
        log: &Log,
    ) -> Result<SetUp, NotSetUp> {
        self.begun.get_or_insert_with(Instant::now);
        self.follow(parts, pod);
        self.waiting = None;
        let mut fetched = log
            .step(Step::Objects, "", objects::fetch(&*parts.api, pod))
            .await?;
        let node_ips = parts.node_ips.borrow().clone();
        let around = FieldContext {
            pod,
            pod_ips,
            node_ips: &node_ips,
            allocatable: &parts.allocatable,
        };
        let memory = parts.allocatable.get("memory");
        let from = Inputs {
            around,
            fetched: &fetched,
            memory: memory
                .and_then(|q| u64::try_from(q.units()).ok())
                .unwrap_or(0),
            known,
        };
        // Volumes that no container uses may not even exist.
        let used = pod::used_volumes(pod);
        let volumes = pod::spec(pod).volumes.iter().flatten();
        let volumes = volumes.filter(|volume| used.contains(&volume.name));
        let work = volumes.map(|volume| self.set_up_one(parts, volume, &from, log));
        let (mut failed, mut unattached, mut again) = (None, vec![], vec![]);
        for result in futures::future::join_all(work).await {
            match result {
                Ok((resolved, at)) => {
                    self.record_set_up(parts, resolved);
                    again.extend(at);
                }
                Err(problem) => {
                    if problem.is_under_way {
                        self.wait(parts, pod);
                    }
                    unattached.extend(problem.unattached);
                    let class = problem.fault.class;
                    let first: &mut Fault = failed.get_or_insert(problem.fault);
                    first.class = first.class.min(class);
                }
            }
        }
        self.count(parts, pod);
        self.set_up |= known || failed.is_none();
        if !self.set_up
            && let Some(why) = self.limit_exceeded(pod, &unattached)
        {
            return Err(NotSetUp::LimitExceeded(why));
        }
        fetched.resolved.clone_from(&self.resolved);
        match failed {
            Some(fault) if !self.set_up => Err(NotSetUp::Failed(fault)),
            outdated => Ok(SetUp {
                fetched,
                outdated: outdated.map(|fault| fault.message),
                again: again.into_iter().min(),
            }),
        }
    }

    /// Sets up or refreshes a volume, and emits an event about a failure.
    async fn set_up_one(
        &self,
        parts: &Parts,
        volume: &Volume,
        from: &Inputs<'_>,
        log: &Log,
    ) -> Result<(ResolvedVolume, Option<Timestamp>), ReportedProblem> {
        let pod = from.around.pod;
        let named = OnceLock::new();
        let set_up = self.attempt(parts, volume, from, &named);
        let (made, again) = Box::pin(log.step(Step::Volume, &volume.name, set_up))
            .await
            .map_err(|problem| self.emit_problem(parts, pod, volume, named.get(), problem))?;
        if made.block && !self.resolved.contains_key(&volume.name) {
            emit_mapped(parts, pod, &made);
        }
        Ok((made, again))
    }

    /// Sets up or refreshes a volume; `named` receives its unique name.
    async fn attempt(
        &self,
        parts: &Parts,
        volume: &Volume,
        from: &Inputs<'_>,
        named: &OnceLock<String>,
    ) -> Result<(ResolvedVolume, Option<Timestamp>), Problem> {
        let pod = from.around.pod;
        let known = self.resolved.get(&volume.name);
        let resolved = match known {
            Some(known) => resolve_again(parts, pod, volume, known, from.memory).await,
            None => resolve(parts, pod, volume, from.memory).await?,
        };
        named.get_or_init(|| resolved.name.clone());
        let (begun, is_new) = (Instant::now(), known.is_none());
        if is_new {
            labels::admit(parts, pod, volume, &resolved).await?;
            warn_shared_group(parts, pod, &resolved).await;
        }
        let outcome =
            set_up_volume(parts, volume, &resolved, from, &self.credentials, is_new).await;
        let failed = outcome.as_ref().err();
        // A refresh without a failure is not an operation, and an operation in progress has no result yet.
        let has_ended = match failed {
            Some(problem) => !problem.is_under_way(),
            None => is_new,
        };
        if has_ended {
            count_attempt(parts, pod, &resolved, failed, begun.elapsed());
        }
        let VolumeSetUp { labelled, again } = outcome.map_err(|problem| match resolved.block {
            true => problem.of_device(),
            false => problem,
        })?;
        let resolved = ResolvedVolume {
            labelled,
            ..resolved
        };
        Ok((resolved, again))
    }

    /// Emits an event about a failure; `name` is the persistent volume's name, if it is known.
    fn emit_problem(
        &self,
        parts: &Parts,
        pod: &Pod,
        volume: &Volume,
        name: Option<&String>,
        problem: Problem,
    ) -> ReportedProblem {
        let of_claim = matches!(problem, Problem::Claim(_));
        let name = name.filter(|_| !of_claim);
        let message = problem.event_message(name.unwrap_or(&volume.name));
        let events = &parts.events;
        match &problem {
            Problem::Permissions(giving) => self.permission_events.begin(events, pod, giving),
            _ => events.pod(pod, None, Kind::Warning, problem.reason(), message.as_str()),
        }
        ReportedProblem {
            fault: Fault {
                class: problem.class(),
                message,
            },
            is_under_way: problem.is_under_way(),
            unattached: match problem {
                Problem::Unattached { is_full, .. } => Some(Unattached {
                    volume: volume.name.clone(),
                    is_full,
                }),
                _ => None,
            },
        }
    }

    /// Retries operations in progress as soon as they complete, instead of after a back-off.
    fn wait(&mut self, parts: &Parts, pod: &Pod) {
        let (host, uid) = (Arc::clone(&parts.host), pod::uid(pod).to_owned());
        let changed = Arc::clone(&self.changed);
        let end = async move {
            host.wait_for_call(&uid).await;
            changed();
        };
        self.waiting = Some(AbortOnDropHandle::new(tokio::spawn(end)));
    }

    /// Why the pod fails, if the node's limit of attached volumes is reached.
    fn limit_exceeded(&self, pod: &Pod, unattached: &[Unattached]) -> Option<String> {
        let waited = self.begun?.elapsed();
        let mounted = self.resolved.keys().map(String::as_str).collect();
        attachment::limit_exceeded(pod, waited, &mounted, unattached)
    }
}

/// Emits an event about a newly mapped block device.
fn emit_mapped(parts: &Parts, pod: &Pod, made: &ResolvedVolume) {
    let (events, reason) = (&parts.events, "SuccessfulMountVolume");
    for message in made.mapped(&parts.config.root_dir, pod::uid(pod)) {
        events.pod(pod, None, Kind::Normal, reason, message);
    }
}

/// Records an attempt to set up a volume. If a disk has a different filesystem than its
/// persistent volume, emits an event about the volume.
fn count_attempt(
    parts: &Parts,
    pod: &Pod,
    resolved: &ResolvedVolume,
    failed: Option<&Problem>,
    took: Duration,
) {
    parts.metrics.volume(VolumeOperation {
        name: match resolved.block {
            true => "map_volume",
            false => "volume_mount",
        },
        plugin: &resolved.qualified_plugin(),
        is_migrated: resolved.is_migrated(),
        has_failed: failed.is_some(),
        took,
    });
    let mut claimed = claims::of_pod(pod).into_iter();
    if let Some(Problem::Mismatch(why)) = failed
        && claimed.any(|(volume, _)| volume.name == resolved.volume)
    {
        let (name, reason) = (&resolved.name, "FailedMountOnFilesystemMismatch");
        let events = &parts.events;
        events.persistent_volume(name, Kind::Warning, reason, why.as_str());
    }
}

/// Emits a warning if a volume is changed to the pod's group while other pods use it with another group.
async fn warn_shared_group(parts: &Parts, pod: &Pod, resolved: &ResolvedVolume) {
    let (Some(found), Some(wanted)) = (
        parts.host.group_of_others(pod, resolved).await,
        pod::ownership(pod).group,
    ) else {
        return;
    };
    let message = format!(
        "The requested fsGroup is {wanted}, but the volume {} has GID {found}. The volume may not be shareable.",
        resolved.name
    );
    let reason = "AlreadyMountedVolume";
    parts.events.pod(pod, None, Kind::Warning, reason, message);
}

/// Removes the volumes of a pod with the contents of its emptyDirs, CSI volumes first. A missing driver blocks only its
/// own volumes: other disks and exports, which other pods may need, are released nevertheless.
pub async fn tear_down(parts: &Parts, uid: &str) -> Result<(), VolumeError> {
    let unpublished = csi::unpublish(&parts.csi, uid).await;
    let each = |taken: VolumeRemoval| {
        parts.metrics.volume(VolumeOperation {
            name: match (taken.staged, taken.block) {
                (true, _) => "unmount_device",
                (false, true) => "unmap_volume",
                (false, false) => "volume_unmount",
            },
            plugin: &taken.plugin,
            is_migrated: false,
            has_failed: taken.has_failed,
            took: taken.took,
        });
    };
    let torn_down = parts.host.tear_down_volumes(uid, &each).await;
    unpublished?;
    torn_down?;
    parts.disks.disks.forget(uid);
    parts.metrics.pod_has_no_volumes(uid);
    Ok(())
}

/// Resolves a volume that is refreshed: a claim's binding stays, but its volume may have been expanded.
async fn resolve_again(
    parts: &Parts,
    pod: &Pod,
    volume: &Volume,
    known: &ResolvedVolume,
    memory: u64,
) -> ResolvedVolume {
    let may_grow = match &known.source {
        Source::Csi(served) => {
            served.claim.is_some()
                && (served.grown.is_some() || parts.csi.csi.supports_expansion(&served.driver))
        }
        Source::Local { .. } => !known.read_only,
        _ => false,
    };
    if !may_grow {
        return known.clone();
    }
    let fresh = resolve(parts, pod, volume, memory)
        .await
        .ok()
        .filter(|fresh| fresh.name == known.name);
    fresh.unwrap_or_else(|| known.clone())
}

/// Resolves a volume; reads the claim and its persistent volume from the API.
async fn resolve(
    parts: &Parts,
    pod: &Pod,
    volume: &Volume,
    memory: u64,
) -> Result<ResolvedVolume, Problem> {
    let here = resolved::NodeProperties {
        memory,
        label: parts.machine.selinux.as_deref(),
    };
    let Some(name) = claims::of_volume(pod, volume) else {
        return resolved::resolve(pod, volume, None, here);
    };
    let namespace = pod.namespace().unwrap_or_default();
    let refused =
        |why: String| Problem::Claim(format!("error processing PVC {namespace}/{name}: {why}"));
    let failed = |e: ApiFailure| refused(format!("failed to fetch PVC from API server: {e}"));
    let found = parts.api.claimed(&namespace, &name).await.map_err(failed)?;
    let wanted = resolved::check_claim(pod, volume, &found.claim)?;
    let bound = found
        .volume
        .ok_or_else(|| refused(format!("persistentVolume {wanted:?} not found")))?;
    let claimed = resolved::Claimed::new(found.claim, bound)?;
    if claimed.is_for_one_pod()
        && !parts
            .ledger
            .acquire_exclusive_claim(pod, &namespace, &name)
            .await
    {
        return Err(resolved::already_in_use(&claimed));
    }
    resolved::check_node_affinity(&claimed, parts.node.borrow().as_deref())?;
    resolved::resolve(pod, volume, Some(&claimed), here)
}

/// Adds the CHAP passwords to a disk that requires them. They are kept only while it is set up.
async fn passwords(
    parts: &Parts,
    resolved: &ResolvedVolume,
) -> Result<Option<ResolvedVolume>, Problem> {
    let Source::Disk {
        disk,
        filesystem,
        attached_as,
    } = &resolved.source
    else {
        return Ok(None);
    };
    let Disk::Iscsi(iscsi) = &**disk else {
        return Ok(None);
    };
    let Some((namespace, name)) = iscsi
        .secret
        .as_ref()
        .filter(|_| iscsi.chap.0 || iscsi.chap.1)
    else {
        return Ok(None);
    };
    let secret =
        parts.api.secret(namespace, name).await.map_err(|e| {
            Problem::later(format!("cannot read the secret {namespace}/{name}: {e}"))
        })?;
    let known = secret
        .data
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), String::from_utf8_lossy(&value.0).into_owned()));
    let disk = Box::new(Disk::Iscsi(Iscsi {
        passwords: Chap(known.collect()),
        ..iscsi.clone()
    }));
    Ok(Some(ResolvedVolume {
        source: Source::Disk {
            disk,
            filesystem: filesystem.clone(),
            attached_as: attached_as.clone(),
        },
        ..resolved.clone()
    }))
}

/// Sets up one volume. `is_new` is whether this agent sets it up for the pod for the first time.
async fn set_up_volume(
    parts: &Parts,
    volume: &Volume,
    resolved: &ResolvedVolume,
    from: &Inputs<'_>,
    credentials: &PodCredentials,
    is_new: bool,
) -> Result<VolumeSetUp, Problem> {
    let (around, fetched) = (&from.around, from.fetched);
    // Containers that are running already have it from an earlier agent.
    let waits = is_new && !from.known;
    if let Source::Csi(served) = &resolved.source {
        return Box::pin(csi::publish(&parts.csi, around.pod, served, is_new, waits)).await;
    }
    if let Source::Disk { attached_as, .. } = &resolved.source {
        attached::report_disk_in_use(&parts.disks, around.pod, resolved, attached_as, waits)
            .await?;
    }
    let given = credentials
        .fetch(&parts.credentials, around.pod, volume)
        .await?;
    let files = payload::files(volume, around, fetched, &given).transpose()?;
    if let Some(with_passwords) = passwords(parts, resolved).await? {
        parts
            .host
            .set_up_volume(around.pod, &with_passwords, files)
            .await?;
    } else {
        parts
            .host
            .set_up_volume(around.pod, resolved, files)
            .await?;
    }
    Ok(VolumeSetUp {
        labelled: resolved.labelled,
        again: growth::expand_local(&parts.csi.expansion, around.pod, resolved, waits).await?,
    })
}
