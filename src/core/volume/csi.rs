//! Requests to CSI drivers: the messages for a volume, built from the volume, its driver and its pod (CSI spec 1.x,
//! `pkg/volume/csi`). Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use holdfast_proto::csi as pb;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, SecretReference,
    Volume as PodVolume,
};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINodeDriver};
use pb::volume_capability::access_mode::Mode;
use pb::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use serde::{Deserialize, Serialize};

use super::claims;
use super::resize::Grown;
use super::{migrated, selinux};
use crate::digest::sha256;
use crate::fault::Fault;
use crate::pod::quoted::quoted;
use crate::{meta, pod};

/// A volume that a CSI driver serves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Volume {
    /// The driver's name.
    pub driver: String,
    /// The driver's volume id; empty for an inline volume, whose id is derived from its pod.
    pub handle: String,
    /// Name of the volume's directory.
    pub name: String,
    /// Volume attributes, passed to the driver.
    pub attributes: BTreeMap<String, String>,
    /// Filesystem type.
    pub fs_type: String,
    /// Access modes, as in the API.
    pub modes: Vec<String>,
    /// Mount options.
    pub options: Vec<String>,
    /// Whether the volume is mounted read-only.
    pub read_only: bool,
    /// Whether the volume is a block device.
    pub block: bool,
    /// Whether the volume is inline (ephemeral): its lifetime is that of its pod.
    pub inline: bool,
    /// Whether the volume is of an in-tree kind that migrated to this driver.
    pub migrated: bool,
    /// SELinux label of the mount, if the driver supports labelled mounts.
    pub label: Option<String>,
    /// Secret for staging: namespace and name.
    pub stage_secret: Option<(String, String)>,
    /// Secret for publishing: namespace and name.
    pub publish_secret: Option<(String, String)>,
    /// Secret for expansion: namespace and name.
    pub expand_secret: Option<(String, String)>,
    /// Namespace and name of the claim; `None` for an inline volume.
    pub claim: Option<(String, String)>,
    /// The pending expansion of the filesystem, if any.
    pub grown: Option<Grown>,
}

/// Unique volume name in the status of nodes and in the attach-detach controller (`GetUniqueVolumeName` in
/// `pkg/volume/util/util.go`).
#[must_use]
pub fn unique_name(driver: &str, handle: &str) -> String {
    format!("kubernetes.io/csi/{driver}^{handle}")
}

/// Name of the VolumeAttachment for a volume and a node (`pkg/volume/csi/csi_attacher.go`).
#[must_use]
pub fn attachment_name(driver: &str, handle: &str, node: &str) -> String {
    format!(
        "csi-{}",
        sha256(format!("{handle}{driver}{node}").as_bytes())
    )
}

/// The driver's volume id for an inline volume.
#[must_use]
pub(crate) fn inline_handle(uid: &str, volume: &str) -> String {
    format!("csi-{}", sha256(format!("{uid}{volume}").as_bytes()))
}

fn secret(reference: Option<&SecretReference>) -> Option<(String, String)> {
    let reference = reference?;
    Some((reference.namespace.clone()?, reference.name.clone()?))
}

/// The CSI volume of a persistent volume.
#[must_use]
pub fn of_persistent(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
    source: &CSIPersistentVolumeSource,
    read_only: bool,
) -> Volume {
    Volume {
        claim: Some((
            meta::namespace(claim).to_owned(),
            meta::name(claim).to_owned(),
        )),
        grown: claims::pending_expansion(volume, claim),
        ..of_source(volume, source, read_only)
    }
}

/// The CSI volume of a volume in a pod spec: inline, or of a migrated kind. `None` for other volumes.
pub fn of_pod(pod: &Pod, volume: &PodVolume) -> Result<Option<Volume>, Fault> {
    if let Some(inline) = of_inline(pod, volume) {
        return Ok(Some(inline));
    }
    let made = migrated::inline(volume, meta::namespace(pod))?;
    Ok(made.and_then(|made| {
        let source = made.spec.as_ref()?.csi.as_ref()?;
        Some(Volume {
            migrated: true,
            ..of_source(&made, source, false)
        })
    }))
}

