//! In-tree volume kinds that migrated to CSI drivers: each volume is translated to an equivalent CSI volume (KEP-625;
//! handles and attributes as in `staging/src/k8s.io/csi-translation-lib`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AzureDiskVolumeSource, AzureFilePersistentVolumeSource, AzureFileVolumeSource,
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm,
    PersistentVolume, PersistentVolumeSpec, SecretReference, Volume, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::fault::Fault;
use crate::meta;

/// CSINode annotation with the migrated kinds; attachers and the scheduler read it.
pub const ANNOTATION: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// Its value, sorted.
pub const PLUGINS: [&str; 7] = [
    "kubernetes.io/aws-ebs",
    "kubernetes.io/azure-disk",
    "kubernetes.io/azure-file",
    "kubernetes.io/cinder",
    "kubernetes.io/gce-pd",
    "kubernetes.io/portworx-volume",
    "kubernetes.io/vsphere-volume",
];

const EBS: &str = "ebs.csi.aws.com";
const PD: &str = "pd.csi.storage.gke.io";
const AZURE_DISK: &str = "disk.csi.azure.com";
const AZURE_FILE: &str = "file.csi.azure.com";
const CINDER: &str = "cinder.csi.openstack.org";
const VSPHERE: &str = "csi.vsphere.vmware.com";
const PORTWORX: &str = "pxd.portworx.com";

/// Placeholder for parts of a handle that only the driver can determine.
const UNSPECIFIED: &str = "UNSPECIFIED";
/// Zone labels: the current one, and the one used before Kubernetes 1.17.
const ZONES: [&str; 2] = [
    "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/zone",
];
/// Region labels, in the same order.
const REGIONS: [&str; 2] = [
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/region",
];
/// Separator of several zones in a label.
const BETWEEN_ZONES: &str = "__";

/// Translation of a volume.
struct Translated {
    source: CSIPersistentVolumeSource,
    /// The driver's topology keys for zone and region.
    zone: Option<&'static str>,
    region: Option<&'static str>,
    /// Whether to keep only access modes that the driver distinguishes.
    strict_modes: bool,
}

fn of(
    driver: &str,
    handle: String,
    fs_type: Option<&String>,
    read_only: Option<bool>,
) -> Translated {
    Translated {
        source: CSIPersistentVolumeSource {
            driver: driver.into(),
            volume_handle: handle,
            fs_type: fs_type.cloned(),
            read_only,
            volume_attributes: Some(BTreeMap::new()),
            ..CSIPersistentVolumeSource::default()
        },
        zone: None,
        region: None,
        strict_modes: false,
    }
}

impl Translated {
    fn with(mut self, key: &str, value: impl Into<String>) -> Translated {
        let attributes = self.source.volume_attributes.get_or_insert_default();
        attributes.insert(key.into(), value.into());
        self
    }

    fn zoned(mut self, zone: &'static str) -> Translated {
        self.zone = Some(zone);
        self
    }

    /// A persistent volume for a volume in a pod spec.
    fn inline(self, name: &str, mode: &str) -> PersistentVolume {
        PersistentVolume {
            metadata: ObjectMeta {
                // The name is used as a directory name.
                name: Some(name.replace('/', "~")),
                ..ObjectMeta::default()
            },
            spec: Some(PersistentVolumeSpec {
                csi: Some(self.source),
                access_modes: Some(vec![mode.into()]),
                ..PersistentVolumeSpec::default()
            }),
            status: None,
        }
    }
}

/// Accepts `aws://ZONE/vol-1`, `aws:///vol-1` and `vol-1`.
fn ebs_handle(id: &str) -> Result<String, Fault> {
    let Some(path) = id.strip_prefix("aws://") else {
        return Ok(id.to_owned());
    };
    let name = path
        .split_once('/')
        .map_or("", |(_, rest)| rest)
        .trim_matches('/');
    if name.starts_with("vol-") && !name.contains('/') {
        Ok(name.to_owned())
    } else {
        Err(Fault::invalid(format!(
            "volumeID {id:?} of awsElasticBlockStore is not aws://ZONE/vol-ID"
        )))
    }
}

fn ebs(
    id: &str,
    fs_type: Option<&String>,
    partition: Option<i32>,
    read_only: Option<bool>,
) -> Result<Translated, Fault> {
    Ok(of(EBS, ebs_handle(id)?, fs_type, read_only)
        .with("partition", partition.unwrap_or(0).to_string())
        .zoned("topology.ebs.csi.aws.com/zone"))
}

