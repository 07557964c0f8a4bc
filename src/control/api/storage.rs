//! The storage kinds: defaults, admission, validation and table columns (`pkg/apis/core/validation/validation.go`,
//! `pkg/apis/storage/validation/validation.go`).

use serde_json::{Value, json};

use super::error::FieldError;
use super::object::{at, entry, list, set_default, text};
use super::resources::Resource;
use crate::store::Store;
use holdfast_core::quantity::Quantity;

type Errors = Vec<FieldError>;

/// Finalizer that protects a claim while a pod uses it.
pub(crate) const CLAIM_IN_USE: &str = "kubernetes.io/pvc-protection";
/// Finalizer that protects a volume while a claim is bound to it.
pub(crate) const VOLUME_IN_USE: &str = "kubernetes.io/pv-protection";

const MODES: [&str; 4] = [
    "ReadWriteOnce",
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOncePod",
];
const POLICIES: [&str; 3] = ["Retain", "Delete", "Recycle"];
const BINDING: [&str; 2] = ["Immediate", "WaitForFirstConsumer"];
const GROUP_POLICIES: [&str; 3] = ["ReadWriteOnceWithFSType", "File", "None"];
const LIFECYCLES: [&str; 2] = ["Persistent", "Ephemeral"];

/// The fields of a volume's spec that are not its source.
const NOT_SOURCES: [&str; 9] = [
    "capacity",
    "accessModes",
    "claimRef",
    "persistentVolumeReclaimPolicy",
    "storageClassName",
    "mountOptions",
    "volumeMode",
    "nodeAffinity",
    "volumeAttributesClassName",
];

/// Fills in the defaults of a kind.
pub fn defaults(kind: &str, object: &mut Value) {
    match kind {
        "PersistentVolumeClaim" => {
            entry(object, "spec");
            entry(object, "status");
            set_default(&mut object["spec"], "volumeMode", json!("Filesystem"));
            set_default(&mut object["status"], "phase", json!("Pending"));
        }
        "PersistentVolume" => {
            entry(object, "spec");
            entry(object, "status");
            let spec = &mut object["spec"];
            set_default(spec, "volumeMode", json!("Filesystem"));
            set_default(spec, "persistentVolumeReclaimPolicy", json!("Retain"));
            if let Some(host) = spec
                .get_mut("hostPath")
                .filter(|h| h.is_object() && h.get("type").is_none())
            {
                host["type"] = json!("");
            }
            set_default(&mut object["status"], "phase", json!("Pending"));
        }
        "StorageClass" => {
            set_default(object, "reclaimPolicy", json!("Delete"));
            set_default(object, "volumeBindingMode", json!("Immediate"));
        }
        "CSIDriver" => {
            entry(object, "spec");
            for (key, value) in [
                ("attachRequired", json!(true)),
                ("podInfoOnMount", json!(false)),
                ("storageCapacity", json!(false)),
                ("requiresRepublish", json!(false)),
                ("seLinuxMount", json!(false)),
                ("fsGroupPolicy", json!("ReadWriteOnceWithFSType")),
                ("volumeLifecycleModes", json!(["Persistent"])),
            ] {
                set_default(&mut object["spec"], key, value);
            }
        }
        _ => {}
    }
}

fn finalizer(object: &mut Value, name: &str) {
    let finalizers = entry(object, "metadata")
        .entry("finalizers")
        .or_insert_with(|| json!([]));
    if let Some(finalizers) = finalizers
        .as_array_mut()
        .filter(|f| !f.iter().any(|f| f == name))
    {
        finalizers.push(name.into());
    }
}

/// Admission of claims: sets the default storage class if no class is named, and the protection finalizer.
pub(crate) fn admit_claim(store: &Store, claim: &mut Value) {
    finalizer(claim, CLAIM_IN_USE);
    if at(claim, &["spec", "storageClassName"]).is_some_and(|c| !c.is_null()) {
        return;
    }
    let Some(resource) = Resource::of_kind("StorageClass") else {
        return;
    };
    let classes = store
        .list(&resource.prefix(None))
        .0
        .into_iter()
        .filter_map(|(_, r)| serde_json::from_slice::<Value>(&r.value).ok());
    let is_default = |class: &Value| {
        text(
            class,
            &[
                "metadata",
                "annotations",
                "storageclass.kubernetes.io/is-default-class",
            ],
        ) == Some("true")
    };
    // If several classes are marked as the default, the newest applies.
    let chosen = classes.filter(is_default).max_by_key(|c| {
        text(c, &["metadata", "creationTimestamp"])
            .unwrap_or_default()
            .to_owned()
    });
    if let Some(class) = chosen {
        entry(claim, "spec").insert(
            "storageClassName".into(),
            super::object::name(&class).into(),
        );
    }
}