fn of_source(
    volume: &PersistentVolume,
    source: &CSIPersistentVolumeSource,
    read_only: bool,
) -> Volume {
    let spec = volume.spec.clone().unwrap_or_default();
    Volume {
        driver: source.driver.clone(),
        handle: source.volume_handle.clone(),
        name: meta::name(volume).to_owned(),
        attributes: source.volume_attributes.clone().unwrap_or_default(),
        fs_type: source.fs_type.clone().unwrap_or_default(),
        modes: spec.access_modes.unwrap_or_default(),
        options: spec.mount_options.unwrap_or_default(),
        // The source's `readOnly` applies only to the attachment.
        read_only,
        block: spec.volume_mode.as_deref() == Some("Block"),
        stage_secret: secret(source.node_stage_secret_ref.as_ref()),
        publish_secret: secret(source.node_publish_secret_ref.as_ref()),
        expand_secret: secret(source.node_expand_secret_ref.as_ref()),
        ..Volume::default()
    }
}

/// The CSI volume of an inline volume; `None` for other volumes.
#[must_use]
pub(crate) fn of_inline(pod: &Pod, volume: &PodVolume) -> Option<Volume> {
    let source = volume.csi.as_ref()?;
    let namespace = meta::namespace(pod);
    Some(Volume {
        driver: source.driver.clone(),
        name: volume.name.clone(),
        attributes: source.volume_attributes.clone().unwrap_or_default(),
        fs_type: source.fs_type.clone().unwrap_or_default(),
        modes: vec!["ReadWriteOnce".into()],
        read_only: source.read_only == Some(true),
        inline: true,
        publish_secret: source
            .node_publish_secret_ref
            .as_ref()
            .map(|s| (namespace.to_owned(), s.name.clone())),
        ..Volume::default()
    })
}

/// Capabilities of a driver's node service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NodeCapabilities {
    /// `STAGE_UNSTAGE_VOLUME`: volumes are staged once for all pods.
    pub stage: bool,
    /// `VOLUME_MOUNT_GROUP`: the driver applies the volume's group.
    pub mount_group: bool,
    /// `SINGLE_NODE_MULTI_WRITER`: the driver distinguishes one writer on a node from several.
    pub single_node_multi_writer: bool,
    /// `EXPAND_VOLUME`: the driver expands filesystems.
    pub expand: bool,
    /// `GET_VOLUME_STATS`: the driver reports usage.
    pub stats: bool,
}

/// The CSI access mode; only the first of the volume's modes counts, as in the kubelet
/// (`pkg/volume/csi/csi_client.go`).
#[must_use]
pub fn mode(modes: &[String], capabilities: NodeCapabilities) -> Mode {
    let many = capabilities.single_node_multi_writer;
    match modes.first().map(String::as_str) {
        None | Some("ReadWriteOnce") if many => Mode::SingleNodeMultiWriter,
        Some("ReadWriteOncePod") if many => Mode::SingleNodeSingleWriter,
        None | Some("ReadWriteOnce" | "ReadWriteOncePod") => Mode::SingleNodeWriter,
        Some("ReadOnlyMany") => Mode::MultiNodeReaderOnly,
        Some("ReadWriteMany") => Mode::MultiNodeMultiWriter,
        Some(_) => Mode::Unknown,
    }
}

/// The kubelet's names of the steps of a volume: wait for attachment, stage, publish.
#[must_use]
pub fn steps(volume: &Volume) -> [&'static str; 3] {
    match volume.block {
        true => [
            "MapVolume.WaitForAttach",
            "MapVolume.SetUpDevice",
            "MapVolume.MapPodDevice",
        ],
        false => [
            "MountVolume.WaitForAttach",
            "MountVolume.MountDevice",
            "MountVolume.SetUp",
        ],
    }
}

/// The volume capability for staging and publishing.
#[must_use]
pub fn capability(
    volume: &Volume,
    capabilities: NodeCapabilities,
    group: Option<u32>,
) -> pb::VolumeCapability {
    let access = if volume.block {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume {
            fs_type: volume.fs_type.clone(),
            mount_flags: volume.options.clone(),
            volume_mount_group: group
                .filter(|_| capabilities.mount_group)
                .map(|g| g.to_string())
                .unwrap_or_default(),
        })
    };
    pb::VolumeCapability {
        access_type: Some(access),
        access_mode: Some(AccessMode {
            mode: mode(&volume.modes, capabilities) as i32,
        }),
    }
}

