//! The Deployment controller: one ReplicaSet per pod template, and rolling updates
//! (`pkg/controller/deployment`). The arithmetic is in `rollout`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, Resource, ResourceExt as _};
use serde_json::json;

use super::Caches;
use super::event;
use super::owned::owner;
use super::rollout::{self, HASH, REVISION};
use super::runtime::{Expectations, Keys, Next, unseen};
use super::{controller_of, controller_reference};
use crate::api::object;
use crate::api::selector::Selector;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};

const COMPONENT: &str = "deployment-controller";

/// Number of deployments reconciled concurrently. Concurrent writes share a sync of the store.
const WORKERS: usize = 16;

/// What to reconcile.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    Deployment(Key),
    /// A set without a controller: the deployments that may adopt it.
    FreeSet(Key),
    /// A set of which a pod ended: a Recreate waits for the pods of old sets.
    PodEnded(Key),
    /// The uid of a deleted set or deployment.
    Deleted(String),
}

/// The uid of an object that was deleted or replaced by one of the same name.
fn deleted<K: Resource>(before: Option<&K>, after: Option<&K>) -> Option<Work> {
    let uid = |object: Option<&K>| object.and_then(|o| o.meta().uid.clone());
    let gone = uid(before).filter(|_| uid(before) != uid(after));
    gone.map(Work::Deleted)
}

fn work_of_deployment(before: Option<&Deployment>, after: Option<&Deployment>) -> Vec<Work> {
    let own = after.or(before).map(|d| Work::Deployment(key(d)));
    own.into_iter().chain(deleted(before, after)).collect()
}

fn work_of_set(before: Option<&ReplicaSet>, after: Option<&ReplicaSet>) -> Vec<Work> {
    let deployment = |set: &ReplicaSet| {
        let owner = controller_reference(set).filter(|o| o.kind == "Deployment")?;
        Some(Work::Deployment((
            set.namespace().unwrap_or_default(),
            owner.name.clone(),
        )))
    };
    let owners = before.into_iter().chain(after).filter_map(deployment);
    let free = after.filter(|set| {
        let same_labels = before.is_some_and(|before| before.labels() == set.labels());
        controller_of(*set).is_none() && !(same_labels && before.and_then(controller_of).is_none())
    });
    let free = free.map(|set| Work::FreeSet(key(set)));
    owners.chain(free).chain(deleted(before, after)).collect()
}

/// The set of a pod that ended or left the set.
fn work_of_pod(before: Option<&Pod>, after: Option<&Pod>) -> Option<Work> {
    let set = |pod: &Pod| {
        let owner = controller_reference(pod).filter(|o| o.kind == "ReplicaSet")?;
        let runs = !holdfast_core::pod::is_terminal(pod);
        runs.then(|| (pod.namespace().unwrap_or_default(), owner.name.clone()))
    };
    let before = before.and_then(set);
    before
        .filter(|set_before| after.and_then(set).as_ref() != Some(set_before))
        .map(Work::PodEnded)
}

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    keys: Arc<Keys<Work>>,
    /// Writes to sets and to deployments that are not visible in the caches yet, by deployment.
    sets: Expectations,
    deployments: Expectations,
    templates: Templates,
}

pub(super) async fn run(client: Client, caches: Caches) {
    let controller = Controller {
        client,
        keys: Keys::new(),
        sets: Expectations::of(&caches.replica_sets),
        deployments: Expectations::of(&caches.deployments),
        caches,
        templates: Templates::default(),
    };
    let (keys, caches) = (&controller.keys, &controller.caches);
    keys.watch(&caches.deployments, work_of_deployment);
    keys.watch(&caches.replica_sets, work_of_set);
    keys.watch(&caches.pods, work_of_pod);
    let work = |work| controller.turn(work);
    keys.work(WORKERS, work).await;
}

impl Controller {
    async fn turn(&self, work: Work) -> Next {
        match work {
            Work::Deployment(deployment) => return self.reconcile_deployment(&deployment).await,
            Work::FreeSet(set) => self.offer(&set),
            Work::PodEnded(set) => self.pod_ended(&set),
            Work::Deleted(uid) => self.templates.forget(&uid),
        }
        Next::Done
    }

