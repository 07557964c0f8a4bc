//! Network disks (iSCSI and Fibre Channel): names, paths and `iscsiadm` logins (`pkg/volume/iscsi`, `pkg/volume/fc`).
//! Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    FCVolumeSource, ISCSIPersistentVolumeSource, ISCSIVolumeSource, LocalObjectReference,
};
use serde::{Deserialize, Serialize};

/// CHAP user names and passwords. `Debug` hides the values.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Chap(pub BTreeMap<String, String>);

impl std::fmt::Debug for Chap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chap({} values)", self.0.len())
    }
}

/// An iSCSI logical unit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Iscsi {
    /// Portal addresses with ports.
    pub portals: Vec<String>,
    /// The target's IQN.
    pub iqn: String,
    /// The LUN.
    pub lun: i32,
    /// The `iscsiadm` interface.
    pub interface: String,
    /// Initiator name, if it is not the node's default.
    pub initiator: Option<String>,
    /// Interface that a kubelet created for that initiator name.
    #[serde(default, rename = "made", skip_serializing_if = "Option::is_none")]
    pub kubelet_interface: Option<String>,
    /// Whether discovery and sessions use CHAP.
    pub chap: (bool, bool),
    /// Secret with the CHAP credentials: namespace and name.
    pub secret: Option<(String, String)>,
    /// Content of the secret; never written to disk.
    #[serde(skip)]
    pub passwords: Chap,
}

/// A network disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disk {
    /// An iSCSI disk.
    Iscsi(Iscsi),
    /// A Fibre Channel disk: target WWNs and LUN, or WWIDs.
    Fc {
        /// World wide names of the targets.
        wwns: Vec<String>,
        /// The LUN.
        lun: i32,
        /// World wide ids of the disk.
        wwids: Vec<String>,
    },
}

fn with_port(portal: &str) -> String {
    if portal
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    {
        portal.to_owned()
    } else {
        format!("{portal}:3260")
    }
}

/// The iSCSI disk of a volume in a pod spec; `namespace` is the pod's.
#[must_use]
pub(crate) fn of_iscsi(source: &ISCSIVolumeSource, namespace: &str) -> Disk {
    let all = std::iter::once(&source.target_portal).chain(source.portals.iter().flatten());
    Disk::Iscsi(Iscsi {
        portals: all.map(|p| with_port(p)).collect(),
        iqn: source.iqn.clone(),
        lun: source.lun,
        interface: source
            .iscsi_interface
            .clone()
            .filter(|i| !i.is_empty())
            .unwrap_or_else(|| "default".into()),
        initiator: source.initiator_name.clone(),
        kubelet_interface: None,
        chap: (
            source.chap_auth_discovery == Some(true),
            source.chap_auth_session == Some(true),
        ),
        secret: source
            .secret_ref
            .as_ref()
            .map(|s| (namespace.to_owned(), s.name.clone())),
        passwords: Chap::default(),
    })
}

/// The iSCSI disk of a persistent volume; `namespace` is the claim's. The secret may be in another namespace.
#[must_use]
pub(crate) fn of_persistent_iscsi(source: &ISCSIPersistentVolumeSource, namespace: &str) -> Disk {
    let reference = source.secret_ref.clone();
    let place = reference
        .as_ref()
        .and_then(|s| s.namespace.clone())
        .unwrap_or_else(|| namespace.to_owned());
    let own = ISCSIVolumeSource {
        chap_auth_discovery: source.chap_auth_discovery,
        chap_auth_session: source.chap_auth_session,
        fs_type: source.fs_type.clone(),
        initiator_name: source.initiator_name.clone(),
        iqn: source.iqn.clone(),
        iscsi_interface: source.iscsi_interface.clone(),
        lun: source.lun,
        portals: source.portals.clone(),
        read_only: source.read_only,
        secret_ref: reference.map(|s| LocalObjectReference {
            name: s.name.unwrap_or_default(),
        }),
        target_portal: source.target_portal.clone(),
    };
    of_iscsi(&own, &place)
}

/// The Fibre Channel disk of a volume.
#[must_use]
pub(crate) fn of_fc(source: &FCVolumeSource) -> Disk {
    Disk::Fc {
        wwns: source.target_wwns.clone().unwrap_or_default(),
        lun: source.lun.unwrap_or(0),
        wwids: source.wwids.clone().unwrap_or_default(),
    }
}

/// Unique name of an iSCSI disk for nodes and the attach-detach controller (`GetVolumeName` in `pkg/volume/iscsi`);
/// `portal` is as the volume spells it.
#[must_use]
pub fn iscsi_name(portal: &str, iqn: &str, lun: i32) -> String {
    format!("kubernetes.io/iscsi/{portal}:{iqn}:{lun}")
}

