//! The endpoints of services: EndpointSlices and Endpoints of services with a selector, and slices that mirror Endpoints
//! which users made for services without one (`pkg/controller/endpointslice`, `pkg/controller/endpoint`,
//! `pkg/controller/endpointslicemirroring`).
//!
//! A changed pod is mapped to the services whose selector matches its labels, so many pods with the same labels are one key.
//! An object is written only if its content changes. Slices of a deleted service are deleted by garbage collection.

mod desired;
mod legacy;
mod mirror;
mod slices;
mod topology;
mod trigger;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Endpoints, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};

use super::runtime::{Expectations, Keys, Next, unseen};
use super::{Caches, event, is_stale};
use desired::{has_endpoint, is_auto, is_ready, matches, selector};
use holdfast_kubeapi::Api;
use holdfast_kubeapi::cache::{Key, key};
use slices::{Changes, MANAGED_BY, SERVICE_NAME};
use topology::Capacities;
use trigger::Triggers;

/// Number of services reconciled concurrently. Concurrent writes share a sync of the store.
const WORKERS: usize = 16;
/// The label of a node with its zone.
const ZONE: &str = "topology.kubernetes.io/zone";

/// What to reconcile.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    /// The slices of a service with a selector.
    Slices(Key),
    /// The Endpoints object of a service with a selector.
    Legacy(Key),
    /// The slices that mirror an Endpoints object.
    Mirror(Key),
    /// A service that was deleted: its Endpoints object.
    Deleted(Key),
    /// The services that select pods with these labels in this namespace.
    Pods(String, BTreeMap<String, String>),
    /// The services of the pods on this node.
    Node(String),
    /// The services with hints in proportion to the processors of zones.
    Topology,
}

/// The values of the index of services: the first requirement of the selector.
pub(super) fn first_requirement(service: &Service) -> Vec<String> {
    let namespace = service.metadata.namespace.as_deref().unwrap_or_default();
    let first = selector(service).and_then(|s| s.first_key_value());
    first
        .map(|(key, value)| requirement(namespace, key, value))
        .into_iter()
        .collect()
}

/// The values of the index of pods that can be endpoints: all labels.
pub(super) fn requirements(pod: &Pod) -> Vec<String> {
    if !has_endpoint(pod) {
        return vec![];
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let labels = pod.labels().iter();
    labels
        .map(|(key, value)| requirement(namespace, key, value))
        .collect()
}

fn requirement(namespace: &str, key: &str, value: &str) -> String {
    format!("{namespace}/{key}={value}")
}

/// The value of the index of slices: namespace and name of the service.
pub(super) fn service_of(slice: &EndpointSlice) -> Vec<String> {
    let (namespace, service) = service_key(slice).unwrap_or_default();
    if service.is_empty() {
        return vec![];
    }
    vec![format!("{namespace}/{service}")]
}

fn service_key(slice: &EndpointSlice) -> Option<Key> {
    let service = slice.labels().get(SERVICE_NAME)?;
    Some((slice.namespace().unwrap_or_default(), service.clone()))
}

fn manager(slice: &EndpointSlice) -> Option<&str> {
    slice.labels().get(MANAGED_BY).map(String::as_str)
}

/// The attributes of a pod that endpoints depend on; `None` if it is no endpoint.
fn observed(pod: &Pod) -> Option<impl PartialEq> {
    let (spec, status) = (pod.spec.as_ref()?, pod.status.as_ref()?);
    has_endpoint(pod).then(|| {
        (
            &pod.metadata.uid,
            &pod.metadata.labels,
            (&spec.hostname, &spec.subdomain, &spec.node_name),
            (&status.pod_ip, &status.pod_ips),
            is_ready(pod),
            pod.metadata.deletion_timestamp.is_some(),
        )
    })
}

/// The work that a change of a pod requires.
fn work_of_pod(before: Option<&Pod>, after: Option<&Pod>) -> Vec<Work> {
    if before.and_then(observed) == after.and_then(observed) {
        return vec![];
    }
    let pods = before
        .into_iter()
        .chain(after)
        .filter(|pod| has_endpoint(pod));
    let work = pods.map(|pod| {
        let namespace = pod.namespace().unwrap_or_default();
        Work::Pods(namespace, pod.labels().clone())
    });
    let work: BTreeSet<Work> = work.collect();
    work.into_iter().collect()
}

/// The work that a change of a service requires.
fn work_of_service(before: Option<&Service>, after: Option<&Service>) -> Vec<Work> {
    let Some(service) = after.or(before) else {
        return vec![];
    };
    // A status, for example of a load balancer, has no influence.
    let observed = |service: &'_ Service| {
        let meta = &service.metadata;
        let deleted = meta.deletion_timestamp.is_some();
        let (labels, annotations) = (meta.labels.clone(), meta.annotations.clone());
        (
            meta.uid.clone(),
            deleted,
            labels,
            annotations,
            service.spec.clone(),
        )
    };
    if before.map(observed) == after.map(observed) {
        return vec![];
    }
    let key = key(service);
    let mut work = vec![
        Work::Slices(key.clone()),
        Work::Legacy(key.clone()),
        Work::Mirror(key.clone()),
    ];
    if after.is_none() {
        work.push(Work::Deleted(key));
    }
    work
}