    /// Queues the deployments whose selector matches a set without a controller.
    fn offer(&self, (namespace, name): &Key) {
        let set = self.caches.replica_sets.get(namespace, name);
        let Some(set) = set.filter(|set| controller_of(&**set).is_none()) else {
            return;
        };
        for deployment in self.caches.deployments_in.get(namespace) {
            if selector(&deployment).is_some_and(|s| s.matches_labels(set.labels())) {
                self.keys.add(Work::Deployment(key(&*deployment)));
            }
        }
    }

    /// Queues the deployment of a set if its strategy is Recreate.
    fn pod_ended(&self, (namespace, set): &Key) {
        let set = self.caches.replica_sets.get(namespace, set);
        let owner = set.as_deref().and_then(controller_reference);
        let deployment = owner.and_then(|o| self.caches.deployments.get(namespace, &o.name));
        let spec = deployment.as_ref().and_then(|d| d.spec.as_ref());
        if let Some(deployment) = deployment
            .as_deref()
            .filter(|_| spec.is_some_and(is_recreate))
        {
            self.keys.add(Work::Deployment(key(deployment)));
        }
    }

    async fn reconcile_deployment(&self, deployment: &Key) -> Next {
        let caches = &self.caches;
        if let Some(left) = unseen([&self.sets, &self.deployments], deployment) {
            // The change that shows the write queues the deployment again.
            return Next::After(left);
        }
        let Some(found) = caches.deployments.get(&deployment.0, &deployment.1) else {
            self.sets.forget(deployment);
            self.deployments.forget(deployment);
            return Next::Done;
        };
        if found.metadata.deletion_timestamp.is_some() {
            return Next::Done;
        }
        match self.reconcile(&found).await {
            Ok(next) => next,
            Err(error) => {
                tracing::debug!(%error, deployment = found.name_any(), "reconcile of a Deployment failed, retrying");
                Next::Retry
            }
        }
    }

