//! Volumes of a pod (`ValidateVolumes` and its callees).

use std::collections::HashSet;

use serde_json::Value;

use super::super::{Errors, LABEL, is_label};
use super::Rule::{Between, Check, OneOf, Required, Text};
use super::container::{field_ref, resource_field};
use super::syntax::{
    ABSOLUTE, MODE, NO_BACKSTEPS, at_most_one, descending_path, has_no_backsteps, is_absolute,
    local_path, unique_names,
};
use super::{Row, row, table};
use crate::api::error::FieldError;
use crate::api::object::{list, text};
use holdfast_core::quantity::Quantity;

/// The volume sources, in upstream's order.
const SOURCES: [&str; 30] = [
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
];

pub(crate) const HOST_PATHS: &[&str] = &[
    "",
    "BlockDevice",
    "CharDevice",
    "Directory",
    "DirectoryOrCreate",
    "File",
    "FileOrCreate",
    "Socket",
];

const KEY_TYPES: &[&str] = &[
    "RSA3072",
    "RSA4096",
    "ECDSAP256",
    "ECDSAP384",
    "ECDSAP521",
    "ED25519",
];

/// Rules for single volumes.
const VOLUME: &[Row] = &[
    row("name", Required(""), &["\"\""]),
    row("name", Text(is_label, LABEL), &["\"A.b\""]),
    row("emptyDir", Check(size_limit), &[r#"{"sizeLimit": "-1"}"#]),
    row("hostPath.path", Required(""), &["null"]),
    row(
        "hostPath.path",
        Text(has_no_backsteps, NO_BACKSTEPS),
        &["\"/var/../etc\""],
    ),
    row("hostPath.type", OneOf(HOST_PATHS), &["\"Folder\""]),
    row("gitRepo.repository", Required(""), &["\"\""]),
    row("gitRepo.directory", Check(descending_path), &["\"/x\""]),
    row("secret.secretName", Required(""), &["\"\""]),
    row("secret.defaultMode", Between(0, 0o777, MODE), &["512"]),
    row(
        "secret.items[]",
        Check(key_to_path),
        &[r#"{"key": "k", "path": "../x"}"#],
    ),
    row("configMap.name", Required(""), &["null"]),
    row("configMap.defaultMode", Between(0, 0o777, MODE), &["-1"]),
    row(
        "configMap.items[]",
        Check(key_to_path),
        &[r#"{"key": "", "path": "x"}"#],
    ),
    row("nfs.server", Required(""), &["\"\""]),
    row("nfs.path", Required(""), &["\"\""]),
    row("nfs.path", Text(is_absolute, ABSOLUTE), &["\"export\""]),
    row("persistentVolumeClaim.claimName", Required(""), &["\"\""]),
    row("iscsi.targetPortal", Required(""), &["\"\""]),
    row("iscsi.iqn", Required(""), &["\"\""]),
    row(
        "iscsi.iqn",
        Text(is_iqn, "must be valid format"),
        &["\"disk\""],
    ),
    row(
        "iscsi.lun",
        Between(0, 255, "must be between 0 and 255, inclusive"),
        &["256"],
    ),
    row("fc", Check(fibre_channel), &["{}"]),
    row("csi.driver", Required(""), &["\"\""]),
    row("csi.nodePublishSecretRef.name", Required(""), &["\"\""]),
    row("ephemeral.volumeClaimTemplate", Required(""), &["null"]),
    row(
        "downwardAPI.defaultMode",
        Between(0, 0o777, MODE),
        &["4096"],
    ),
    row(
        "downwardAPI.items[]",
        Check(downward_file),
        &[r#"{"path": "x"}"#],
    ),
    row("projected.defaultMode", Between(0, 0o777, MODE), &["512"]),
    row("projected.sources[].secret.name", Required(""), &["\"\""]),
    row(
        "projected.sources[].secret.items[]",
        Check(key_to_path),
        &[r#"{"key": "k", "path": "/x"}"#],
    ),
    row(
        "projected.sources[].configMap.name",
        Required(""),
        &["\"\""],
    ),
    row(
        "projected.sources[].configMap.items[]",
        Check(key_to_path),
        &[r#"{"key": "k", "path": "..x"}"#],
    ),
    row(
        "projected.sources[].downwardAPI.items[]",
        Check(downward_file),
        &[r#"{"path": "a/../b", "fieldRef": {"fieldPath": "metadata.name"}}"#],
    ),
    row(
        "projected.sources[].serviceAccountToken.expirationSeconds",
        Check(expiration),
        &["599", "4294967297"],
    ),
    row(
        "projected.sources[].serviceAccountToken.path",
        Required(""),
        &["\"\""],
    ),
    row(
        "projected.sources[].serviceAccountToken.path",
        Check(local_path),
        &["\"../token\""],
    ),
    row(
        "projected.sources[].clusterTrustBundle",
        Check(trust_bundle),
        &[r#"{"path": "x"}"#],
    ),
    row(
        "projected.sources[].clusterTrustBundle.path",
        Required(""),
        &["\"\""],
    ),
    row(
        "projected.sources[].clusterTrustBundle.path",
        Check(local_path),
        &["\"../x\""],
    ),
    row(
        "projected.sources[].podCertificate.keyType",
        Required(""),
        &["null"],
    ),
    row(
        "projected.sources[].podCertificate.keyType",
        OneOf(KEY_TYPES),
        &["\"DSA\""],
    ),
    row(
        "projected.sources[].podCertificate.maxExpirationSeconds",
        Check(certificate_lifetime),
        &["3599"],
    ),
    row(
        "projected.sources[].podCertificate.credentialBundlePath",
        Check(local_path),
        &["\"../x\""],
    ),
    row(
        "projected.sources[].podCertificate.keyPath",
        Check(local_path),
        &["\"/x\""],
    ),
    row(
        "projected.sources[].podCertificate.certificateChainPath",
        Check(local_path),
        &["\"../x\""],
    ),
    row(
        "projected.sources[].podCertificate",
        Check(certificate_paths),
        &[r#"{"signerName": "a/b", "keyType": "ED25519"}"#],
    ),
    row(
        "projected",
        Check(projected_paths),
        &[
            r#"{"sources": [{"secret": {"name": "s", "items": [{"key": "k", "path": "p"}]}}, {"configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}}]}"#,
        ],
    ),
];

/// Rules for items of a ConfigMap or Secret.
const ITEM: &[Row] = &[
    row("key", Required(""), &["\"\""]),
    row("path", Required(""), &["\"\""]),
    row("path", Check(local_path), &["\"../x\""]),
    row("mode", Between(0, 0o777, MODE), &["512"]),
];

/// Rules for downward API files.
const FILE: &[Row] = &[
    row("path", Required(""), &["\"\""]),
    row("path", Check(local_path), &["\"../x\""]),
    row("mode", Between(0, 0o777, MODE), &["512"]),
    row(
        "fieldRef",
        Check(volume_field),
        &[r#"{"fieldPath": "status.podIP"}"#],
    ),
    row("resourceFieldRef.containerName", Required(""), &["\"\""]),
    row(
        "resourceFieldRef",
        Check(resource_field),
        &[r#"{"containerName": "c", "resource": "x"}"#],
    ),
];

/// Rules across the volumes of a pod.
const VOLUMES: &[Row] = &[
    row(
        "volumes[]",
        Check(one_source),
        &[r#"{"name": "v", "emptyDir": {}, "hostPath": {"path": "/x"}}"#],
    ),
    row(
        "volumes[].projected.sources[]",
        Check(one_projection),
        &[r#"{"secret": {"name": "s"}, "configMap": {"name": "c"}}"#],
    ),
    row(
        "volumes[]",
        Check(each),
        &[r#"{"name": "", "emptyDir": {}}"#],
    ),
    row(
        "volumes",
        Check(unique_names),
        &[r#"[{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]"#],
    ),
];

/// Validates the volumes of a pod spec.
pub fn check(spec: &Value, path: &str, errors: &mut Errors) {
    table(VOLUMES, spec, path, errors);
}

fn each(volume: &Value, path: &str, errors: &mut Errors) {
    table(VOLUME, volume, path, errors);
}

/// A volume has at most one source; without one it defaults to an emptyDir.
fn one_source(volume: &Value, path: &str, errors: &mut Errors) {
    at_most_one(
        volume,
        path,
        &SOURCES,
        "may not specify more than 1 volume type",
        errors,
    );
}

fn size_limit(source: &Value, path: &str, errors: &mut Errors) {
    let Some(limit) = text(source, &["sizeLimit"]) else {
        return;
    };
    if limit
        .parse::<Quantity>()
        .is_ok_and(|limit| limit < Quantity::ZERO)
    {
        let why = "SizeLimit field must be a valid resource quantity";
        errors.push(FieldError::forbidden(format!("{path}.sizeLimit"), why));
    }
}

/// An item of a ConfigMap or Secret (`validateKeyToPath`).
fn key_to_path(item: &Value, path: &str, errors: &mut Errors) {
    table(ITEM, item, path, errors);
}

/// A downward API file (`validateDownwardAPIVolumeFile`).
fn downward_file(file: &Value, path: &str, errors: &mut Errors) {
    table(FILE, file, path, errors);
    match (
        file["fieldRef"].is_null(),
        file["resourceFieldRef"].is_null(),
    ) {
        (true, true) => {
            errors.push(FieldError::required(
                path,
                "one of fieldRef and resourceFieldRef is required",
            ));
        }
        (false, false) => {
            let why = "fieldRef and resourceFieldRef can not be specified simultaneously";
            errors.push(FieldError::invalid(path, &"resource".into(), why));
        }
        _ => {}
    }
}

fn volume_field(field: &Value, path: &str, errors: &mut Errors) {
    let paths = [
        "metadata.annotations",
        "metadata.labels",
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
    ];
    field_ref(field, path, &paths, errors);
}

fn is_iqn(name: &str) -> bool {
    ["iqn", "eui", "naa"].iter().any(|kind| {
        name.strip_prefix(kind)
            .is_some_and(|rest| rest.starts_with('.') && rest.len() > 1)
    })
}

/// Either target ports with a LUN, or WWIDs (`validateFCVolumeSource`).
fn fibre_channel(source: &Value, path: &str, errors: &mut Errors) {
    let ports = list(source, &["targetWWNs"]);
    let ids = list(source, &["wwids"]);
    if ports.is_empty() && ids.is_empty() {
        errors.push(FieldError::required(
            format!("{path}.targetWWNs"),
            "must specify either targetWWNs or wwids, but not both",
        ));
    }
    if !ports.is_empty() && !ids.is_empty() {
        errors.push(FieldError::invalid(
            format!("{path}.targetWWNs"),
            &source["targetWWNs"],
            "targetWWNs and wwids can not be specified simultaneously",
        ));
    }
    let lun = &source["lun"];
    if !ports.is_empty() && lun.is_null() {
        let why = "lun is required if targetWWNs is specified";
        errors.push(FieldError::required(format!("{path}.lun"), why));
    }
    if !ports.is_empty() && lun.as_i64().is_some_and(|lun| !(0..=255).contains(&lun)) {
        errors.push(FieldError::invalid(
            format!("{path}.lun"),
            lun,
            "must be between 0 and 255, inclusive",
        ));
    }
}

fn expiration(seconds: &Value, path: &str, errors: &mut Errors) {
    let problem = match seconds.as_i64().unwrap_or_default() {
        ..600 => "may not specify a duration less than 10 minutes",
        600..=0x1_0000_0000 => return,
        _ => "may not specify a duration larger than 2^32 seconds",
    };
    errors.push(FieldError::invalid(path, seconds, problem));
}

fn trust_bundle(source: &Value, path: &str, errors: &mut Errors) {
    match (source["name"].is_null(), source["signerName"].is_null()) {
        (true, true) => {
            errors.push(FieldError::required(
                path,
                "either name or signerName must be specified",
            ));
        }
        (false, false) => {
            errors.push(FieldError::invalid(
                path,
                source,
                "only one of name and signerName may be used",
            ));
        }
        (false, true) if !source["labelSelector"].is_null() => {
            errors.push(FieldError::invalid(
                format!("{path}.labelSelector"),
                &source["labelSelector"],
                "labelSelector must be unset if name is specified",
            ));
        }
        _ => {}
    }
}

/// Maximum lifetime of a pod certificate, in seconds: 91 days.
const MAX_CERTIFICATE_LIFETIME: i64 = 91 * 86_400;

fn certificate_lifetime(seconds: &Value, path: &str, errors: &mut Errors) {
    let why = match seconds.as_i64().unwrap_or_default() {
        ..3600 => "if provided, maxExpirationSeconds must be >= 3600".to_owned(),
        3600..=MAX_CERTIFICATE_LIFETIME => return,
        _ => format!("if provided, maxExpirationSeconds must be <= {MAX_CERTIFICATE_LIFETIME}"),
    };
    errors.push(FieldError::invalid(path, seconds, &why));
}

fn certificate_paths(source: &Value, path: &str, errors: &mut Errors) {
    let paths = ["credentialBundlePath", "keyPath", "certificateChainPath"];
    if paths
        .iter()
        .all(|p| text(source, &[p]).is_none_or(str::is_empty))
    {
        errors.push(FieldError::required(
            path,
            "specify at least one of credentialBundlePath, keyPath, and certificateChainPath",
        ));
    }
}

const PROJECTIONS: [&str; 6] = [
    "secret",
    "configMap",
    "downwardAPI",
    "serviceAccountToken",
    "clusterTrustBundle",
    "podCertificate",
];

fn one_projection(source: &Value, path: &str, errors: &mut Errors) {
    if PROJECTIONS
        .iter()
        .filter(|kind| !source[**kind].is_null())
        .count()
        > 1
    {
        errors.push(FieldError::forbidden(
            path,
            "may not specify more than 1 volume type per source",
        ));
    }
}

/// The files of different sources have different paths.
fn projected_paths(projected: &Value, path: &str, errors: &mut Errors) {
    let mut seen = HashSet::new();
    for source in list(projected, &["sources"]) {
        let items = ["secret", "configMap", "downwardAPI"]
            .iter()
            .flat_map(|kind| list(source, &[kind, "items"]))
            .filter_map(|item| text(item, &["path"]));
        let own = [
            text(source, &["clusterTrustBundle", "path"]),
            text(source, &["podCertificate", "credentialBundlePath"]),
            text(source, &["podCertificate", "keyPath"]),
            text(source, &["podCertificate", "certificateChainPath"]),
        ];
        for file in items
            .chain(own.into_iter().flatten())
            .filter(|file| !file.is_empty())
        {
            if !seen.insert(file) {
                errors.push(FieldError::invalid(
                    path,
                    &file.into(),
                    "conflicting duplicate paths",
                ));
            }
        }
    }
}

#[cfg(test)]
pub(crate) fn examples() -> Vec<(&'static str, &'static [Row], Value)> {
    use serde_json::json;
    let item = || json!([{"key": "k", "path": "a/b", "mode": 420}]);
    let field = || json!([{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]);
    let one = json!({
        "name": "v",
        "emptyDir": {"sizeLimit": "1Mi"},
        "hostPath": {"path": "/var/data", "type": "Directory"},
        "gitRepo": {"repository": "r", "directory": "d"},
        "secret": {"secretName": "s", "defaultMode": 420, "items": item()},
        "configMap": {"name": "c", "defaultMode": 0, "items": item()},
        "nfs": {"server": "s", "path": "/export"},
        "persistentVolumeClaim": {"claimName": "c"},
        "iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2026-01.example:disk", "lun": 0},
        "fc": {"targetWWNs": ["5"], "lun": 0},
        "csi": {"driver": "d.example", "nodePublishSecretRef": {"name": "s"}},
        "ephemeral": {"volumeClaimTemplate": {"spec": {}}},
        "downwardAPI": {"defaultMode": 511, "items": field()},
        "projected": {"defaultMode": 256, "sources": [{
            "secret": {"name": "s", "items": item()},
            "configMap": {"name": "c", "items": [{"key": "k", "path": "c"}]},
            "downwardAPI": {"items": [{"path": "d", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}}]},
            "serviceAccountToken": {"path": "token", "expirationSeconds": 600},
            "clusterTrustBundle": {"name": "b", "path": "bundle"},
            "podCertificate": {"signerName": "a.example/b", "keyType": "ED25519", "maxExpirationSeconds": 3600, "credentialBundlePath": "p", "keyPath": "key", "certificateChainPath": "chain"},
        }]},
    });
    vec![
        // A volume may have one source only; the example has all of them to cover all rules.
        ("volume", VOLUME, one),
        (
            "item",
            ITEM,
            json!({"key": "k", "path": "a/b", "mode": 420}),
        ),
        (
            "file",
            FILE,
            json!({"path": "a", "mode": 420, "fieldRef": {"fieldPath": "metadata.uid"}, "resourceFieldRef": {"containerName": "c", "resource": "requests.memory", "divisor": "1Mi"}}),
        ),
        (
            "volumes",
            VOLUMES,
            json!({"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]}),
        ),
    ]
}
