//! A pod's volume once its claim is resolved: where it lies on this node and how it comes there
//! (kubelet spec, 9.1 and 9.3). Pure.

mod problem;

pub use problem::Problem;

use std::path::Path;

use k8s_openapi::api::core::v1::{
    Container, FCVolumeSource, PersistentVolume, PersistentVolumeClaim, Pod, Volume,
};

use super::claims::{self, Grown};
use super::csi;
use super::disks::{self, Disk};
use super::{migrated, selinux};
use crate::core::fault::Fault;
use crate::core::pod::resources::{Side, of_container, of_pod_level};
use crate::core::quantity::Quantity;
use crate::core::{meta, pod};

/// What an emptyDir is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Medium {
    /// A directory on the node's disk.
    Disk {
        /// Whether the filesystem may be trusted to count it: who is in the pod cannot change whose its files are.
        counted: bool,
    },
    /// A tmpfs of at most so many bytes; 0 for the kernel's default.
    Memory(u64),
    /// Huge pages of so many bytes each.
    HugePages(u64),
}

/// How a volume comes to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The agent makes it.
    EmptyDir(Medium),
    /// The agent writes its files: into memory, except those of ConfigMaps.
    Files {
        /// Whether they lie in memory: what may be secret must never reach a disk.
        in_memory: bool,
        /// The directory of the plugin.
        plugin: &'static str,
    },
    /// It is there already, of this type.
    HostPath {
        /// The path on the node.
        path: String,
        /// The type that is checked; empty for none.
        kind: String,
    },
    /// The runtime mounts an image.
    Image,
    /// A directory or block device of this node.
    Local {
        /// Its path.
        path: String,
        /// The filesystem that a device gets which has none.
        filesystem: String,
        /// What it has grown to, where the claim says that its filesystem has less.
        grown: Option<Grown>,
    },
    /// A driver publishes it.
    Csi(Box<csi::Volume>),
    /// A disk behind a network, with the filesystem that it gets if it has none.
    Disk {
        /// The disk.
        disk: Box<Disk>,
        /// The filesystem.
        filesystem: String,
        /// The name that the attach-detach controller has for it.
        attached_as: String,
    },
    /// Another machine's directory.
    Nfs {
        /// `server:/path`.
        device: String,
    },
}

/// A volume of a pod, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedVolume {
    /// Its name in the pod.
    pub volume: String,
    /// The name of its directory: the pod's for it, or the persistent volume's.
    pub name: String,
    /// How it comes to the node.
    pub source: Source,
    /// Whether nobody may write to it.
    pub read_only: bool,
    /// Whether it is a device and not a filesystem.
    pub block: bool,
    /// The options of its mount.
    pub options: Vec<String>,
    /// Whether its group is ours to set.
    pub owned: bool,
    /// Whether its files get their SELinux label from the mount, and need none of their own.
    pub labelled: bool,
    /// The group that may use its files, of a persistent volume that names one.
    pub group: Option<i64>,
    /// Its access mode as metrics name it: `RWO`, for instance, or `inline`.
    pub access_mode: &'static str,
}

/// What volumes are made with on this node.
#[derive(Debug, Clone, Copy, Default)]
pub struct Here<'a> {
    /// What pods may use of the node's memory, in bytes.
    pub memory: u64,
    /// The SELinux label of containers' files; none where there is no SELinux.
    pub label: Option<&'a str>,
}

impl ResolvedVolume {
    /// A volume that has nothing particular.
    fn plain(volume: &Volume, source: Source) -> ResolvedVolume {
        ResolvedVolume {
            volume: volume.name.clone(),
            name: volume.name.clone(),
            source,
            read_only: false,
            block: false,
            options: vec![],
            owned: false,
            labelled: false,
            group: None,
            access_mode: selinux::INLINE,
        }
    }

    /// The directory of its plugin below the pod's `volumes`.
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

    /// Its plugin as metrics name it: of a driver's volume with the driver.
    #[must_use]
    pub fn qualified_plugin(&self) -> String {
        let plugin = self.plugin().replace('~', "/");
        match &self.source {
            Source::Csi(served) => format!("{plugin}:{}", served.driver),
            _ => plugin,
        }
    }

