//! Garbage collection by owner references for the kinds that have owners here: ReplicaSets, jobs, pods and EndpointSlices
//! (`pkg/controller/garbagecollector/garbagecollector.go`). Pods of deleted nodes are handled by `nodes`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::runtime::{Keys, Next};
use super::{Caches, is_stale};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{self, Cache};
use holdfast_kubeapi::client::code;

/// Number of objects collected concurrently. Concurrent writes share a sync of the store.
const WORKERS: usize = 16;
/// How long to wait for an owner that the API has and the cache does not show.
const UNSEEN_OWNER: Duration = Duration::from_secs(5);
/// The collector's finalizers.
const FINALIZERS: [&str; 2] = ["orphan", "foregroundDeletion"];

/// The kinds that have owners or dependents here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Kind {
    Deployment,
    ReplicaSet,
    CronJob,
    Job,
    Pod,
    Service,
    Endpoints,
    EndpointSlice,
}

impl Kind {
    /// The kind of an owner; `None` if owners of this kind are not tracked here.
    fn of_owner(owner: &OwnerReference) -> Option<Kind> {
        match owner.kind.as_str() {
            "Deployment" => Some(Kind::Deployment),
            "ReplicaSet" => Some(Kind::ReplicaSet),
            "CronJob" => Some(Kind::CronJob),
            "Job" => Some(Kind::Job),
            "Service" if owner.api_version == "v1" => Some(Kind::Service),
            "Endpoints" => Some(Kind::Endpoints),
            _ => None,
        }
    }
}

/// What to collect.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    /// An object whose owners or finalizers have changed, or whose dependents have become fewer.
    Object(Kind, cache::Key),
    /// The dependents of an owner with this uid, which was deleted or waits for them.
    DependentsOf(String),
}

/// The work that a change of an object requires.
fn work_of<K: Resource>(kind: Kind, before: Option<&K>, after: Option<&K>) -> Vec<Work> {
    let (old, new) = (before.map(Resource::meta), after.map(Resource::meta));
    let owners = |meta: Option<&ObjectMeta>| -> Vec<OwnerReference> {
        meta.and_then(|m| m.owner_references.clone())
            .unwrap_or_default()
    };
    let (old_owners, new_owners) = (owners(old), owners(new));
    let finalizers = |meta: Option<&ObjectMeta>| {
        FINALIZERS.map(|name| meta.is_some_and(|meta| has_finalizer(meta, name)))
    };
    let uid = |meta: Option<&ObjectMeta>| meta.and_then(|meta| meta.uid.clone());
    let (replaced, begun) = (uid(old) != uid(new), finalizers(old) != finalizers(new));
    let mut work = vec![];
    if let Some(object) = after
        && ((replaced || old_owners != new_owners) && !new_owners.is_empty() || begun)
    {
        work.push(Work::Object(kind, cache::key(object)));
    }
    if begun || replaced {
        let owners = [uid(old).filter(|_| replaced), uid(new).filter(|_| begun)];
        work.extend(owners.into_iter().flatten().map(Work::DependentsOf));
    }
    let namespace = old
        .and_then(|meta| meta.namespace.clone())
        .unwrap_or_default();
    let left = old_owners
        .iter()
        .filter(|owner| replaced || !new_owners.contains(owner));
    work.extend(left.filter_map(|owner| {
        let key = (namespace.clone(), owner.name.clone());
        Some(Work::Object(Kind::of_owner(owner)?, key))
    }));
    work
}

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

/// What the workers share.
struct Collector {
    client: Client,
    caches: Caches,
    keys: Arc<Keys<Work>>,
}

pub(super) async fn run(client: Client, caches: Caches) {
    let keys = Keys::new();
    keys.watch(&caches.deployments, |b, a| work_of(Kind::Deployment, b, a));
    keys.watch(&caches.replica_sets, |b, a| work_of(Kind::ReplicaSet, b, a));
    keys.watch(&caches.cron_jobs, |b, a| work_of(Kind::CronJob, b, a));
    keys.watch(&caches.jobs, |b, a| work_of(Kind::Job, b, a));
    keys.watch(&caches.pods, |b, a| work_of(Kind::Pod, b, a));
    keys.watch(&caches.services, |b, a| work_of(Kind::Service, b, a));
    keys.watch(&caches.endpoints, |b, a| work_of(Kind::Endpoints, b, a));
    keys.watch(&caches.slices, |b, a| work_of(Kind::EndpointSlice, b, a));
    let collector = Collector {
        client,
        caches,
        keys,
    };
    let turn = |work| collector.turn(work);
    collector.keys.work(WORKERS, turn).await;
}

