//! Garbage collection by owner references for the kinds that have owners here: ReplicaSets, jobs and pods
//! (`pkg/controller/garbagecollector/garbagecollector.go`). Pods of deleted nodes are handled by `nodes`.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Caches;
use super::any_change;
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::Cache;
use holdfast_kubeapi::client::code;

/// The decision for one object.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Stay,
    /// All owners were deleted.
    Delete,
    /// An owner waits for its dependents (foreground deletion).
    DeleteForeground,
    /// Remove the reference to this owner: it orphans its dependents, or was deleted while other owners remain.
    Release(String),
}

/// The observed state of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Alive,
    Deleted,
    WaitsForDependents,
    Orphans,
}

fn decide(owners: &[OwnerReference], state_of: impl Fn(&OwnerReference) -> Owner) -> Decision {
    if owners.is_empty() {
        return Decision::Stay;
    }
    let states: Vec<(Owner, &OwnerReference)> = owners.iter().map(|o| (state_of(o), o)).collect();
    if let Some((_, owner)) = states.iter().find(|(s, _)| *s == Owner::Orphans) {
        return Decision::Release(owner.uid.clone());
    }
    if states.iter().all(|(s, _)| *s == Owner::Deleted) {
        return Decision::Delete;
    }
    if states.iter().any(|(s, _)| *s == Owner::WaitsForDependents)
        && states.iter().all(|(s, _)| *s != Owner::Alive)
    {
        return Decision::DeleteForeground;
    }
    match states.iter().find(|(s, _)| *s == Owner::Deleted) {
        Some((_, dangling)) => Decision::Release(dangling.uid.clone()),
        None => Decision::Stay,
    }
}

fn has_finalizer(meta: &ObjectMeta, name: &str) -> bool {
    meta.deletion_timestamp.is_some() && meta.finalizers.iter().flatten().any(|f| f == name)
}

pub(super) async fn run(client: Client, caches: Caches) {
    let mut changes = [
        caches.deployments.changes(),
        caches.replica_sets.changes(),
        caches.jobs.changes(),
        caches.cron_jobs.changes(),
        caches.pods.changes(),
    ];
    loop {
        for receiver in &mut changes {
            receiver.mark_unchanged();
        }
        for set in caches.replica_sets.list() {
            if let Some(decision) = decision_for(&caches, &set.metadata) {
                act::<ReplicaSet>(&client, &set.metadata, decision).await;
            }
        }
        for job in caches.jobs.list() {
            if let Some(decision) = decision_for(&caches, &job.metadata) {
                act::<Job>(&client, &job.metadata, decision).await;
            }
        }
        let pods = caches.pods.list();
        let work = pods.iter().filter_map(|pod| {
            let decision = decision_for(&caches, &pod.metadata)?;
            Some(act::<Pod>(&client, &pod.metadata, decision))
        });
        futures::future::join_all(work).await;
        for deployment in caches.deployments.list() {
            finish::<Deployment>(&client, &caches, &deployment.metadata).await;
        }
        for set in caches.replica_sets.list() {
            finish::<ReplicaSet>(&client, &caches, &set.metadata).await;
        }
        for job in caches.jobs.list() {
            finish::<Job>(&client, &caches, &job.metadata).await;
        }
        for cron in caches.cron_jobs.list() {
            finish::<CronJob>(&client, &caches, &cron.metadata).await;
        }
        any_change(&mut changes, Duration::from_secs(10)).await;
    }
}

fn dependents(caches: &Caches, uid: &str) -> (usize, usize) {
    let mut counts = (0, 0);
    let mut add = |meta: &ObjectMeta| {
        for owner in meta
            .owner_references
            .iter()
            .flatten()
            .filter(|o| o.uid == uid)
        {
            counts.0 += 1;
            counts.1 += usize::from(owner.block_owner_deletion == Some(true));
        }
    };
    caches
        .replica_sets
        .list()
        .iter()
        .for_each(|s| add(&s.metadata));
    caches.jobs.list().iter().for_each(|j| add(&j.metadata));
    caches.pods.list().iter().for_each(|p| add(&p.metadata));
    counts
}

/// The state of an owner according to a cache.
fn state<K>(cache: &Cache<K>, namespace: &str, owner: &OwnerReference) -> Owner
where
    K: Resource + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default,
{
    let found = cache.get(namespace, &owner.name);
    match found.as_ref().map(|found| found.meta()) {
        Some(meta) if meta.uid.as_deref() != Some(&owner.uid) => Owner::Deleted,
        None => Owner::Deleted,
        Some(meta) if has_finalizer(meta, "orphan") => Owner::Orphans,
        Some(meta) if has_finalizer(meta, "foregroundDeletion") => Owner::WaitsForDependents,
        Some(_) => Owner::Alive,
    }
}

/// The decision for an object; `None` if it stays.
fn decision_for(caches: &Caches, meta: &ObjectMeta) -> Option<Decision> {
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let state_of = |owner: &OwnerReference| match owner.kind.as_str() {
        "Deployment" => state(&caches.deployments, namespace, owner),
        "ReplicaSet" => state(&caches.replica_sets, namespace, owner),
        "Job" => state(&caches.jobs, namespace, owner),
        "CronJob" => state(&caches.cron_jobs, namespace, owner),
        // Owners of other kinds, such as the Node of a mirror pod, are not tracked here.
        _ => Owner::Alive,
    };
    let decision = decide(meta.owner_references.as_deref()?, state_of);
    (decision != Decision::Stay).then_some(decision)
}