    /// What the events say of a device that a pod has, when it has it: where a kubelet with this root directory lists it for
    /// all pods, and where for this one (upstream's `GetGlobalMapPath` and `GetPodDeviceMapPath`).
    #[must_use]
    pub fn mapped(&self, root: &Path, uid: &str) -> [String; 2] {
        let plugins = root.join("plugins");
        let global = match &self.source {
            Source::Csi(_) => plugins
                .join("kubernetes.io/csi/volumeDevices")
                .join(&self.name)
                .join("dev"),
            Source::Disk { disk, .. } => plugins.join(disk.device_place().join("/")),
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

    /// Whether a driver has taken over its kind.
    #[must_use]
    pub fn is_migrated(&self) -> bool {
        matches!(&self.source, Source::Csi(served) if served.migrated)
    }

    /// Whether the runtime gives its files the container's SELinux label (kubelet spec, 9.7): what is ours to change,
    /// and has no label from its mount.
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

/// A claim and the volume it is bound to.
#[derive(Debug, Clone)]
pub struct Claimed {
    /// The claim.
    pub claim: PersistentVolumeClaim,
    /// The volume, as [translated](migrated::persistent).
    pub volume: PersistentVolume,
    /// Whether it is of a kind that a CSI driver has taken over.
    pub migrated: bool,
}

impl Claimed {
    /// A claim with the volume that it is bound to.
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

    /// Whether its volume is a device.
    #[must_use]
    pub fn is_block(&self) -> bool {
        let spec = self.volume.spec.as_ref();
        spec.and_then(|s| s.volume_mode.as_deref()) == Some("Block")
    }

    /// Whether only one pod at a time may use it: if its volume has no other access mode.
    #[must_use]
    pub fn is_for_one_pod(&self) -> bool {
        let spec = self.volume.spec.as_ref();
        let modes = spec.and_then(|s| s.access_modes.as_deref());
        modes.is_some_and(|modes| modes == ["ReadWriteOncePod"])
    }
}

/// Why a claim cannot be used by a pod, as far as the claim itself tells; else the name of its volume.
pub fn usable(
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
    let owned = || {
        claim
            .metadata
            .owner_references
            .iter()
            .flatten()
            .any(|o| o.controller == Some(true) && Some(&o.uid) == pod.metadata.uid.as_ref())
    };
    if volume.ephemeral.is_some() && !owned() {
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

/// The size of huge pages that a pod asks for, if there is only one.
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
                "emptyDir medium {medium:?} is not known: use a size such as HugePages-2Mi"
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
            "medium HugePages is used, but no container asks for huge pages: add a request for hugepages-<size>",
        )),
        [one] => size(one)
            .ok_or_else(|| Fault::invalid(format!("hugepages-{one} is not a size of pages"))),
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
            let pods = crate::core::pod::cgroup::pod_limits(pod, None, None)
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
            "emptyDir medium {other:?} is not known: use \"\", Memory or HugePages"
        ))),
    }
}

/// The group that a persistent volume's annotation names: its files are that group's.
fn group_of(volume: &PersistentVolume) -> Option<i64> {
    let named = meta::annotations(volume).get("pv.beta.kubernetes.io/gid")?;
    named.parse().ok()
}

/// The options of a persistent volume's mount: an annotation, from before there was a field, goes before that
/// (`util.MountOptionFromSpec`). Those of drivers' volumes are the field's alone.
fn mount_options(volume: &PersistentVolume) -> Vec<String> {
    if let Some(named) = meta::annotations(volume).get("volume.beta.kubernetes.io/mount-options") {
        let named = named.split(',').filter(|option| !option.is_empty());
        return named.map(str::to_owned).collect();
    }
    let spec = volume.spec.as_ref();
    spec.and_then(|s| s.mount_options.clone())
        .unwrap_or_default()
}

/// Options of a mount are refused where nothing is mounted.
fn has_no_options(volume: &PersistentVolume) -> Result<(), Problem> {
    if mount_options(volume).is_empty() {
        return Ok(());
    }
    Err(Problem::Step {
        step: "MountVolume.MountOptionSupport check",
        of: Some(meta::name(volume).to_owned()),
        why: "mount options are not supported for this volume type".into(),
    })
}

