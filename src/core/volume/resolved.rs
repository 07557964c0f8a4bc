//! Resolution of a pod's volume, including its claim: the source, and how it is mounted on this node
//! (`pkg/kubelet/volumemanager`). Pure.

mod problem;

pub use problem::Problem;

use std::path::Path;

use k8s_openapi::api::core::v1::{
    Container, FCVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, Volume,
};

use super::claims;
use super::csi;
use super::disks::{self, Disk};
use super::resize::Grown;
use super::{migrated, selinux};
use crate::fault::Fault;
use crate::pod::resources::{Side, of_container, of_pod_level};
use crate::quantity::Quantity;
use crate::{meta, pod};

/// Medium of an emptyDir.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Medium {
    /// A directory on the node's disk.
    Disk {
        /// Whether a filesystem quota may measure the usage (KEP-1029). Requires a user namespace, so that processes in
        /// the pod cannot change the project id of files.
        counted: bool,
    },
    /// A tmpfs of this size in bytes; 0 means the kernel's default.
    Memory(u64),
    /// Huge pages of this size in bytes.
    HugePages(u64),
}

/// How a volume is provided on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory that the agent creates.
    EmptyDir(Medium),
    /// Files that the agent writes: in memory, except for ConfigMaps.
    Files {
        /// Whether the files are in memory, because secret content must never be written to a disk.
        in_memory: bool,
        /// Name of the plugin's directory.
        plugin: &'static str,
    },
    /// An existing path of the node.
    HostPath {
        /// The path on the node.
        path: String,
        /// The required type; empty means no check.
        kind: String,
    },
    /// An image that the runtime mounts.
    Image,
    /// A local directory or block device of this node.
    Local {
        /// The path.
        path: String,
        /// Filesystem type with which an unformatted device is formatted.
        filesystem: String,
        /// The pending expansion of the filesystem, if any.
        grown: Option<Grown>,
    },
    /// A volume that a CSI driver publishes.
    Csi(Box<csi::Volume>),
    /// A network disk.
    Disk {
        /// The disk.
        disk: Box<Disk>,
        /// Filesystem type with which an unformatted disk is formatted.
        filesystem: String,
        /// Unique volume name in the attach-detach controller.
        attached_as: String,
    },
    /// An NFS export.
    Nfs {
        /// `server:/path`.
        device: String,
    },
}

/// A resolved volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedVolume {
    /// Name of the volume in the pod spec.
    pub volume: String,
    /// Name of the volume's directory: the name in the pod spec, or that of the persistent volume.
    pub name: String,
    /// How the volume is provided.
    pub source: Source,
    /// Whether the volume is read-only.
    pub read_only: bool,
    /// Whether the volume is a block device instead of a filesystem.
    pub block: bool,
    /// Mount options.
    pub options: Vec<String>,
    /// Whether the agent applies the pod's `fsGroup`.
    pub applies_fs_group: bool,
    /// Whether the mount has an SELinux label, so that files need none of their own.
    pub labelled: bool,
    /// Supplemental group from the annotation of a persistent volume.
    pub group: Option<i64>,
    /// Access mode as in metrics, such as `RWO` or `inline`.
    pub access_mode: &'static str,
}

/// Properties of the node that volumes depend on.
#[derive(Debug, Clone, Copy, Default)]
pub struct NodeProperties<'a> {
    /// Allocatable memory of the node in bytes.
    pub memory: u64,
    /// SELinux label of container files; `None` without SELinux.
    pub label: Option<&'a str>,
}

impl ResolvedVolume {
    /// A volume with default properties.
    fn plain(volume: &Volume, source: Source) -> ResolvedVolume {
        ResolvedVolume {
            volume: volume.name.clone(),
            name: volume.name.clone(),
            source,
            read_only: false,
            block: false,
            options: vec![],
            applies_fs_group: false,
            labelled: false,
            group: None,
            access_mode: selinux::INLINE,
        }
    }

