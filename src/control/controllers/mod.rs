//! The bundled controllers: Deployment, ReplicaSet, Job, CronJob, endpoints of services, garbage collection by owner
//! references, namespaces, node lifecycle, pod ranges of nodes, volumes, certificates and tokens.
//!
//! Each controller is a loop that observes watched caches, decides, and writes. The decisions are pure functions over
//! typed objects. All reads and writes use the API.

mod attach;
mod binder;
mod bootstrap;
mod certificates;
mod cronjob;
mod deployment;
mod endpoints;
mod garbage;
mod ipam;
mod job;
mod namespace;
mod nodes;
mod owned;
mod replicaset;
mod rollout;
mod runtime;
mod tokens;

pub use binder::DIRECTORY;
pub(crate) use certificates::Sign;
pub(crate) use tokens::SignToken;

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{
    ConfigMap, Endpoints, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Service,
    ServiceAccount,
};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, Resource};
use tokio::sync::watch;
use tokio::task::JoinSet;

use holdfast_core::digest::fnv64;
use holdfast_core::node::pod_ranges::PodRanges;
use holdfast_kubeapi::cache::Cache;
use holdfast_kubeapi::client::code;
use holdfast_kubeapi::{Api, Index};

/// Event reasons of type Warning, in addition to those that begin or end with "Failed".
const WARNINGS: [&str; 11] = [
    "BackoffLimitExceeded",
    "CIDRNotAvailable",
    "DeadlineExceeded",
    "MaxFailedIndexesExceeded",
    "MissSchedule",
    "PodFailurePolicy",
    "TooManyMissedTimes",
    "TooManySucceededPods",
    "UnexpectedJob",
    "UnknownTimeZone",
    "UnparseableSchedule",
];

/// The caches that controllers and scheduler share.
#[derive(Clone)]
pub struct Caches {
    /// All pods.
    pub pods: Cache<Pod>,
    /// All nodes.
    pub nodes: Cache<Node>,
    replica_sets: Cache<ReplicaSet>,
    deployments: Cache<Deployment>,
    jobs: Cache<Job>,
    cron_jobs: Cache<CronJob>,
    namespaces: Cache<Namespace>,
    accounts: Cache<ServiceAccount>,
    config_maps: Cache<ConfigMap>,
    /// All claims.
    pub claims: Cache<PersistentVolumeClaim>,
    /// All volumes.
    pub volumes: Cache<PersistentVolume>,
    /// All storage classes.
    pub classes: Cache<StorageClass>,
    /// The pods by the uid of their controller.
    pods_of: Index<Pod>,
    /// The pods without a controller by namespace.
    free_pods: Index<Pod>,
    /// The pods by the node that they are bound to.
    pods_on: Index<Pod>,
    /// The ReplicaSets by namespace.
    sets_in: Index<ReplicaSet>,
    /// The ReplicaSets by the uid of their controller.
    sets_of: Index<ReplicaSet>,
    /// The ReplicaSets without a controller by namespace.
    free_sets: Index<ReplicaSet>,
    /// The deployments by namespace.
    deployments_in: Index<Deployment>,
    /// The jobs by namespace.
    jobs_in: Index<Job>,
    /// The jobs by the uid of their controller.
    jobs_of: Index<Job>,
    /// The pods, ReplicaSets and jobs by the uids of all their owners.
    owned_pods: Index<Pod>,
    owned_sets: Index<ReplicaSet>,
    owned_jobs: Index<Job>,
    services: Cache<Service>,
    endpoints: Cache<Endpoints>,
    slices: Cache<EndpointSlice>,
    /// The services with a selector by its first requirement.
    services_by_requirement: Index<Service>,
    /// The pods that can be endpoints by each of their labels.
    pods_by_label: Index<Pod>,
    /// The slices by namespace and name of their service.
    slices_of: Index<EndpointSlice>,
    /// The slices by the uids of all their owners.
    owned_slices: Index<EndpointSlice>,
}