    async fn reconcile(&self, deployment: &Deployment) -> Result<Next, kube::Error> {
        let (client, templates) = (&self.client, &self.templates);
        let deployment_key = key(deployment);
        let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), &deployment_key.0);
        let Some(spec) = &deployment.spec else {
            return Ok(Next::Done);
        };
        let owned = self.own(deployment).await?;
        let wanted = templates.digest(&deployment.metadata, Some(&spec.template));
        let mut matching: Vec<&Arc<ReplicaSet>> = owned
            .iter()
            .filter(|s| {
                let template = s.spec.as_ref().and_then(|s| s.template.as_ref());
                templates.digest(&s.metadata, template) == wanted
            })
            .collect();
        matching.sort_by_key(|s| s.metadata.creation_timestamp.as_ref().map(|t| t.0));
        let mut new = matching.first().map(|s| Arc::clone(s));
        let old: Vec<Arc<ReplicaSet>> = owned
            .iter()
            .filter(|s| new.as_ref().is_none_or(|n| n.uid() != s.uid()))
            .cloned()
            .collect();
        let highest = old.iter().map(|s| rollout::revision(s)).max().unwrap_or(0);
        if spec.paused != Some(true) {
            match &new {
                None => {
                    let template = rollout::bare_template(Some(&spec.template));
                    let created = create(&sets, deployment, highest + 1, &template).await?;
                    if let Some(created) = created {
                        self.sets.record(&deployment_key, &created);
                        new = Some(Arc::new(created));
                    }
                }
                Some(set) if rollout::revision(set) <= highest => {
                    let patch =
                        json!({"metadata": {"annotations": {REVISION: (highest + 1).to_string()}}});
                    let patched = sets
                        .patch(
                            &set.name_any(),
                            &PatchParams::default(),
                            &Patch::Merge(patch),
                        )
                        .await?;
                    self.sets.record(&deployment_key, &patched);
                    new = Some(Arc::new(patched));
                }
                Some(_) => {}
            }
        }
        let running_old = self.waits_for_pods(spec, &old);
        for scale in rollout::step(deployment, new.as_deref(), &old, running_old) {
            let patch = json!({"spec": {"replicas": scale.to}, "metadata": {"annotations": {"deployment.kubernetes.io/desired-replicas": spec.replicas.unwrap_or(1).to_string()}}});
            let patched = sets
                .patch(&scale.name, &PatchParams::default(), &Patch::Merge(patch))
                .await?;
            self.sets.record(&deployment_key, &patched);
            let direction = if scale.to > scale.from { "up" } else { "down" };
            event(
                client,
                deployment,
                "Deployment",
                "apps/v1",
                COMPONENT,
                "ScalingReplicaSet",
                format!(
                    "Scaled {direction} replica set {} from {} to {}",
                    scale.name, scale.from, scale.to
                ),
            )
            .await;
        }
        self.write_status(deployment, new.as_deref(), &old).await?;
        clean_up(&sets, deployment, &old).await?;
        if new.is_none() && spec.paused != Some(true) {
            // The name of the new set was taken.
            return Ok(Next::Retry);
        }
        Ok(Next::after(rollout::time_to_deadline(
            deployment,
            Timestamp::now(),
        )))
    }

    /// Whether a Recreate strategy must wait for pods of old sets.
    fn waits_for_pods(&self, spec: &DeploymentSpec, old: &[Arc<ReplicaSet>]) -> bool {
        let pods = |uid: String| self.caches.pods_of.get(&uid);
        let mut old = old.iter().filter_map(|s| s.uid());
        is_recreate(spec)
            && old.any(|uid| {
                pods(uid)
                    .iter()
                    .any(|p| !holdfast_core::pod::is_terminal(p))
            })
    }

    /// The deployment's ReplicaSets. Matching orphans are adopted, and owned sets that do not match are released.
    async fn own(&self, deployment: &Deployment) -> Result<Vec<Arc<ReplicaSet>>, kube::Error> {
        let deployment_key = key(deployment);
        let uid = deployment.uid().unwrap_or_default();
        let selector = selector(deployment);
        let api: Api<ReplicaSet> = Api::namespaced(self.client.clone(), &deployment_key.0);
        let mut owned = Vec::new();
        let known = self.caches.sets_of.get(&uid).into_iter();
        for set in known.chain(self.caches.free_sets.get(&deployment_key.0)) {
            let matches = selector
                .as_ref()
                .is_some_and(|s| s.matches_labels(set.labels()));
            match controller_of(&*set) {
                Some(owner) if owner == uid && matches => owned.push(set),
                Some(owner) if owner == uid => {
                    let patch = json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid}]}});
                    let released = api
                        .patch(
                            &set.name_any(),
                            &PatchParams::default(),
                            &Patch::Strategic(patch),
                        )
                        .await?;
                    self.sets.record(&deployment_key, &released);
                }
                None if matches && set.metadata.deletion_timestamp.is_none() => {
                    let patch = json!({"metadata": {"ownerReferences": [owner(deployment)]}});
                    let adopted = api
                        .patch(
                            &set.name_any(),
                            &PatchParams::default(),
                            &Patch::Strategic(patch),
                        )
                        .await?;
                    self.sets.record(&deployment_key, &adopted);
                    owned.push(Arc::new(adopted));
                }
                _ => {}
            }
        }
        Ok(owned)
    }

    /// Writes the status and the revision annotation through `/status`, which does not change the generation.
    async fn write_status(
        &self,
        deployment: &Deployment,
        new: Option<&ReplicaSet>,
        old: &[Arc<ReplicaSet>],
    ) -> Result<(), kube::Error> {
        let status = rollout::status(deployment, new, old, &object::now());
        let revision = new.map(|s| rollout::revision(s).to_string());
        let current = deployment
            .status
            .as_ref()
            .and_then(|s| serde_json::to_value(s).ok())
            .unwrap_or_default();
        let same_status = status
            .as_object()
            .into_iter()
            .flatten()
            .all(|(k, v)| current.get(k).map_or(*v == 0, |c| c == v));
        if same_status
            && revision
                .as_ref()
                .is_none_or(|r| deployment.annotations().get(REVISION) == Some(r))
        {
            return Ok(());
        }
        let mut patch = json!({"status": status});
        if let Some(revision) = revision {
            patch["metadata"] = json!({"annotations": {REVISION: revision}});
        }
        let deployment_key = key(deployment);
        let api: Api<Deployment> = Api::namespaced(self.client.clone(), &deployment_key.0);
        let written = api
            .patch_status(
                &deployment_key.1,
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await?;
        self.deployments.record(&deployment_key, &written);
        Ok(())
    }
}