    /// Name of the plugin's directory below the pod's `volumes` directory.
    #[must_use]
    pub fn plugin(&self) -> &'static str {
        match &self.source {
            Source::EmptyDir(_) => "kubernetes.io~empty-dir",
            Source::Files { plugin, .. } => plugin,
            Source::HostPath { .. } => "kubernetes.io~host-path",
            Source::Image => "kubernetes.io~image",
            Source::Local { .. } => "kubernetes.io~local-volume",
            Source::Nfs { .. } => "kubernetes.io~nfs",
            Source::Csi(_) => "kubernetes.io~csi",
            Source::Disk { disk, .. } => disk.plugin(),
        }
    }

    /// The plugin's name in metrics; for CSI volumes with the driver's name.
    #[must_use]
    pub fn qualified_plugin(&self) -> String {
        let plugin = self.plugin().replace('~', "/");
        match &self.source {
            Source::Csi(served) => format!("{plugin}:{}", served.driver),
            _ => plugin,
        }
    }

    /// Event messages after a block device is mapped: the global path and the pod's path at which a kubelet with this
    /// root directory lists it (`GetGlobalMapPath` and `GetPodDeviceMapPath`).
    #[must_use]
    pub fn mapped(&self, root: &Path, uid: &str) -> [String; 2] {
        let plugins = root.join("plugins");
        let global = match &self.source {
            Source::Csi(_) => plugins
                .join("kubernetes.io/csi/volumeDevices")
                .join(&self.name)
                .join("dev"),
            Source::Disk { disk, .. } => plugins.join(disk.device_path().join("/")),
            _ => plugins
                .join(self.plugin())
                .join("volumeDevices")
                .join(&self.name),
        };
        let own = root.join("pods").join(uid).join("volumeDevices");
        let places = [
            ("globalMapPath", global),
            ("volumeMapPath", own.join(self.plugin())),
        ];
        places.map(|(what, place)| {
            format!(
                "MapVolume.MapPodDevice succeeded for volume {:?} {what} {place:?}",
                self.name
            )
        })
    }

    /// Whether the volume is of an in-tree kind that migrated to a CSI driver.
    #[must_use]
    pub fn is_migrated(&self) -> bool {
        matches!(&self.source, Source::Csi(served) if served.migrated)
    }

    /// Whether the runtime relabels the volume's files with the container's SELinux label: only for writable volumes of
    /// the node without a labelled mount (KEP-1710).
    #[must_use]
    pub fn is_relabelled(&self) -> bool {
        let ours = match &self.source {
            Source::EmptyDir(_) | Source::Files { .. } => true,
            Source::Local { .. } | Source::Disk { .. } | Source::Csi(_) => !self.read_only,
            Source::HostPath { .. } | Source::Image | Source::Nfs { .. } => false,
        };
        ours && !self.block && !self.labelled
    }
}

/// A claim with its persistent volume.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The claim.
    pub claim: PersistentVolumeClaim,
    /// The persistent volume, [translated](migrated::persistent) to CSI if needed.
    pub volume: PersistentVolume,
    /// Whether the volume is of an in-tree kind that migrated to a CSI driver.
    pub migrated: bool,
}

impl Claimed {
    /// Combines a claim with its persistent volume.
    pub fn new(claim: PersistentVolumeClaim, volume: PersistentVolume) -> Result<Claimed, Fault> {
        let is_csi = |v: &PersistentVolume| v.spec.as_ref().is_some_and(|s| s.csi.is_some());
        let before = is_csi(&volume);
        let volume = migrated::persistent(volume)?;
        Ok(Claimed {
            migrated: is_csi(&volume) && !before,
            claim,
            volume,
        })
    }

    /// Whether the volume is a block device.
    #[must_use]
    pub(crate) fn is_block(&self) -> bool {
        let spec = self.volume.spec.as_ref();
        spec.and_then(|s| s.volume_mode.as_deref()) == Some("Block")
    }