impl Caches {
    /// Starts the watches.
    #[must_use]
    pub fn start(client: &Client) -> Caches {
        let config = || watcher::Config::default().streaming_lists();
        let pods = Cache::start(Api::all(client.clone()), config());
        let replica_sets = Cache::start(Api::all(client.clone()), config());
        let deployments = Cache::start(Api::all(client.clone()), config());
        let jobs = Cache::start(Api::all(client.clone()), config());
        let services = Cache::start(Api::all(client.clone()), config());
        let slices = Cache::start(Api::all(client.clone()), config());
        Caches {
            pods_of: Index::new(&pods, uids_of_controller),
            free_pods: Index::new(&pods, namespace_if_free),
            pods_on: Index::new(&pods, |pod| {
                nodes::node_of(pod).map(str::to_owned).into_iter().collect()
            }),
            sets_in: Index::new(&replica_sets, namespace_of),
            sets_of: Index::new(&replica_sets, uids_of_controller),
            free_sets: Index::new(&replica_sets, namespace_if_free),
            deployments_in: Index::new(&deployments, namespace_of),
            jobs_in: Index::new(&jobs, namespace_of),
            jobs_of: Index::new(&jobs, uids_of_controller),
            owned_pods: Index::new(&pods, uids_of_owners),
            owned_sets: Index::new(&replica_sets, uids_of_owners),
            owned_jobs: Index::new(&jobs, uids_of_owners),
            services_by_requirement: Index::new(&services, endpoints::first_requirement),
            pods_by_label: Index::new(&pods, endpoints::requirements),
            slices_of: Index::new(&slices, endpoints::service_of),
            owned_slices: Index::new(&slices, uids_of_owners),
            services,
            slices,
            endpoints: Cache::start(Api::all(client.clone()), config()),
            pods,
            nodes: Cache::start(Api::all(client.clone()), config()),
            replica_sets,
            deployments,
            jobs,
            cron_jobs: Cache::start(Api::all(client.clone()), config()),
            namespaces: Cache::start(Api::all(client.clone()), config()),
            accounts: Cache::start(Api::all(client.clone()), config()),
            config_maps: Cache::start(
                Api::all(client.clone()),
                config().fields("metadata.name=kube-root-ca.crt"),
            ),
            claims: Cache::start(Api::all(client.clone()), config()),
            volumes: Cache::start(Api::all(client.clone()), config()),
            classes: Cache::start(Api::all(client.clone()), config()),
        }
    }

    async fn synced(&self) {
        tokio::join!(
            self.pods.synced(),
            self.nodes.synced(),
            self.replica_sets.synced(),
            self.deployments.synced(),
            self.jobs.synced(),
            self.cron_jobs.synced(),
            self.namespaces.synced(),
            self.accounts.synced(),
            self.config_maps.synced(),
            self.claims.synced(),
            self.volumes.synced(),
            self.classes.synced(),
            self.services.synced(),
            self.endpoints.synced(),
            self.slices.synced()
        );
    }
}

/// Whether a write failed because its object was deleted or changed. The cache shows that later.
fn is_stale(error: &kube::Error) -> bool {
    matches!(code(error), Some(404 | 409))
}

/// Runs all controllers until the process exits. `ca` is the CA certificate that pods use to verify the apiserver.
/// `directories` is where local volumes are created, with the name of this machine's node. `sign` signs certificates of
/// nodes, and `sign_token` signs tokens in Secrets. `ranges` are the pod ranges for nodes, and
/// `heartbeat_grace` is the maximum time of a node without heartbeats.
pub async fn run(
    client: Client,
    caches: Caches,
    ca: String,
    directories: Option<(PathBuf, String)>,
    (sign, sign_token): (Sign, SignToken),
    (ranges, heartbeat_grace): (PodRanges, Duration),
) {
    caches.synced().await;
    // One task per controller, so that a long reconciliation does not delay others. Dropping this
    // future cancels them. A panic of one stops the process.
    let mut all = JoinSet::new();
    let (c, o) = (|| client.clone(), || caches.clone());
    all.spawn(bootstrap::run(c()));
    all.spawn(certificates::run(c(), o(), sign));
    all.spawn(ipam::run(c(), o(), ranges));
    all.spawn(tokens::run(c(), o(), ca.clone(), sign_token));
    all.spawn(deployment::run(c(), o()));
    all.spawn(replicaset::run(c(), o()));
    all.spawn(job::run(c(), o()));
    all.spawn(cronjob::run(c(), o()));
    all.spawn(endpoints::run(c(), o()));
    all.spawn(garbage::run(c(), o()));
    all.spawn(attach::run(c(), o()));
    all.spawn(binder::run(c(), o(), directories));
    all.spawn(nodes::run(c(), o(), heartbeat_grace));
    all.spawn(namespace::run(c(), o(), ca));
    if let Some(Err(error)) = all.join_next().await {
        tracing::error!(%error, "a controller ended");
    }
}