fn selector(deployment: &Deployment) -> Option<Selector> {
    let selector = serde_json::to_value(&deployment.spec.as_ref()?.selector).ok()?;
    Selector::of_object(&selector)
}

fn is_recreate(spec: &DeploymentSpec) -> bool {
    spec.strategy.as_ref().and_then(|s| s.type_.as_deref()) == Some("Recreate")
}

/// The SHA-256 digest of a template without its hash label.
type Digest = [u8; 32];

/// Digests of templates by the owner's uid and generation. A template changes only with the generation. Comparing
/// serialised templates on every change of a pod would take most of the controller's time.
#[derive(Default)]
struct Templates(Mutex<HashMap<String, (Option<i64>, Digest)>>);

impl Templates {
    fn digest(&self, meta: &ObjectMeta, template: Option<&PodTemplateSpec>) -> Digest {
        let uid = meta.uid.as_deref().unwrap_or_default();
        if let Some((generation, digest)) = lock(&self.0).get(uid)
            && *generation == meta.generation
        {
            return *digest;
        }
        let text = rollout::bare_template(template).to_string();
        let mut digest = Digest::default();
        let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
        digest.copy_from_slice(hash.as_ref());
        lock(&self.0).insert(uid.to_owned(), (meta.generation, digest));
        digest
    }

    /// Removes a deleted object.
    fn forget(&self, uid: &str) {
        lock(&self.0).remove(uid);
    }
}

/// Whether the set that has the name of `wanted` has another template or owner. Otherwise it was created recently and
/// is not in the cache yet, or was deleted since.
fn collides(taken: Option<&ReplicaSet>, wanted: &ReplicaSet) -> bool {
    let template = |set: &ReplicaSet| set.spec.as_ref().and_then(|s| s.template.clone());
    taken.is_some_and(|taken| {
        controller_of(taken) != controller_of(wanted) || template(taken) != template(wanted)
    })
}

