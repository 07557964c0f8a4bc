//! The Deployment controller: one ReplicaSet per pod template, and rolling updates
//! (`pkg/controller/deployment`). The arithmetic is in `rollout`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use serde_json::json;

use super::Caches;
use super::Pending;
use super::any_change;
use super::controller_of;
use super::event;
use super::owned::owner;
use super::rollout::{self, HASH, REVISION};
use crate::api::object;
use crate::api::selector::Selector;
use holdfast_core::lock::lock;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache;

const COMPONENT: &str = "deployment-controller";

pub(super) async fn run(client: Client, caches: Caches) {
    let mut changes = [
        caches.deployments.changes(),
        caches.replica_sets.changes(),
        caches.pods.changes(),
    ];
    let (pending, templates) = (Pending::default(), Templates::default());
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        for deployment in caches.deployments.list() {
            let uid = deployment.uid().unwrap_or_default();
            let seen = |(namespace, name): &cache::Key| {
                let set = caches
                    .replica_sets
                    .get(namespace, name)
                    .map(|s| cache::revision(&*s));
                set.or_else(|| {
                    caches
                        .deployments
                        .get(namespace, name)
                        .map(|d| cache::revision(&*d))
                })
            };
            if deployment.metadata.deletion_timestamp.is_some() || !pending.settled(&uid, seen) {
                continue;
            }
            // Read again: the cache now contains everything that `settled` has seen.
            let (namespace, name) = cache::key(&*deployment);
            let Some(deployment) = caches.deployments.get(&namespace, &name) else {
                continue;
            };
            let work = reconcile(&client, &caches, &deployment, &pending, &templates);
            if let Err(error) = work.await {
                tracing::debug!(%error, deployment = deployment.name_any(), "reconcile of a Deployment failed, retrying");
            }
        }
        templates.keep(&caches);
        any_change(&mut changes, Duration::from_secs(5)).await;
    }
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

    /// Removes the entries of deleted objects once they are the majority.
    fn keep(&self, caches: &Caches) {
        let (sets, deployments) = (caches.replica_sets.list(), caches.deployments.list());
        let mut known = lock(&self.0);
        if known.len() > 2 * (sets.len() + deployments.len()) + 100 {
            let sets = sets.iter().filter_map(|s| s.uid());
            let all: HashSet<String> = deployments
                .iter()
                .filter_map(|d| d.uid())
                .chain(sets)
                .collect();
            known.retain(|uid, _| all.contains(uid));
        }
    }
}

async fn reconcile(
    client: &Client,
    caches: &Caches,
    deployment: &Deployment,
    pending: &Pending,
    templates: &Templates,
) -> Result<(), kube::Error> {
    let (namespace, name) = cache::key(deployment);
    let uid = deployment.uid().unwrap_or_default();
    let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), &namespace);
    let Some(spec) = &deployment.spec else {
        return Ok(());
    };
    let owned = own(client, caches, deployment, pending).await?;
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
                    pending.record_write(&uid, &created);
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
                pending.record_write(&uid, &patched);
                new = Some(Arc::new(patched));
            }
            Some(_) => {}
        }
    }
    let running_old = waits_for_pods(caches, spec, &old);
    for scale in rollout::step(deployment, new.as_deref(), &old, running_old) {
        let patch = json!({"spec": {"replicas": scale.to}, "metadata": {"annotations": {"deployment.kubernetes.io/desired-replicas": spec.replicas.unwrap_or(1).to_string()}}});
        let patched = sets
            .patch(&scale.name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        pending.record_write(&uid, &patched);
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
    write_status(
        client,
        deployment,
        new.as_deref(),
        &old,
        &namespace,
        &name,
        pending,
    )
    .await?;
    clean_up(&sets, deployment, &old).await
}

/// Whether a Recreate strategy must wait for pods of old sets.
fn waits_for_pods(caches: &Caches, spec: &DeploymentSpec, old: &[Arc<ReplicaSet>]) -> bool {
    let strategy = spec.strategy.as_ref().and_then(|s| s.type_.as_deref());
    if strategy != Some("Recreate") || old.is_empty() {
        return false;
    }
    let old: HashSet<String> = old.iter().filter_map(|s| s.uid()).collect();
    caches.pods.list().iter().any(|p| {
        controller_of(&**p).is_some_and(|o| old.contains(o)) && !holdfast_core::pod::is_terminal(p)
    })
}

/// The deployment's ReplicaSets. Matching orphans are adopted, and owned sets that do not match are released.
async fn own(
    client: &Client,
    caches: &Caches,
    deployment: &Deployment,
    pending: &Pending,
) -> Result<Vec<Arc<ReplicaSet>>, kube::Error> {
    let (namespace, _) = cache::key(deployment);
    let uid = deployment.uid().unwrap_or_default();
    let selector = deployment
        .spec
        .as_ref()
        .and_then(|s| serde_json::to_value(&s.selector).ok())
        .and_then(|s| Selector::of_object(&s));
    let api: Api<ReplicaSet> = Api::namespaced(client.clone(), &namespace);
    let mut owned = Vec::new();
    for set in caches
        .replica_sets
        .list()
        .into_iter()
        .filter(|s| s.metadata.namespace.as_ref() == Some(&namespace))
    {
        let matches = selector
            .as_ref()
            .is_some_and(|s| s.matches_labels(set.labels()));
        match controller_of(&*set) {
            Some(owner) if owner == uid && matches => owned.push(set),
            Some(owner) if owner == uid => {
                let patch =
                    json!({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid}]}});
                pending.record_write(
                    &uid,
                    &api.patch(
                        &set.name_any(),
                        &PatchParams::default(),
                        &Patch::Strategic(patch),
                    )
                    .await?,
                );
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
                pending.record_write(&uid, &adopted);
                owned.push(Arc::new(adopted));
            }
            _ => {}
        }
    }
    Ok(owned)
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

/// Writes the status and the revision annotation through `/status`, which does not change the generation.
async fn write_status(
    client: &Client,
    deployment: &Deployment,
    new: Option<&ReplicaSet>,
    old: &[Arc<ReplicaSet>],
    namespace: &str,
    name: &str,
    pending: &Pending,
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
    let api: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let written = api
        .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    pending.record_write(&deployment.uid().unwrap_or_default(), &written);
    Ok(())
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
