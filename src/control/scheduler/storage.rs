//! Whether a pod's claims are available on a node, and the writes that bind them
//! (`pkg/scheduler/framework/plugins/volumebinding/binder.go`). Pure.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use holdfast_core::volume::claims::{self, NO_PROVISIONER, SELECTED_NODE};

/// Claims, volumes and classes, as observed.
#[derive(Default)]
pub struct Storage {
    /// All claims.
    pub claims: Vec<Arc<PersistentVolumeClaim>>,
    /// All volumes.
    pub volumes: Vec<Arc<PersistentVolume>>,
    /// All storage classes.
    pub classes: Vec<Arc<StorageClass>>,
}

/// A write that starts the binding of a claim, as a merge patch.
#[derive(Debug)]
pub enum Wanted {
    /// Reserves this volume for the claim.
    Volume(Arc<PersistentVolume>, Value),
    /// Writes the selected node to the claim, for its provisioner.
    Node(Arc<PersistentVolumeClaim>, Value),
}

impl Storage {
    fn claim(&self, pod: &Pod, name: &str) -> Option<&Arc<PersistentVolumeClaim>> {
        self.claims
            .iter()
            .find(|c| c.metadata.namespace == pod.metadata.namespace && c.name_any() == name)
    }

    fn class(&self, claim: &PersistentVolumeClaim) -> Option<&Arc<StorageClass>> {
        let name = claim.spec.as_ref()?.storage_class_name.as_deref()?;
        self.classes.iter().find(|c| c.name_any() == name)
    }

    fn waits_for_consumer(&self, claim: &PersistentVolumeClaim) -> bool {
        self.class(claim)
            .is_some_and(|c| c.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"))
    }

    /// Why a pod's claims are not available on a node; empty if they are.
    #[must_use]
    pub fn check(&self, pod: &Pod, node: &Node) -> Vec<String> {
        claims::of_pod(pod)
            .into_iter()
            .filter_map(|(volume, name)| {
                self.check_one(pod, volume.ephemeral.is_some(), &name, node)
            })
            .collect()
    }

    fn check_one(&self, pod: &Pod, ephemeral: bool, name: &str, node: &Node) -> Option<String> {
        let Some(claim) = self.claim(pod, name) else {
            return Some(if ephemeral {
                format!(
                    "waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}"
                )
            } else {
                format!("persistentvolumeclaim {name:?} not found")
            });
        };
        if claim.metadata.deletion_timestamp.is_some() {
            return Some(format!("persistentvolumeclaim {name:?} is being deleted"));
        }
        if let Some(bound) = claims::bound(claim) {
            let volume = self.volumes.iter().find(|v| v.name_any() == bound);
            return match volume {
                None => Some(format!("persistentvolume {bound:?} not found")),
                Some(volume) if !claims::is_accessible_from(volume, node) => {
                    Some("node(s) didn't match PersistentVolume's node affinity".into())
                }
                Some(_) => None,
            };
        }
        if !self.waits_for_consumer(claim) {
            return Some("pod has unbound immediate PersistentVolumeClaims".into());
        }
        let made = self
            .class(claim)
            .is_some_and(|c| c.provisioner != NO_PROVISIONER);
        let found = claims::best(self.volumes.iter().map(|v| &**v), claim, Some(node)).is_some();
        (!made && !found).then(|| "node(s) didn't find available persistent volumes to bind".into())
    }

    /// The writes needed to bind the claims of a pod on `node`; `None` if all are bound. Volumes
    /// reserved here are not reserved for other claims.
    pub fn reserve(&mut self, pod: &Pod, node: &Node) -> Option<Vec<Wanted>> {
        let (mut wanted, mut all_bound) = (vec![], true);
        for (_, name) in claims::of_pod(pod) {
            let Some(claim) = self
                .claim(pod, &name)
                .cloned()
                .filter(|c| claims::bound(c).is_none())
            else {
                continue;
            };
            all_bound = false;
            let found = claims::best(self.volumes.iter().map(|v| &**v), &claim, Some(node))
                .map(|v| v.name_any());
            let volume =
                found.and_then(|name| self.volumes.iter_mut().find(|v| v.name_any() == name));
            let Some(volume) = volume else {
                let patch = json!({"metadata": {"annotations": {SELECTED_NODE: node.name_any()}}});
                let is_selected = claim.annotations().get(SELECTED_NODE) == Some(&node.name_any());
                wanted.extend((!is_selected).then_some(Wanted::Node(claim, patch)));
                continue;
            };
            if claims::is_for(volume, &claim) {
                continue;
            }
            let reference = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.namespace(), "name": claim.name_any(), "uid": claim.uid()});
            let patch = json!({"metadata": {"resourceVersion": volume.resource_version()}, "spec": {"claimRef": reference}});
            wanted.push(Wanted::Volume(Arc::clone(volume), patch));
            if let Some(spec) = &mut Arc::make_mut(volume).spec {
                spec.claim_ref = serde_json::from_value(reference).ok();
            }
        }
        (!all_bound).then_some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(claims: Value, volumes: Value, provisioner: &str) -> Storage {
        let class = json!([{"metadata": {"name": "late"}, "provisioner": provisioner, "volumeBindingMode": "WaitForFirstConsumer"}]);
        fn all<K: serde::de::DeserializeOwned>(list: Value) -> Vec<Arc<K>> {
            serde_json::from_value::<Vec<K>>(list)
                .expect("objects")
                .into_iter()
                .map(Arc::new)
                .collect()
        }
        Storage {
            claims: all(claims),
            volumes: all(volumes),
            classes: all(class),
        }
    }