/// Creates the set of the current template with zero replicas. `None` if a set of another template has the name: the
/// collision is counted, and the next attempt uses another name.
async fn create(
    sets: &Api<ReplicaSet>,
    deployment: &Deployment,
    revision: i64,
    template: &serde_json::Value,
) -> Result<Option<ReplicaSet>, kube::Error> {
    let Some(spec) = deployment.spec.clone() else {
        return Ok(None);
    };
    let collisions = deployment
        .status
        .as_ref()
        .and_then(|s| s.collision_count)
        .unwrap_or(0);
    let hash = rollout::template_hash(template, collisions);
    let mut labelled = spec.template.clone();
    let mut selector = spec.selector.clone();
    labelled
        .metadata
        .get_or_insert_default()
        .labels
        .get_or_insert_default()
        .insert(HASH.into(), hash.clone());
    selector
        .match_labels
        .get_or_insert_default()
        .insert(HASH.into(), hash.clone());
    let labels = labelled.metadata.as_ref().and_then(|m| m.labels.clone());
    let mut annotations: BTreeMap<String, String> = deployment.annotations().clone();
    annotations.retain(|key, _| {
        key != "kubectl.kubernetes.io/last-applied-configuration"
            && !key.starts_with("deployment.kubernetes.io/")
    });
    annotations.insert(REVISION.into(), revision.to_string());
    let (surge, _) = rollout::bounds(deployment);
    annotations.insert(
        "deployment.kubernetes.io/desired-replicas".into(),
        spec.replicas.unwrap_or(1).to_string(),
    );
    annotations.insert(
        "deployment.kubernetes.io/max-replicas".into(),
        (spec.replicas.unwrap_or(1) + surge).to_string(),
    );
    let set = ReplicaSet {
        metadata: ObjectMeta {
            name: Some(format!("{}-{hash}", deployment.name_any())),
            namespace: deployment.namespace(),
            labels,
            annotations: Some(annotations),
            owner_references: Some(vec![owner(deployment)]),
            ..ObjectMeta::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(0),
            selector,
            template: Some(labelled),
            min_ready_seconds: spec.min_ready_seconds,
        }),
        status: None,
    };
    match sets.create(&PostParams::default(), &set).await {
        Ok(set) => Ok(Some(set)),
        Err(error) if holdfast_kubeapi::client::code(&error) == Some(409) => {
            let taken = sets.get_opt(&set.name_any()).await?;
            if !collides(taken.as_ref(), &set) {
                return Ok(None);
            }
            let namespace = deployment.namespace().unwrap_or_default();
            let deployments: Api<Deployment> = Api::namespaced(sets.client(), &namespace);
            let patch = json!({"status": {"collisionCount": collisions.saturating_add(1)}});
            deployments
                .patch_status(
                    &deployment.name_any(),
                    &PatchParams::default(),
                    &Patch::Merge(patch),
                )
                .await?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Deletes old sets beyond the history limit once the rollout is complete.
async fn clean_up(
    sets: &Api<ReplicaSet>,
    deployment: &Deployment,
    old: &[Arc<ReplicaSet>],
) -> Result<(), kube::Error> {
    let limit = deployment
        .spec
        .as_ref()
        .and_then(|s| s.revision_history_limit)
        .unwrap_or(10);
    let mut empty: Vec<&Arc<ReplicaSet>> = old
        .iter()
        .filter(|s| {
            s.spec.as_ref().and_then(|s| s.replicas) == Some(0)
                && s.status.as_ref().is_none_or(|s| s.replicas == 0)
                && s.metadata.deletion_timestamp.is_none()
        })
        .collect();
    empty.sort_by_key(|s| rollout::revision(s));
    let surplus = empty
        .len()
        .saturating_sub(usize::try_from(limit).unwrap_or(usize::MAX));
    for set in empty.into_iter().take(surplus) {
        sets.delete(&set.name_any(), &DeleteParams::background())
            .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A template is serialised once per generation.
    #[test]
    fn pod_templates_are_compared_by_hash() {
        let template = |image: &str, hash: &str| -> PodTemplateSpec {
            serde_json::from_value(json!({"metadata": {"labels": {"a": "b", HASH: hash}}, "spec": {"containers": [{"name": "c", "image": image}]}}))
                .expect("a template")
        };
        let meta = |uid: &str, generation| ObjectMeta {
            uid: Some(uid.into()),
            generation: Some(generation),
            ..ObjectMeta::default()
        };
        let templates = Templates::default();
        let digest = |meta, template: &PodTemplateSpec| templates.digest(&meta, Some(template));
        let first = digest(meta("d", 1), &template("i:1", "x"));
        assert_eq!(digest(meta("s", 1), &template("i:1", "y")), first);
        assert_ne!(digest(meta("t", 1), &template("i:2", "x")), first);
        // The template is not serialised again in the same generation.
        assert_eq!(digest(meta("d", 1), &template("i:2", "x")), first);
        assert_ne!(digest(meta("d", 2), &template("i:2", "x")), first);
        assert_eq!(lock(&templates.0).len(), 3);
    }

    #[test]
    fn changes_of_pods_are_work_only_if_a_pod_ends() {
        let pod = |phase: &str, set: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n",
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set, "controller": true}]},
                "status": {"phase": phase}}))
            .expect("a pod")
        };
        let (runs, done) = (pod("Running", "s"), pod("Succeeded", "s"));
        let of_s = || Some(Work::PodEnded(("n".into(), "s".into())));
        assert_eq!(work_of_pod(None, Some(&runs)), None);
        assert_eq!(work_of_pod(Some(&pod("Pending", "s")), Some(&runs)), None);
        assert_eq!(work_of_pod(Some(&runs), Some(&done)), of_s());
        assert_eq!(work_of_pod(Some(&runs), None), of_s());
        assert_eq!(work_of_pod(Some(&runs), Some(&pod("Running", "t"))), of_s());
        assert_eq!(work_of_pod(Some(&done), None), None);
    }

    #[test]
    fn only_a_different_template_or_owner_is_a_hash_collision() {
        let set = |uid: &str, image: &str| -> ReplicaSet {
            serde_json::from_value(json!({
                "metadata": {"name": "d-1", "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": uid, "controller": true}]},
                "spec": {"selector": {}, "template": {"spec": {"containers": [{"name": "c", "image": image}]}}},
            }))
            .expect("a set")
        };
        let wanted = set("u", "i:1");
        assert!(!collides(None, &wanted), "gone again");
        assert!(!collides(Some(&set("u", "i:1")), &wanted), "ours");
        assert!(collides(Some(&set("u", "i:2")), &wanted));
        assert!(collides(Some(&set("other", "i:1")), &wanted));
    }
}
