//! Claims and volumes: binding, release, protection, claims of generic ephemeral volumes, and provisioning of local
//! directories (`pkg/controller/volume/persistentvolume/pv_controller.go`).
//!
//! Each reconciliation reads the observed state and takes the next step for each object. A step based on stale state is
//! rejected because of its resource version, and is decided again.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use super::any_change;
use super::runtime::relevant_changes;
use super::{Caches, is_stale};
use crate::api::storage::{CLAIM_IN_USE, VOLUME_IN_USE};
use holdfast_core::pod;
use holdfast_core::volume::claims::{
    self, BIND_COMPLETED, BOUND_BY_CONTROLLER, PROVISIONED_BY, SELECTED_NODE,
};
use holdfast_kubeapi::Api;

/// The provisioner of directories on this machine.
pub const DIRECTORY: &str = "holdfast.example/directory";

/// One write.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// Patches a claim.
    Claim(Arc<PersistentVolumeClaim>, Value),
    /// Patches a claim's status.
    ClaimStatus(Arc<PersistentVolumeClaim>, Value),
    /// Patches a volume.
    Volume(Arc<PersistentVolume>, Value),
    /// Patches a volume's status.
    VolumeStatus(Arc<PersistentVolume>, Value),
    /// Creates a directory and its volume.
    Provision(Box<PersistentVolume>),
    /// Removes a provisioned directory and its volume.
    Remove(Arc<PersistentVolume>),
    /// Creates the claim of an ephemeral volume.
    CreateClaim(Box<PersistentVolumeClaim>),
    /// Deletes a claim whose pod was deleted.
    DeleteClaim(Arc<PersistentVolumeClaim>),
    /// Emits an event why a claim is not bound: reason and message.
    Event(Arc<PersistentVolumeClaim>, &'static str, String),
}

/// The observed state.
struct Observed {
    claims: Vec<Arc<PersistentVolumeClaim>>,
    volumes: Vec<Arc<PersistentVolume>>,
    classes: Vec<Arc<StorageClass>>,
    pods: Vec<Arc<Pod>>,
    /// Where directories are created, and the node of this machine; `None` disables provisioning.
    directories: Option<(PathBuf, String)>,
}

fn without_finalizer(finalizers: Option<&Vec<String>>, name: &str) -> Option<Value> {
    let finalizers = finalizers.filter(|f| f.iter().any(|f| f == name))?;
    Some(
        json!({"metadata": {"finalizers": finalizers.iter().filter(|f| *f != name).collect::<Vec<_>>()}}),
    )
}

fn phase(status: Option<&String>) -> &str {
    status.map_or("", String::as_str)
}

impl Observed {
    fn is_used(&self, claim: &PersistentVolumeClaim) -> bool {
        let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
        self.pods.iter().any(|p| claims::uses(p, &namespace, &name))
    }

    fn class(&self, claim: &PersistentVolumeClaim) -> Option<&Arc<StorageClass>> {
        let name = claim
            .spec
            .as_ref()?
            .storage_class_name
            .as_deref()
            .filter(|c| !c.is_empty())?;
        self.classes.iter().find(|c| c.name_any() == name)
    }

    /// The next step for a claim. `taken` contains the volumes that other claims get in this reconciliation.
    fn steps_for_claim(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        taken: &mut BTreeSet<String>,
    ) -> Vec<Step> {
        let owner = claim
            .owner_references()
            .iter()
            .find(|o| o.controller == Some(true) && o.kind == "Pod");
        let deleting = claim.metadata.deletion_timestamp.is_some();
        if let Some(owner) = owner.filter(|_| !deleting)
            && !self
                .pods
                .iter()
                .any(|p| p.uid().as_deref() == Some(&owner.uid))
        {
            return vec![Step::DeleteClaim(Arc::clone(claim))];
        }
        if deleting && !self.is_used(claim) {
            return without_finalizer(claim.metadata.finalizers.as_ref(), CLAIM_IN_USE)
                .map(|patch| Step::Claim(Arc::clone(claim), patch))
                .into_iter()
                .collect();
        }
        match claim
            .spec
            .as_ref()
            .and_then(|s| s.volume_name.clone())
            .filter(|v| !v.is_empty())
        {
            Some(volume) => self.steps_for_bound(claim, &volume),
            None if deleting => vec![],
            None => self.steps_for_unbound(claim, taken),
        }
    }

