//! Disks that nodes attach without a CSI driver (iSCSI, Fibre Channel). The controller only
//! maintains the list of attached volumes, so that two nodes never use a disk that only one may
//! use (`pkg/controller/volume/attachdetach`). Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt as _;

use super::{bound_pods, claimed, in_use, listed};
use holdfast_core::pod;
use holdfast_core::volume::disks;

/// A disk that a pod needs.
struct Need<'a> {
    pod: &'a Arc<Pod>,
    node: &'a str,
    /// The volume's name, for events.
    volume: String,
    /// The volume's unique name in the node's status.
    unique: String,
    /// No other node may use the disk at the same time.
    exclusive: bool,
}

/// Whether a unique name belongs to such a disk.
fn is_disk(unique: &str) -> bool {
    ["kubernetes.io/iscsi/", "kubernetes.io/fc/"]
        .iter()
        .any(|plugin| unique.starts_with(plugin))
}

/// The unique name of a persistent volume in the node's status, if it is such a disk.
fn of_persistent(volume: &PersistentVolume) -> Option<String> {
    let spec = volume.spec.as_ref()?;
    if let Some(source) = &spec.iscsi {
        return Some(disks::iscsi_name(
            &source.target_portal,
            &source.iqn,
            source.lun,
        ));
    }
    spec.fc.as_ref().map(disks::fc_name)
}

/// Whether only one node may use a persistent volume. Without access modes, any number may.
fn is_for_one_node(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|s| s.access_modes.as_deref());
    let modes = modes.unwrap_or_default();
    let is_of_many = |mode: &String| matches!(mode.as_str(), "ReadWriteMany" | "ReadOnlyMany");
    !modes.is_empty() && !modes.iter().any(is_of_many)
}

fn needs<'a>(
    pods: &'a [Arc<Pod>],
    claims: &[Arc<PersistentVolumeClaim>],
    volumes: &[Arc<PersistentVolume>],
) -> Vec<Need<'a>> {
    let mut needs = vec![];
    for (pod, node) in bound_pods(pods) {
        for volume in pod::spec(pod).volumes.iter().flatten() {
            let iscsi = volume.iscsi.as_ref();
            let iscsi = iscsi.map(|s| disks::iscsi_name(&s.target_portal, &s.iqn, s.lun));
            if let Some(unique) = iscsi.or_else(|| volume.fc.as_ref().map(disks::fc_name)) {
                needs.push(Need {
                    pod,
                    node,
                    volume: volume.name.clone(),
                    unique,
                    exclusive: false,
                });
            }
        }
        for volume in claimed(pod, claims, volumes) {
            if let Some(unique) = of_persistent(volume) {
                needs.push(Need {
                    pod,
                    node,
                    volume: volume.name_any(),
                    unique,
                    exclusive: is_for_one_node(volume),
                });
            }
        }
    }
    needs
}

/// The listed disks by node name.
pub(super) type Lists = BTreeMap<String, BTreeSet<String>>;