/// The volume capability for expansion: without a group, and without the SELinux mount option, because the volume is
/// mounted already.
#[must_use]
pub fn expansion_capability(
    volume: &Volume,
    capabilities: NodeCapabilities,
) -> pb::VolumeCapability {
    let label = volume.label.as_deref().map(selinux::option);
    let options = volume.options.iter().filter(|o| Some(*o) != label.as_ref());
    let plain = Volume {
        options: options.cloned().collect(),
        ..volume.clone()
    };
    capability(&plain, capabilities, None)
}

/// Whether the agent, not the driver, applies the pod's group to the volume.
#[must_use]
pub fn applies_fs_group(
    volume: &Volume,
    driver: Option<&CSIDriver>,
    capabilities: NodeCapabilities,
) -> bool {
    if capabilities.mount_group || volume.block || volume.read_only {
        return false;
    }
    match driver
        .and_then(|d| d.spec.fs_group_policy.as_deref())
        .unwrap_or("ReadWriteOnceWithFSType")
    {
        "File" => true,
        "None" => false,
        _ => {
            !volume.fs_type.is_empty()
                && volume
                    .modes
                    .iter()
                    .any(|m| m == "ReadWriteOnce" || m == "ReadWriteOncePod")
        }
    }
}

/// Whether a driver supports mounts with an SELinux label.
#[must_use]
pub fn mounts_with_label(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|d| d.spec.se_linux_mount == Some(true))
}

/// Adds the SELinux label to the mount options, or removes the label if the driver does not support it.
#[must_use]
pub fn labelled(volume: &Volume, driver: Option<&CSIDriver>) -> Volume {
    let label = volume.label.clone().filter(|_| mounts_with_label(driver));
    let options = volume
        .options
        .iter()
        .cloned()
        .chain(label.as_deref().map(selinux::option))
        .collect();
    Volume {
        label,
        options,
        ..volume.clone()
    }
}

/// The CSI drivers of a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Drivers {
    /// Registered drivers.
    pub present: Vec<CSINodeDriver>,
    /// Names of drivers that were unregistered since the agent started. Other drivers in CSINode that have not
    /// registered again since the start stay listed.
    pub unregistered: BTreeSet<String>,
}

impl Drivers {
    /// The drivers for CSINode, given the `known` ones that it lists now.
    #[must_use]
    pub fn merged(&self, known: &[CSINodeDriver]) -> Vec<CSINodeDriver> {
        let is_present = |name: &str| self.present.iter().any(|driver| driver.name == name);
        let kept = known.iter().filter(|driver| {
            !self.unregistered.contains(&driver.name) && !is_present(&driver.name)
        });
        let mut all: Vec<CSINodeDriver> = kept.chain(&self.present).cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The Node annotation with the drivers' node ids, given its `known` value; `None` if it would be empty.
    #[must_use]
    pub fn node_ids(&self, known: Option<&str>) -> Option<String> {
        let known = known.and_then(|text| serde_json::from_str(text).ok());
        let mut ids: BTreeMap<String, String> = known.unwrap_or_default();
        ids.retain(|name, _| !self.unregistered.contains(name));
        let present = self.present.iter();
        ids.extend(present.map(|driver| (driver.name.clone(), driver.node_id.clone())));
        // A map of strings always serialises to JSON.
        (!ids.is_empty()).then(|| serde_json::json!(ids).to_string())
    }
}

/// Why a pod cannot use a volume that another pod uses exclusively.
pub const ALREADY_IN_USE: &str =
    "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

/// Whether only one pod at a time may use the volume (KEP-2485). If the volume has further modes, exclusive use is not
/// enforced.
#[must_use]
pub fn is_for_one_pod(volume: &Volume) -> bool {
    volume.modes == ["ReadWriteOncePod"]
}

/// How often to refresh a driver's attachment limit (KEP-4876); `None` means never.
#[must_use]
pub fn refresh_period(driver: Option<&CSIDriver>) -> Option<Duration> {
    let seconds = driver?.spec.node_allocatable_update_period_seconds?;
    u64::try_from(seconds)
        .ok()
        .filter(|seconds| *seconds > 0)
        .map(Duration::from_secs)
}

/// The volume's lifecycle mode in CSIDriver.
fn lifecycle(volume: &Volume) -> &'static str {
    match volume.inline {
        true => "Ephemeral",
        false => "Persistent",
    }
}