    /// Whether only one pod at a time may use the claim: ReadWriteOncePod is its only access mode.
    #[must_use]
    pub fn is_for_one_pod(&self) -> bool {
        let spec = self.volume.spec.as_ref();
        let modes = spec.and_then(|s| s.access_modes.as_deref());
        modes.is_some_and(|modes| modes == ["ReadWriteOncePod"])
    }
}

/// Checks that a pod may use a claim, and returns the name of its persistent volume.
pub fn check_claim(
    pod: &Pod,
    volume: &Volume,
    claim: &PersistentVolumeClaim,
) -> Result<String, Problem> {
    let (namespace, name) = (meta::namespace(pod), meta::name(claim));
    let refuse = |why: &str| {
        Err(Problem::Claim(format!(
            "error processing PVC {namespace}/{name}: {why}"
        )))
    };
    let is_owned = || {
        claim
            .metadata
            .owner_references
            .iter()
            .flatten()
            .any(|o| o.controller == Some(true) && Some(&o.uid) == pod.metadata.uid.as_ref())
    };
    if volume.ephemeral.is_some() && !is_owned() {
        let why = format!(
            "PVC {namespace}/{name} was not created for pod {namespace}/{} (pod is not owner)",
            meta::name(pod)
        );
        return Err(Problem::Claim(why));
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return refuse("PVC is being deleted");
    }
    let bound = claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound");
    match claim.spec.as_ref().and_then(|s| s.volume_name.as_deref()) {
        _ if !bound => refuse("PVC is not bound"),
        None | Some("") => refuse("PVC has empty pvc.Spec.VolumeName"),
        Some(volume) => Ok(volume.to_owned()),
    }
}

fn mounts(container: &Container, volume: &str) -> bool {
    container
        .volume_mounts
        .iter()
        .flatten()
        .any(|m| m.name == volume)
}

fn devices(container: &Container, volume: &str) -> bool {
    container
        .volume_devices
        .iter()
        .flatten()
        .any(|d| d.name == volume)
}

/// Size of the huge pages for a medium. If the medium does not name it, the pod must request exactly one size.
fn page_size(pod: &Pod, medium: &str) -> Result<u64, Fault> {
    let size = |text: &str| {
        text.parse::<Quantity>()
            .ok()
            .and_then(|q| u64::try_from(q.units()).ok())
            .filter(|s| *s > 0)
    };
    if let Some(text) = medium.strip_prefix("HugePages-") {
        return size(text).ok_or_else(|| {
            Fault::invalid(format!(
                "unknown emptyDir medium {medium:?}: use a size such as HugePages-2Mi"
            ))
        });
    }
    let mut sizes: Vec<String> = pod::containers(pod)
        .iter()
        .flat_map(|(_, c)| of_container(c, Side::Requests).into_keys())
        .chain(of_pod_level(pod, Side::Requests).into_keys())
        .filter_map(|name| Some(name.strip_prefix("hugepages-")?.to_owned()))
        .collect();
    sizes.sort();
    sizes.dedup();
    match sizes.as_slice() {
        [] => Err(Fault::invalid(
            "medium HugePages is used, but no container requests huge pages: add a request for hugepages-<size>",
        )),
        [one] => size(one)
            .ok_or_else(|| Fault::invalid(format!("hugepages-{one} does not name a page size"))),
        _ => Err(Fault::invalid(
            "medium: HugePages can't be used if container requests multiple huge page sizes",
        )),
    }
}

fn empty_dir(
    pod: &Pod,
    source: &k8s_openapi::api::core::v1::EmptyDirVolumeSource,
    memory: u64,
) -> Result<Medium, Fault> {
    match source.medium.as_deref().unwrap_or_default() {
        "" => Ok(Medium::Disk {
            counted: pod::spec(pod).host_users == Some(false),
        }),
        "Memory" => {
            let own = source
                .size_limit
                .as_ref()
                .and_then(|q| q.0.parse::<Quantity>().ok())
                .and_then(|q| u64::try_from(q.units()).ok());
            let pods = crate::pod::cgroup::pod_limits(pod, None, None)
                .memory
                .and_then(|m| u64::try_from(m).ok());
            let smallest = [own, pods, Some(memory)]
                .into_iter()
                .flatten()
                .filter(|s| *s > 0)
                .min();
            Ok(Medium::Memory(smallest.unwrap_or(0)))
        }
        medium if medium.starts_with("HugePages") => page_size(pod, medium).map(Medium::HugePages),
        other => Err(Fault::invalid(format!(
            "unknown emptyDir medium {other:?}: use \"\", Memory or HugePages"
        ))),
    }
}