    fn steps_for_unbound(
        &self,
        claim: &Arc<PersistentVolumeClaim>,
        taken: &mut BTreeSet<String>,
    ) -> Vec<Step> {
        let class = self.class(claim);
        let waits =
            class.is_some_and(|c| c.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
        let selected = claim.annotations().get(SELECTED_NODE);
        let free = self
            .volumes
            .iter()
            .map(|v| &**v)
            .filter(|v| !taken.contains(&v.name_any()));
        if waits && selected.is_none() && !free.clone().any(|v| claims::is_for(v, claim)) {
            return vec![Step::Event(
                Arc::clone(claim),
                "WaitForFirstConsumer",
                "waiting for first consumer to be created before binding".into(),
            )];
        }
        // Only the scheduler knows which volumes the consumer's node can reach; it reserves one by its `claimRef`.
        let found = if waits {
            free.clone().find(|v| claims::is_for(v, claim))
        } else {
            claims::best(free, claim, None)
        };
        if let Some(found) = found {
            taken.insert(found.name_any());
            let Some(volume) = self
                .volumes
                .iter()
                .find(|v| v.name_any() == found.name_any())
            else {
                return vec![];
            };
            let mut annotations = json!({BIND_COMPLETED: "yes"});
            annotations[BOUND_BY_CONTROLLER] = "yes".into();
            // Writes the volume first: two claims may compete for it.
            return vec![
                Step::Volume(Arc::clone(volume), reference(claim)),
                Step::Claim(
                    Arc::clone(claim),
                    json!({"metadata": {"annotations": annotations}, "spec": {"volumeName": volume.name_any()}}),
                ),
            ];
        }
        let event = |reason, message: String| vec![Step::Event(Arc::clone(claim), reason, message)];
        let wanted = claim
            .spec
            .as_ref()
            .and_then(|s| s.storage_class_name.clone())
            .unwrap_or_default();
        match class {
            Some(class) if class.provisioner == DIRECTORY => match &self.directories {
                Some((dir, node)) if selected.is_none_or(|s| s == node) => vec![Step::Provision(
                    Box::new(directory(claim, class, dir, node)),
                )],
                Some((_, node)) => event(
                    "ProvisioningFailed",
                    format!(
                        "class {wanted:?} creates directories only on node {node}, and the pod is scheduled to node {}",
                        selected.map_or("", String::as_str)
                    ),
                ),
                None => event(
                    "ProvisioningFailed",
                    format!(
                        "class {wanted:?} creates directories, and this control plane has no directory for volumes"
                    ),
                ),
            },
            Some(class) if class.provisioner != claims::NO_PROVISIONER => event(
                "ExternalProvisioning",
                format!(
                    "Waiting for a volume to be created either by the external provisioner '{}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered.",
                    class.provisioner
                ),
            ),
            None if !wanted.is_empty() => event(
                "ProvisioningFailed",
                format!("storageclass.storage.k8s.io {wanted:?} not found"),
            ),
            _ => event(
                "FailedBinding",
                "no persistent volumes available for this claim and no storage class is set".into(),
            ),
        }
    }

    fn steps_for_bound(&self, claim: &Arc<PersistentVolumeClaim>, name: &str) -> Vec<Step> {
        let status = claim.status.clone().unwrap_or_default();
        let Some(volume) = self.volumes.iter().find(|v| v.name_any() == name) else {
            let lost = claims::bound(claim).is_some() && phase(status.phase.as_ref()) != "Lost";
            return if lost {
                vec![Step::ClaimStatus(
                    Arc::clone(claim),
                    json!({"phase": "Lost"}),
                )]
            } else {
                vec![]
            };
        };
        let spec = volume.spec.clone().unwrap_or_default();
        if !claims::is_for(volume, claim) && spec.claim_ref.is_some() {
            return vec![Step::Event(
                Arc::clone(claim),
                "FailedBinding",
                format!("volume {name:?} already bound to a different claim."),
            )];
        }
        let mut steps = vec![];
        let known = spec
            .claim_ref
            .as_ref()
            .and_then(|r| r.uid.clone())
            .unwrap_or_default();
        if known != claim.uid().unwrap_or_default() {
            steps.push(Step::Volume(Arc::clone(volume), reference(claim)));
        }
        if !claim.annotations().contains_key(BIND_COMPLETED) {
            steps.push(Step::Claim(
                Arc::clone(claim),
                json!({"metadata": {"annotations": {BIND_COMPLETED: "yes"}}}),
            ));
        }
        // The capacity is not updated when the volume grows later: the node reports
        // it after it has resized the filesystem.
        if phase(status.phase.as_ref()) != "Bound"
            || status.access_modes != spec.access_modes
            || status.capacity.is_none()
        {
            let bound = json!({"phase": "Bound", "accessModes": spec.access_modes, "capacity": spec.capacity});
            steps.push(Step::ClaimStatus(Arc::clone(claim), bound));
        }
        steps
    }

    /// The next step for a volume.
    fn steps_for_volume(&self, volume: &Arc<PersistentVolume>) -> Vec<Step> {
        let spec = volume.spec.clone().unwrap_or_default();
        let now = volume
            .status
            .as_ref()
            .and_then(|s| s.phase.clone())
            .unwrap_or_default();
        let becomes = |phase: &str| {
            if now == phase {
                vec![]
            } else {
                vec![Step::VolumeStatus(
                    Arc::clone(volume),
                    json!({"phase": phase}),
                )]
            }
        };
        let claim = spec.claim_ref.as_ref().and_then(|r| {
            self.claims
                .iter()
                .find(|c| c.metadata.namespace == r.namespace && c.metadata.name == r.name)
        });
        let alive = claim.is_some_and(|c| claims::is_for(volume, c));
        if volume.metadata.deletion_timestamp.is_some() && !alive {
            return without_finalizer(volume.metadata.finalizers.as_ref(), VOLUME_IN_USE)
                .map(|patch| Step::Volume(Arc::clone(volume), patch))
                .into_iter()
                .collect();
        }
        let Some(reference) = &spec.claim_ref else {
            return becomes("Available");
        };
        let bound_once = reference.uid.as_ref().is_some_and(|uid| !uid.is_empty());
        match (alive, bound_once) {
            (true, true) => becomes("Bound"),
            // Reserved for a claim that does not exist yet.
            (_, false) => becomes("Available"),
            (false, true) => {
                let ours = volume.annotations().get(PROVISIONED_BY).map(String::as_str);
                match (spec.persistent_volume_reclaim_policy.as_deref(), ours) {
                    (Some("Delete"), Some(DIRECTORY)) if self.directories.is_some() => {
                        vec![Step::Remove(Arc::clone(volume))]
                    }
                    (Some("Retain"), _) | (_, Some(_)) => becomes("Released"),
                    _ if now == "Failed" => vec![],
                    _ => {
                        let why = "no provisioner in this cluster can delete the storage of this volume: delete it manually, or use the reclaim policy Retain";
                        vec![Step::VolumeStatus(
                            Arc::clone(volume),
                            json!({"phase": "Failed", "reason": "VolumeFailedDelete", "message": why}),
                        )]
                    }
                }
            }
        }
    }

    /// Creates the missing claims of a pod's ephemeral volumes.
    fn steps_for_pod(&self, pod: &Pod) -> Vec<Step> {
        if pod::is_terminal(pod) || pod.metadata.deletion_timestamp.is_some() {
            return vec![];
        }
        let lacks = |name: &str| {
            !self
                .claims
                .iter()
                .any(|c| c.metadata.namespace == pod.metadata.namespace && c.name_any() == name)
        };
        let make = |(volume, name): (&k8s_openapi::api::core::v1::Volume, String)| {
            let template = volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?;
            let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid(), "controller": true, "blockOwnerDeletion": true});
            let metadata = template.metadata.clone().unwrap_or_default();
            let claim = json!({"metadata": {"name": name, "namespace": pod.namespace(), "labels": metadata.labels, "annotations": metadata.annotations,
                "ownerReferences": [owner]}, "spec": template.spec});
            serde_json::from_value(claim)
                .ok()
                .filter(|_| lacks(&name))
                .map(|claim| Step::CreateClaim(Box::new(claim)))
        };
        claims::of_pod(pod).into_iter().filter_map(make).collect()
    }

    fn steps(&self) -> Vec<Step> {
        let mut taken = BTreeSet::new();
        let mut steps: Vec<Step> = self
            .pods
            .iter()
            .flat_map(|pod| self.steps_for_pod(pod))
            .collect();
        steps.extend(
            self.claims
                .iter()
                .flat_map(|claim| self.steps_for_claim(claim, &mut taken)),
        );
        steps.extend(
            self.volumes
                .iter()
                .filter(|v| !taken.contains(&v.name_any()))
                .flat_map(|volume| self.steps_for_volume(volume)),
        );
        steps
    }
}

