//! Claims and persistent volumes: the claims of a pod, the volume to bind to a claim, and node affinity of volumes
//! (`pkg/controller/volume/persistentvolume`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod, Volume};

use crate::node::node_affinity::term_matches;
use crate::quantity::Quantity;
use crate::volume::resize::{self, Grown};
use crate::{meta, pod, selector};

/// Annotation of a claim whose binding is complete.
pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// Annotation of a claim or volume that the controller bound, not the user.
pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// Annotation of a claim with the node of its first consumer.
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// Annotation of a volume with its provisioner.
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Provisioner of storage classes with manually created volumes.
pub const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

/// The claim name behind a volume; `None` if the volume is not a claim.
#[must_use]
pub fn of_volume(pod: &Pod, volume: &Volume) -> Option<String> {
    if let Some(claim) = &volume.persistent_volume_claim {
        return Some(claim.claim_name.clone());
    }
    volume
        .ephemeral
        .as_ref()
        .map(|_| format!("{}-{}", meta::name(pod), volume.name))
}

/// The volumes of a pod that are claims, each with its claim name.
#[must_use]
pub fn of_pod(pod: &Pod) -> Vec<(&Volume, String)> {
    pod::spec(pod)
        .volumes
        .iter()
        .flatten()
        .filter_map(|v| Some((v, of_volume(pod, v)?)))
        .collect()
}

/// Whether a pod uses a claim and is not terminal.
#[must_use]
pub fn uses(pod: &Pod, namespace: &str, claim: &str) -> bool {
    meta::namespace(pod) == namespace
        && !pod::is_terminal(pod)
        && of_pod(pod).iter().any(|(_, name)| name == claim)
}

/// The volume that a claim is bound to; `None` until the binding is complete.
#[must_use]
pub fn bound(claim: &PersistentVolumeClaim) -> Option<&str> {
    let volume = claim
        .spec
        .as_ref()?
        .volume_name
        .as_deref()
        .filter(|v| !v.is_empty())?;
    meta::annotations(claim)
        .contains_key(BIND_COMPLETED)
        .then_some(volume)
}

fn storage(
    map: Option<&BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>>,
) -> Quantity {
    map.and_then(|m| m.get("storage"))
        .and_then(|q| q.0.parse().ok())
        .unwrap_or(Quantity::ZERO)
}

/// Whether a volume is reserved for a claim: by name, and by uid if the volume has one.
#[must_use]
pub fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(reference) = volume.spec.as_ref().and_then(|s| s.claim_ref.as_ref()) else {
        return false;
    };
    let same =
        reference.name == claim.metadata.name && reference.namespace == claim.metadata.namespace;
    same && reference
        .uid
        .as_ref()
        .is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_ref())
}

/// Whether a volume is accessible from a node.
#[must_use]
pub fn is_accessible_from(volume: &PersistentVolume, node: &Node) -> bool {
    let required = volume
        .spec
        .as_ref()
        .and_then(|s| s.node_affinity.as_ref())
        .and_then(|a| a.required.as_ref());
    required.is_none_or(|r| {
        r.node_selector_terms
            .iter()
            .any(|term| term_matches(term, node))
    })
}

/// Whether a volume satisfies a claim.
#[must_use]
pub(crate) fn satisfies(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let (Some(has), Some(wanted)) = (&volume.spec, &claim.spec) else {
        return false;
    };
    let class = |c: &Option<String>| c.clone().unwrap_or_default();
    let mode = |m: &Option<String>| m.clone().unwrap_or_else(|| "Filesystem".into());
    let request = wanted.resources.as_ref().and_then(|r| r.requests.as_ref());
    let offered = has.access_modes.as_deref().unwrap_or_default();
    let selected = wanted
        .selector
        .as_ref()
        .is_none_or(|s| selector::matches(s, meta::labels(volume)));
    volume.metadata.deletion_timestamp.is_none()
        && class(&has.storage_class_name) == class(&wanted.storage_class_name)
        && mode(&has.volume_mode) == mode(&wanted.volume_mode)
        && wanted
            .access_modes
            .iter()
            .flatten()
            .all(|m| offered.contains(m))
        && storage(has.capacity.as_ref()) >= storage(request)
        && selected
}