async fn act<K>(client: &Client, meta: &ObjectMeta, decision: Decision)
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + DeserializeOwned,
    K::DynamicType: Default,
{
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let name = meta.name.as_deref().unwrap_or_default();
    let result = match decision {
        Decision::Release(uid) => {
            let patch = json!({"metadata": {"uid": meta.uid, "ownerReferences": [{"$patch": "delete", "uid": uid}]}});
            api.patch(name, &PatchParams::default(), &Patch::Strategic(patch))
                .await
                .map(|_| ())
        }
        Decision::Delete | Decision::DeleteForeground if meta.deletion_timestamp.is_none() => {
            // The cache may be stale: an owner missing there may have been created recently.
            if decision == Decision::Delete && !owners_deleted(client, namespace, meta).await {
                return;
            }
            let mut parameters = if decision == Decision::Delete {
                DeleteParams::background()
            } else {
                DeleteParams::foreground()
            };
            parameters.preconditions = Some(Preconditions {
                uid: meta.uid.clone(),
                resource_version: None,
            });
            api.delete(name, &parameters).await.map(|_| ())
        }
        _ => Ok(()),
    };
    if let Err(error) = result
        && !matches!(code(&error), Some(404 | 409))
    {
        tracing::debug!(%error, name, "garbage collection of an object failed, retrying");
    }
}

/// The uid of an object, read from the API.
async fn uid_of<K>(
    client: &Client,
    namespace: &str,
    name: &str,
) -> Result<Option<String>, kube::Error>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + DeserializeOwned,
    K::DynamicType: Default,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await?;
    Ok(found.and_then(|found| found.meta().uid.clone()))
}

/// Checks with the API that every owner was deleted.
async fn owners_deleted(client: &Client, namespace: &str, meta: &ObjectMeta) -> bool {
    for owner in meta.owner_references.iter().flatten() {
        let found = match owner.kind.as_str() {
            "Deployment" => uid_of::<Deployment>(client, namespace, &owner.name).await,
            "Job" => uid_of::<Job>(client, namespace, &owner.name).await,
            "CronJob" => uid_of::<CronJob>(client, namespace, &owner.name).await,
            _ => uid_of::<ReplicaSet>(client, namespace, &owner.name).await,
        };
        match found {
            Ok(None) => {}
            Ok(Some(uid)) if uid != owner.uid => {}
            _ => return false,
        }
    }
    true
}

/// Removes the collector's finalizers once their work is done.
async fn finish<K>(client: &Client, caches: &Caches, meta: &ObjectMeta)
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + DeserializeOwned,
    K::DynamicType: Default,
{
    // Most objects have no such finalizer, so their dependents need not be counted.
    if !["orphan", "foregroundDeletion"]
        .iter()
        .any(|name| has_finalizer(meta, name))
    {
        return;
    }
    let uid = meta.uid.as_deref().unwrap_or_default();
    let (all, blocking) = dependents(caches, uid);
    let done: HashSet<&str> = [("orphan", all), ("foregroundDeletion", blocking)]
        .into_iter()
        .filter(|(f, n)| has_finalizer(meta, f) && *n == 0)
        .map(|(f, _)| f)
        .collect();
    if done.is_empty() {
        return;
    }
    let left: Vec<&String> = meta
        .finalizers
        .iter()
        .flatten()
        .filter(|f| !done.contains(f.as_str()))
        .collect();
    let patch = json!({"metadata": {"finalizers": left, "resourceVersion": meta.resource_version}});
    let api: Api<K> = Api::namespaced(
        client.clone(),
        meta.namespace.as_deref().unwrap_or_default(),
    );
    if let Err(error) = api
        .patch(
            meta.name.as_deref().unwrap_or_default(),
            &PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await
    {
        tracing::debug!(%error, "removing a finalizer failed, retrying");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_deleted_when_all_its_owners_are() {
        let owner = |uid: &str| OwnerReference {
            uid: uid.into(),
            ..OwnerReference::default()
        };
        let state_of = |o: &OwnerReference| match o.uid.as_str() {
            "alive" => Owner::Alive,
            "waits" => Owner::WaitsForDependents,
            "orphans" => Owner::Orphans,
            _ => Owner::Deleted,
        };
        let cases = [
            (vec![], Decision::Stay),
            (vec!["gone"], Decision::Delete),
            (vec!["alive"], Decision::Stay),
            (vec!["alive", "gone"], Decision::Release("gone".into())),
            (vec!["waits"], Decision::DeleteForeground),
            (vec!["waits", "alive"], Decision::Stay),
            (vec!["orphans"], Decision::Release("orphans".into())),
        ];
        for (owners, expected) in cases {
            let owners: Vec<_> = owners.into_iter().map(owner).collect();
            assert_eq!(decide(&owners, state_of), expected, "{owners:?}");
        }
    }
}