impl Collector {
    async fn turn(&self, work: Work) -> Next {
        let caches = &self.caches;
        match work {
            Work::DependentsOf(uid) => {
                for work in dependents(caches, &uid) {
                    self.keys.add(work);
                }
                Next::Done
            }
            Work::Object(kind, key) => match kind {
                Kind::Deployment => self.collect(&caches.deployments, &key).await,
                Kind::ReplicaSet => self.collect(&caches.replica_sets, &key).await,
                Kind::CronJob => self.collect(&caches.cron_jobs, &key).await,
                Kind::Job => self.collect(&caches.jobs, &key).await,
                Kind::Pod => self.collect(&caches.pods, &key).await,
                Kind::Service => self.collect(&caches.services, &key).await,
                Kind::Endpoints => self.collect(&caches.endpoints, &key).await,
                Kind::EndpointSlice => self.collect(&caches.slices, &key).await,
            },
        }
    }

    /// Collects one object, or removes its finalizers.
    async fn collect<K>(&self, cache: &Cache<K>, (namespace, name): &cache::Key) -> Next
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
        K::DynamicType: Default,
    {
        let Some(object) = cache.get(namespace, name) else {
            return Next::Done;
        };
        let (client, caches, meta) = (&self.client, &self.caches, object.meta());
        let acted = match decision_for(caches, meta) {
            Some(decision) => act::<K>(client, meta, decision).await,
            None => Next::Done,
        };
        match finish::<K>(client, caches, meta).await {
            Next::Done => acted,
            next => next,
        }
    }
}

/// The objects that an owner with this uid has.
fn dependents(caches: &Caches, uid: &str) -> Vec<Work> {
    fn work<K: Resource>(kind: Kind, objects: &[Arc<K>]) -> impl Iterator<Item = Work> {
        let keys = objects.iter().map(|object| cache::key(&**object));
        keys.map(move |key| Work::Object(kind, key))
    }
    let mut all = vec![];
    all.extend(work(Kind::ReplicaSet, &caches.owned_sets.get(uid)));
    all.extend(work(Kind::Job, &caches.owned_jobs.get(uid)));
    all.extend(work(Kind::Pod, &caches.owned_pods.get(uid)));
    all.extend(work(Kind::EndpointSlice, &caches.owned_slices.get(uid)));
    all
}

/// The number of dependents of an owner, and of those that block its deletion.
fn count_dependents(caches: &Caches, uid: &str) -> (usize, usize) {
    let mut counts = (0, 0);
    let mut add = |meta: &ObjectMeta| {
        let owners = meta.owner_references.iter().flatten();
        for owner in owners.filter(|o| o.uid == uid) {
            counts.0 += 1;
            counts.1 += usize::from(owner.block_owner_deletion == Some(true));
        }
    };
    let (sets, jobs, pods) = (
        caches.owned_sets.get(uid),
        caches.owned_jobs.get(uid),
        caches.owned_pods.get(uid),
    );
    sets.iter().for_each(|s| add(&s.metadata));
    jobs.iter().for_each(|j| add(&j.metadata));
    pods.iter().for_each(|p| add(&p.metadata));
    let slices = caches.owned_slices.get(uid);
    slices.iter().for_each(|s| add(&s.metadata));
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
    let state_of = |owner: &OwnerReference| match Kind::of_owner(owner) {
        Some(Kind::Deployment) => state(&caches.deployments, namespace, owner),
        Some(Kind::ReplicaSet) => state(&caches.replica_sets, namespace, owner),
        Some(Kind::Job) => state(&caches.jobs, namespace, owner),
        Some(Kind::CronJob) => state(&caches.cron_jobs, namespace, owner),
        Some(Kind::Service) => state(&caches.services, namespace, owner),
        Some(Kind::Endpoints) => state(&caches.endpoints, namespace, owner),
        // Owners of other kinds, such as the Node of a mirror pod, are not tracked here.
        Some(Kind::Pod | Kind::EndpointSlice) | None => Owner::Alive,
    };
    let decision = decide(meta.owner_references.as_deref()?, state_of);
    (decision != Decision::Stay).then_some(decision)
}