/// The work that a change of a slice requires. A controller's own write wakes it if it waits for the write.
fn work_of_slice(before: Option<&EndpointSlice>, after: Option<&EndpointSlice>) -> Vec<Work> {
    let of = |slice: &EndpointSlice| {
        let key = service_key(slice)?;
        match manager(slice)? {
            slices::CONTROLLER => Some(Work::Slices(key)),
            mirror::CONTROLLER => Some(Work::Mirror(key)),
            _ => None,
        }
    };
    let work = before.into_iter().chain(after).filter_map(of);
    let work: BTreeSet<Work> = work.collect();
    work.into_iter().collect()
}

/// The work that a change of an Endpoints object requires.
fn work_of_endpoints(before: Option<&Endpoints>, after: Option<&Endpoints>) -> Vec<Work> {
    let Some(object) = after.or(before) else {
        return vec![];
    };
    let is_ours = [before, after]
        .into_iter()
        .flatten()
        .all(legacy::is_managed);
    // The objects of services with a selector are not mirrored.
    if is_ours {
        return vec![Work::Legacy(key(object))];
    }
    vec![Work::Legacy(key(object)), Work::Mirror(key(object))]
}

/// The work that a change of a node requires: its existence and its zone are part of endpoints.
fn work_of_node(before: Option<&Node>, after: Option<&Node>) -> Option<Work> {
    let zone = |node: &Node| node.labels().get(ZONE).cloned();
    let is_changed = before.map(zone) != after.map(zone);
    let node = after.or(before).filter(|_| is_changed)?;
    Some(Work::Node(node.name_any()))
}

/// The work that a change of a node's part in the processors of its zone requires.
fn work_of_capacity(before: Option<&Node>, after: Option<&Node>) -> Option<Work> {
    let is_changed = before.and_then(topology::observed) != after.and_then(topology::observed);
    is_changed.then_some(Work::Topology)
}

/// What the workers share.
struct Controller {
    client: Client,
    caches: Caches,
    keys: Arc<Keys<Work>>,
    /// Writes to slices that are not visible in the cache yet, by service; those of mirrored slices separately.
    slices: Expectations,
    mirrored: Expectations,
    legacy: Expectations,
    slice_triggers: Triggers,
    legacy_triggers: Triggers,
}