/// The patch that binds a volume to a claim.
fn reference(claim: &PersistentVolumeClaim) -> Value {
    json!({"spec": {"claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(), "name": claim.name_any(),
        "uid": claim.uid(), "resourceVersion": claim.resource_version()}}})
}

/// A volume of a directory on this machine.
fn directory(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    dir: &Path,
    node: &str,
) -> PersistentVolume {
    let name = format!("pvc-{}", claim.uid().unwrap_or_default());
    let spec = claim.spec.clone().unwrap_or_default();
    let mut volume = json!({
        "metadata": {"name": name, "annotations": {PROVISIONED_BY: DIRECTORY}},
        "spec": {
            "capacity": {"storage": spec.resources.and_then(|r| r.requests).and_then(|r| r.get("storage").cloned())},
            "accessModes": spec.access_modes, "storageClassName": class.name_any(), "persistentVolumeReclaimPolicy": class.reclaim_policy,
            "hostPath": {"path": dir.join(&name), "type": "Directory"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]}},
        },
    });
    volume["spec"]["claimRef"] = reference(claim)["spec"]["claimRef"].clone();
    serde_json::from_value(volume).unwrap_or_default()
}

/// The directory of a volume that this provisioner created, else `None`: the
/// directory is later removed with its contents.
fn provisioned_path(dir: &Path, volume: &PersistentVolume) -> Option<PathBuf> {
    let name = volume.name_any();
    let plain = name
        .strip_prefix("pvc-")?
        .chars()
        .all(|c| c.is_ascii_hexdigit() || c == '-');
    let path = dir.join(&name);
    let same = volume
        .spec
        .as_ref()?
        .host_path
        .as_ref()
        .is_some_and(|h| Path::new(&h.path) == path);
    (plain && same).then_some(path)
}