/// The common region of all zones: `us-central1` for `us-central1-a`.
fn pd_region(zones: &[&str]) -> Result<String, Fault> {
    let region = |zone: &str| {
        let parts: Vec<&str> = zone.split('-').collect();
        (parts.len() == 3).then(|| parts[..2].join("-"))
    };
    let first = zones.first().and_then(|zone| region(zone));
    first
        .filter(|first| {
            zones
                .iter()
                .all(|zone| region(zone).as_ref() == Some(first))
        })
        .ok_or_else(|| {
            Fault::invalid(format!(
                "the zones {} are not in one region",
                zones.join(", ")
            ))
        })
}

fn pd_handle(zones: &str, disk: &str) -> Result<String, Fault> {
    let zones: Vec<&str> = zones.split(BETWEEN_ZONES).collect();
    Ok(match zones[..] {
        [""] => format!("projects/{UNSPECIFIED}/zones/{UNSPECIFIED}/disks/{disk}"),
        [zone] => format!("projects/{UNSPECIFIED}/zones/{zone}/disks/{disk}"),
        _ => {
            let region = pd_region(&zones)?;
            format!("projects/{UNSPECIFIED}/regions/{region}/disks/{disk}")
        }
    })
}

fn pd(
    handle: String,
    fs_type: Option<&String>,
    partition: Option<i32>,
    read_only: Option<bool>,
) -> Translated {
    let partition = partition.filter(|number| *number != 0);
    let translated = of(PD, handle, fs_type, read_only)
        .with(
            "partition",
            partition.map_or(String::new(), |number| number.to_string()),
        )
        .zoned("topology.gke.io/zone");
    Translated {
        strict_modes: true,
        ..translated
    }
}

fn azure_disk(disk: &AzureDiskVolumeSource) -> Result<Translated, Fault> {
    if let Some(kind) = disk
        .kind
        .as_ref()
        .filter(|kind| !kind.eq_ignore_ascii_case("Managed"))
    {
        return Err(Fault::invalid(format!(
            "azureDisk of kind {kind:?} has no CSI driver: only Managed disks have one"
        )));
    }
    let mut translated = of(
        AZURE_DISK,
        disk.disk_uri.clone(),
        disk.fs_type.as_ref(),
        disk.read_only,
    )
    .with("kind", "Managed");
    for (key, value) in [
        ("cachingmode", &disk.caching_mode),
        ("fstype", &disk.fs_type),
    ] {
        if let Some(value) = value {
            translated = translated.with(key, value.clone());
        }
    }
    Ok(translated)
}

/// A share; the name of its secret contains the storage account.
struct Share<'a> {
    group: &'a str,
    secret: &'a str,
    share: &'a str,
    name: &'a str,
    namespace: &'a str,
}

fn azure_file(share: &Share<'_>, read_only: Option<bool>) -> Translated {
    let Share {
        group,
        secret,
        share,
        name,
        namespace,
    } = share;
    let account = secret
        .strip_prefix("azure-storage-account-")
        .and_then(|rest| rest.strip_suffix("-secret"))
        .filter(|account| !account.is_empty())
        .unwrap_or(secret);
    let handle = format!("{group}#{account}#{share}#{name}#{namespace}");
    let mut translated = of(AZURE_FILE, handle, None, read_only).with("sharename", *share);
    translated.source.node_stage_secret_ref = Some(SecretReference {
        name: Some((*secret).to_owned()),
        namespace: Some((*namespace).to_owned()),
    });
    translated
}

fn vsphere(path: &str, fs_type: Option<&String>, policy: Option<&String>) -> Translated {
    let translated = of(VSPHERE, path.to_owned(), fs_type, None);
    match policy.filter(|policy| !policy.is_empty()) {
        Some(policy) => translated.with("storagepolicyname", policy.clone()),
        None => translated,
    }
}

fn portworx(volume: &PersistentVolume, id: &str, fs_type: Option<&String>) -> Translated {
    let mut translated = of(PORTWORX, id.to_owned(), fs_type, None);
    let of_key = |key: &str| meta::annotations(volume).get(key).cloned();
    let secret = of_key("openstorage.io/auth-secret-name")
        .zip(of_key("openstorage.io/auth-secret-namespace"));
    if let Some((name, namespace)) = secret {
        let reference = Some(SecretReference {
            name: Some(name),
            namespace: Some(namespace),
        });
        let source = &mut translated.source;
        source.node_stage_secret_ref.clone_from(&reference);
        source.node_publish_secret_ref.clone_from(&reference);
        source.node_expand_secret_ref.clone_from(&reference);
        source.controller_publish_secret_ref.clone_from(&reference);
        source.controller_expand_secret_ref = reference;
    }
    translated
}