/// Unique name of a Fibre Channel disk for nodes and the attach-detach controller.
#[must_use]
pub fn fc_name(source: &FCVolumeSource) -> String {
    let targets = source.target_wwns.as_deref().unwrap_or_default();
    match source.lun {
        Some(lun) if !targets.is_empty() => {
            format!("kubernetes.io/fc/[{}]:{lun}", targets.join(" "))
        }
        _ => {
            let own = source.wwids.as_deref().unwrap_or_default();
            format!("kubernetes.io/fc/[{}]", own.join(" "))
        }
    }
}

/// Possible unique names of the disk with this directory below the plugin's directory. The directory name is ambiguous.
#[must_use]
pub fn unique_names_of_directory(directory: &str) -> Vec<String> {
    let unit = directory
        .rsplit_once("-lun-")
        .and_then(|(disk, lun)| Some((disk, lun.parse::<i32>().ok()?)));
    let Some((disk, lun)) = unit else {
        return vec![format!("kubernetes.io/fc/[{directory}]")];
    };
    let of_target = ["-iqn.", "-eui.", "-naa."];
    let target = of_target.iter().find_map(|kind| disk.find(kind));
    let Some((portal, iqn)) =
        target.and_then(|at| Some((disk.get(..at)?, disk.get(at.checked_add(1)?..)?)))
    else {
        let targets = disk.replace('-', " ");
        return vec![format!("kubernetes.io/fc/[{targets}]:{lun}")];
    };
    // The volume may omit the default port.
    let portals = [Some(portal), portal.strip_suffix(":3260")];
    let portals = portals.into_iter().flatten();
    portals.map(|portal| iscsi_name(portal, iqn, lun)).collect()
}

impl Disk {
    /// Name of the plugin's directory.
    #[must_use]
    pub fn plugin(&self) -> &'static str {
        match self {
            Disk::Iscsi(_) => "kubernetes.io~iscsi",
            Disk::Fc { .. } => "kubernetes.io~fc",
        }
    }

    /// Path of the global mount below the `plugins` directory, as segments.
    #[must_use]
    pub fn global_mount_path(&self) -> Vec<String> {
        match self {
            Disk::Iscsi(i) => {
                let portal = i.portals.first().map(String::as_str).unwrap_or_default();
                vec![
                    "kubernetes.io".into(),
                    "iscsi".into(),
                    format!("iface-{}", i.interface),
                    format!("{portal}-{}-lun-{}", i.iqn, i.lun),
                ]
            }
            Disk::Fc { wwns, lun, wwids } => {
                let name = if wwns.is_empty() {
                    wwids.join("-").replace(' ', "_")
                } else {
                    format!("{}-lun-{lun}", wwns.join("-"))
                };
                vec!["kubernetes.io".into(), "fc".into(), name]
            }
        }
    }

    /// Path of the directory that records the pods with this block device, as segments below `plugins`.
    #[must_use]
    pub fn device_path(&self) -> Vec<String> {
        let mut path = self.global_mount_path();
        path.insert(2, "volumeDevices".into());
        path
    }

    /// Whether a link below `/dev/disk` refers to this disk, by the names of its directory and the link.
    #[must_use]
    pub fn is_named(&self, dir: &str, link: &str) -> bool {
        let ends = |name: &str| {
            link == name
                || link
                    .strip_suffix(name)
                    .is_some_and(|before| before.ends_with('-'))
        };
        match self {
            Disk::Iscsi(i) => dir == "by-path" && i.portals.iter().any(|p| ends(&i.link(p))),
            Disk::Fc { wwns, lun, wwids } => match dir {
                "by-path" => wwns.iter().any(|w| {
                    ends(&format!(
                        "fc-0x{}-lun-{lun}",
                        w.trim_start_matches("0x").to_lowercase()
                    ))
                }),
                "by-id" => wwids
                    .iter()
                    .any(|w| link == format!("scsi-{}", w.replace(' ', "_"))),
                _ => false,
            },
        }
    }
}

/// Session file of a kubelet (`pkg/volume/iscsi`). Go accepts field names in any case, and writes these.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct KubeletSession {
    portals: Vec<String>,
    iqn: String,
    lun: String,
    #[serde(default)]
    iface: String,
    #[serde(default)]
    initiator_name: String,
}

/// A session file of this agent or of a kubelet.
#[derive(Deserialize)]
#[serde(untagged)]
enum Session {
    Own(Iscsi),
    Kubelet(KubeletSession),
}

impl From<KubeletSession> for Iscsi {
    fn from(session: KubeletSession) -> Iscsi {
        let own_name = !session.initiator_name.is_empty();
        let interface = match session.iface.as_str() {
            "" => "default".to_owned(),
            name => name.to_owned(),
        };
        Iscsi {
            portals: session.portals,
            iqn: session.iqn,
            lun: session.lun.parse().unwrap_or(0),
            initiator: own_name.then_some(session.initiator_name),
            kubelet_interface: own_name.then(|| interface.clone()),
            interface,
            ..Iscsi::default()
        }
    }
}