/// Creates a volume's directory, writable for any user that pods run as.
fn make_directory(path: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o755).create(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))
}

/// Runs blocking disk work on a separate thread.
async fn on_disk(
    work: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> Result<(), kube::Error> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(std::io::Error::other).flatten();
    done.map_err(|error| kube::Error::Service(Box::new(error)))
}

async fn execute(
    client: &Client,
    step: Step,
    directories: Option<&(PathBuf, String)>,
) -> Result<(), kube::Error> {
    let merge = |patch: Value, version: Option<String>| {
        let mut patch = patch;
        patch["metadata"]["resourceVersion"] = json!(version);
        Patch::Merge(patch)
    };
    let status_patch = |status: Value| Patch::Merge(json!({"status": status}));
    let parameters = PatchParams::default();
    let of = |claim: &PersistentVolumeClaim| {
        Api::<PersistentVolumeClaim>::namespaced(
            client.clone(),
            &claim.namespace().unwrap_or_default(),
        )
    };
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    match step {
        Step::Claim(claim, patch) => of(&claim)
            .patch(
                &claim.name_any(),
                &parameters,
                &merge(patch, claim.resource_version()),
            )
            .await
            .map(|_| ()),
        Step::ClaimStatus(claim, status) => of(&claim)
            .patch_status(&claim.name_any(), &parameters, &status_patch(status))
            .await
            .map(|_| ()),
        Step::Volume(volume, patch) => volumes
            .patch(
                &volume.name_any(),
                &parameters,
                &merge(patch, volume.resource_version()),
            )
            .await
            .map(|_| ()),
        Step::VolumeStatus(volume, status) => volumes
            .patch_status(&volume.name_any(), &parameters, &status_patch(status))
            .await
            .map(|_| ()),
        Step::Provision(volume) => {
            let Some(path) = directories.and_then(|(dir, _)| provisioned_path(dir, &volume)) else {
                return Ok(());
            };
            on_disk(move || make_directory(&path)).await?;
            volumes
                .create(&PostParams::default(), &volume)
                .await
                .map(|_| ())
        }
        Step::Remove(volume) => {
            let Some(path) = directories.and_then(|(dir, _)| provisioned_path(dir, &volume)) else {
                return Ok(());
            };
            // Pods could write here and mount file systems; `remove_tree` leaves mounts in place.
            let remove = move || holdfast_sys::removal::remove_tree(&path);
            on_disk(move || remove().map_err(std::io::Error::other)).await?;
            volumes
                .delete(&volume.name_any(), &DeleteParams::default())
                .await
                .map(|_| ())
        }
        Step::CreateClaim(claim) => of(&claim)
            .create(&PostParams::default(), &claim)
            .await
            .map(|_| ()),
        Step::DeleteClaim(claim) => {
            let same = Preconditions {
                uid: claim.uid(),
                resource_version: None,
            };
            let same = DeleteParams::default().preconditions(same);
            of(&claim)
                .delete(&claim.name_any(), &same)
                .await
                .map(|_| ())
        }
        Step::Event(claim, reason, message) => {
            super::event(
                client,
                &*claim,
                "PersistentVolumeClaim",
                "v1",
                "persistentvolume-controller",
                reason,
                message,
            )
            .await;
            Ok(())
        }
    }
}