/// The first topology label of a volume; empty if there is none.
fn located<'a>(volume: &'a PersistentVolume, keys: [&str; 2]) -> &'a str {
    let labels = volume.metadata.labels.as_ref();
    let found = keys.iter().find_map(|key| labels?.get(*key));
    found.map_or("", String::as_str)
}

/// Translates the Azure share of a persistent volume.
fn persistent_share(
    volume: &PersistentVolume,
    spec: &PersistentVolumeSpec,
    file: &AzureFilePersistentVolumeSource,
) -> Result<Translated, Fault> {
    let claimed = spec
        .claim_ref
        .as_ref()
        .and_then(|claim| claim.namespace.as_ref());
    let namespace = file.secret_namespace.as_ref().or(claimed);
    let group = meta::annotations(volume).get("kubernetes.io/azure-file-resource-group");
    let share = Share {
        group: group.map_or("", String::as_str),
        secret: &file.secret_name,
        share: &file.share_name,
        name: meta::name(volume),
        namespace: namespace.ok_or_else(|| Fault::missing("azureFile has neither secretNamespace nor a claim: the namespace of its secret is unknown"))?,
    };
    Ok(azure_file(&share, file.read_only))
}

fn translated(
    volume: &PersistentVolume,
    spec: &PersistentVolumeSpec,
) -> Result<Option<Translated>, Fault> {
    Ok(Some(if let Some(disk) = &spec.aws_elastic_block_store {
        ebs(
            &disk.volume_id,
            disk.fs_type.as_ref(),
            disk.partition,
            disk.read_only,
        )?
    } else if let Some(disk) = &spec.gce_persistent_disk {
        // The older label takes precedence, as upstream.
        let handle = pd_handle(located(volume, [ZONES[1], ZONES[0]]), &disk.pd_name)?;
        pd(
            handle,
            disk.fs_type.as_ref(),
            disk.partition,
            disk.read_only,
        )
    } else if let Some(disk) = &spec.azure_disk {
        azure_disk(disk)?
    } else if let Some(file) = &spec.azure_file {
        persistent_share(volume, spec, file)?
    } else if let Some(disk) = &spec.cinder {
        of(
            CINDER,
            disk.volume_id.clone(),
            disk.fs_type.as_ref(),
            disk.read_only,
        )
        .zoned("topology.cinder.csi.openstack.org/zone")
    } else if let Some(disk) = &spec.vsphere_volume {
        Translated {
            region: Some("topology.csi.vmware.com/region"),
            ..vsphere(
                &disk.volume_path,
                disk.fs_type.as_ref(),
                disk.storage_policy_name.as_ref(),
            )
            .zoned("topology.csi.vmware.com/zone")
        }
    } else if let Some(disk) = &spec.portworx_volume {
        portworx(volume, &disk.volume_id, disk.fs_type.as_ref())
    } else {
        return Ok(None);
    }))
}

/// The required terms of a volume's node affinity.
fn terms(spec: &mut PersistentVolumeSpec) -> &mut Vec<NodeSelectorTerm> {
    let affinity = spec
        .node_affinity
        .get_or_insert_with(VolumeNodeAffinity::default);
    let required = affinity.required.get_or_insert_with(NodeSelector::default);
    &mut required.node_selector_terms
}

/// Replaces topology keys by the driver's key. If the affinity has no such key, adds the value of the volume's label.
fn renamed(spec: &mut PersistentVolumeSpec, label: &str, keys: [&str; 2], name: &str) {
    let mut found = false;
    let required = spec
        .node_affinity
        .iter_mut()
        .filter_map(|a| a.required.as_mut());
    for term in required.flat_map(|r| &mut r.node_selector_terms) {
        for expression in term.match_expressions.iter_mut().flatten() {
            if keys.contains(&expression.key.as_str()) {
                (found, expression.key) = (true, name.to_owned());
            }
        }
    }
    let mut places: Vec<String> = label
        .split(BETWEEN_ZONES)
        .map(|place| place.trim().to_owned())
        .filter(|place| !place.is_empty())
        .collect();
    if found || places.is_empty() {
        return;
    }
    places.sort();
    places.dedup();
    let terms = terms(spec);
    if terms.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    for term in terms {
        let expression = NodeSelectorRequirement {
            key: name.to_owned(),
            operator: "In".into(),
            values: Some(places.clone()),
        };
        term.match_expressions
            .get_or_insert_default()
            .push(expression);
    }
}

/// Access modes that the driver of a disk distinguishes: ReadWriteOnce unless all modes are read-only.
fn strict(modes: &[String]) -> Vec<String> {
    let only_readers = !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany");
    let mode = if only_readers {
        "ReadOnlyMany"
    } else {
        "ReadWriteOnce"
    };
    vec![mode.into()]
}