    fn claim(name: &str, class: &str, more: Value) -> Value {
        let mut claim = json!({"metadata": {"name": name, "namespace": "n", "uid": name}, "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}}}});
        json_patch::merge(&mut claim, &more);
        claim
    }

    fn volume(name: &str, host: &str) -> Value {
        json!({"metadata": {"name": name}, "spec": {"storageClassName": "late", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "host", "operator": "In", "values": [host]}]}]}}}})
    }

    fn node(name: &str) -> Node {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"host": name}}}))
            .expect("a node")
    }

    fn pod(claims: &[&str]) -> Pod {
        let volumes: Vec<Value> = claims
            .iter()
            .map(|c| json!({"name": c, "persistentVolumeClaim": {"claimName": c}}))
            .collect();
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [], "volumes": volumes}})).expect("a pod")
    }

    #[test]
    fn nodes_are_rejected_with_the_reason_of_the_claim() {
        let bound = json!({"metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}}, "spec": {"volumeName": "v"}});
        let cases = [
            (
                json!([]),
                json!([]),
                NO_PROVISIONER,
                Some("persistentvolumeclaim \"c\" not found"),
            ),
            (
                json!([claim("c", "", json!({}))]),
                json!([]),
                NO_PROVISIONER,
                Some("unbound immediate"),
            ),
            (
                json!([claim("c", "late", json!({}))]),
                json!([]),
                NO_PROVISIONER,
                Some("didn't find available persistent volumes"),
            ),
            (
                json!([claim("c", "late", json!({}))]),
                json!([]),
                "some.example/driver",
                None,
            ),
            (
                json!([claim("c", "late", json!({}))]),
                json!([volume("v", "a")]),
                NO_PROVISIONER,
                None,
            ),
            (
                json!([claim("c", "late", json!({}))]),
                json!([volume("v", "b")]),
                NO_PROVISIONER,
                Some("didn't find available persistent volumes"),
            ),
            (
                json!([claim("c", "late", bound.clone())]),
                json!([volume("v", "a")]),
                NO_PROVISIONER,
                None,
            ),
            (
                json!([claim("c", "late", bound.clone())]),
                json!([volume("v", "b")]),
                NO_PROVISIONER,
                Some("node affinity"),
            ),
            (
                json!([claim("c", "late", bound)]),
                json!([]),
                NO_PROVISIONER,
                Some("persistentvolume \"v\" not found"),
            ),
        ];
        for (claims, volumes, provisioner, expected) in cases {
            let why = storage(claims.clone(), volumes, provisioner).check(&pod(&["c"]), &node("a"));
            match expected {
                None => assert_eq!(why, Vec::<String>::new(), "{claims}"),
                Some(text) => assert!(
                    why.first().is_some_and(|w| w.contains(text)),
                    "{claims}: {why:?}"
                ),
            }
        }
    }

    #[test]
    fn each_claim_gets_its_own_volume_or_the_selected_node_annotation() {
        let mut storage = storage(
            json!([claim("c", "late", json!({})), claim("d", "late", json!({}))]),
            json!([volume("v", "a"), volume("w", "b")]),
            "some.example/driver",
        );
        let wanted = storage
            .reserve(&pod(&["c", "d"]), &node("a"))
            .expect("neither is bound");
        assert!(
            matches!(&wanted[..], [Wanted::Volume(v, _), Wanted::Node(c, _)] if v.name_any() == "v" && c.name_any() == "d"),
            "{wanted:?}"
        );
        let again = storage.reserve(&pod(&["c"]), &node("a"));
        assert!(
            again.is_some_and(|w| w.is_empty()),
            "the claim has a volume and waits for the binder"
        );
        assert!(storage.reserve(&pod(&[]), &node("a")).is_none());
    }
}
