//! The node authoriser: a node may access only the objects that its pods refer to
//! (`plugin/pkg/auth/authorizer/node/graph.go`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::auth::Attributes;
use super::object::text;
use crate::store::{Change, Event, Store};
use holdfast_core::lock::lock;
use holdfast_core::{
    meta,
    node::claims as resource_claims,
    pod::{self, references},
    volume::claims,
};

/// The objects in a pod's namespace to which the pod refers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Edges {
    node: String,
    account: String,
    config_maps: BTreeSet<String>,
    secrets: BTreeSet<String>,
    claims: BTreeSet<String>,
    resource_claims: BTreeSet<String>,
}

/// Annotation of mirror pods.
const MIRROR: &str = "kubernetes.io/config.mirror";

fn edges(pod: &Pod) -> Edges {
    let spec = pod::spec(pod);
    let node = spec.node_name.clone().unwrap_or_default();
    // A node creates mirror pods itself, so a mirror pod must not grant access to anything (upstream's `AddPod`).
    if meta::annotations(pod).contains_key(MIRROR) {
        return Edges {
            node,
            ..Edges::default()
        };
    }
    let mut refers = references::of(pod);
    refers.secrets.append(&mut refers.pull_secrets);
    refers.secrets.append(&mut refers.storage_secrets);
    Edges {
        node,
        account: spec.service_account_name.clone().unwrap_or_default(),
        config_maps: refers.config_maps,
        secrets: refers.secrets,
        claims: claims::of_pod(pod)
            .into_iter()
            .map(|(_, name)| name)
            .collect(),
        // A claim that is not created from its template yet cannot be read.
        resource_claims: resource_claims::references(pod)
            .unwrap_or_default()
            .into_iter()
            .map(|reference| reference.name)
            .collect(),
    }
}

/// The Secrets that a node reads for a persistent volume, as namespace and name (upstream's `VisitPVSecretNames`). The
/// Secrets of a CSI controller are left out.
fn secrets_of_volume(volume: &Value) -> Vec<(&str, &str)> {
    let filled = |path: &[&str]| text(volume, path).filter(|t| !t.is_empty());
    let claim = text(volume, &["spec", "claimRef", "namespace"]).unwrap_or_default();
    let mut found = vec![];
    if let Some(name) = filled(&["spec", "azureFile", "secretName"]) {
        let namespace = filled(&["spec", "azureFile", "secretNamespace"]);
        found.push((namespace.unwrap_or(claim), name));
    }
    for (source, key, default) in [
        ("cephfs", "secretRef", claim),
        ("cinder", "secretRef", ""),
        ("flexVolume", "secretRef", claim),
        ("rbd", "secretRef", claim),
        ("scaleIO", "secretRef", claim),
        ("iscsi", "secretRef", claim),
        ("storageos", "secretRef", ""),
        ("csi", "nodePublishSecretRef", ""),
        ("csi", "nodeStageSecretRef", ""),
        ("csi", "nodeExpandSecretRef", ""),
    ] {
        if let Some(name) = filled(&["spec", source, key, "name"]) {
            let namespace = filled(&["spec", source, key, "namespace"]);
            found.push((namespace.unwrap_or(default), name));
        }
    }
    found
}

/// Key prefix of pods in the store.
const PODS: &str = "pods/";

/// The graph. Each request of a node first applies the few changes since the previous one.
#[derive(Default)]
pub(crate) struct Graph(Mutex<PodEdges>);

/// The state of all pods.
#[derive(Default)]
struct PodEdges {
    /// The revision up to which changes are applied; `None` before the first request.
    position: Option<u64>,
    /// The node of each pod, by the pod's key.
    nodes: HashMap<Arc<str>, String>,
    /// The edges of each node's pods, by node and pod key.
    edges: HashMap<String, BTreeMap<Arc<str>, Arc<Edges>>>,
}