/// The best volume for a claim: one reserved for it, or else the smallest free volume that satisfies it. If `node` is
/// given, the volume must be accessible from it.
#[must_use]
pub fn best<'a>(
    volumes: impl Iterator<Item = &'a PersistentVolume> + Clone,
    claim: &PersistentVolumeClaim,
    node: Option<&Node>,
) -> Option<&'a PersistentVolume> {
    if let Some(reserved) = volumes.clone().find(|v| is_for(v, claim)) {
        return Some(reserved);
    }
    let free = |v: &&PersistentVolume| v.spec.as_ref().is_some_and(|s| s.claim_ref.is_none());
    let fits = |v: &&PersistentVolume| {
        satisfies(v, claim) && node.is_none_or(|n| is_accessible_from(v, n))
    };
    volumes.filter(free).filter(fits).min_by_key(|v| {
        (
            storage(v.spec.as_ref().and_then(|s| s.capacity.as_ref())),
            meta::name(*v).to_owned(),
        )
    })
}

/// Annotation of a claim whose volume can be expanded without any action on nodes.
const NODE_EXPANSION_NOT_REQUIRED: &str = "volume.kubernetes.io/node-expansion-not-required";

/// Whether every node that mounts the claim's volume must expand it.
fn expands_on_every_node(claim: &PersistentVolumeClaim) -> bool {
    let modes = claim.spec.as_ref().and_then(|s| s.access_modes.as_ref());
    modes.is_some_and(|modes| modes.iter().any(|m| m == "ReadWriteMany"))
        && !meta::annotations(claim).contains_key(NODE_EXPANSION_NOT_REQUIRED)
}