/// Checks that a driver supports the volume's lifecycle mode. Without a CSIDriver object, only persistent volumes are
/// supported. The error message is the kubelet's.
pub fn check_lifecycle(volume: &Volume, driver: Option<&CSIDriver>) -> Result<(), Fault> {
    let mode = lifecycle(volume);
    let modes = driver.map(|d| d.spec.volume_lifecycle_modes.as_deref().unwrap_or_default());
    let why = match modes {
        None | Some([]) if mode == "Persistent" => return Ok(()),
        Some(modes) if modes.iter().any(|m| m == mode) => return Ok(()),
        None => "no CSIDriver object".to_owned(),
        Some(modes) => format!(
            "only supports [{}]",
            modes
                .iter()
                .map(|m| quoted(m))
                .collect::<Vec<_>>()
                .join(" ")
        ),
    };
    Err(Fault::later(format!(
        "kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode {mode:?} not supported by driver {} ({why})",
        volume.driver
    )))
}

/// Whether a volume must be attached before it is staged.
#[must_use]
pub fn needs_attachment(volume: &Volume, driver: Option<&CSIDriver>) -> bool {
    !volume.inline && driver.is_none_or(|d| d.spec.attach_required != Some(false))
}

/// The volume context for publishing: the volume's attributes, and pod information if the driver requests it.
#[must_use]
pub fn context(volume: &Volume, pod: &Pod, driver: Option<&CSIDriver>) -> HashMap<String, String> {
    let mut context: HashMap<String, String> = volume.attributes.clone().into_iter().collect();
    if driver.is_some_and(|d| d.spec.pod_info_on_mount == Some(true)) {
        let account = pod::spec(pod)
            .service_account_name
            .clone()
            .unwrap_or_default();
        for (key, value) in [
            ("pod.name", meta::name(pod).to_owned()),
            ("pod.namespace", meta::namespace(pod).to_owned()),
            ("pod.uid", pod::uid(pod).to_owned()),
            ("serviceAccount.name", account),
            ("ephemeral", volume.inline.to_string()),
        ] {
            context.insert(format!("csi.storage.k8s.io/{key}"), value);
        }
    }
    context
}

/// Metadata stored with a published volume (`vol_data.json`), in the kubelet's format; a restarted agent restores
/// volumes from it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeData {
    /// Name of the volume's directory.
    #[serde(rename = "specVolID")]
    pub spec_vol_id: String,
    /// The driver's volume id.
    pub volume_handle: String,
    /// The driver.
    pub driver_name: String,
    /// This node's name.
    pub node_name: String,
    /// Name of the VolumeAttachment, if the volume is attached.
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub attachment_id: String,
    /// `Persistent` or `Ephemeral`.
    pub volume_lifecycle_mode: String,
    /// SELinux label of the mount, if any.
    #[serde(
        rename = "seLinuxMountContext",
        skip_serializing_if = "String::is_empty"
    )]
    pub label: String,
}