/// The supplemental group in the annotation of a persistent volume.
fn group_of(volume: &PersistentVolume) -> Option<i64> {
    let named = meta::annotations(volume).get("pv.beta.kubernetes.io/gid")?;
    named.parse().ok()
}

/// Mount options of a persistent volume. The older annotation takes precedence over the field, except for CSI volumes
/// (`util.MountOptionFromSpec`).
fn mount_options(volume: &PersistentVolume) -> Vec<String> {
    if let Some(named) = meta::annotations(volume).get("volume.beta.kubernetes.io/mount-options") {
        let named = named.split(',').filter(|option| !option.is_empty());
        return named.map(str::to_owned).collect();
    }
    let spec = volume.spec.as_ref();
    spec.and_then(|s| s.mount_options.clone())
        .unwrap_or_default()
}

/// Rejects mount options for volumes that are not mounted.
fn check_no_options(volume: &PersistentVolume) -> Result<(), Problem> {
    if mount_options(volume).is_empty() {
        return Ok(());
    }
    Err(Problem::Step {
        step: "MountVolume.MountOptionSupport check",
        of: Some(meta::name(volume).to_owned()),
        why: "mount options are not supported for this volume type".into(),
    })
}

/// Resolves a volume. `claimed` is its claim, if it has one.
pub fn resolve(
    pod: &Pod,
    volume: &Volume,
    claimed: Option<&Claimed>,
    node: NodeProperties<'_>,
) -> Result<ResolvedVolume, Problem> {
    let plain = |source: Source| ResolvedVolume::plain(volume, source);
    if let Some(claimed) = claimed {
        return persistent(pod, volume, claimed, node);
    }
    if let Some(source) = &volume.empty_dir {
        return Ok(ResolvedVolume {
            applies_fs_group: true,
            ..plain(Source::EmptyDir(empty_dir(pod, source, node.memory)?))
        });
    }
    if let Some(host) = &volume.host_path {
        return Ok(plain(Source::HostPath {
            path: host.path.clone(),
            kind: host.type_.clone().unwrap_or_default(),
        }));
    }
    for (is, in_memory, plugin) in [
        (
            volume.config_map.is_some(),
            false,
            "kubernetes.io~configmap",
        ),
        (
            volume.downward_api.is_some(),
            true,
            "kubernetes.io~downward-api",
        ),
        (volume.secret.is_some(), true, "kubernetes.io~secret"),
        (volume.projected.is_some(), true, "kubernetes.io~projected"),
    ] {
        if is {
            return Ok(ResolvedVolume {
                read_only: true,
                applies_fs_group: true,
                ..plain(Source::Files { in_memory, plugin })
            });
        }
    }
    if volume.image.is_some() {
        return Ok(ResolvedVolume {
            read_only: true,
            ..plain(Source::Image)
        });
    }
    if let Some(nfs) = &volume.nfs {
        return Ok(ResolvedVolume {
            read_only: nfs.read_only == Some(true),
            ..plain(Source::Nfs {
                device: nfs_device(&nfs.server, &nfs.path),
            })
        });
    }
    let namespace = meta::namespace(pod);
    if let Some(source) = &volume.iscsi {
        let source_of = Source::Disk {
            disk: Box::new(disks::of_iscsi(source, namespace)),
            filesystem: filesystem(source.fs_type.as_ref()),
            attached_as: disks::iscsi_name(&source.target_portal, &source.iqn, source.lun),
        };
        return Ok(ResolvedVolume {
            read_only: source.read_only == Some(true),
            applies_fs_group: true,
            ..plain(source_of)
        });
    }
    if let Some(source) = &volume.fc {
        return Ok(ResolvedVolume {
            read_only: source.read_only == Some(true),
            applies_fs_group: true,
            ..plain(fc(source))
        });
    }
    if let Some(served) = csi::of_pod(pod, volume)? {
        return Ok(ResolvedVolume {
            name: served.name.clone(),
            read_only: served.read_only,
            ..plain(Source::Csi(Box::new(served)))
        });
    }
    let flex = volume.flex_volume.as_ref();
    Err(unsupported(&volume.name, flex.map(|f| &f.driver)))
}

