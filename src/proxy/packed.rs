//! Objects as a cache keeps them here: encoded, and without fields that neither the data plane nor DNS reads. A decoded
//! EndpointSlice takes several hundred bytes for each endpoint, an encoded one about a hundred, and decoding one service's
//! slices takes microseconds.

use std::borrow::Cow;
use std::marker::PhantomData;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Namespace, Pod, PodSpec, PodStatus, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};

/// The label of a slice with the name of its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// When the change of a Service or a pod happened that caused the last change of a slice (`v1.EndpointsLastChangeTriggerTime`).
const TRIGGER: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// The annotations of a Service that a data plane reads (`v1.AnnotationTopologyMode`). Others may have 100 KiB.
const TOPOLOGY: [&str; 2] = [
    "service.kubernetes.io/topology-mode",
    "service.kubernetes.io/topology-aware-hints",
];

/// A kind that can be packed.
pub(crate) trait Pack: Resource<DynamicType = ()> + DeserializeOwned + Serialize {
    /// Removes what no reader uses.
    fn slim(&mut self);

    /// The name of the Service that the object describes; empty if there is none.
    fn service(&self) -> String;
}

/// An encoded object of kind `K`.
pub(crate) struct Packed<K> {
    /// Name, namespace, uid and resource version.
    meta: ObjectMeta,
    /// The name of the Service that the object describes, in the object's namespace.
    pub(crate) service: Box<str>,
    /// When the object's cause happened; `None` without the annotation.
    pub(crate) trigger: Option<Timestamp>,
    encoded: Box<[u8]>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Pack> Packed<K> {
    /// Packs an object.
    pub(crate) fn new(mut object: K) -> Result<Packed<K>, serde_json::Error> {
        let meta = object.meta();
        let kept = ObjectMeta {
            name: meta.name.clone(),
            namespace: meta.namespace.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            ..ObjectMeta::default()
        };
        let annotations = meta.annotations.as_ref();
        let trigger = annotations.and_then(|all| all.get(TRIGGER)?.parse().ok());
        let service = object.service().into_boxed_str();
        object.slim();
        let meta = object.meta_mut();
        if let Some(annotations) = &mut meta.annotations {
            annotations.retain(|name, _| TOPOLOGY.contains(&name.as_str()));
        }
        meta.managed_fields = None;
        (meta.owner_references, meta.finalizers) = (None, None);
        let encoded = serde_json::to_vec(&object)?.into_boxed_slice();
        Ok(Packed {
            meta: kept,
            service,
            trigger,
            encoded,
            kind: PhantomData,
        })
    }

    /// Decodes the object.
    pub(crate) fn unpack(&self) -> Result<K, serde_json::Error> {
        serde_json::from_slice(&self.encoded)
    }
}

impl<'de, K: Pack> Deserialize<'de> for Packed<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Packed<K>, D::Error> {
        Packed::new(K::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<K: Pack> Resource for Packed<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind(of: &()) -> Cow<'_, str> {
        K::kind(of)
    }

    fn group(of: &()) -> Cow<'_, str> {
        K::group(of)
    }

    fn version(of: &()) -> Cow<'_, str> {
        K::version(of)
    }

    fn plural(of: &()) -> Cow<'_, str> {
        K::plural(of)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

impl Pack for Service {
    fn slim(&mut self) {
        if let Some(status) = &mut self.status {
            status.conditions = None;
        }
    }

    fn service(&self) -> String {
        self.metadata.name.clone().unwrap_or_default()
    }
}

impl Pack for EndpointSlice {
    fn slim(&mut self) {
        for endpoint in self.endpoints.iter_mut().flatten() {
            (endpoint.target_ref, endpoint.deprecated_topology) = (None, None);
        }
    }

    fn service(&self) -> String {
        let labels = self.metadata.labels.as_ref();
        labels
            .and_then(|l| l.get(SERVICE_NAME))
            .cloned()
            .unwrap_or_default()
    }
}

impl Pack for Namespace {
    fn slim(&mut self) {
        (self.spec, self.status) = (None, None);
    }

    fn service(&self) -> String {
        String::new()
    }
}

impl Pack for Pod {
    fn slim(&mut self) {
        self.spec = self.spec.take().map(|spec| PodSpec {
            node_name: spec.node_name,
            host_network: spec.host_network,
            containers: with_ports(spec.containers),
            init_containers: spec.init_containers.map(with_ports),
            ..PodSpec::default()
        });
        self.status = self.status.take().map(|status| PodStatus {
            phase: status.phase,
            pod_ip: status.pod_ip,
            pod_ips: status.pod_ips,
            ..PodStatus::default()
        });
    }

    fn service(&self) -> String {
        String::new()
    }
}

/// The named ports of containers.
fn with_ports(containers: Vec<Container>) -> Vec<Container> {
    let slim = |container: Container| Container {
        ports: container.ports,
        restart_policy: container.restart_policy,
        ..Container::default()
    };
    let has_ports = |container: &Container| container.ports.is_some();
    containers.into_iter().map(slim).filter(has_ports).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_slice_keeps_what_is_read_and_nothing_else() {
        let endpoint = json!({"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": true, "terminating": false},
            "hostname": "a", "nodeName": "n", "zone": "z", "hints": {"forZones": [{"name": "z"}]},
            "targetRef": {"kind": "Pod", "name": "p", "namespace": "d", "uid": "u"}});
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "web-x", "namespace": "d", "uid": "u", "resourceVersion": "7", "labels": {SERVICE_NAME: "web"},
                "annotations": {TRIGGER: "2026-11-29T17:00:00Z", "other": "x".repeat(1000)}, "ownerReferences": []},
            "endpoints": [endpoint], "ports": [{"name": "http", "port": 80, "protocol": "TCP"}]});
        let packed: Packed<EndpointSlice> = serde_json::from_value(slice).expect("a slice");
        assert_eq!(&*packed.service, "web");
        assert_eq!(
            packed.trigger,
            Some("2026-11-29T17:00:00Z".parse().expect("a time"))
        );
        assert_eq!(packed.meta().resource_version.as_deref(), Some("7"));
        assert!(packed.encoded.len() < 500, "{}", packed.encoded.len());
        let slice = packed.unpack().expect("a slice");
        let endpoint = &slice.endpoints.as_ref().expect("endpoints")[0];
        assert!(endpoint.target_ref.is_none() && slice.metadata.annotations == Some([].into()));
        assert_eq!(endpoint.hostname.as_deref(), Some("a"));
        assert_eq!(endpoint.zone.as_deref(), Some("z"));
        assert!(endpoint.hints.is_some());
        assert!(slice.metadata.labels.is_some());
    }

    #[test]
    fn what_is_not_a_slice_is_refused() {
        let text = json!({"apiVersion": "v1", "kind": "Service", "metadata": {}});
        assert!(serde_json::from_value::<Packed<EndpointSlice>>(text).is_err());
    }
}
