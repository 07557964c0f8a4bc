//! A pod's volumes: what they are made from is followed, they are set up side by side, and what a change in
//! the API makes of them is in the container as soon as it is known (kubelet spec, chapter 9).

mod attached;
pub mod csi;
mod growth;
mod labels;
pub mod objects;
mod permissions;
pub mod projected;
mod reported;
pub mod storage_limits;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use kube::ResourceExt as _;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

pub use attached::AttachedDisks;

use self::csi::VolumeError;
use self::objects::Fetched;
use self::permissions::Telling;
use self::projected::Held;
use super::Context;
use super::Kind;
use super::metrics::{PodVolumes, VolumeOperation};
use super::pod::journal::Log;
use crate::core::fault::Fault;
use crate::core::pod::env::Surroundings;
use crate::core::pod::journal::Step;
use crate::core::pod::references::{self, References};
use crate::core::volume::attachment::{self, Unattached};
use crate::core::volume::disks::{Chap, Disk, Iscsi};
use crate::core::volume::resolved::{self, Problem, ResolvedVolume, Source};
use crate::core::{
    pod,
    volume::{claims, payload},
};
use crate::host::TakenAway;
use crate::kubeapi::objects::{Following, OnChange};
use crate::kubeapi::pods::ApiFailure;

/// The volumes of one pod.
pub struct Volumes {
    held: Held,
    /// When they were asked for first.
    begun: Option<Instant>,
    /// They have been set up at least once.
    set_up: bool,
    /// What they are made from, and for as long as it is followed.
    following: Option<(References, Following)>,
    /// The volumes resolved so far, by their names.
    resolved: BTreeMap<String, Arc<ResolvedVolume>>,
    /// Called when something that they are made from has changed.
    changed: OnChange,
    /// Those whose files are being given to the pod's group.
    telling: Telling,
    /// Waits for the end of what is under way for them, and says that something has changed then.
    waiting: Option<AbortOnDropHandle<()>>,
}

/// The volumes of a pod are there.
pub struct SetUp {
    /// What they and environments are made from.
    pub fetched: Fetched,
    /// Why what was set up before could not be refreshed, if it could not.
    pub outdated: Option<String>,
    /// When something is to be tried again that holds nothing up.
    pub again: Option<Timestamp>,
}

/// What volumes are made from, beside their pod.
struct MadeFrom<'a> {
    around: Surroundings<'a>,
    fetched: &'a Fetched,
    /// How much memory the node's pods have, in bytes.
    memory: u64,
    /// They were set up before.
    known: bool,
}

/// A volume is there.
struct Made {
    /// Its files need no SELinux label of their own: they have it from the mount, or can have none.
    labelled: bool,
    /// See [`SetUp::again`].
    again: Option<Timestamp>,
}

/// Why the volumes of a pod are not all there.
pub enum NotSetUp {
    /// It is tried again.
    Failed(Fault),
    /// The node has as many as it can have attached: the pod is not taken.
    LimitExceeded(String),
}

impl From<ApiFailure> for NotSetUp {
    fn from(failure: ApiFailure) -> NotSetUp {
        NotSetUp::Failed(Fault::later(failure.to_string()))
    }
}

/// A problem that a pod was told of.
struct Told {
    fault: Fault,
    is_under_way: bool,
    /// Whether it is that the volume is not attached.
    unattached: Option<Unattached>,
}

impl Volumes {
    /// Nothing is set up; `changed` is called when something that they are made from has changed.
    #[must_use]
    pub fn new(changed: OnChange) -> Volumes {
        Volumes {
            held: Held::default(),
            begun: None,
            set_up: false,
            following: None,
            resolved: BTreeMap::new(),
            changed,
            telling: Telling::default(),
            waiting: None,
        }
    }

    /// Follows the objects that the pod refers to, and only these.
    fn follow(&mut self, context: &Context, pod: &Pod) {
        let wanted = references::of(pod);
        if self
            .following
            .as_ref()
            .is_some_and(|(known, _)| *known == wanted)
        {
            return;
        }
        // The new ones first, so that what stays is not given up in between.
        let following = context.api.follow(
            &pod.namespace().unwrap_or_default(),
            &wanted.config_maps,
            &wanted.secrets,
            &self.changed,
        );
        self.following = Some((wanted, following));
    }