pub(super) async fn run(client: Client, caches: Caches) {
    let controller = Controller {
        client,
        keys: Keys::new(),
        slices: Expectations::of(&caches.slices),
        mirrored: Expectations::of(&caches.slices),
        legacy: Expectations::of(&caches.endpoints),
        slice_triggers: Triggers::default(),
        legacy_triggers: Triggers::default(),
        caches,
    };
    let (keys, caches) = (&controller.keys, &controller.caches);
    keys.watch(&caches.services, work_of_service);
    keys.watch(&caches.pods, work_of_pod);
    keys.watch(&caches.nodes, work_of_node);
    keys.watch(&caches.nodes, work_of_capacity);
    keys.watch(&caches.slices, work_of_slice);
    keys.watch(&caches.endpoints, work_of_endpoints);
    keys.work(WORKERS, |work| controller.turn(work)).await;
}

impl Controller {
    async fn turn(&self, work: Work) -> Next {
        match work {
            Work::Slices(service) => self.reconcile_slices(&service).await,
            Work::Legacy(service) => self.reconcile_legacy(&service).await,
            Work::Mirror(service) => self.reconcile_mirror(&service).await,
            Work::Deleted(service) => self.delete_endpoints(&service).await,
            Work::Pods(namespace, labels) => {
                self.queue_services(&namespace, &labels);
                Next::Done
            }
            Work::Topology => {
                let services = self.caches.services.list();
                for service in services.iter().filter(|s| is_auto(s)) {
                    self.keys.add(Work::Slices(key(&**service)));
                }
                Next::Done
            }
            Work::Node(node) => {
                let pods = self.caches.pods_on.get(&node);
                let pods = pods.iter().filter(|pod| has_endpoint(pod));
                let labels = pods.map(|pod| (pod.namespace().unwrap_or_default(), pod.labels()));
                let labels: BTreeSet<_> = labels.collect();
                for (namespace, labels) in labels {
                    self.queue_services(&namespace, labels);
                }
                Next::Done
            }
        }
    }

    /// Queues the services that select pods with these labels.
    fn queue_services(&self, namespace: &str, labels: &BTreeMap<String, String>) {
        for (label, value) in labels {
            let index = &self.caches.services_by_requirement;
            for service in index.get(&requirement(namespace, label, value)) {
                if selector(&service).is_some_and(|s| matches(s, labels)) {
                    self.keys.add(Work::Slices(key(&*service)));
                    self.keys.add(Work::Legacy(key(&*service)));
                }
            }
        }
    }

    /// The service, if its endpoints are its pods, and these pods.
    fn selected(&self, (namespace, name): &Key) -> Option<(Arc<Service>, Vec<Arc<Pod>>)> {
        let service = self.caches.services.get(namespace, name)?;
        let wanted = selector(&service)?;
        let (label, value) = wanted.first_key_value()?;
        let index = &self.caches.pods_by_label;
        let mut pods = index.get(&requirement(namespace, label, value));
        pods.retain(|pod| matches(wanted, pod.labels()));
        Some((Arc::clone(&service), pods))
    }

    /// The slices of a service that this manager writes.
    fn slices_of(&self, (namespace, name): &Key, of: &str) -> Vec<Arc<EndpointSlice>> {
        let mut slices = self.caches.slices_of.get(&format!("{namespace}/{name}"));
        slices.retain(|slice| manager(slice) == Some(of));
        slices
    }

    async fn reconcile_slices(&self, service: &Key) -> Next {
        if let Some(left) = unseen([&self.slices], service) {
            // The change that shows the write queues the service again.
            return Next::After(left);
        }
        if self.caches.services.get(&service.0, &service.1).is_none() {
            self.slices.forget(service);
            self.slice_triggers.forget(service);
            return Next::Done;
        }
        let Some((found, pods)) = self.selected(service) else {
            return Next::Done;
        };
        let existing = self.slices_of(service, slices::CONTROLLER);
        let trigger = self.slice_triggers.next(service, &found, &pods);
        let zone_of = |node: &str| {
            let node = self.caches.nodes.get("", node)?;
            Some(node.labels().get(ZONE).cloned())
        };
        let nodes = is_auto(&found).then(|| self.caches.nodes.list());
        let capacities = nodes.and_then(|nodes| Capacities::of(nodes.iter().map(|n| &**n)));
        let capacities = capacities.as_ref();
        let changes = slices::plan(&found, &pods, &existing, zone_of, capacities, trigger);
        let Err(error) = self.write(service, changes, &self.slices).await else {
            return Next::Done;
        };
        let message = format!(
            "Error updating Endpoint Slices for Service {}/{}: {error}",
            service.0, service.1
        );
        let reason = "FailedToUpdateEndpointSlices";
        let component = "endpoint-slice-controller";
        event(
            &self.client,
            &*found,
            "Service",
            "v1",
            component,
            reason,
            message,
        )
        .await;
        Next::Retry
    }