/// Admission of volumes: sets the protection finalizer.
pub(crate) fn admit_volume(volume: &mut Value) {
    finalizer(volume, VOLUME_IN_USE);
}

fn one_of(value: Option<&str>, field: &str, allowed: &[&str], errors: &mut Errors) {
    if let Some(value) = value.filter(|v| !allowed.contains(v)) {
        errors.push(FieldError::unsupported(field, value, allowed));
    }
}

fn modes(object: &Value, errors: &mut Errors) {
    let modes = list(object, &["spec", "accessModes"]);
    if modes.is_empty() {
        errors.push(FieldError::required(
            "spec.accessModes",
            "at least 1 access mode is required",
        ));
    }
    for mode in modes {
        one_of(mode.as_str(), "spec.accessModes", &MODES, errors);
    }
    if modes.len() > 1 && modes.iter().any(|m| m == "ReadWriteOncePod") {
        errors.push(FieldError::forbidden(
            "spec.accessModes",
            "may not use ReadWriteOncePod with other access modes",
        ));
    }
    one_of(
        text(object, &["spec", "volumeMode"]),
        "spec.volumeMode",
        &["Block", "Filesystem"],
        errors,
    );
}

fn amount(object: &Value, path: &[&str], field: &str, errors: &mut Errors) {
    match at(object, path) {
        None => errors.push(FieldError::required(field, "")),
        Some(value) => match value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
            .parse::<Quantity>()
        {
            Ok(quantity) if quantity > Quantity::ZERO => {}
            Ok(_) => errors.push(FieldError::invalid(
                field,
                value,
                "must be greater than zero",
            )),
            Err(error) => errors.push(FieldError::invalid(field, value, &error.to_string())),
        },
    }
}

/// The names of a volume's sources.
fn sources(spec: &Value) -> Vec<&String> {
    spec.as_object()
        .into_iter()
        .flatten()
        .filter(|(key, value)| !NOT_SOURCES.contains(&key.as_str()) && !value.is_null())
        .map(|(k, _)| k)
        .collect()
}

/// Validates an object of one of these kinds.
pub fn validate(kind: &str, object: &Value, errors: &mut Errors) {
    match kind {
        "PersistentVolumeClaim" => {
            modes(object, errors);
            amount(
                object,
                &["spec", "resources", "requests", "storage"],
                "spec.resources[storage]",
                errors,
            );
        }
        "PersistentVolume" => {
            modes(object, errors);
            amount(
                object,
                &["spec", "capacity", "storage"],
                "spec.capacity[storage]",
                errors,
            );
            one_of(
                text(object, &["spec", "persistentVolumeReclaimPolicy"]),
                "spec.persistentVolumeReclaimPolicy",
                &POLICIES,
                errors,
            );
            match sources(&object["spec"]).as_slice() {
                [] => errors.push(FieldError::required("spec", "must specify a volume type")),
                [_] => {}
                [_, second, ..] => errors.push(FieldError::forbidden(
                    format!("spec.{second}"),
                    "may not specify more than 1 volume type",
                )),
            }
            for (source, field) in [
                ("hostPath", "path"),
                ("local", "path"),
                ("nfs", "server"),
                ("nfs", "path"),
                ("csi", "driver"),
                ("csi", "volumeHandle"),
            ] {
                if at(object, &["spec", source]).is_some()
                    && text(object, &["spec", source, field]).is_none_or(str::is_empty)
                {
                    errors.push(FieldError::required(format!("spec.{source}.{field}"), ""));
                }
            }
            if at(object, &["spec", "local"]).is_some()
                && at(object, &["spec", "nodeAffinity", "required"]).is_none()
            {
                errors.push(FieldError::required(
                    "spec.nodeAffinity",
                    "Local volume requires node affinity",
                ));
            }
        }
        "StorageClass" => {
            if text(object, &["provisioner"]).is_none_or(str::is_empty) {
                errors.push(FieldError::required("provisioner", ""));
            }
            one_of(
                text(object, &["reclaimPolicy"]),
                "reclaimPolicy",
                &POLICIES[..2],
                errors,
            );
            one_of(
                text(object, &["volumeBindingMode"]),
                "volumeBindingMode",
                &BINDING,
                errors,
            );
        }
        "CSIDriver" => {
            one_of(
                text(object, &["spec", "fsGroupPolicy"]),
                "spec.fsGroupPolicy",
                &GROUP_POLICIES,
                errors,
            );
            for mode in list(object, &["spec", "volumeLifecycleModes"]) {
                one_of(
                    mode.as_str(),
                    "spec.volumeLifecycleModes",
                    &LIFECYCLES,
                    errors,
                );
            }
        }
        "CSINode" => {
            let mut seen = std::collections::HashSet::new();
            for (i, driver) in list(object, &["spec", "drivers"]).iter().enumerate() {
                for key in ["name", "nodeID"] {
                    if text(driver, &[key]).is_none_or(str::is_empty) {
                        errors.push(FieldError::required(format!("spec.drivers[{i}].{key}"), ""));
                    }
                }
                if let Some(name) = text(driver, &["name"]).filter(|name| !seen.insert(*name)) {
                    errors.push(FieldError::duplicate(
                        format!("spec.drivers[{i}].name"),
                        name,
                    ));
                }
            }
        }
        "VolumeAttachment" => {
            for key in ["attacher", "nodeName"] {
                if text(object, &["spec", key]).is_none_or(str::is_empty) {
                    errors.push(FieldError::required(format!("spec.{key}"), ""));
                }
            }
        }
        _ => {}
    }
}