impl PodEdges {
    /// Stores the current state of a pod: `None` if it was deleted or cannot be decoded.
    fn update_pod(&mut self, key: &Arc<str>, pod: Option<&Pod>) {
        if let Some(node) = self.nodes.remove(key)
            && let Some(pods) = self.edges.get_mut(&node)
        {
            pods.remove(key);
            if pods.is_empty() {
                self.edges.remove(&node);
            }
        }
        let Some(own) = pod.map(edges).filter(|own| !own.node.is_empty()) else {
            return;
        };
        self.nodes.insert(Arc::clone(key), own.node.clone());
        let pods = self.edges.entry(own.node.clone()).or_default();
        pods.insert(Arc::clone(key), Arc::new(own));
    }

    fn catch_up(&mut self, store: &Store) {
        let changes = self.position.map(|p| store.changes(p, PODS, usize::MAX));
        let Some(Ok((events, complete))) = changes else {
            // On the first request, and if the history that is needed is compacted: read all pods.
            *self = PodEdges::default();
            let (pods, revision) = store.list(PODS);
            for (key, record) in pods {
                self.update_pod(&key, serde_json::from_slice(&record.value).ok().as_ref());
            }
            self.position = Some(revision);
            return;
        };
        let newest: HashMap<&Arc<str>, &Event> =
            events.iter().map(|event| (&event.key, &**event)).collect();
        for (key, event) in newest {
            let pod = (event.change == Change::Put)
                .then(|| serde_json::from_slice(&event.record.value).ok())
                .flatten();
            self.update_pod(key, pod.as_ref());
        }
        self.position = Some(complete);
    }
}

impl Graph {
    /// The edges of a node's pods in a namespace.
    fn of(&self, store: &Store, node: &str, namespace: &str) -> Vec<Arc<Edges>> {
        let prefix = match namespace {
            "" => PODS.to_owned(),
            namespace => format!("{PODS}{namespace}/"),
        };
        let mut all = lock(&self.0);
        all.catch_up(store);
        let pods = all.edges.get(node).into_iter().flatten();
        pods.filter(|(key, _)| key.starts_with(&prefix))
            .map(|(_, own)| Arc::clone(own))
            .collect()
    }

    /// Whether the requested object is related to the node. Kinds without such a relation are always allowed.
    #[must_use]
    pub(crate) fn is_related(
        &self,
        store: &Store,
        node: &str,
        attributes: &Attributes<'_>,
    ) -> bool {
        let any = |fits: &dyn Fn(&Edges) -> bool| {
            self.of(store, node, attributes.namespace)
                .iter()
                .any(|edges| fits(edges))
        };
        // Without a namespace, the name would match in all namespaces.
        let named = !attributes.name.is_empty();
        let one = named && !attributes.namespace.is_empty();
        match (attributes.resource, attributes.sub) {
            ("configmaps", "") => one && any(&|e| e.config_maps.contains(attributes.name)),
            ("secrets", "") => {
                one && (any(&|e| e.secrets.contains(attributes.name))
                    || self.is_of_a_volume(store, node, attributes))
            }
            ("serviceaccounts", "" | "token") => one && any(&|e| e.account == attributes.name),
            ("persistentvolumeclaims", "" | "status") => {
                one && any(&|e| e.claims.contains(attributes.name))
            }
            ("resourceclaims", "") => one && any(&|e| e.resource_claims.contains(attributes.name)),
            ("persistentvolumes", "") => {
                named
                    && self.has_volume(
                        store,
                        node,
                        &object(store, &format!("persistentvolumes/{}", attributes.name)),
                    )
            }
            ("volumeattachments", "") => {
                let attachment = object(store, &format!("volumeattachments/{}", attributes.name));
                named && attachment.is_none_or(|a| text(&a, &["spec", "nodeName"]) == Some(node))
            }
            // If the pod does not exist, the request is allowed and gets a 404.
            ("pods", "status" | "eviction") => is_own_pod(store, node, attributes),
            ("pods", "") if matches!(attributes.verb, "get" | "delete") => {
                is_own_pod(store, node, attributes)
            }
            ("podcertificaterequests", "") if one => {
                let key = format!(
                    "podcertificaterequests/{}/{}",
                    attributes.namespace, attributes.name
                );
                object(store, &key).is_none_or(|r| text(&r, &["spec", "nodeName"]) == Some(node))
            }
            _ => true,
        }
    }