    /// A volume is set up.
    fn has_come(&mut self, context: &Context, resolved: ResolvedVolume) {
        if !self.resolved.contains_key(&resolved.volume)
            && let Some(begun) = self.begun
        {
            let plugin = resolved.qualified_plugin();
            context.metrics.volume_ready(&plugin, begun.elapsed());
        }
        let name = resolved.volume.clone();
        self.resolved.insert(name, Arc::new(resolved));
    }

    /// Says which volumes the pod is to have, and which it has.
    fn count(&self, context: &Context, pod: &Pod) {
        let used = pod::used_volumes(pod);
        let wanted = pod::spec(pod).volumes.iter().flatten();
        let wanted = wanted.filter(|volume| used.contains(&volume.name));
        let plugin = |volume: &Volume| match self.resolved.get(&volume.name) {
            Some(resolved) => resolved.qualified_plugin(),
            None => resolved::resolve(pod, volume, None, resolved::Here::default())
                .map_or_else(|_| "N/A".into(), |resolved| resolved.qualified_plugin()),
        };
        let actual = self.resolved.values();
        let counted = PodVolumes {
            desired: wanted.map(plugin).collect(),
            actual: actual.map(|resolved| resolved.qualified_plugin()).collect(),
        };
        context.metrics.pod_has_volumes(pod::uid(pod), counted);
    }