/// The expansion that nodes have to do for a claim; `None` if there is none. If the claim records the state of the
/// expansion (KEP-1790), its allocated size applies, and the result is `None` unless the state is a node's. A
/// ReadWriteMany volume is also returned if the claim's status already has the new size, because this node may still
/// have less.
#[must_use]
pub(crate) fn pending_expansion(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Option<Grown> {
    let parsed = |text: &str| text.parse::<Quantity>().ok();
    let status = claim.status.as_ref()?;
    let claim_size = parsed(&status.capacity.as_ref()?.get("storage")?.0)?;
    let given = status.allocated_resources.as_ref();
    let given = given.and_then(|given| given.get("storage"));
    let state = status.allocated_resource_statuses.as_ref();
    let state = state.and_then(|state| state.get("storage"));
    let text = match (given, state.map(String::as_str)) {
        (None, None) => &volume.spec.as_ref()?.capacity.as_ref()?.get("storage")?.0,
        (Some(given), None | Some(resize::PENDING | resize::IN_PROGRESS)) => &given.0,
        _ => return None,
    };
    let now = parsed(text)?;
    let claim_has_size = now <= claim_size;
    let is_wanted = match claim_has_size {
        true => state.is_none() && expands_on_every_node(claim),
        false => given.is_none() || state.is_some(),
    };
    let requested = claim.spec.as_ref().and_then(|s| s.resources.as_ref());
    let requested = requested.and_then(|r| r.requests.as_ref()?.get("storage"));
    is_wanted.then(|| Grown {
        namespace: meta::namespace(claim).to_owned(),
        claim: meta::name(claim).to_owned(),
        uid: claim.metadata.uid.clone(),
        claim_bytes: claim_size.units(),
        bytes: now.units(),
        text: text.clone(),
        records_state: state.is_some(),
        claim_has_size,
        is_superseded: requested
            .and_then(|q| parsed(&q.0))
            .is_some_and(|q| q != now),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn volume(name: &str, size: &str, more: Value) -> PersistentVolume {
        let mut spec = json!({"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "storageClassName": "c"});
        json_patch::merge(&mut spec, &more);
        serde_json::from_value(
            json!({"metadata": {"name": name, "labels": {"disk": name}}, "spec": spec}),
        )
        .expect("a volume")
    }

    fn claim(more: Value) -> PersistentVolumeClaim {
        let mut spec = json!({"resources": {"requests": {"storage": "2Gi"}}, "accessModes": ["ReadWriteOnce"], "storageClassName": "c"});
        json_patch::merge(&mut spec, &more);
        serde_json::from_value(
            json!({"metadata": {"name": "claim", "namespace": "n", "uid": "u"}, "spec": spec}),
        )
        .expect("a claim")
    }

    #[test]
    fn the_smallest_sufficient_volume_is_chosen() {
        let taken = json!({"claimRef": {"namespace": "n", "name": "other", "uid": "x"}});
        let volumes = [
            volume("small", "1Gi", json!({})),
            volume("taken", "2Gi", taken),
            volume("large", "10Gi", json!({})),
            volume("fits", "3Gi", json!({})),
            volume("raw", "2Gi", json!({"volumeMode": "Block"})),
        ];
        let chosen = |claim: &PersistentVolumeClaim| {
            best(volumes.iter(), claim, None).map(|v| meta::name(v).to_owned())
        };
        for (more, expected) in [
            (json!({}), Some("fits")),
            (
                json!({"selector": {"matchLabels": {"disk": "large"}}}),
                Some("large"),
            ),
            (
                json!({"selector": {"matchExpressions": [{"key": "disk", "operator": "NotIn", "values": ["fits"]}]}}),
                Some("large"),
            ),
            (json!({"accessModes": ["ReadWriteMany"]}), None),
            (json!({"storageClassName": ""}), None),
            (json!({"volumeMode": "Block"}), Some("raw")),
            (
                json!({"resources": {"requests": {"storage": "11Gi"}}}),
                None,
            ),
        ] {
            assert_eq!(chosen(&claim(more.clone())).as_deref(), expected, "{more}");
        }
    }

    #[test]
    fn a_volume_reserved_for_the_claim_is_chosen_whatever_its_size() {
        let mine = volume(
            "mine",
            "1Mi",
            json!({"claimRef": {"namespace": "n", "name": "claim"}}),
        );
        let before = volume(
            "before",
            "9Gi",
            json!({"claimRef": {"namespace": "n", "name": "claim", "uid": "an older one"}}),
        );
        assert_eq!(
            best([before, mine].iter(), &claim(json!({})), None)
                .map(|v| meta::name(v).to_owned())
                .as_deref(),
            Some("mine")
        );
    }

    #[test]
    fn a_volume_is_available_only_where_its_node_affinity_matches() {
        let node = |name: &str| -> Node {
            serde_json::from_value(json!({"metadata": {"name": name, "labels": {"host": name}}}))
                .expect("a node")
        };
        let pinned = json!({"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "host", "operator": "In", "values": ["a"]}]}]}}});
        let volumes = [volume("pinned", "2Gi", pinned)];
        assert!(best(volumes.iter(), &claim(json!({})), Some(&node("a"))).is_some());
        assert!(best(volumes.iter(), &claim(json!({})), Some(&node("b"))).is_none());
    }

    #[test]
    fn generic_ephemeral_volumes_are_claims_too() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {"containers": [], "volumes": [
            {"name": "a", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "b", "ephemeral": {}}, {"name": "c", "emptyDir": {}}]}}))
        .expect("a pod");
        assert_eq!(
            of_pod(&pod)
                .iter()
                .map(|(v, c)| (v.name.as_str(), c.as_str()))
                .collect::<Vec<_>>(),
            [("a", "data"), ("b", "p-b")]
        );
        assert!(uses(&pod, "n", "p-b") && !uses(&pod, "m", "p-b"));
    }

    #[test]
    fn a_volume_larger_than_its_claims_status_needs_an_expansion() {
        let volume = |size: &str| {
            serde_json::from_value(
                json!({"metadata": {"name": "v"}, "spec": {"capacity": {"storage": size}}}),
            )
            .expect("a volume")
        };
        let claim = |status: Value| {
            serde_json::from_value(
                json!({"metadata": {"namespace": "n", "name": "c"}, "status": status}),
            )
            .expect("a claim")
        };
        let known = claim(json!({"capacity": {"storage": "1Mi"}}));
        assert_eq!(
            pending_expansion(&volume("2Mi"), &known),
            Some(Grown {
                namespace: "n".into(),
                claim: "c".into(),
                uid: None,
                claim_bytes: 1 << 20,
                bytes: 2 << 20,
                text: "2Mi".into(),
                records_state: false,
                claim_has_size: false,
                is_superseded: false,
            })
        );
        assert_eq!(
            (
                pending_expansion(&volume("1Mi"), &known),
                pending_expansion(&volume("512Ki"), &known)
            ),
            (None, None)
        );
        assert_eq!(
            pending_expansion(&volume("2Mi"), &claim(json!({}))),
            None,
            "the claim's capacity is not known yet"
        );
        // The allocated size applies, and the state must be a node's.
        for (state, grows) in [
            (json!({"storage": "NodeResizePending"}), true),
            (json!({"storage": "NodeResizeInProgress"}), true),
            (json!({"storage": "NodeResizeInfeasible"}), false),
            (json!({"storage": "ControllerResizeInProgress"}), false),
            (json!(null), false),
        ] {
            let followed = claim(
                json!({"capacity": {"storage": "1Mi"}, "allocatedResources": {"storage": "3Mi"}, "allocatedResourceStatuses": state}),
            );
            let grown = pending_expansion(&volume("4Mi"), &followed);
            let expected = grows.then(|| ("3Mi".to_owned(), 3 << 20, true));
            assert_eq!(
                grown.map(|g| (g.text, g.bytes, g.records_state)),
                expected,
                "{state}"
            );
        }
    }
    #[test]
    fn a_shared_volume_is_expanded_on_every_node() {
        let volume = serde_json::from_value(
            json!({"metadata": {"name": "v"}, "spec": {"capacity": {"storage": "2Mi"}}}),
        )
        .expect("a volume");
        let grown = |modes: Value, annotations: Value, status: Value| {
            let claim = serde_json::from_value(json!({"metadata": {"name": "c", "annotations": annotations},
                "spec": {"accessModes": modes, "resources": {"requests": {"storage": "2Mi"}}}, "status": status}))
            .expect("a claim");
            pending_expansion(&volume, &claim).map(|g| (g.bytes, g.claim_has_size, g.is_superseded))
        };
        let (many, one) = (json!(["ReadWriteMany"]), json!(["ReadWriteOnce"]));
        let done = json!({"capacity": {"storage": "2Mi"}});
        let expected = Some((2 << 20, true, false));
        assert_eq!(grown(many.clone(), json!({}), done.clone()), expected);
        assert_eq!(grown(one, json!({}), done.clone()), None);
        let nothing = json!({NODE_EXPANSION_NOT_REQUIRED: ""});
        assert_eq!(grown(many.clone(), nothing, done), None);
        let followed = |state: Value| json!({"capacity": {"storage": "3Mi"}, "allocatedResources": {"storage": "3Mi"}, "allocatedResourceStatuses": state});
        assert_eq!(
            grown(many.clone(), json!({}), followed(json!(null))),
            Some((3 << 20, true, true)),
            "the claim requests 2Mi"
        );
        let state = json!({"storage": "NodeResizePending"});
        assert_eq!(grown(many, json!({}), followed(state)), None);
    }
}