    /// Writes slices. Conflicts are no error: the cache will show the reason and queue the service again. Neither is a
    /// namespace that is being deleted.
    async fn write(
        &self,
        service: &Key,
        changes: Changes,
        expected: &Expectations,
    ) -> Result<(), kube::Error> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &service.0);
        let parameters = PostParams::default();
        let creations = changes
            .create
            .iter()
            .map(|slice| api.create(&parameters, slice));
        let created = futures::future::join_all(creations).await;
        let names: Vec<String> = changes.update.iter().map(|s| s.name_any()).collect();
        let updates = changes.update.iter().zip(&names);
        let updates = updates.map(|(slice, name)| api.replace(name, &parameters, slice));
        let updated = futures::future::join_all(updates).await;
        let mut failure = None;
        for result in created.into_iter().chain(updated) {
            match result {
                Ok(slice) => expected.record(service, &slice),
                Err(error) if is_stale(&error) || is_terminating(&error) => {}
                Err(error) => failure = Some(error),
            }
        }
        for slice in changes.delete {
            let parameters = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: slice.uid(),
                    resource_version: None,
                }),
                ..DeleteParams::background()
            };
            match api.delete(&slice.name_any(), &parameters).await {
                Ok(_) => {}
                Err(error) if is_stale(&error) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    async fn reconcile_legacy(&self, service: &Key) -> Next {
        if let Some(left) = unseen([&self.legacy], service) {
            return Next::After(left);
        }
        let (namespace, name) = service;
        let current = self.caches.endpoints.get(namespace, name);
        if self.caches.services.get(namespace, name).is_none() {
            self.legacy.forget(service);
            self.legacy_triggers.forget(service);
            // Left behind if the service was deleted while no controller ran.
            return match current.is_some_and(|e| legacy::is_managed(&e)) {
                true => self.delete_endpoints(service).await,
                false => Next::Done,
            };
        }
        let Some((found, pods)) = self.selected(service) else {
            return Next::Done;
        };
        let trigger = self.legacy_triggers.next(service, &found, &pods);
        let Some(new) = legacy::plan(&found, &pods, current.as_deref(), trigger) else {
            return Next::Done;
        };
        let api: Api<Endpoints> = Api::namespaced(self.client.clone(), namespace);
        let parameters = PostParams::default();
        let (written, reason) = match current {
            Some(_) => {
                let written = api.replace(name, &parameters, &new).await;
                (written, "FailedToUpdateEndpoint")
            }
            None => (
                api.create(&parameters, &new).await,
                "FailedToCreateEndpoint",
            ),
        };
        match written {
            Ok(written) => self.legacy.record(service, &written),
            Err(error) if is_stale(&error) || is_terminating(&error) => {}
            Err(error) => {
                let message = format!("writing Endpoints {namespace}/{name} failed: {error}");
                let component = legacy::CONTROLLER;
                event(
                    &self.client,
                    &new,
                    "Endpoints",
                    "v1",
                    component,
                    reason,
                    message,
                )
                .await;
                return Next::Retry;
            }
        }
        Next::Done
    }

    /// Deletes the Endpoints object of a service that does not exist, also one that a user made.
    async fn delete_endpoints(&self, service: &Key) -> Next {
        let (namespace, name) = service;
        let Some(current) = self.caches.endpoints.get(namespace, name) else {
            return Next::Done;
        };
        let is_lock = current.annotations().contains_key(mirror::LEADER);
        if is_lock || self.caches.services.get(namespace, name).is_some() {
            return Next::Done;
        }
        let api: Api<Endpoints> = Api::namespaced(self.client.clone(), namespace);
        let mut parameters = DeleteParams::background();
        parameters.preconditions = Some(Preconditions {
            uid: current.uid(),
            resource_version: None,
        });
        match api.delete(name, &parameters).await {
            Ok(_) => Next::Done,
            Err(error) if is_stale(&error) => Next::Done,
            Err(error) => {
                tracing::debug!(%error, namespace, name, "deleting Endpoints failed, retrying");
                Next::Retry
            }
        }
    }

    async fn reconcile_mirror(&self, service: &Key) -> Next {
        if let Some(left) = unseen([&self.mirrored], service) {
            return Next::After(left);
        }
        let (namespace, name) = service;
        let existing = self.slices_of(service, mirror::CONTROLLER);
        let found = self.caches.services.get(namespace, name);
        let endpoints = self.caches.endpoints.get(namespace, name);
        let is_custom = found.is_some_and(|service| mirror::is_custom(&service));
        let endpoints = endpoints.filter(|e| is_custom && mirror::is_mirrored(e));
        let changes = match endpoints {
            Some(endpoints) => mirror::plan(&endpoints, &existing),
            None => Changes {
                delete: existing,
                ..Changes::default()
            },
        };
        match self.write(service, changes, &self.mirrored).await {
            Ok(()) => Next::Done,
            Err(error) => {
                tracing::debug!(%error, namespace, name, "mirroring Endpoints failed, retrying");
                Next::Retry
            }
        }
    }
}