/// The error for an unsupported volume type, in the kubelet's words (`ErrNoPluginMatched`); `flex` is the driver of a
/// flexVolume.
fn unsupported(name: &str, flex: Option<&String>) -> Problem {
    let why = match flex {
        Some(driver) => format!(
            "no volume plugin matched: volume {name:?} is a flexVolume of driver {driver:?}; FlexVolume is deprecated and not implemented here, no driver in volumePluginDir is called: use a CSI driver"
        ),
        None => format!(
            "no volume plugin matched: volume {name:?} has a type that this version does not support: it supports emptyDir, hostPath, configMap, secret, downwardAPI, projected, image, nfs, iscsi, fc, csi, and claims of hostPath, local, nfs, iscsi, fc and csi volumes, and the in-tree types that have migrated to CSI drivers"
        ),
    };
    Fault::invalid(why).into()
}

/// The filesystem type of a disk, by default ext4.
fn filesystem(named: Option<&String>) -> String {
    named
        .cloned()
        .filter(|f| !f.is_empty())
        .unwrap_or_else(|| "ext4".into())
}

fn nfs_device(server: &str, path: &str) -> String {
    if server.contains(':') {
        format!("[{server}]:{path}")
    } else {
        format!("{server}:{path}")
    }
}

fn fc(source: &FCVolumeSource) -> Source {
    Source::Disk {
        disk: Box::new(disks::of_fc(source)),
        filesystem: filesystem(source.fs_type.as_ref()),
        attached_as: disks::fc_name(source),
    }
}

/// Whether the claim's volume is a block device. Fails if the volume is bound to another claim, or if containers use it
/// in the other mode.
fn check_mode(pod: &Pod, volume: &Volume, claimed: &Claimed) -> Result<bool, Problem> {
    let reference = claimed.volume.spec.as_ref();
    let reference = reference.and_then(|spec| spec.claim_ref.as_ref()?.uid.as_ref());
    if reference != claimed.claim.metadata.uid.as_ref() {
        let (namespace, claim) = (meta::namespace(pod), meta::name(&claimed.claim));
        let name = meta::name(&claimed.volume);
        return Err(Problem::Claim(format!(
            "error processing PVC {namespace}/{claim}: persistentVolume {name:?} is bound to another claim"
        )));
    }
    let block = claimed.is_block();
    let containers = pod::containers(pod);
    if block && containers.iter().any(|(_, c)| mounts(c, &volume.name)) {
        return Err(Problem::Claim(format!(
            "volume {} has volumeMode Block, but is specified in volumeMounts",
            volume.name
        )));
    }
    if !block && containers.iter().any(|(_, c)| devices(c, &volume.name)) {
        return Err(Problem::Claim(format!(
            "volume {} has volumeMode Filesystem, but is specified in volumeDevices",
            volume.name
        )));
    }
    Ok(block)
}

