//! Claims can grow only if their class allows it (upstream's admission plugin PersistentVolumeClaimResize). Pure.

use serde_json::Value;

use super::error::ApiError;
use super::object::{at, name, text};
use holdfast_core::quantity::Quantity;

fn size(claim: &Value) -> Quantity {
    text(claim, &["spec", "resources", "requests", "storage"])
        .and_then(|q| q.parse().ok())
        .unwrap_or(Quantity::ZERO)
}

fn class(claim: &Value) -> &str {
    let annotation = "volume.beta.kubernetes.io/storage-class";
    text(claim, &["metadata", "annotations", annotation])
        .or(text(claim, &["spec", "storageClassName"]))
        .unwrap_or_default()
}

/// Checks whether a claim may be changed to `new`; `read` returns a class by name.
///
/// # Errors
///
/// 403, in upstream's wording.
pub fn check(
    old: &Value,
    new: &Value,
    read: impl FnOnce(&str) -> Option<Value>,
) -> Result<(), ApiError> {
    if size(new) <= size(old) {
        return Ok(());
    }
    let refuse = |why: &str| ApiError::refused("", "persistentvolumeclaims", name(old), why);
    if text(old, &["status", "phase"]) != Some("Bound") {
        return Err(refuse(
            "Only bound persistent volume claims can be expanded",
        ));
    }
    let own = class(new);
    let allowed = !own.is_empty()
        && own == class(old)
        && read(own).is_some_and(|c| at(&c, &["allowVolumeExpansion"]) == Some(&true.into()));
    if allowed {
        return Ok(());
    }
    Err(refuse(
        "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_claim_can_be_expanded_if_its_class_allows_it() {
        let claim = |size: &str, class: &str, phase: &str| json!({"metadata": {"name": "c"}, "spec": {"storageClassName": class, "resources": {"requests": {"storage": size}}}, "status": {"phase": phase}});
        let classes = |name: &str| match name {
            "grows" => Some(json!({"allowVolumeExpansion": true})),
            "fixed" => Some(json!({"allowVolumeExpansion": false})),
            "silent" => Some(json!({})),
            _ => None,
        };
        let of = |old: &Value, size: &str, class: &str| {
            check(old, &claim(size, class, "Bound"), classes).map_err(|e| e.message)
        };
        let support = "persistentvolumeclaims \"c\" is forbidden: only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize";
        for (class, expected) in [
            ("grows", Ok(())),
            ("fixed", Err(support.to_owned())),
            ("silent", Err(support.to_owned())),
            ("nosuch", Err(support.to_owned())),
            ("", Err(support.to_owned())),
        ] {
            let old = claim("1Gi", class, "Bound");
            assert_eq!(of(&old, "2Gi", class), expected, "{class}");
            assert_eq!(of(&old, "1024Mi", class), Ok(()), "{class}");
        }
        assert_eq!(
            of(&claim("1Gi", "fixed", "Bound"), "2Gi", "grows"),
            Err(support.to_owned())
        );
        assert_eq!(
            of(&claim("1Gi", "grows", "Pending"), "2Gi", "grows"),
            Err("persistentvolumeclaims \"c\" is forbidden: Only bound persistent volume claims can be expanded".into())
        );
    }
}