/// Validates an update of a claim's spec. The binder may set `volumeName`. A bound claim may request more storage. It
/// may request less only after a failed expansion, and still more than its current capacity (KEP-1790).
fn claim_update(old: &Value, new: &Value, errors: &mut Errors) {
    let bound = text(old, &["status", "phase"]) == Some("Bound");
    let mut allowed = new["spec"].clone();
    if text(old, &["spec", "volumeName"]).is_none_or(str::is_empty) {
        match old["spec"].get("volumeName") {
            Some(name) => allowed["volumeName"] = name.clone(),
            None => drop(allowed.as_object_mut().map(|s| s.remove("volumeName"))),
        }
    }
    let request = ["spec", "resources", "requests", "storage"];
    if bound
        && at(new, &request).is_some()
        && let Some(before) = at(old, &request)
    {
        allowed["resources"]["requests"]["storage"] = before.clone();
    }
    if allowed != old["spec"] {
        let rule = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
        errors.push(FieldError::forbidden("spec", rule));
    }
    let amount = |object, path: &[&str]| text(object, path)?.parse::<Quantity>().ok();
    if let (Some(before), Some(after)) = (amount(old, &request), amount(new, &request))
        && after < before
        && amount(old, &["status", "capacity", "storage"]).is_none_or(|has| after <= has)
    {
        errors.push(FieldError::forbidden(
            "spec.resources.requests.storage",
            "field can not be less than status.capacity",
        ));
    }
}

/// Validates an update.
pub(crate) fn validate_update(kind: &str, old: &Value, new: &Value, errors: &mut Errors) {
    match kind {
        "PersistentVolumeClaim" => {
            claim_update(old, new, errors);
        }
        "PersistentVolume" => {
            let source = |volume: &Value| {
                sources(&volume["spec"])
                    .first()
                    .map(|key| volume["spec"][key.as_str()].clone())
            };
            if source(old) != source(new) {
                errors.push(FieldError::forbidden(
                    "spec.persistentvolumesource",
                    "spec.persistentvolumesource is immutable after creation",
                ));
            }
            if old["spec"]["volumeMode"] != new["spec"]["volumeMode"] {
                errors.push(FieldError::invalid(
                    "spec.volumeMode",
                    &new["spec"]["volumeMode"],
                    "field is immutable",
                ));
            }
        }
        "StorageClass" => {
            for key in [
                "provisioner",
                "parameters",
                "reclaimPolicy",
                "volumeBindingMode",
            ] {
                if old[key] != new[key] {
                    errors.push(FieldError::forbidden(
                        key,
                        &format!("updates to {key} are forbidden."),
                    ));
                }
            }
        }
        "VolumeAttachment" if old["spec"] != new["spec"] => {
            errors.push(FieldError::invalid(
                "spec",
                &new["spec"],
                "field is immutable",
            ));
        }
        _ => {}
    }
}

type Column = (&'static str, &'static str, u8);
const NAME: Column = ("Name", "string", 0);
const AGE: Column = ("Age", "string", 0);