    fn has_volume(&self, store: &Store, node: &str, volume: &Option<Value>) -> bool {
        let claim = volume.as_ref().and_then(|v| {
            Some((
                text(v, &["spec", "claimRef", "namespace"])?,
                text(v, &["spec", "claimRef", "name"])?,
            ))
        });
        claim.is_some_and(|(namespace, name)| {
            self.of(store, node, namespace)
                .iter()
                .any(|e| e.claims.contains(name))
        })
    }

    /// Whether a Secret belongs to a persistent volume that the node mounts.
    fn is_of_a_volume(&self, store: &Store, node: &str, attributes: &Attributes<'_>) -> bool {
        let volumes = store
            .list("persistentvolumes/")
            .0
            .into_iter()
            .filter_map(|(_, r)| serde_json::from_slice::<Value>(&r.value).ok());
        let refers = |volume: &Value| {
            secrets_of_volume(volume).contains(&(attributes.namespace, attributes.name))
        };
        volumes
            .filter(refers)
            .any(|volume| self.has_volume(store, node, &Some(volume)))
    }
}

fn object(store: &Store, key: &str) -> Option<Value> {
    serde_json::from_slice(&store.get(key)?.value).ok()
}

fn is_own_pod(store: &Store, node: &str, attributes: &Attributes<'_>) -> bool {
    object(
        store,
        &format!("pods/{}/{}", attributes.namespace, attributes.name),
    )
    .is_none_or(|pod| text(&pod, &["spec", "nodeName"]) == Some(node))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn edges_of(spec: &Value, annotations: &Value) -> Edges {
        let mut whole = json!({"nodeName": "here", "containers": []});
        json_patch::merge(&mut whole, spec);
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "annotations": annotations}, "spec": whole});
        edges(&serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_bound_pod_grants_its_node_access_to_its_references() {
        let own = edges_of(
            &json!({"serviceAccountName": "s", "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "c", "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]}],
            "volumes": [{"name": "a", "secret": {"secretName": "t"}}, {"name": "b", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "u"}}},
                {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}}, {"name": "e", "ephemeral": {}}],
            "resourceClaims": [{"name": "r", "resourceClaimName": "device"}]}),
            &Value::Null,
        );
        let names = |list: &[&str]| {
            list.iter()
                .map(|n| (*n).to_owned())
                .collect::<BTreeSet<String>>()
        };
        assert_eq!((own.node.as_str(), own.account.as_str()), ("here", "s"));
        assert_eq!(own.secrets, names(&["pull", "t", "u"]));
        assert_eq!(
            (own.config_maps, own.claims),
            (names(&["m"]), names(&["claim", "p-e"]))
        );
        assert_eq!(own.resource_claims, names(&["device"]));
    }

    /// A bound pod grants its node access to all its references; the same pod as a mirror grants none.
    #[test]
    fn a_mirror_pod_grants_its_node_no_access() {
        for (spec, kind) in references::every::every_reference() {
            let mirror = edges_of(&spec, &json!({MIRROR: "h"}));
            let nothing = Edges {
                node: "here".into(),
                ..Edges::default()
            };
            assert_eq!(mirror, nothing, "{spec}");
            let bound = edges_of(&spec, &Value::Null);
            // No edge exists for kinds that all nodes can read and for unnamed objects. The deprecated `serviceAccount`
            // is copied to `serviceAccountName` on creation, so it has no edge either.
            let has_edge = matches!(kind, "secrets" | "configmaps" | "resourceclaims")
                || kind.starts_with("persistentvolumeclaims")
                || (kind == "serviceaccounts" && spec.get("serviceAccount").is_none());
            assert_eq!(
                bound != nothing,
                has_edge || kind.ends_with("map volumes)"),
                "{spec}"
            );
        }
    }

    #[test]
    fn volume_secrets_are_looked_up_in_their_own_namespace() {
        let of = |source: Value| {
            let mut spec = json!({"claimRef": {"namespace": "claims", "name": "c"}});
            json_patch::merge(&mut spec, &source);
            let volume = json!({"spec": spec});
            secrets_of_volume(&volume)
                .into_iter()
                .map(|(namespace, name)| format!("{namespace}/{name}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        let (bare, full) = (json!({"name": "s"}), json!({"name": "s", "namespace": "n"}));
        for source in ["cephfs", "flexVolume", "rbd", "scaleIO", "iscsi"] {
            assert_eq!(
                of(json!({source: {"secretRef": bare}})),
                "claims/s",
                "{source}"
            );
            assert_eq!(of(json!({source: {"secretRef": full}})), "n/s", "{source}");
        }
        for source in ["cinder", "storageos"] {
            assert_eq!(of(json!({source: {"secretRef": full}})), "n/s", "{source}");
        }
        assert_eq!(of(json!({"azureFile": {"secretName": "s"}})), "claims/s");
        assert_eq!(
            of(json!({"azureFile": {"secretName": "s", "secretNamespace": "n"}})),
            "n/s"
        );
        for key in [
            "nodePublishSecretRef",
            "nodeStageSecretRef",
            "nodeExpandSecretRef",
        ] {
            assert_eq!(of(json!({"csi": {key: full}})), "n/s", "{key}");
        }
        for key in ["controllerPublishSecretRef", "controllerExpandSecretRef"] {
            assert_eq!(of(json!({"csi": {key: full}})), "", "{key}");
        }
    }

    /// The graph follows pods that are created, bound, changed and deleted without reading all pods again.
    #[tokio::test]
    async fn the_graph_is_updated_when_pods_change() {
        use crate::store::{Bytes, Change, Expect, Write};
        let (store, graph) = (Store::in_memory(), Graph::default());
        let attributes = |namespace, name| Attributes {
            verb: "get",
            resource: "secrets",
            namespace,
            name,
            ..Attributes::default()
        };
        let can_read = |node: &str, namespace: &'static str, name: &'static str| {
            graph.is_related(&store, node, &attributes(namespace, name))
        };
        let write = async |key: &str, at: Option<u64>, pod: Option<(&str, &str)>| {
            let (node, secret) = pod.unwrap_or_default();
            let object = json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": [],
                "volumes": [{"name": "a", "secret": {"secretName": secret}}]}});
            let write = Write {
                key: key.into(),
                expect: at.map_or(Expect::Absent, Expect::Revision),
                requires: None,
                change: if pod.is_some() {
                    Change::Put
                } else {
                    Change::Delete
                },
                render: Box::new(move |_| Bytes::from(object.to_string())),
                attrs: Arc::default(),
            };
            store.write(write).await.expect("written").revision
        };
        assert!(!can_read("a", "n", "s"));
        let first = write("pods/n/p", None, Some(("", "s"))).await;
        assert!(!can_read("a", "n", "s"), "not bound yet");
        let second = write("pods/n/p", Some(first), Some(("a", "s"))).await;
        assert!(can_read("a", "n", "s") && !can_read("b", "n", "s") && !can_read("a", "m", "s"));
        let third = write("pods/n/p", Some(second), Some(("a", "t"))).await;
        let fourth = write("pods/n/p", Some(third), Some(("b", "t"))).await;
        let other = write("pods/n2/p", None, Some(("b", "u"))).await;
        assert!(!can_read("a", "n", "s") && !can_read("a", "n", "t") && can_read("b", "n", "t"));
        assert!(can_read("b", "n2", "u") && !can_read("b", "n", "u"));
        write("pods/n/p", Some(fourth), None).await;
        write("pods/n2/p", Some(other), Some(("b", "v"))).await;
        assert!(!can_read("b", "n", "t") && can_read("b", "n2", "v"));
        assert_eq!(lock(&graph.0).nodes.len(), 1);
    }
}