    /// Sets up what is missing and refreshes what has changed. `known` says that they were set up before: then
    /// what cannot be refreshed stays as it was.
    pub async fn set_up(
        &mut self,
        context: &Context,
        pod: &Pod,
        pod_ips: &[String],
        known: bool,
        log: &Log,
    ) -> Result<SetUp, NotSetUp> {
        self.begun.get_or_insert_with(Instant::now);
        self.follow(context, pod);
        self.waiting = None;
        let mut fetched = log
            .step(Step::Objects, "", objects::fetch(&*context.api, pod))
            .await?;
        let (allocatable, node_ips) = (context.allocatable(), context.node_ips.borrow().clone());
        let around = Surroundings {
            pod,
            pod_ips,
            node_ips: &node_ips,
            allocatable: &allocatable,
        };
        let memory = allocatable.get("memory");
        let from = MadeFrom {
            around,
            fetched: &fetched,
            memory: memory
                .and_then(|q| u64::try_from(q.units()).ok())
                .unwrap_or(0),
            known,
        };
        // What no container has may not even be there.
        let used = pod::used_volumes(pod);
        let volumes = pod::spec(pod).volumes.iter().flatten();
        let volumes = volumes.filter(|volume| used.contains(&volume.name));
        let work = volumes.map(|volume| self.set_up_one(context, volume, &from, log));
        let (mut failed, mut unattached, mut again) = (None, vec![], vec![]);
        for result in futures::future::join_all(work).await {
            match result {
                Ok((resolved, at)) => {
                    self.has_come(context, resolved);
                    again.extend(at);
                }
                Err(problem) => {
                    if problem.is_under_way {
                        self.wait(context, pod);
                    }
                    unattached.extend(problem.unattached);
                    let class = problem.fault.class;
                    let first: &mut Fault = failed.get_or_insert(problem.fault);
                    first.class = first.class.min(class);
                }
            }
        }
        self.count(context, pod);
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

    /// Sets up a volume, or refreshes it, and tells the pod what came of it.
    async fn set_up_one(
        &self,
        context: &Context,
        volume: &Volume,
        from: &MadeFrom<'_>,
        log: &Log,
    ) -> Result<(ResolvedVolume, Option<Timestamp>), Told> {
        let pod = from.around.pod;
        let named = OnceLock::new();
        let set_up = self.attempt(context, volume, from, &named);
        let (made, again) = Box::pin(log.step(Step::Volume, &volume.name, set_up))
            .await
            .map_err(|problem| self.tell_problem(context, pod, volume, named.get(), problem))?;
        if made.block && !self.resolved.contains_key(&volume.name) {
            tell_mapped(context, pod, &made);
        }
        Ok((made, again))
    }

    /// The attempt itself; `named` gets the name that others know the volume by.
    async fn attempt(
        &self,
        context: &Context,
        volume: &Volume,
        from: &MadeFrom<'_>,
        named: &OnceLock<String>,
    ) -> Result<(ResolvedVolume, Option<Timestamp>), Problem> {
        let pod = from.around.pod;
        let known = self.resolved.get(&volume.name);
        let resolved = match known {
            Some(known) => again(context, pod, volume, known, from.memory).await,
            None => resolve(context, pod, volume, from.memory).await?,
        };
        named.get_or_init(|| resolved.name.clone());
        let (begun, is_new) = (Instant::now(), known.is_none());
        if is_new {
            labels::admit(context, pod, volume, &resolved).await?;
            warn_of_others(context, pod, &resolved).await;
        }
        let outcome = one(context, volume, &resolved, from, &self.held, is_new).await;
        let failed = outcome.as_ref().err();
        // Looking once more at what is set up is no operation, and what is under way is none yet.
        let has_ended = match failed {
            Some(problem) => !problem.is_under_way(),
            None => is_new,
        };
        if has_ended {
            tell_attempt(context, pod, &resolved, failed, begun.elapsed());
        }
        let Made { labelled, again } = outcome.map_err(|problem| match resolved.block {
            true => problem.of_device(),
            false => problem,
        })?;
        let resolved = ResolvedVolume {
            labelled,
            ..resolved
        };
        Ok((resolved, again))
    }

    /// Tells a pod why it does not have a volume; `name` is the persistent volume's, if that is known.
    fn tell_problem(
        &self,
        context: &Context,
        pod: &Pod,
        volume: &Volume,
        name: Option<&String>,
        problem: Problem,
    ) -> Told {
        let of_claim = matches!(problem, Problem::Claim(_));
        let name = name.filter(|_| !of_claim);
        let message = problem.told(name.unwrap_or(&volume.name));
        let events = &context.events;
        match &problem {
            Problem::Permissions(giving) => self.telling.begin(events, pod, giving),
            _ => events.pod(pod, None, Kind::Warning, problem.reason(), message.as_str()),
        }
        Told {
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

    /// What is under way is tried again as soon as it has ended, and not only after the pause that follows a failure.
    fn wait(&mut self, context: &Context, pod: &Pod) {
        let (host, uid) = (Arc::clone(&context.host), pod::uid(pod).to_owned());
        let changed = Arc::clone(&self.changed);
        let end = async move {
            host.call_ends(&uid).await;
            changed();
        };
        self.waiting = Some(AbortOnDropHandle::new(tokio::spawn(end)));
    }

    /// Why the pod is given up, if the node can have no more volumes attached.
    fn limit_exceeded(&self, pod: &Pod, unattached: &[Unattached]) -> Option<String> {
        let waited = self.begun?.elapsed();
        let mounted = self.resolved.keys().map(String::as_str).collect();
        attachment::limit_exceeded(pod, waited, &mounted, unattached)
    }
}

/// Tells a pod of a device that it has from now on.
fn tell_mapped(context: &Context, pod: &Pod, made: &ResolvedVolume) {
    let (events, reason) = (&context.events, "SuccessfulMountVolume");
    for message in made.mapped(&context.config.root_dir, pod::uid(pod)) {
        events.pod(pod, None, Kind::Normal, reason, message);
    }
}

/// Counts an attempt to set up a volume. That a disk has another filesystem than its volume asks for, the volume is told.
fn tell_attempt(
    context: &Context,
    pod: &Pod,
    resolved: &ResolvedVolume,
    failed: Option<&Problem>,
    took: Duration,
) {
    context.metrics.volume(VolumeOperation {
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
        let events = &context.events;
        events.persistent_volume(name, Kind::Warning, reason, why.as_str());
    }
}

/// Tells that a volume is given to the pod's group though other pods have it under another one.
async fn warn_of_others(context: &Context, pod: &Pod, resolved: &ResolvedVolume) {
    let (Some(found), Some(wanted)) = (
        context.host.group_of_others(pod, resolved).await,
        pod::ownership(pod).group,
    ) else {
        return;
    };
    let message = format!(
        "The requested fsGroup is {wanted}, but the volume {} has GID {found}. The volume may not be shareable.",
        resolved.name
    );
    let reason = "AlreadyMountedVolume";
    context
        .events
        .pod(pod, None, Kind::Warning, reason, message);
}

/// Takes away the volumes of a pod, those of drivers first, with what was in its emptyDirs. A driver that is gone holds up its
/// own alone: disks and exports of others, which somebody else may wait for, go all the same.
pub async fn tear_down(context: &Context, uid: &str) -> Result<(), VolumeError> {
    let unpublished = csi::unpublish(context, uid).await;
    let each = |taken: TakenAway| {
        context.metrics.volume(VolumeOperation {
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
    let torn_down = context.host.tear_down_volumes(uid, &each).await;
    unpublished?;
    torn_down?;
    context.disks.forget(uid);
    context.metrics.pod_has_no_volumes(uid);
    Ok(())
}

/// Resolves a volume that is set up again: what a claim was bound to stays, but it may have grown.
async fn again(
    context: &Context,
    pod: &Pod,
    volume: &Volume,
    known: &ResolvedVolume,
    memory: u64,
) -> ResolvedVolume {
    let may_grow = match &known.source {
        Source::Csi(served) => {
            served.claim.is_some() && (served.grown.is_some() || context.csi.grows(&served.driver))
        }
        Source::Local { .. } => !known.read_only,
        _ => false,
    };
    if !may_grow {
        return known.clone();
    }
    let fresh = resolve(context, pod, volume, memory)
        .await
        .ok()
        .filter(|fresh| fresh.name == known.name);
    fresh.unwrap_or_else(|| known.clone())
}

/// Resolves a volume; a claim and its volume are read as they are now.
async fn resolve(
    context: &Context,
    pod: &Pod,
    volume: &Volume,
    memory: u64,
) -> Result<ResolvedVolume, Problem> {
    let here = resolved::Here {
        memory,
        label: context.machine.selinux.as_deref(),
    };
    let Some(name) = claims::of_volume(pod, volume) else {
        return resolved::resolve(pod, volume, None, here);
    };
    let namespace = pod.namespace().unwrap_or_default();
    let refused =
        |why: String| Problem::Claim(format!("error processing PVC {namespace}/{name}: {why}"));
    let failed = |e: ApiFailure| refused(format!("failed to fetch PVC from API server: {e}"));
    let found = context
        .api
        .claimed(&namespace, &name)
        .await
        .map_err(failed)?;
    let wanted = resolved::usable(pod, volume, &found.claim)?;
    let bound = found
        .volume
        .ok_or_else(|| refused(format!("persistentVolume {wanted:?} not found")))?;
    let claimed = resolved::Claimed::new(found.claim, bound)?;
    if claimed.is_for_one_pod() && !context.ledger.hold_alone(pod, &namespace, &name).await {
        return Err(resolved::taken(&claimed));
    }
    resolved::reached(&claimed, context.node.borrow().as_deref())?;
    resolved::resolve(pod, volume, Some(&claimed), here)
}

/// A disk that asks for passwords, with them; they are held only while it is set up.
async fn passwords(
    context: &Context,
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
    let secret = context.api.secret(namespace, name).await.map_err(|e| {
        Problem::later(format!("the secret {namespace}/{name} cannot be read: {e}"))
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

/// One volume. `is_new` says that the pod had it not yet.
async fn one(
    context: &Context,
    volume: &Volume,
    resolved: &ResolvedVolume,
    from: &MadeFrom<'_>,
    held: &Held,
    is_new: bool,
) -> Result<Made, Problem> {
    let (around, fetched) = (&from.around, from.fetched);
    // Containers that run have it from an agent before this one.
    let waits = is_new && !from.known;
    if let Source::Csi(served) = &resolved.source {
        return Box::pin(csi::publish(context, around.pod, served, is_new, waits)).await;
    }
    if let Source::Disk { attached_as, .. } = &resolved.source {
        attached::of_disk(context, around.pod, resolved, attached_as, waits).await?;
    }
    let given = held.fetch(context, around.pod, volume).await?;
    let files = payload::files(volume, around, fetched, &given).transpose()?;
    if let Some(with_passwords) = passwords(context, resolved).await? {
        context
            .host
            .set_up_volume(around.pod, &with_passwords, files)
            .await?;
    } else {
        context
            .host
            .set_up_volume(around.pod, resolved, files)
            .await?;
    }
    Ok(Made {
        labelled: resolved.labelled,
        again: growth::of_local(context, around.pod, resolved, waits).await?,
    })
}