/// Waits until a cache changes, or `most` has elapsed.
async fn any_change(receivers: &mut [watch::Receiver<u64>], most: Duration) {
    let waits = receivers.iter_mut().map(|r| Box::pin(r.changed()));
    // A cache lives as long as the controllers, so `changed` fails only when the process exits.
    let _ = tokio::time::timeout(most, futures::future::select_all(waits)).await;
}

/// The reference to the controlling owner.
fn controller_reference<K: Resource>(object: &K) -> Option<&OwnerReference> {
    let owners = object.meta().owner_references.as_deref()?;
    owners.iter().find(|o| o.controller == Some(true))
}

/// The uid of the controlling owner.
fn controller_of<K: Resource>(object: &K) -> Option<&str> {
    controller_reference(object).map(|o| o.uid.as_str())
}

/// The uid of the controlling owner as the value of an index.
fn uids_of_controller<K: Resource>(object: &K) -> Vec<String> {
    controller_of(object)
        .map(str::to_owned)
        .into_iter()
        .collect()
}

/// The uids of all owners as the values of an index.
fn uids_of_owners<K: Resource>(object: &K) -> Vec<String> {
    let owners = object.meta().owner_references.iter().flatten();
    owners.map(|o| o.uid.clone()).collect()
}

/// The namespace as the value of an index.
fn namespace_of<K: Resource>(object: &K) -> Vec<String> {
    object.meta().namespace.clone().into_iter().collect()
}

/// The namespace of an object without a controller as the value of an index.
fn namespace_if_free<K: Resource>(object: &K) -> Vec<String> {
    match controller_of(object) {
        None => namespace_of(object),
        Some(_) => vec![],
    }
}

/// Emits an event about an object; a repeated event only increases the count. Errors are
/// logged, because events must not block a controller.
pub(super) async fn event<K>(
    client: &Client,
    about: &K,
    kind: &str,
    api_version: &str,
    component: &str,
    reason: &str,
    message: String,
) where
    K: Resource,
{
    let warning =
        reason.starts_with("Failed") || reason.ends_with("Failed") || WARNINGS.contains(&reason);
    let meta = about.meta();
    let namespace = meta.namespace.clone().unwrap_or_else(|| "default".into());
    let now = super::api::object::now();
    let uid = meta.uid.as_deref().unwrap_or_default();
    let same = fnv64([uid, component, reason, &message].join("\n").bytes());
    let name = format!("{}.{same:016x}", meta.name.as_deref().unwrap_or_default());
    let event = serde_json::json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {"kind": kind, "apiVersion": api_version, "name": meta.name, "namespace": namespace, "uid": meta.uid, "resourceVersion": meta.resource_version},
        "reason": reason, "message": message, "type": if warning { "Warning" } else { "Normal" },
        "source": {"component": component}, "reportingComponent": component, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    });
    let api: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(client.clone(), &namespace);
    let sent = async {
        let event = serde_json::from_value(event).map_err(kube::Error::SerdeError)?;
        match api.create(&PostParams::default(), &event).await {
            Err(error) if code(&error) == Some(409) => {
                let count = api.get(&name).await?.count.unwrap_or(1);
                let again =
                    serde_json::json!({"count": count.saturating_add(1), "lastTimestamp": now});
                let patch = Patch::Merge(again);
                api.patch(&name, &PatchParams::default(), &patch).await
            }
            sent => sent,
        }
    };
    let sent: Result<_, kube::Error> = sent.await;
    if let Err(error) = sent {
        tracing::debug!(%error, reason, "writing an event failed");
    }
}