async fn act<K>(client: &Client, meta: &ObjectMeta, decision: Decision) -> Next
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
            if decision == Decision::Delete {
                match owners_deleted(client, namespace, meta).await {
                    Ok(true) => {}
                    Ok(false) => return Next::After(UNSEEN_OWNER),
                    Err(error) => {
                        tracing::debug!(%error, name, "reading the owners of an object failed, retrying");
                        return Next::Retry;
                    }
                }
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
        && !is_stale(&error)
    {
        tracing::debug!(%error, name, "garbage collection of an object failed, retrying");
        return Next::Retry;
    }
    Next::Done
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
async fn owners_deleted(
    client: &Client,
    namespace: &str,
    meta: &ObjectMeta,
) -> Result<bool, kube::Error> {
    for owner in meta.owner_references.iter().flatten() {
        let found = match owner.kind.as_str() {
            "Deployment" => uid_of::<Deployment>(client, namespace, &owner.name).await?,
            "Job" => uid_of::<Job>(client, namespace, &owner.name).await?,
            "CronJob" => uid_of::<CronJob>(client, namespace, &owner.name).await?,
            "Service" => uid_of::<Service>(client, namespace, &owner.name).await?,
            "Endpoints" => uid_of::<Endpoints>(client, namespace, &owner.name).await?,
            _ => uid_of::<ReplicaSet>(client, namespace, &owner.name).await?,
        };
        if found.is_some_and(|uid| uid == owner.uid) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Removes the collector's finalizers once their work is done.
async fn finish<K>(client: &Client, caches: &Caches, meta: &ObjectMeta) -> Next
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + DeserializeOwned,
    K::DynamicType: Default,
{
    // Most objects have no such finalizer, so their dependents need not be counted.
    if !FINALIZERS.iter().any(|name| has_finalizer(meta, name)) {
        return Next::Done;
    }
    let uid = meta.uid.as_deref().unwrap_or_default();
    let (all, blocking) = count_dependents(caches, uid);
    let done: HashSet<&str> = [("orphan", all), ("foregroundDeletion", blocking)]
        .into_iter()
        .filter(|(f, n)| has_finalizer(meta, f) && *n == 0)
        .map(|(f, _)| f)
        .collect();
    if done.is_empty() {
        return Next::Done;
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
        return match code(&error) {
            Some(404) => Next::Done,
            _ => Next::Retry,
        };
    }
    Next::Done
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    /// A pod with this uid, these owners and this finalizer, which is being deleted if it has a finalizer.
    fn pod(uid: &str, owners: &[&str], finalizer: Option<&str>) -> Pod {
        let owner = |owner: &&str| json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner});
        let owners: Vec<_> = owners.iter().map(owner).collect();
        let deleted = finalizer.map(|_| "2026-01-01T00:00:00Z");
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": uid, "ownerReferences": owners,
            "annotations": {"n": uid}, "deletionTimestamp": deleted, "finalizers": finalizer.map(|f| [f])}}))
        .expect("a pod")
    }

    #[test]
    fn only_changes_of_owners_and_finalizers_are_work() {
        let of = |before: Option<Pod>, after: Option<Pod>| {
            let work = work_of(Kind::Pod, before.as_ref(), after.as_ref());
            let shown = |work| match work {
                Work::Object(kind, (_, name)) => format!("{kind:?} {name}"),
                Work::DependentsOf(uid) => format!("of {uid}"),
            };
            work.into_iter().map(shown).collect::<Vec<_>>().join(", ")
        };
        let owned = |owners: &[&str]| Some(pod("u", owners, None));
        let cases = [
            (None, owned(&[]), ""),
            (None, owned(&["s"]), "Pod p"),
            (owned(&["s"]), owned(&["s"]), ""),
            (owned(&["s"]), owned(&["t"]), "Pod p, ReplicaSet s"),
            (owned(&["s", "t"]), None, "of u, ReplicaSet s, ReplicaSet t"),
            (
                owned(&["s"]),
                Some(pod("v", &["s"], None)),
                "Pod p, of u, ReplicaSet s",
            ),
            (
                owned(&[]),
                Some(pod("u", &[], Some("orphan"))),
                "Pod p, of u",
            ),
            (owned(&[]), Some(pod("u", &[], Some("other"))), ""),
        ];
        for (before, after, expected) in cases {
            assert_eq!(
                of(before.clone(), after.clone()),
                expected,
                "{before:?} {after:?}"
            );
        }
    }

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