/// Whether a creation failed because its namespace is being deleted.
fn is_terminating(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else {
        return false;
    };
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .into_iter()
        .any(|cause| cause.reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parsed<T: serde::de::DeserializeOwned>(object: Value) -> T {
        serde_json::from_value(object).expect("an object")
    }

    fn pod(more: Value) -> Pod {
        let mut pod = json!({"metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}},
            "spec": {"nodeName": "n1", "containers": []}, "status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]}});
        json_patch::merge(&mut pod, &more);
        parsed(pod)
    }

    fn shown(work: impl IntoIterator<Item = Work>) -> String {
        let one = |work| match work {
            Work::Slices((_, name)) => format!("slices {name}"),
            Work::Legacy((_, name)) => format!("legacy {name}"),
            Work::Mirror((_, name)) => format!("mirror {name}"),
            Work::Deleted((_, name)) => format!("deleted {name}"),
            Work::Pods(_, labels) => {
                format!("pods {}", labels.values().cloned().collect::<String>())
            }
            Work::Node(name) => format!("node {name}"),
            Work::Topology => "topology".to_owned(),
        };
        let all: Vec<String> = work.into_iter().map(one).collect();
        all.join(", ")
    }

    #[test]
    fn only_changes_that_endpoints_depend_on_are_work() {
        let plain = || Some(pod(json!({})));
        let with = |more: Value| Some(pod(more));
        let labelled = || with(json!({"metadata": {"labels": {"a": "c"}}}));
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
        let pending = || with(json!({"status": {"podIP": null, "podIPs": null}}));
        for (before, after, expected) in [
            (None, plain(), "pods b"),
            (plain(), None, "pods b"),
            (plain(), plain(), ""),
            (
                plain(),
                with(json!({"metadata": {"annotations": {"k": "v"}}})),
                "",
            ),
            (
                plain(),
                with(json!({"status": {"startTime": "2026-01-01T00:00:00Z"}})),
                "",
            ),
            (plain(), with(ready), "pods b"),
            (plain(), labelled(), "pods b, pods c"),
            (None, pending(), ""),
            (pending(), plain(), "pods b"),
            (
                plain(),
                with(json!({"status": {"phase": "Failed"}})),
                "pods b",
            ),
        ] {
            let work = work_of_pod(before.as_ref(), after.as_ref());
            assert_eq!(shown(work), expected, "{before:?} {after:?}");
        }
    }

    #[test]
    fn changes_of_other_kinds_are_work_for_their_service() {
        let service = |more: Value| -> Service {
            let mut service = json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"selector": {"a": "b"}}});
            json_patch::merge(&mut service, &more);
            parsed(service)
        };
        let status =
            service(json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}));
        let plain = service(json!({}));
        assert_eq!(shown(work_of_service(Some(&plain), Some(&status))), "");
        let all = "slices s, legacy s, mirror s";
        assert_eq!(shown(work_of_service(None, Some(&plain))), all);
        let deleted = format!("{all}, deleted s");
        assert_eq!(shown(work_of_service(Some(&plain), None)), deleted);
        let slice = |manager: &str| -> EndpointSlice {
            parsed(
                json!({"metadata": {"name": "x", "namespace": "n", "labels": {SERVICE_NAME: "s", MANAGED_BY: manager}}, "addressType": "IPv4"}),
            )
        };
        let (own, other) = (slice(slices::CONTROLLER), slice("someone.example"));
        assert_eq!(shown(work_of_slice(Some(&own), Some(&own))), "slices s");
        assert_eq!(shown(work_of_slice(Some(&own), Some(&other))), "slices s");
        assert_eq!(shown(work_of_slice(None, Some(&other))), "");
        let mirrored = slice(mirror::CONTROLLER);
        assert_eq!(shown(work_of_slice(Some(&mirrored), None)), "mirror s");
        let endpoints = |manager: &str| -> Endpoints {
            parsed(
                json!({"metadata": {"name": "s", "namespace": "n", "labels": {legacy::MANAGED_BY: manager}}}),
            )
        };
        let own = endpoints(legacy::CONTROLLER);
        assert_eq!(shown(work_of_endpoints(None, Some(&own))), "legacy s");
        let custom = endpoints("");
        let both = "legacy s, mirror s";
        assert_eq!(shown(work_of_endpoints(Some(&own), Some(&custom))), both);
        let node = |zone: &str| -> Node {
            parsed(json!({"metadata": {"name": "n1", "labels": {ZONE: zone}}}))
        };
        assert_eq!(shown(work_of_node(None, Some(&node("a")))), "node n1");
        assert_eq!(shown(work_of_node(Some(&node("a")), Some(&node("a")))), "");
        assert_eq!(
            shown(work_of_node(Some(&node("a")), Some(&node("b")))),
            "node n1"
        );
        let with = |processors: &str, heartbeat: &str| -> Node {
            let ready = json!({"type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat});
            parsed(
                json!({"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": processors}, "conditions": [ready]}}),
            )
        };
        let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:10Z");
        let of = |after: Node| shown(work_of_capacity(Some(&with("1", early)), Some(&after)));
        assert_eq!(of(with("1", late)), "");
        assert_eq!(of(with("2", early)), "topology");
        assert_eq!(of(node("a")), "topology", "it is not ready");
    }

    #[test]
    fn pods_and_services_are_indexed_by_requirements() {
        let service = |selector: Value| -> Service {
            parsed(
                json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"selector": selector}}),
            )
        };
        assert_eq!(
            first_requirement(&service(json!({"c": "d", "a": "b"}))),
            ["n/a=b"]
        );
        assert_eq!(first_requirement(&service(json!({}))), [""; 0]);
        assert_eq!(first_requirement(&service(Value::Null)), [""; 0]);
        let two = json!({"metadata": {"labels": {"c": "d"}}});
        assert_eq!(requirements(&pod(two)), ["n/a=b", "n/c=d"]);
        let ended = json!({"status": {"phase": "Succeeded"}});
        assert_eq!(requirements(&pod(ended)), [""; 0]);
    }
}