/// Resolves the persistent volume of a claim.
fn persistent(
    pod: &Pod,
    volume: &Volume,
    claimed: &Claimed,
    node: NodeProperties<'_>,
) -> Result<ResolvedVolume, Problem> {
    let spec = claimed.volume.spec.clone().unwrap_or_default();
    let name = meta::name(&claimed.volume).to_owned();
    let block = check_mode(pod, volume, claimed)?;
    let used = volume.persistent_volume_claim.as_ref();
    let read_only = used.is_some_and(|c| c.read_only == Some(true));
    let made = |source: Source, read_only: bool, applies_fs_group: bool| ResolvedVolume {
        name: name.clone(),
        read_only,
        block,
        options: mount_options(&claimed.volume),
        applies_fs_group,
        group: group_of(&claimed.volume),
        access_mode: selinux::access_mode(spec.access_modes.as_deref().unwrap_or_default()),
        ..ResolvedVolume::plain(volume, source)
    };
    let modes = spec.access_modes.clone().unwrap_or_default();
    let label = node
        .label
        .and_then(|files| selinux::of_volume(pod, &volume.name, &modes, files))
        .filter(|_| !block);
    // Disks are mounted with the SELinux label.
    let disk = |source: Source, own: Option<bool>| {
        let mut made = made(source, read_only || own == Some(true), !block);
        made.labelled = label.is_some();
        made.options.extend(label.as_deref().map(selinux::option));
        made
    };
    if let Some(host) = &spec.host_path {
        check_no_options(&claimed.volume)?;
        return Ok(made(
            Source::HostPath {
                path: host.path.clone(),
                kind: host.type_.clone().unwrap_or_default(),
            },
            read_only,
            false,
        ));
    }
    if let Some(local) = &spec.local {
        let filesystem = filesystem(local.fs_type.as_ref());
        return Ok(made(
            Source::Local {
                path: local.path.clone(),
                filesystem,
                grown: claims::pending_expansion(&claimed.volume, &claimed.claim)
                    .filter(|grown| !grown.claim_has_size),
            },
            read_only,
            !block,
        ));
    }
    if let Some(nfs) = &spec.nfs {
        return Ok(made(
            Source::Nfs {
                device: nfs_device(&nfs.server, &nfs.path),
            },
            read_only || nfs.read_only == Some(true),
            false,
        ));
    }
    if let Some(source) = &spec.iscsi {
        let of = Source::Disk {
            disk: Box::new(disks::of_persistent_iscsi(source, meta::namespace(pod))),
            filesystem: filesystem(source.fs_type.as_ref()),
            attached_as: disks::iscsi_name(&source.target_portal, &source.iqn, source.lun),
        };
        return Ok(disk(of, source.read_only));
    }
    if let Some(source) = &spec.fc {
        return Ok(disk(fc(source), source.read_only));
    }
    if let Some(source) = &spec.csi {
        let served = csi::Volume {
            label,
            migrated: claimed.migrated,
            ..csi::of_persistent(&claimed.volume, &claimed.claim, source, read_only)
        };
        let read_only = served.read_only;
        return Ok(made(Source::Csi(Box::new(served)), read_only, false));
    }
    let flex = spec.flex_volume.as_ref();
    Err(unsupported(&volume.name, flex.map(|f| &f.driver)))
}

/// Checks that the volume of a claim is accessible from the node.
pub fn check_node_affinity(
    claimed: &Claimed,
    node: Option<&k8s_openapi::api::core::v1::Node>,
) -> Result<(), Problem> {
    match node {
        Some(node) if !claims::is_accessible_from(&claimed.volume, node) => Err(Problem::Step {
            step: match claimed.is_block() {
                true => "MapVolume.NodeAffinity check",
                false => "MountVolume.NodeAffinity check",
            },
            of: Some(meta::name(&claimed.volume).to_owned()),
            why: "no matching NodeSelectorTerms".into(),
        }),
        _ => Ok(()),
    }
}

/// The error for an exclusive claim that another pod uses.
#[must_use]
pub fn already_in_use(claimed: &Claimed) -> Problem {
    Problem::Step {
        step: "MountVolume.SetUp",
        of: Some(meta::name(&claimed.volume).to_owned()),
        why: csi::ALREADY_IN_USE.into(),
    }
}

#[cfg(test)]
mod tests;