/// Translates a persistent volume to CSI; volumes of other kinds are returned unchanged.
pub fn persistent(volume: PersistentVolume) -> Result<PersistentVolume, Fault> {
    let Some(spec) = &volume.spec else {
        return Ok(volume);
    };
    let Some(found) = translated(&volume, spec)? else {
        return Ok(volume);
    };
    let (zone, region) = (located(&volume, ZONES), located(&volume, REGIONS));
    let mut spec = spec.clone();
    if let Some(name) = found.zone {
        renamed(&mut spec, zone, ZONES, name);
        match found.region {
            Some(name) => renamed(&mut spec, region, REGIONS, name),
            None => renamed(&mut spec, "", [REGIONS[1]; 2], REGIONS[0]),
        }
    }
    if found.strict_modes {
        spec.access_modes = spec.access_modes.map(|modes| strict(&modes));
    }
    let spec = PersistentVolumeSpec {
        csi: Some(found.source),
        aws_elastic_block_store: None,
        gce_persistent_disk: None,
        azure_disk: None,
        azure_file: None,
        cinder: None,
        vsphere_volume: None,
        portworx_volume: None,
        ..spec
    };
    Ok(PersistentVolume {
        spec: Some(spec),
        ..volume
    })
}

/// Translates the Azure share of a volume in a pod spec.
fn inline_share(
    volume: &Volume,
    file: &AzureFileVolumeSource,
    namespace: &str,
) -> PersistentVolume {
    let share = Share {
        group: "",
        secret: &file.secret_name,
        share: &file.share_name,
        name: &volume.name,
        namespace: if namespace.is_empty() {
            "default"
        } else {
            namespace
        },
    };
    let found = azure_file(&share, file.read_only);
    let name = found.source.volume_handle.clone();
    found.inline(&name, "ReadWriteMany")
}