/// The table columns of a kind; `None` for other kinds.
#[must_use]
pub fn columns(kind: &str) -> Option<&'static [Column]> {
    Some(match kind {
        "PersistentVolumeClaim" => &[
            NAME,
            ("Status", "string", 0),
            ("Volume", "string", 0),
            ("Capacity", "string", 0),
            ("Access Modes", "string", 0),
            ("StorageClass", "string", 0),
            ("VolumeAttributesClass", "string", 0),
            AGE,
            ("VolumeMode", "string", 1),
        ],
        "PersistentVolume" => &[
            NAME,
            ("Capacity", "string", 0),
            ("Access Modes", "string", 0),
            ("Reclaim Policy", "string", 0),
            ("Status", "string", 0),
            ("Claim", "string", 0),
            ("StorageClass", "string", 0),
            ("VolumeAttributesClass", "string", 0),
            ("Reason", "string", 0),
            AGE,
            ("VolumeMode", "string", 1),
        ],
        "StorageClass" => &[
            NAME,
            ("Provisioner", "string", 0),
            ("ReclaimPolicy", "string", 0),
            ("VolumeBindingMode", "string", 0),
            ("AllowVolumeExpansion", "boolean", 0),
            AGE,
        ],
        "CSIDriver" => &[
            NAME,
            ("AttachRequired", "boolean", 0),
            ("PodInfoOnMount", "boolean", 0),
            ("StorageCapacity", "boolean", 0),
            ("TokenRequests", "string", 0),
            ("RequiresRepublish", "boolean", 0),
            ("Modes", "string", 0),
            AGE,
        ],
        "CSINode" => &[NAME, ("Drivers", "integer", 0), AGE],
        "VolumeAttachment" => &[
            NAME,
            ("Attacher", "string", 0),
            ("PV", "string", 0),
            ("Node", "string", 0),
            ("Attached", "boolean", 0),
            AGE,
        ],
        _ => return None,
    })
}

fn short_modes(object: &Value, path: &[&str]) -> Value {
    let short = |mode: &Value| match mode.as_str().unwrap_or_default() {
        "ReadWriteOnce" => "RWO",
        "ReadOnlyMany" => "ROX",
        "ReadWriteMany" => "RWX",
        "ReadWriteOncePod" => "RWOP",
        _ => "",
    };
    list(object, path)
        .iter()
        .map(short)
        .collect::<Vec<_>>()
        .join(",")
        .into()
}