/// An event: a pod, a reason and a message.
pub(super) type PodEvent = (Arc<Pod>, &'static str, String);

/// Decides which disks each node's status lists, and the events for pending pods.
pub(super) fn decide(
    pods: &[Arc<Pod>],
    claims: &[Arc<PersistentVolumeClaim>],
    volumes: &[Arc<PersistentVolume>],
    nodes: &[Arc<Node>],
) -> (Lists, Vec<PodEvent>) {
    let needs = needs(pods, claims, volumes);
    let mut lists = Lists::new();
    // A disk that a node lists or uses is not assigned to another node.
    let mut taken: BTreeSet<(String, String)> = BTreeSet::new();
    for node in nodes {
        let (name, in_use) = (node.name_any(), in_use(node));
        let is_kept = |unique: &&str| {
            let is_needed = |need: &Need<'_>| need.node == name && need.unique == **unique;
            in_use.contains(*unique) || needs.iter().any(is_needed)
        };
        let before = listed(node).into_iter().filter(|unique| is_disk(unique));
        let before: BTreeSet<&str> = before.collect();
        let kept = before.iter().copied().filter(is_kept);
        lists.insert(name.clone(), kept.map(str::to_owned).collect());
        let known = in_use.iter().copied().filter(|unique| is_disk(unique));
        for unique in before.into_iter().chain(known) {
            taken.insert((unique.to_owned(), name.clone()));
        }
    }
    let mut events = vec![];
    for need in &needs {
        let Some(list) = lists.get_mut(need.node) else {
            continue;
        };
        let elsewhere =
            |(unique, node): &(String, String)| *unique == need.unique && node != need.node;
        let volume = &need.volume;
        if !list.contains(&need.unique) && need.exclusive && taken.iter().any(elsewhere) {
            let message = format!(
                "Multi-Attach error for volume {volume:?} Volume is already exclusively attached to one node and can't be attached to another"
            );
            events.push((Arc::clone(need.pod), "FailedAttachVolume", message));
            continue;
        }
        list.insert(need.unique.clone());
        taken.insert((need.unique.clone(), need.node.to_owned()));
        let message = format!("AttachVolume.Attach succeeded for volume {volume:?} ");
        events.push((Arc::clone(need.pod), "SuccessfulAttachVolume", message));
    }
    events.retain(|(pod, ..)| pod::phase(pod) == "Pending");
    (lists, events)
}

/// Whether any such disk exists.
pub(super) fn has_disks(
    pods: &[Arc<Pod>],
    volumes: &[Arc<PersistentVolume>],
    nodes: &[Arc<Node>],
) -> bool {
    let own = |pod: &Arc<Pod>| {
        let mut volumes = pod::spec(pod).volumes.iter().flatten();
        volumes.any(|volume| volume.iscsi.is_some() || volume.fc.is_some())
    };
    pods.iter().any(own)
        || volumes.iter().any(|volume| of_persistent(volume).is_some())
        || nodes
            .iter()
            .any(|node| listed(node).into_iter().any(is_disk))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const DISK: &str = "kubernetes.io/iscsi/192.0.2.7:iqn.2024-01.test:x:1";

    fn parsed<K: serde::de::DeserializeOwned>(value: Value) -> Arc<K> {
        Arc::new(serde_json::from_value(value).expect("an object"))
    }

    fn node(name: &str, in_use: &[&str], attached: &[&str]) -> Arc<Node> {
        let attached = attached
            .iter()
            .map(|name| json!({"name": name, "devicePath": ""}));
        let attached: Vec<Value> = attached.collect();
        let status = json!({"volumesInUse": in_use, "volumesAttached": attached});
        parsed(json!({"metadata": {"name": name}, "status": status}))
    }

    fn pod(name: &str, node: &str, volume: Value) -> Arc<Pod> {
        let spec = json!({"nodeName": node, "containers": [], "volumes": [volume]});
        parsed(
            json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec, "status": {"phase": "Pending"}}),
        )
    }

    fn persistent(modes: &[&str]) -> (Arc<PersistentVolumeClaim>, Arc<PersistentVolume>) {
        let disk = json!({"targetPortal": "192.0.2.7", "iqn": "iqn.2024-01.test:x", "lun": 1});
        let bound = json!({"pv.kubernetes.io/bind-completed": "yes"});
        (
            parsed(
                json!({"metadata": {"name": "c", "namespace": "n", "annotations": bound}, "spec": {"volumeName": "pv"}}),
            ),
            parsed(
                json!({"metadata": {"name": "pv"}, "spec": {"accessModes": modes, "iscsi": disk}}),
            ),
        )
    }

    fn decided(
        pods: &[Arc<Pod>],
        modes: &[&str],
        nodes: &[Arc<Node>],
    ) -> (Vec<(String, Vec<String>)>, Vec<&'static str>) {
        let (claim, volume) = persistent(modes);
        assert!(has_disks(pods, std::slice::from_ref(&volume), nodes));
        let (lists, events) = decide(pods, &[claim], &[volume], nodes);
        let lists = lists
            .into_iter()
            .map(|(node, names)| (node, names.into_iter().collect()));
        (
            lists.collect(),
            events.into_iter().map(|(_, reason, _)| reason).collect(),
        )
    }

    #[test]
    fn an_exclusive_disk_moves_to_another_node_after_the_first_has_unmounted_and_unlisted_it() {
        let claimed = || json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let (first, second) = (pod("p", "one", claimed()), pod("q", "two", claimed()));
        let (disk, none): (Vec<String>, Vec<String>) = (vec![DISK.into()], vec![]);
        let on = |one: &[String], two: &[String]| {
            vec![
                ("one".to_owned(), one.to_vec()),
                ("two".to_owned(), two.to_vec()),
            ]
        };
        let (attached, refused) = ("SuccessfulAttachVolume", "FailedAttachVolume");
        let exclusive: &[&str] = &["ReadWriteOnce"];
        // Both pods need the disk at the same time: the first gets it.
        let free = [node("one", &[], &[]), node("two", &[], &[])];
        let both = [first, Arc::clone(&second)];
        assert_eq!(
            decided(&both, exclusive, &free),
            (on(&disk, &none), vec![attached, refused])
        );
        let many: &[&str] = &["ReadWriteOnce", "ReadOnlyMany"];
        assert_eq!(
            decided(&both, many, &free),
            (on(&disk, &disk), vec![attached; 2])
        );
        // The first pod was deleted. Its node unmounts the disk, then the disk is removed from the list, and only then
        // assigned to the second pod's node.
        let only = [second];
        for (in_use, listed, expected) in [
            (vec![DISK], vec![DISK], (on(&disk, &none), vec![refused])),
            (vec![], vec![DISK], (on(&none, &none), vec![refused])),
            (vec![DISK], vec![], (on(&none, &none), vec![refused])),
            (vec![], vec![], (on(&none, &disk), vec![attached])),
        ] {
            let nodes = [node("one", &in_use, &listed), node("two", &[], &[])];
            assert_eq!(
                decided(&only, exclusive, &nodes),
                expected,
                "{in_use:?} {listed:?}"
            );
        }
    }

    #[test]
    fn inline_disks_of_pods_are_listed_by_their_unique_volume_names() {
        let fc = json!({"name": "f", "fc": {"targetWWNs": ["a1", "a2"], "lun": 2}});
        let nodes = [node("one", &[], &[DISK, "kubernetes.io/csi/d^h"])];
        let (lists, events) = decide(&[pod("p", "one", fc)], &[], &[], &nodes);
        let expected = BTreeSet::from(["kubernetes.io/fc/[a1 a2]:2".to_owned()]);
        assert_eq!(
            lists["one"], expected,
            "disks that no pod needs are removed from the list"
        );
        assert_eq!(
            events[0].2,
            "AttachVolume.Attach succeeded for volume \"f\" "
        );
    }
}