/// Translates a volume in a pod spec to CSI; `None` for other kinds.
pub fn inline(volume: &Volume, namespace: &str) -> Result<Option<PersistentVolume>, Fault> {
    let once = "ReadWriteOnce";
    let by = |read_only: Option<bool>| {
        if read_only == Some(true) {
            "ReadOnlyMany"
        } else {
            once
        }
    };
    Ok(Some(if let Some(disk) = &volume.aws_elastic_block_store {
        let found = ebs(
            &disk.volume_id,
            disk.fs_type.as_ref(),
            disk.partition,
            disk.read_only,
        )?;
        let name = format!("{EBS}-{}", found.source.volume_handle);
        found.inline(&name, once)
    } else if let Some(disk) = &volume.gce_persistent_disk {
        let found = pd(
            pd_handle("", &disk.pd_name)?,
            disk.fs_type.as_ref(),
            disk.partition,
            disk.read_only,
        );
        found.inline(&format!("{PD}-{}", disk.pd_name), by(disk.read_only))
    } else if let Some(disk) = &volume.azure_disk {
        azure_disk(disk)?.inline(&disk.disk_uri, once)
    } else if let Some(file) = &volume.azure_file {
        inline_share(volume, file, namespace)
    } else if let Some(disk) = &volume.cinder {
        let found = of(
            CINDER,
            disk.volume_id.clone(),
            disk.fs_type.as_ref(),
            disk.read_only,
        );
        found.inline(&format!("{CINDER}-{}", disk.volume_id), once)
    } else if let Some(disk) = &volume.vsphere_volume {
        let found = vsphere(
            &disk.volume_path,
            disk.fs_type.as_ref(),
            disk.storage_policy_name.as_ref(),
        );
        found.inline(&format!("{VSPHERE}-{}", disk.volume_path), once)
    } else if let Some(disk) = &volume.portworx_volume {
        let found = portworx(
            &PersistentVolume::default(),
            &disk.volume_id,
            disk.fs_type.as_ref(),
        );
        found.inline(
            &format!("{PORTWORX}-{}", disk.volume_id),
            by(disk.read_only),
        )
    } else {
        return Ok(None);
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn volume(metadata: Value, spec: Value) -> PersistentVolume {
        let mut full = json!({"name": "pv"});
        json_patch::merge(&mut full, &metadata);
        serde_json::from_value(json!({"metadata": full, "spec": spec})).expect("a volume")
    }

    #[test]
    fn each_in_tree_type_becomes_its_drivers_volume() {
        for (spec, driver, handle, attributes) in [
            (
                json!({"awsElasticBlockStore": {"volumeID": "aws://eu-1a/vol-1", "fsType": "xfs", "partition": 2}}),
                EBS,
                "vol-1",
                json!({"partition": "2"}),
            ),
            (
                json!({"gcePersistentDisk": {"pdName": "d"}}),
                PD,
                "projects/UNSPECIFIED/zones/UNSPECIFIED/disks/d",
                json!({"partition": ""}),
            ),
            (
                json!({"azureDisk": {"diskName": "d", "diskURI": "/s/d", "kind": "managed", "fsType": "ext4", "cachingMode": "None"}}),
                AZURE_DISK,
                "/s/d",
                json!({"kind": "Managed", "fstype": "ext4", "cachingmode": "None"}),
            ),
            (
                json!({"azureFile": {"secretName": "azure-storage-account-acc-secret", "shareName": "s"}, "claimRef": {"namespace": "n"}}),
                AZURE_FILE,
                "#acc#s#pv#n",
                json!({"sharename": "s"}),
            ),
            (json!({"cinder": {"volumeID": "c"}}), CINDER, "c", json!({})),
            (
                json!({"vsphereVolume": {"volumePath": "[ds] a/b.vmdk", "storagePolicyName": "p"}}),
                VSPHERE,
                "[ds] a/b.vmdk",
                json!({"storagepolicyname": "p"}),
            ),
            (
                json!({"portworxVolume": {"volumeID": "x"}}),
                PORTWORX,
                "x",
                json!({}),
            ),
        ] {
            let made = persistent(volume(json!({}), spec.clone())).expect("a translation");
            let csi = made.spec.and_then(|s| s.csi).expect("a CSI volume");
            let translated = serde_json::to_value(&csi.volume_attributes).expect("a map");
            assert_eq!(
                (csi.driver.as_str(), csi.volume_handle.as_str(), &translated),
                (driver, handle, &attributes),
                "{spec}"
            );
        }
        let other = volume(json!({}), json!({"nfs": {"server": "s", "path": "/"}}));
        assert_eq!(persistent(other.clone()), Ok(other));
    }

    #[test]
    fn volumes_without_a_driver_are_rejected() {
        for wrong in [
            json!({"awsElasticBlockStore": {"volumeID": "aws://z/snap-1"}}),
            json!({"azureDisk": {"diskName": "d", "diskURI": "u", "kind": "Dedicated"}}),
            json!({"azureFile": {"secretName": "s", "shareName": "s"}}),
        ] {
            assert!(
                persistent(volume(json!({}), wrong.clone())).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn zones_get_the_drivers_labels_and_disks_its_access_modes() {
        let affinity = |key: &str| json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": key, "operator": "In", "values": ["z"]}]}]}});
        let spec_of = |made: PersistentVolume| serde_json::to_value(made.spec).expect("a spec");
        let named = spec_of(
            persistent(volume(
                json!({}),
                json!({"cinder": {"volumeID": "c"}, "nodeAffinity": affinity(ZONES[1])}),
            ))
            .expect("fine"),
        );
        assert_eq!(
            named["nodeAffinity"],
            affinity("topology.cinder.csi.openstack.org/zone")
        );
        let label = json!({"labels": {ZONES[0]: "us-central1-b__us-central1-a"}});
        let disk = json!({"gcePersistentDisk": {"pdName": "d"}, "accessModes": ["ReadWriteMany", "ReadOnlyMany"]});
        let regional = spec_of(persistent(volume(label, disk)).expect("fine"));
        assert_eq!(
            regional["csi"]["volumeHandle"],
            "projects/UNSPECIFIED/regions/us-central1/disks/d"
        );
        assert_eq!(regional["accessModes"], json!(["ReadWriteOnce"]));
        let term =
            &regional["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0];
        assert_eq!(term["values"], json!(["us-central1-a", "us-central1-b"]));
        assert_eq!(term["key"], "topology.gke.io/zone");
    }

    #[test]
    fn an_inline_volume_is_named_after_its_disk() {
        let of = |source: Value| {
            let volume: Volume = serde_json::from_value(source).expect("a volume");
            inline(&volume, "n").expect("a translation")
        };
        let disk = of(json!({"name": "v", "azureDisk": {"diskName": "d", "diskURI": "/s/d"}}))
            .expect("a volume");
        assert_eq!(meta::name(&disk), "~s~d");
        let pd = of(json!({"name": "v", "gcePersistentDisk": {"pdName": "d", "readOnly": true}}))
            .expect("a volume");
        assert_eq!(
            pd.spec.expect("a spec").access_modes,
            Some(vec!["ReadOnlyMany".to_owned()])
        );
        assert!(of(json!({"name": "v", "emptyDir": {}})).is_none());
    }
}