/// Runs until the process exits. `directories` is where local volumes are created, and the name of this machine's node.
pub(super) async fn run(client: Client, caches: Caches, directories: Option<(PathBuf, String)>) {
    let mut changes = [
        caches.claims.changes(),
        caches.volumes.changes(),
        caches.classes.changes(),
        relevant_changes(&caches.pods, |before, after| {
            let mut pods = before.into_iter().chain(after);
            pods.any(|pod| !holdfast_core::volume::claims::of_pod(pod).is_empty())
        }),
    ];
    let mut emitted: BTreeMap<String, String> = BTreeMap::new();
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        let observed = Observed {
            claims: caches.claims.list(),
            volumes: caches.volumes.list(),
            classes: caches.classes.list(),
            pods: caches.pods.list(),
            directories: directories.clone(),
        };
        emitted.retain(|uid, _| {
            observed
                .claims
                .iter()
                .any(|c| c.uid().as_ref() == Some(uid))
        });
        let mut unfinished = false;
        for step in observed.steps() {
            if let Step::Event(claim, _, message) = &step
                && emitted
                    .insert(claim.uid().unwrap_or_default(), message.clone())
                    .as_ref()
                    == Some(message)
            {
                continue;
            }
            match execute(&client, step.clone(), directories.as_ref()).await {
                // 404 and 409: the step was based on stale state; the next reconciliation decides again.
                Err(error) if !is_stale(&error) => {
                    tracing::warn!(error = %holdfast_kubeapi::failure::chain(&error), ?step, "reconcile of a claim or volume failed, retrying");
                    unfinished = true;
                }
                Err(_) => unfinished = true,
                Ok(()) => {}
            }
        }
        let most = if unfinished {
            Duration::from_millis(500)
        } else {
            Duration::from_secs(60)
        };
        any_change(&mut changes, most).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(more: Value) -> Arc<PersistentVolumeClaim> {
        let mut claim = json!({"metadata": {"name": "c", "namespace": "n", "uid": "0-1", "finalizers": [CLAIM_IN_USE]},
            "spec": {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteOnce"], "storageClassName": "fast"}});
        json_patch::merge(&mut claim, &more);
        Arc::new(serde_json::from_value(claim).expect("a claim"))
    }

    fn volume(more: Value) -> Arc<PersistentVolume> {
        let mut volume = json!({"metadata": {"name": "v", "finalizers": [VOLUME_IN_USE]},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "persistentVolumeReclaimPolicy": "Retain"}});
        json_patch::merge(&mut volume, &more);
        Arc::new(serde_json::from_value(volume).expect("a volume"))
    }

    fn observed(
        claims: Vec<Arc<PersistentVolumeClaim>>,
        volumes: Vec<Arc<PersistentVolume>>,
        provisioner: &str,
        mode: &str,
    ) -> Observed {
        let class = json!({"metadata": {"name": "fast"}, "provisioner": provisioner, "volumeBindingMode": mode, "reclaimPolicy": "Delete"});
        let classes = vec![Arc::new(serde_json::from_value(class).expect("a class"))];
        Observed {
            claims,
            volumes,
            classes,
            pods: vec![],
            directories: Some(("/data".into(), "here".into())),
        }
    }

    fn kinds(observed: &Observed) -> Vec<String> {
        observed
            .steps()
            .iter()
            .map(|s| {
                format!("{s:?}")
                    .split(['(', ' '])
                    .next()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect()
    }

    const MINE: &str = r#"{"spec": {"claimRef": {"namespace": "n", "name": "c", "uid": "0-1"}}}"#;

    fn mine() -> Value {
        serde_json::from_str(MINE).expect("json")
    }

    #[test]
    fn a_claim_is_bound_in_steps_that_can_be_interrupted_anywhere() {
        let none = claims::NO_PROVISIONER;
        assert_eq!(
            kinds(&observed(
                vec![claim(json!({}))],
                vec![volume(json!({}))],
                none,
                "Immediate"
            )),
            ["Volume", "Claim"]
        );
        // The volume was patched, the claim was not.
        assert_eq!(
            kinds(&observed(
                vec![claim(json!({}))],
                vec![volume(mine())],
                none,
                "Immediate"
            )),
            ["Volume", "Claim"]
        );
        let chosen = json!({"spec": {"volumeName": "v"}, "metadata": {"annotations": {BIND_COMPLETED: "yes"}}});
        assert_eq!(
            kinds(&observed(
                vec![claim(chosen.clone())],
                vec![volume(mine())],
                none,
                "Immediate"
            )),
            ["ClaimStatus", "VolumeStatus"]
        );
        let mut done = chosen;
        done["status"] = json!({"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}});
        let mut bound = mine();
        bound["status"] = json!({"phase": "Bound"});
        assert_eq!(
            kinds(&observed(
                vec![claim(done.clone())],
                vec![volume(bound)],
                none,
                "Immediate"
            )),
            Vec::<String>::new()
        );
        assert_eq!(
            kinds(&observed(vec![claim(done)], vec![], none, "Immediate")),
            ["ClaimStatus"],
            "the claim becomes Lost when its volume was deleted"
        );
        let two = claim(json!({"metadata": {"name": "d", "uid": "0-2"}}));
        let both = observed(
            vec![claim(json!({})), two],
            vec![volume(json!({}))],
            none,
            "Immediate",
        );
        assert_eq!(
            kinds(&both),
            ["Volume", "Claim", "Event"],
            "a volume is bound to only one claim"
        );
    }

    #[test]
    fn a_claim_waits_for_its_consumer_and_directories_are_provisioned_on_this_node() {
        let waiting =
            |more: Value, mode: &str| observed(vec![claim(more)], vec![], DIRECTORY, mode);
        assert_eq!(kinds(&waiting(json!({}), "Immediate")), ["Provision"]);
        assert_eq!(
            kinds(&waiting(json!({}), "WaitForFirstConsumer")),
            ["Event"]
        );
        let at = |node: &str| json!({"metadata": {"annotations": {SELECTED_NODE: node}}});
        assert_eq!(
            kinds(&waiting(at("here"), "WaitForFirstConsumer")),
            ["Provision"]
        );
        assert_eq!(
            kinds(&waiting(at("there"), "WaitForFirstConsumer")),
            ["Event"]
        );
    }

    #[test]
    fn released_volumes_are_deleted_only_if_this_process_provisioned_them() {
        let steps_of_orphan = |more: Value| {
            let mut orphan = mine();
            json_patch::merge(&mut orphan, &more);
            observed(vec![], vec![volume(orphan)], DIRECTORY, "Immediate").steps()
        };
        let phase = |steps: &[Step]| match steps {
            [Step::VolumeStatus(_, status)] => {
                status["phase"].as_str().unwrap_or_default().to_owned()
            }
            other => format!("{other:?}")
                .split('(')
                .next()
                .unwrap_or_default()
                .to_owned(),
        };
        assert_eq!(phase(&steps_of_orphan(json!({}))), "Released");
        assert_eq!(
            phase(&steps_of_orphan(
                json!({"spec": {"persistentVolumeReclaimPolicy": "Delete"}})
            )),
            "Failed"
        );
        let ours = json!({"metadata": {"annotations": {PROVISIONED_BY: DIRECTORY}}, "spec": {"persistentVolumeReclaimPolicy": "Delete"}});
        assert_eq!(phase(&steps_of_orphan(ours)), "[Remove");
        for (name, path, fine) in [
            ("pvc-0-1", "/data/pvc-0-1", true),
            ("pvc-..", "/data/pvc-..", false),
            ("v", "/data/v", false),
            ("pvc-0-1", "/etc", false),
        ] {
            let volume =
                volume(json!({"metadata": {"name": name}, "spec": {"hostPath": {"path": path}}}));
            assert_eq!(
                provisioned_path(Path::new("/data"), &volume).is_some(),
                fine,
                "{name} {path}"
            );
        }
    }

    #[test]
    fn claims_and_volumes_in_use_are_not_deleted() {
        let deleting = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let mut busy = observed(vec![claim(deleting)], vec![], DIRECTORY, "Immediate");
        assert_eq!(kinds(&busy), ["Claim"]);
        let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [], "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]}});
        busy.pods
            .push(Arc::new(serde_json::from_value(pod).expect("a pod")));
        assert_eq!(kinds(&busy), Vec::<String>::new());
    }
}
