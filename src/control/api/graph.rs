//! What a node has to do with: the objects that pods bound to it refer to, and nothing else (the Node authoriser;
//! control-plane spec, 6.2).

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use super::auth::Ask;
use super::object::text;
use crate::control::store::Store;
use crate::core::lock::lock;
use crate::core::{
    node::claims as resource_claims,
    pod::{self, references},
    volume::claims,
};

/// What one pod refers to in its namespace.
#[derive(Debug, Default, PartialEq, Eq)]
struct Edges {
    node: String,
    account: String,
    config_maps: BTreeSet<String>,
    secrets: BTreeSet<String>,
    claims: BTreeSet<String>,
    resource_claims: BTreeSet<String>,
}

fn edges(pod: &Pod) -> Edges {
    let spec = pod::spec(pod);
    let mut refers = references::of(pod);
    refers.secrets.append(&mut refers.pull_secrets);
    for volume in spec.volumes.iter().flatten() {
        let csi = volume
            .csi
            .as_ref()
            .and_then(|c| c.node_publish_secret_ref.as_ref());
        let iscsi = volume.iscsi.as_ref().and_then(|i| i.secret_ref.as_ref());
        refers
            .secrets
            .extend(csi.into_iter().chain(iscsi).map(|s| s.name.clone()));
    }
    Edges {
        node: spec.node_name.clone().unwrap_or_default(),
        account: spec
            .service_account_name
            .clone()
            .unwrap_or_else(|| "default".into()),
        config_maps: refers.config_maps,
        secrets: refers.secrets,
        claims: claims::of_pod(pod)
            .into_iter()
            .map(|(_, name)| name)
            .collect(),
        // One that is not made yet has nothing to be read.
        resource_claims: resource_claims::references(pod)
            .unwrap_or_default()
            .into_iter()
            .map(|reference| reference.name)
            .collect(),
    }
}

/// The graph, read from the store; what was read of a pod is kept until the pod changes.
#[derive(Default)]
pub struct Graph(Mutex<HashMap<Arc<str>, (u64, Arc<Edges>)>>);

impl Graph {
    /// What the pods of a node in a namespace refer to.
    fn of(&self, store: &Store, node: &str, namespace: &str) -> Vec<Arc<Edges>> {
        let prefix = if namespace.is_empty() {
            "pods/".to_owned()
        } else {
            format!("pods/{namespace}/")
        };
        let mut known = lock(&self.0);
        let mut found = vec![];
        let mut seen = BTreeSet::new();
        for (key, record) in store.list(&prefix).0 {
            seen.insert(Arc::clone(&key));
            let fresh = known
                .get(&key)
                .filter(|(revision, _)| *revision == record.revision)
                .map(|(_, edges)| Arc::clone(edges));
            let own = match fresh {
                Some(own) => own,
                None => {
                    let Ok(pod) = serde_json::from_slice::<Pod>(&record.value) else {
                        continue;
                    };
                    let own = Arc::new(edges(&pod));
                    known.insert(key, (record.revision, Arc::clone(&own)));
                    own
                }
            };
            if own.node == node {
                found.push(own);
            }
        }
        known.retain(|key, _| !key.starts_with(&prefix) || seen.contains(key));
        found
    }

    /// Whether what a node asks for has to do with it. Kinds without such a relation always have.
    #[must_use]
    pub fn is_related(&self, store: &Store, node: &str, ask: &Ask<'_>) -> bool {
        let any = |fits: &dyn Fn(&Edges) -> bool| {
            self.of(store, node, ask.namespace)
                .iter()
                .any(|edges| fits(edges))
        };
        let named = !ask.name.is_empty();
        match (ask.resource, ask.sub) {
            ("configmaps", "") => named && any(&|e| e.config_maps.contains(ask.name)),
            ("secrets", "") => {
                named
                    && (any(&|e| e.secrets.contains(ask.name))
                        || self.is_of_a_volume(store, node, ask))
            }
            ("serviceaccounts", "" | "token") => named && any(&|e| e.account == ask.name),
            ("persistentvolumeclaims", "" | "status") => {
                named && any(&|e| e.claims.contains(ask.name))
            }
            ("resourceclaims", "") => named && any(&|e| e.resource_claims.contains(ask.name)),
            ("persistentvolumes", "") => {
                named
                    && self.has_volume(
                        store,
                        node,
                        &object(store, &format!("persistentvolumes/{}", ask.name)),
                    )
            }
            ("volumeattachments", "") => {
                let attachment = object(store, &format!("volumeattachments/{}", ask.name));
                named && attachment.is_none_or(|a| text(&a, &["spec", "nodeName"]) == Some(node))
            }
            // One that is gone is answered as such.
            ("pods", "status" | "eviction") => own_pod(store, node, ask),
            ("pods", "") if matches!(ask.verb, "get" | "delete") => own_pod(store, node, ask),
            ("podcertificaterequests", "") if named => {
                let key = format!("podcertificaterequests/{}/{}", ask.namespace, ask.name);
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

    /// Whether a secret belongs to a persistent volume that the node mounts.
    fn is_of_a_volume(&self, store: &Store, node: &str, ask: &Ask<'_>) -> bool {
        let volumes = store
            .list("persistentvolumes/")
            .0
            .into_iter()
            .filter_map(|(_, r)| serde_json::from_slice::<Value>(&r.value).ok());
        let paths: [&[&str]; 5] = [
            &["csi", "nodeStageSecretRef"],
            &["csi", "nodePublishSecretRef"],
            &["csi", "nodeExpandSecretRef"],
            &["csi", "controllerPublishSecretRef"],
            &["iscsi", "secretRef"],
        ];
        let refers = |volume: &Value| {
            let own = text(volume, &["spec", "claimRef", "namespace"]);
            paths.iter().any(|path| {
                let reference = path.iter().fold(&volume["spec"], |value, key| &value[*key]);
                let namespace = text(reference, &["namespace"]).or(own);
                text(reference, &["name"]) == Some(ask.name) && namespace == Some(ask.namespace)
            })
        };
        volumes
            .filter(refers)
            .any(|volume| self.has_volume(store, node, &Some(volume)))
    }
}

fn object(store: &Store, key: &str) -> Option<Value> {
    serde_json::from_slice(&store.get(key)?.value).ok()
}

fn own_pod(store: &Store, node: &str, ask: &Ask<'_>) -> bool {
    object(store, &format!("pods/{}/{}", ask.namespace, ask.name))
        .is_none_or(|pod| text(&pod, &["spec", "nodeName"]) == Some(node))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pods_references_are_its_nodes() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {
            "nodeName": "here", "serviceAccountName": "s", "imagePullSecrets": [{"name": "pull"}],
            "containers": [{"name": "c", "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]}],
            "volumes": [{"name": "a", "secret": {"secretName": "t"}}, {"name": "b", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "u"}}},
                {"name": "c", "persistentVolumeClaim": {"claimName": "claim"}}, {"name": "e", "ephemeral": {}}],
            "resourceClaims": [{"name": "r", "resourceClaimName": "device"}]}}))
        .expect("a pod");
        let own = edges(&pod);
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
}