/// The metadata for a volume of pod `uid` on node `node`; `attaches` is whether the volume must be attached.
#[must_use]
pub fn volume_data(volume: &Volume, uid: &str, node: &str, attaches: bool) -> VolumeData {
    let volume_handle = match volume.inline {
        true => inline_handle(uid, &volume.name),
        false => volume.handle.clone(),
    };
    let attachment_id = match attaches {
        true => attachment_name(&volume.driver, &volume_handle, node),
        false => String::new(),
    };
    VolumeData {
        spec_vol_id: volume.name.clone(),
        volume_handle,
        driver_name: volume.driver.clone(),
        node_name: node.to_owned(),
        attachment_id,
        volume_lifecycle_mode: lifecycle(volume).to_owned(),
        label: volume.label.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn driver(spec: Value) -> CSIDriver {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": spec})).expect("a driver")
    }

    fn volume(modes: &[&str], fs_type: &str) -> Volume {
        Volume {
            modes: modes.iter().map(|m| (*m).into()).collect(),
            fs_type: fs_type.into(),
            ..Volume::default()
        }
    }

    #[test]
    fn drivers_that_have_not_reregistered_stay_published() {
        let driver = |name: &str, id: &str| CSINodeDriver {
            name: name.into(),
            node_id: id.into(),
            ..CSINodeDriver::default()
        };
        let drivers = Drivers {
            present: vec![driver("b", "2"), driver("a", "1")],
            unregistered: BTreeSet::from(["c".to_owned()]),
        };
        let merged = drivers.merged(&[driver("a", "0"), driver("c", "3"), driver("d", "4")]);
        assert_eq!(
            merged,
            [driver("a", "1"), driver("b", "2"), driver("d", "4")]
        );
        assert_eq!(
            drivers.node_ids(Some(r#"{"c": "3", "d": "4"}"#)).as_deref(),
            Some(r#"{"a":"1","b":"2","d":"4"}"#)
        );
        assert_eq!(Drivers::default().node_ids(None), None);
    }

    #[test]
    fn an_selinux_label_is_passed_only_to_drivers_that_support_it() {
        let own = Volume {
            label: Some("u:r:t:s0:c1,c2".into()),
            options: vec!["noatime".into()],
            ..Volume::default()
        };
        let mounted = labelled(&own, Some(&driver(json!({"seLinuxMount": true}))));
        assert_eq!(
            (mounted.options.join(","), mounted.label.clone()),
            (
                "noatime,context=\"u:r:t:s0:c1,c2\"".into(),
                own.label.clone()
            )
        );
        let grown = expansion_capability(&mounted, NodeCapabilities::default()).access_type;
        assert!(matches!(grown, Some(AccessType::Mount(m)) if m.mount_flags == ["noatime"]));
        for none in [None, Some(driver(json!({})))] {
            let mounted = labelled(&own, none.as_ref());
            assert_eq!((mounted.options.len(), mounted.label), (1, None));
        }
    }

    #[test]
    fn access_modes_follow_the_drivers_capabilities() {
        let (plain, fine) = (
            NodeCapabilities::default(),
            NodeCapabilities {
                single_node_multi_writer: true,
                ..NodeCapabilities::default()
            },
        );
        for (modes, capabilities, expected) in [
            (vec!["ReadWriteOnce"], plain, Mode::SingleNodeWriter),
            (vec!["ReadWriteOnce"], fine, Mode::SingleNodeMultiWriter),
            (vec!["ReadWriteOncePod"], plain, Mode::SingleNodeWriter),
            (vec!["ReadWriteOncePod"], fine, Mode::SingleNodeSingleWriter),
            (vec!["ReadOnlyMany"], plain, Mode::MultiNodeReaderOnly),
            (
                vec!["ReadOnlyMany", "ReadWriteMany"],
                plain,
                Mode::MultiNodeReaderOnly,
            ),
            (
                vec!["ReadWriteMany", "ReadWriteOnce"],
                fine,
                Mode::MultiNodeMultiWriter,
            ),
            (vec![], plain, Mode::SingleNodeWriter),
            (vec![], fine, Mode::SingleNodeMultiWriter),
        ] {
            let modes: Vec<String> = modes.into_iter().map(Into::into).collect();
            assert_eq!(mode(&modes, capabilities), expected, "{modes:?}");
        }
    }

    #[test]
    fn fs_group_policy_decides_who_sets_the_group() {
        let (rwo, rwx) = (
            volume(&["ReadWriteOnce"], "ext4"),
            volume(&["ReadWriteMany"], "ext4"),
        );
        let policy = |p: &str| driver(json!({"fsGroupPolicy": p}));
        let plain = NodeCapabilities::default();
        for (volume, driver, expected) in [
            (&rwo, None, true),
            (&rwx, None, false),
            (&volume(&["ReadWriteOnce"], ""), None, false),
            (&rwx, Some(policy("File")), true),
            (&rwo, Some(policy("None")), false),
        ] {
            assert_eq!(
                applies_fs_group(volume, driver.as_ref(), plain),
                expected,
                "{driver:?}"
            );
        }
        let own = NodeCapabilities {
            mount_group: true,
            ..plain
        };
        assert!(
            !applies_fs_group(&rwo, None, own),
            "the driver sets the group"
        );
        let message = capability(&rwo, own, Some(42));
        assert!(
            matches!(message.access_type, Some(AccessType::Mount(m)) if m.volume_mount_group == "42")
        );
    }

    #[test]
    fn pod_info_is_passed_only_to_drivers_that_request_it() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"serviceAccountName": "s", "containers": [], "volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"a": "b"}}}]}}))
        .expect("a pod");
        let inline = of_inline(&pod, &pod::spec(&pod).volumes.as_ref().expect("volumes")[0])
            .expect("inline");
        assert_eq!(
            context(&inline, &pod, None),
            HashMap::from([("a".to_owned(), "b".to_owned())])
        );
        let context = context(
            &inline,
            &pod,
            Some(&driver(json!({"podInfoOnMount": true}))),
        );
        assert_eq!(
            (
                context["csi.storage.k8s.io/pod.uid"].as_str(),
                context["csi.storage.k8s.io/ephemeral"].as_str(),
                context.len()
            ),
            ("u", "true", 6)
        );
        assert!(!needs_attachment(&inline, None));
        assert!(!needs_attachment(
            &volume(&[], ""),
            Some(&driver(json!({"attachRequired": false})))
        ));
    }

    #[test]
    fn a_driver_serves_only_its_declared_lifecycle_modes() {
        let (inline, persistent) = (
            Volume {
                driver: "d".into(),
                inline: true,
                ..Volume::default()
            },
            Volume {
                driver: "d".into(),
                ..Volume::default()
            },
        );
        let refused = |mode: &str, why: &str| {
            Err(Fault::later(format!(
                "kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode {mode:?} not supported by driver d ({why})"
            )))
        };
        let of = |modes: Value| Some(driver(json!({"volumeLifecycleModes": modes})));
        for (driver, alone, with_pod) in [
            (None, Ok(()), refused("Ephemeral", "no CSIDriver object")),
            (
                of(json!(["Ephemeral"])),
                refused("Persistent", "only supports [\"Ephemeral\"]"),
                Ok(()),
            ),
            (of(json!(["Persistent", "Ephemeral"])), Ok(()), Ok(())),
            (
                of(json!(["Persistent"])),
                Ok(()),
                refused("Ephemeral", "only supports [\"Persistent\"]"),
            ),
        ] {
            assert_eq!(check_lifecycle(&persistent, driver.as_ref()), alone);
            assert_eq!(check_lifecycle(&inline, driver.as_ref()), with_pod);
        }
    }

    #[test]
    fn read_only_of_a_source_applies_only_as_for_the_attacher() {
        let volume = serde_json::from_value(
            json!({"metadata": {"name": "pv"}, "spec": {"csi": {"driver": "d", "volumeHandle": "h", "readOnly": true}}}),
        )
        .expect("a volume");
        let claim = PersistentVolumeClaim::default();
        let PersistentVolume { spec, .. } = &volume;
        let source = spec.as_ref().and_then(|s| s.csi.as_ref()).expect("csi");
        for claimed in [false, true] {
            let made = of_persistent(&volume, &claim, source, claimed);
            assert_eq!(made.read_only, claimed, "as its claim is used");
        }
    }

    #[test]
    fn names_match_those_of_the_attacher() {
        assert_eq!(unique_name("d", "h"), "kubernetes.io/csi/d^h");
        assert_eq!(
            attachment_name("d", "h", "n"),
            format!("csi-{}", sha256(b"hdn"))
        );
        assert_eq!(inline_handle("u", "v"), format!("csi-{}", sha256(b"uv")));
    }

    #[test]
    fn vol_data_json_has_the_kubelets_keys() {
        let data = VolumeData {
            spec_vol_id: "pv".into(),
            volume_handle: "h".into(),
            driver_name: "d".into(),
            node_name: "n".into(),
            volume_lifecycle_mode: "Persistent".into(),
            ..VolumeData::default()
        };
        let text = serde_json::to_string(&data).expect("json");
        assert_eq!(
            text,
            r#"{"specVolID":"pv","volumeHandle":"h","driverName":"d","nodeName":"n","volumeLifecycleMode":"Persistent"}"#
        );
        assert_eq!(
            serde_json::from_str::<VolumeData>(&text).expect("read"),
            data
        );
        let volume = Volume {
            driver: "d".into(),
            handle: "h".into(),
            name: "pv".into(),
            label: Some("u:r:t:s0".into()),
            ..Volume::default()
        };
        let data = volume_data(&volume, "uid", "n", true);
        let text = serde_json::to_string(&data).expect("json");
        assert!(
            text.contains(r#""seLinuxMountContext":"u:r:t:s0""#),
            "{text}"
        );
        assert_eq!(data.attachment_id, attachment_name("d", "h", "n"));
    }
}