/// Resolves a volume. `claimed` is its claim if it has one.
pub fn resolve(
    pod: &Pod,
    volume: &Volume,
    claimed: Option<&Claimed>,
    here: Here<'_>,
) -> Result<ResolvedVolume, Problem> {
    let plain = |source: Source| ResolvedVolume::plain(volume, source);
    if let Some(claimed) = claimed {
        return persistent(pod, volume, claimed, here);
    }
    if let Some(source) = &volume.empty_dir {
        return Ok(ResolvedVolume {
            owned: true,
            ..plain(Source::EmptyDir(empty_dir(pod, source, here.memory)?))
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
                owned: true,
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
            owned: true,
            ..plain(source_of)
        });
    }
    if let Some(source) = &volume.fc {
        return Ok(ResolvedVolume {
            read_only: source.read_only == Some(true),
            owned: true,
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
    Err(unserved(&volume.name, flex.map(|f| &f.driver)))
}

/// Why a volume is not served, with the kubelet's words (`ErrNoPluginMatched`); `flex` is the driver of a flexVolume.
fn unserved(name: &str, flex: Option<&String>) -> Problem {
    let why = match flex {
        Some(driver) => format!(
            "no volume plugin matched: volume {name:?} is a flexVolume of driver {driver:?}; FlexVolume is deprecated and not built here, no driver in volumePluginDir is called: use a CSI driver"
        ),
        None => format!(
            "no volume plugin matched: volume {name:?} is of a type that this version does not serve: it serves emptyDir, hostPath, configMap, secret, downwardAPI, projected, image, nfs, iscsi, fc, csi, and claims of hostPath, local, nfs, iscsi, fc and csi volumes, and the types that CSI drivers have taken over"
        ),
    };
    Fault::invalid(why).into()
}

/// The filesystem of a disk.
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

/// Whether the claim's volume is a device; refused where it is not the claim's, or where containers take it for something else.
fn fits(pod: &Pod, volume: &Volume, claimed: &Claimed) -> Result<bool, Problem> {
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
    let everyone = pod::containers(pod);
    if block && everyone.iter().any(|(_, c)| mounts(c, &volume.name)) {
        return Err(Problem::Claim(format!(
            "volume {} has volumeMode Block, but is specified in volumeMounts",
            volume.name
        )));
    }
    if !block && everyone.iter().any(|(_, c)| devices(c, &volume.name)) {
        return Err(Problem::Claim(format!(
            "volume {} has volumeMode Filesystem, but is specified in volumeDevices",
            volume.name
        )));
    }
    Ok(block)
}

/// A volume that a claim is bound to.
fn persistent(
    pod: &Pod,
    volume: &Volume,
    claimed: &Claimed,
    here: Here<'_>,
) -> Result<ResolvedVolume, Problem> {
    let spec = claimed.volume.spec.clone().unwrap_or_default();
    let name = meta::name(&claimed.volume).to_owned();
    let block = fits(pod, volume, claimed)?;
    let used = volume.persistent_volume_claim.as_ref();
    let read_only = used.is_some_and(|c| c.read_only == Some(true));
    let made = |source: Source, read_only: bool, owned: bool| ResolvedVolume {
        name: name.clone(),
        read_only,
        block,
        options: mount_options(&claimed.volume),
        owned,
        group: group_of(&claimed.volume),
        access_mode: selinux::access_mode(spec.access_modes.as_deref().unwrap_or_default()),
        ..ResolvedVolume::plain(volume, source)
    };
    let modes = spec.access_modes.clone().unwrap_or_default();
    let label = here
        .label
        .and_then(|files| selinux::of_volume(pod, &volume.name, &modes, files))
        .filter(|_| !block);
    // A disk of our own is mounted with its label.
    let disk = |source: Source, own: Option<bool>| {
        let mut made = made(source, read_only || own == Some(true), !block);
        made.labelled = label.is_some();
        made.options.extend(label.as_deref().map(selinux::option));
        made
    };
    if let Some(host) = &spec.host_path {
        has_no_options(&claimed.volume)?;
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
                grown: claims::growth(&claimed.volume, &claimed.claim)
                    .filter(|grown| !grown.is_told),
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
    Err(unserved(&volume.name, flex.map(|f| &f.driver)))
}

/// Whether a node reaches the volume of a claim.
pub fn reached(
    claimed: &Claimed,
    node: Option<&k8s_openapi::api::core::v1::Node>,
) -> Result<(), Problem> {
    match node {
        Some(node) if !claims::reaches(&claimed.volume, node) => Err(Problem::Step {
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

/// Why the volume of a claim cannot be had: another pod has it.
#[must_use]
pub fn taken(claimed: &Claimed) -> Problem {
    Problem::Step {
        step: "MountVolume.SetUp",
        of: Some(meta::name(&claimed.volume).to_owned()),
        why: csi::TAKEN.into(),
    }
}

#[cfg(test)]
mod tests;