/// The cells of a table row.
#[must_use]
pub fn cells(kind: &str, object: &Value, age: &str) -> Vec<Value> {
    let name = super::object::name(object);
    let or = |path: &[&str], other: &str| {
        Value::from(
            text(object, path)
                .filter(|v| !v.is_empty())
                .unwrap_or(other),
        )
    };
    let yes = |path: &[&str]| Value::from(at(object, path) == Some(&Value::Bool(true)));
    let class = || or(&["spec", "storageClassName"], "");
    let attributes = || or(&["spec", "volumeAttributesClassName"], "<unset>");
    let deleting = super::object::is_deleting(object);
    let phase = || {
        if deleting {
            "Terminating".into()
        } else {
            or(&["status", "phase"], "")
        }
    };
    match kind {
        "PersistentVolumeClaim" => {
            let bound = text(object, &["spec", "volumeName"]).is_some_and(|v| !v.is_empty());
            let (capacity, modes) = if bound {
                (
                    or(&["status", "capacity", "storage"], ""),
                    short_modes(object, &["status", "accessModes"]),
                )
            } else {
                ("".into(), "".into())
            };
            vec![
                name.into(),
                phase(),
                or(&["spec", "volumeName"], ""),
                capacity,
                modes,
                class(),
                attributes(),
                age.into(),
                or(&["spec", "volumeMode"], ""),
            ]
        }
        "PersistentVolume" => {
            let claim = match (
                text(object, &["spec", "claimRef", "namespace"]),
                text(object, &["spec", "claimRef", "name"]),
            ) {
                (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
                _ => String::new(),
            };
            vec![
                name.into(),
                or(&["spec", "capacity", "storage"], ""),
                short_modes(object, &["spec", "accessModes"]),
                or(&["spec", "persistentVolumeReclaimPolicy"], ""),
                phase(),
                claim.into(),
                class(),
                attributes(),
                or(&["status", "reason"], ""),
                age.into(),
                or(&["spec", "volumeMode"], ""),
            ]
        }
        "StorageClass" => {
            let default = text(
                object,
                &[
                    "metadata",
                    "annotations",
                    "storageclass.kubernetes.io/is-default-class",
                ],
            ) == Some("true");
            let name = if default {
                format!("{name} (default)")
            } else {
                name.to_owned()
            };
            vec![
                name.into(),
                or(&["provisioner"], ""),
                or(&["reclaimPolicy"], "Delete"),
                or(&["volumeBindingMode"], "Immediate"),
                yes(&["allowVolumeExpansion"]),
                age.into(),
            ]
        }
        "CSIDriver" => {
            let strings = |path: &[&str]| {
                list(object, path)
                    .iter()
                    .filter_map(Value::as_str)
                    .collect::<Vec<_>>()
                    .join(",")
            };
            let audiences: Vec<&str> = list(object, &["spec", "tokenRequests"])
                .iter()
                .filter_map(|t| t["audience"].as_str())
                .collect();
            vec![
                name.into(),
                yes(&["spec", "attachRequired"]),
                yes(&["spec", "podInfoOnMount"]),
                yes(&["spec", "storageCapacity"]),
                if audiences.is_empty() {
                    "<unset>".into()
                } else {
                    audiences.join(",").into()
                },
                yes(&["spec", "requiresRepublish"]),
                strings(&["spec", "volumeLifecycleModes"]).into(),
                age.into(),
            ]
        }
        "CSINode" => vec![
            name.into(),
            list(object, &["spec", "drivers"]).len().into(),
            age.into(),
        ],
        _ => vec![
            name.into(),
            or(&["spec", "attacher"], ""),
            or(&["spec", "source", "persistentVolumeName"], ""),
            or(&["spec", "nodeName"], ""),
            yes(&["status", "attached"]),
            age.into(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(kind: &str, object: &Value) -> Vec<String> {
        let mut errors = Errors::new();
        validate(kind, object, &mut errors);
        errors.into_iter().map(|e| e.field).collect()
    }

    #[test]
    fn validation_errors_have_the_field() {
        let claim = |spec: Value| fields("PersistentVolumeClaim", &json!({"spec": spec}));
        assert_eq!(
            claim(
                json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}})
            ),
            Vec::<String>::new()
        );
        assert_eq!(
            claim(json!({})),
            ["spec.accessModes", "spec.resources[storage]"]
        );
        assert_eq!(
            claim(json!({"accessModes": ["RWO"], "resources": {"requests": {"storage": "0"}}})),
            ["spec.accessModes", "spec.resources[storage]"]
        );
        let volume = |more: Value| {
            let mut spec =
                json!({"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}});
            json_patch::merge(&mut spec, &more);
            fields("PersistentVolume", &json!({"spec": spec}))
        };
        assert_eq!(
            volume(json!({"hostPath": {"path": "/x"}})),
            Vec::<String>::new()
        );
        assert_eq!(volume(json!({})), ["spec"]);
        assert_eq!(
            volume(json!({"hostPath": {"path": "/x"}, "nfs": {"server": "s", "path": "/"}})),
            ["spec.nfs"]
        );
        assert_eq!(
            volume(json!({"local": {"path": "/x"}})),
            ["spec.nodeAffinity"]
        );
        assert_eq!(
            volume(json!({"csi": {"driver": "d"}})),
            ["spec.csi.volumeHandle"]
        );
        assert_eq!(
            fields("StorageClass", &json!({"reclaimPolicy": "Recycle"})),
            ["provisioner", "reclaimPolicy"]
        );
    }

    #[test]
    fn a_claims_spec_is_immutable_except_for_size_and_volume_name() {
        let claim = |size: &str, volume: &str, phase: &str| json!({"spec": {"resources": {"requests": {"storage": size}}, "volumeName": volume, "x": 1}, "status": {"phase": phase}});
        for (old, new, fine) in [
            (claim("1", "", "Pending"), claim("1", "v", "Pending"), true),
            (claim("1", "", "Pending"), claim("2", "", "Pending"), false),
            (claim("1", "v", "Bound"), claim("2", "v", "Bound"), true),
            (claim("1", "v", "Bound"), claim("1", "w", "Bound"), false),
        ] {
            let mut errors = Errors::new();
            validate_update("PersistentVolumeClaim", &old, &new, &mut errors);
            assert_eq!(errors.is_empty(), fine, "{old} {new}");
        }
    }

    #[test]
    fn a_claim_without_a_class_gets_the_newest_default_class() {
        let store = Store::in_memory();
        let mut claim = json!({"metadata": {"name": "c"}, "spec": {}});
        admit_claim(&store, &mut claim);
        assert_eq!(
            (
                at(&claim, &["spec", "storageClassName"]),
                &claim["metadata"]["finalizers"]
            ),
            (None, &json!([CLAIM_IN_USE]))
        );
        let mut none = json!({"metadata": {"name": "c"}, "spec": {"storageClassName": ""}});
        admit_claim(&store, &mut none);
        assert_eq!(none["spec"]["storageClassName"], "");
    }
}