impl Iscsi {
    /// Parses a session file of this agent or of a kubelet.
    pub fn parse_session(text: &[u8]) -> Result<Iscsi, String> {
        match serde_json::from_slice(text) {
            Ok(Session::Own(own)) => Ok(own),
            Ok(Session::Kubelet(session)) => Ok(session.into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The interface to use; a separate one if the volume has an initiator name.
    fn iface(&self, portal: &str) -> String {
        if let Some(interface) = &self.kubelet_interface {
            interface.clone()
        } else if self.initiator.is_some() {
            format!("{portal}:{}", self.iqn)
        } else {
            self.interface.clone()
        }
    }

    /// Name of the disk's link below `/dev/disk/by-path`, which udev creates.
    #[must_use]
    pub fn link(&self, portal: &str) -> String {
        format!("ip-{portal}-iscsi-{}-lun-{}", self.iqn, self.lun)
    }

    fn with(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    /// Arguments of the `iscsiadm` calls that log in to a portal.
    #[must_use]
    pub fn login(&self, portal: &str) -> Vec<Vec<String>> {
        let iface = self.iface(portal);
        let mut calls = vec![];
        if let Some(name) = &self.initiator {
            calls.push(Self::with(&["-m", "iface", "-I", &iface, "-o", "new"]));
            calls.push(Self::with(&[
                "-m",
                "iface",
                "-I",
                &iface,
                "-o",
                "update",
                "-n",
                "iface.initiatorname",
                "-v",
                name,
            ]));
        }
        let discovery = [
            "-m",
            "discoverydb",
            "-t",
            "sendtargets",
            "-p",
            portal,
            "-I",
            &iface,
        ];
        let node = ["-m", "node", "-p", portal, "-T", &self.iqn, "-I", &iface];
        let set = |base: &[&str], key: &str, value: &str| {
            Self::with(&[base, &["-o", "update", "-n", key, "-v", value]].concat())
        };
        if self.chap.0 {
            calls.push(Self::with(&[&discovery[..], &["-o", "new"]].concat()));
            calls.push(set(
                &discovery,
                "discovery.sendtargets.auth.authmethod",
                "CHAP",
            ));
            let own = self
                .passwords
                .0
                .iter()
                .filter(|(key, _)| key.starts_with("discovery.sendtargets.auth."));
            calls.extend(own.map(|(key, value)| set(&discovery, key, value)));
        }
        calls.push(Self::with(&[&discovery[..], &["--discover"]].concat()));
        if self.chap.1 {
            calls.push(set(&node, "node.session.auth.authmethod", "CHAP"));
            let own = self
                .passwords
                .0
                .iter()
                .filter(|(key, _)| key.starts_with("node.session.auth."));
            calls.extend(own.map(|(key, value)| set(&node, key, value)));
        }
        calls.push(Self::with(&[&node[..], &["--login"]].concat()));
        // Disables automatic login at boot; the agent logs in when a pod needs the disk.
        calls.push(set(&node, "node.startup", "manual"));
        calls
    }

    /// Arguments of the `iscsiadm` calls that log out of a portal.
    #[must_use]
    pub fn logout(&self, portal: &str) -> Vec<Vec<String>> {
        let iface = self.iface(portal);
        let node = ["-m", "node", "-p", portal, "-T", &self.iqn, "-I", &iface];
        let mut calls = vec![
            Self::with(&[&node[..], &["--logout"]].concat()),
            Self::with(&[&node[..], &["-o", "delete"]].concat()),
        ];
        // A kubelet's interface serves all portals, so it is deleted after the last one.
        let is_last = self.kubelet_interface.is_none()
            || self.portals.last().is_some_and(|last| last == portal);
        if self.initiator.is_some() && is_last {
            calls.push(Self::with(&["-m", "iface", "-I", &iface, "-o", "delete"]));
        }
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn iscsi(more: Value) -> Disk {
        let mut source = json!({"targetPortal": "192.0.2.1", "iqn": "iqn.2026-11.test:disk", "lun": 3, "portals": ["192.0.2.2:9999"]});
        json_patch::merge(&mut source, &more);
        of_iscsi(&serde_json::from_value(source).expect("a source"), "n")
    }

    #[test]
    fn disks_are_identified_by_their_links() {
        let disk = iscsi(json!({}));
        for (dir, link, expected) in [
            (
                "by-path",
                "ip-192.0.2.1:3260-iscsi-iqn.2026-11.test:disk-lun-3",
                true,
            ),
            (
                "by-path",
                "pci-0000:01-ip-192.0.2.2:9999-iscsi-iqn.2026-11.test:disk-lun-3",
                true,
            ),
            (
                "by-path",
                "ip-192.0.2.1:3260-iscsi-iqn.2026-11.test:disk-lun-33",
                false,
            ),
            (
                "by-path",
                "ip-192.0.2.1:3260-iscsi-iqn.2026-11.test:disk-lun-3-part1",
                false,
            ),
            (
                "by-id",
                "ip-192.0.2.1:3260-iscsi-iqn.2026-11.test:disk-lun-3",
                false,
            ),
        ] {
            assert_eq!(disk.is_named(dir, link), expected, "{link}");
        }
        let fc = |source: Value| of_fc(&serde_json::from_value(source).expect("a source"));
        let by_target = fc(json!({"targetWWNs": ["50060E801049CFD1"], "lun": 0}));
        assert!(by_target.is_named("by-path", "pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-0"));
        assert!(!by_target.is_named("by-path", "pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-01"));
        let own = fc(json!({"wwids": ["3600508b400105e210000900000490000"]}));
        assert!(own.is_named("by-id", "scsi-3600508b400105e210000900000490000"));
        assert_eq!(
            by_target.global_mount_path().last().map(String::as_str),
            Some("50060E801049CFD1-lun-0")
        );
    }

    #[test]
    fn a_login_sets_only_the_requested_parameters() {
        let Disk::Iscsi(plain) = iscsi(json!({})) else {
            panic!("iSCSI")
        };
        let words =
            |calls: Vec<Vec<String>>| calls.into_iter().map(|c| c.join(" ")).collect::<Vec<_>>();
        let node = "-m node -p P -T iqn.2026-11.test:disk -I default";
        assert_eq!(
            words(plain.login("P")),
            [
                "-m discoverydb -t sendtargets -p P -I default --discover".to_owned(),
                format!("{node} --login"),
                format!("{node} -o update -n node.startup -v manual")
            ]
        );
        assert_eq!(
            words(plain.logout("P")),
            [format!("{node} --logout"), format!("{node} -o delete")]
        );
        let Disk::Iscsi(mut secured) =
            iscsi(json!({"chapAuthSession": true, "initiatorName": "iqn.me"}))
        else {
            panic!("iSCSI")
        };
        secured.passwords = Chap(BTreeMap::from([
            ("node.session.auth.password".into(), "p".into()),
            ("other".into(), "q".into()),
        ]));
        let calls = words(secured.login("P"));
        assert!(
            calls
                .iter()
                .any(|c| c.ends_with("-n node.session.auth.password -v p"))
                && !calls.iter().any(|c| c.contains("other")),
            "{calls:?}"
        );
        assert!(calls[0].ends_with("-o new") && calls[1].ends_with("-v iqn.me"));
        assert_eq!(format!("{:?}", secured.passwords), "Chap(2 values)");
    }

    #[test]
    fn sessions_that_a_kubelet_began_are_logged_out() {
        // As kubelet 1.36 writes it.
        let session_file = |iface: &str, name: &str| {
            format!(
                r#"{{"VolName":"vol","Portals":["192.0.2.1:3260","192.0.2.2:3260"],"Iqn":"iqn.2026-11.test:disk","Lun":"3","InitIface":"default","Iface":"{iface}","InitiatorName":"{name}","MetricsProvider":null}}
"#
            )
        };
        let ended = |text: &str| -> Vec<String> {
            let session = Iscsi::parse_session(text.as_bytes()).expect("a recorded session");
            assert_eq!(session.lun, 3);
            let calls = session.portals.iter().flat_map(|p| session.logout(p));
            calls.map(|call| call.join(" ")).collect()
        };
        let node = |portal: &str, iface: &str, what: &str| {
            format!("-m node -p {portal}:3260 -T iqn.2026-11.test:disk -I {iface} {what}")
        };
        let nodes = |iface: &str| {
            ["192.0.2.1", "192.0.2.2"]
                .map(|portal| ["--logout", "-o delete"].map(|what| node(portal, iface, what)))
        };
        assert_eq!(
            ended(&session_file("default", "")),
            nodes("default").concat()
        );
        let own = "192.0.2.1:3260:vol";
        let mut expected = nodes(own).concat();
        expected.push(format!("-m iface -I {own} -o delete"));
        assert_eq!(ended(&session_file(own, "iqn.me")), expected);
        let Disk::Iscsi(ours) = iscsi(json!({"initiatorName": "iqn.me"})) else {
            panic!("iSCSI")
        };
        let text = serde_json::to_vec(&ours).expect("JSON");
        assert_eq!(Iscsi::parse_session(&text), Ok(ours));
        assert!(Iscsi::parse_session(b"{\"Portals\": 3}").is_err());
    }
}
