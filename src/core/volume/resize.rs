//! Status updates of a claim whose volume is expanded (KEP-1790). The resizer reads the state from the claim; if the
//! node fails, it can stop or try a smaller size. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, PersistentVolumeClaimCondition};
use serde_json::{Value, json};

/// State: the node may expand the filesystem.
pub(crate) const PENDING: &str = "NodeResizePending";
/// State: the node is expanding the filesystem.
pub const IN_PROGRESS: &str = "NodeResizeInProgress";
/// State: the node cannot expand the filesystem and does not retry.
pub const INFEASIBLE: &str = "NodeResizeInfeasible";
/// Condition with the error.
const FAILED: &str = "NodeResizeError";
/// Conditions that are removed after a successful expansion.
const CONDITIONS: [&str; 4] = [
    "Resizing",
    "FileSystemResizePending",
    "ControllerResizeError",
    FAILED,
];

/// Progress of an expansion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize<'a> {
    /// The node starts its part.
    Started,
    /// The volume has this size, as an API quantity.
    Completed(&'a str),
    /// The expansion failed without any change.
    Failed {
        /// The error.
        why: &'a str,
        /// Whether a retry would fail too.
        infeasible: bool,
        /// Time of the failure.
        at: Timestamp,
    },
}

/// Whether a claim is the one whose volume is expanded, and not a new claim of the same name.
#[must_use]
pub fn is_same_claim(claim: &PersistentVolumeClaim, grown: &Grown) -> bool {
    grown.uid.is_none() || grown.uid == claim.metadata.uid
}

/// The merge patch of the claim's status, bound to the claim's resource version.
#[must_use]
pub fn patch(claim: &PersistentVolumeClaim, step: Resize<'_>) -> Value {
    let conditions = claim.status.as_ref().and_then(|s| s.conditions.as_deref());
    let conditions = conditions.unwrap_or_default();
    let without = |gone: &[&str]| -> Vec<&PersistentVolumeClaimCondition> {
        let stays = |c: &&PersistentVolumeClaimCondition| !gone.contains(&c.type_.as_str());
        conditions.iter().filter(stays).collect()
    };
    let status = match step {
        Resize::Started => json!({"allocatedResourceStatuses": {"storage": IN_PROGRESS}}),
        Resize::Completed(size) => {
            let states = claim.status.as_ref();
            let states = states.and_then(|s| s.allocated_resource_statuses.as_ref());
            // A merge patch keeps an empty map, so the field is deleted if no other resource has a state.
            let others = states.is_some_and(|states| states.keys().any(|of| of != "storage"));
            let states = if others {
                json!({"storage": null})
            } else {
                json!(null)
            };
            json!({"capacity": {"storage": size}, "conditions": without(&CONDITIONS), "allocatedResourceStatuses": states})
        }
        Resize::Failed {
            why,
            infeasible,
            at,
        } => {
            let known = conditions
                .iter()
                .find(|c| c.type_ == FAILED && c.status == "True");
            // Repeated failures keep the transition time.
            let since = known.and_then(|c| c.last_transition_time.as_ref());
            let now = at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            let since = since.map_or_else(|| json!(now), |since| json!(since));
            let failed = json!({"type": FAILED, "status": "True", "lastTransitionTime": since,
                "message": format!("failed to expand pvc with {why}")});
            let others = without(&[FAILED]).into_iter().map(|c| json!(c));
            let all: Vec<Value> = others.chain([failed]).collect();
            match infeasible {
                true => {
                    json!({"conditions": all, "allocatedResourceStatuses": {"storage": INFEASIBLE}})
                }
                false => json!({"conditions": all}),
            }
        }
    };
    json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status})
}

/// A volume that was expanded and whose filesystem must follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grown {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// The claim's uid.
    pub uid: Option<String>,
    /// Size in bytes in the claim's status.
    pub claim_bytes: i64,
    /// New size in bytes.
    pub bytes: i64,
    /// New size as an API quantity.
    pub text: String,
    /// Whether the resizer records the state of the expansion in the claim (KEP-1790).
    pub records_state: bool,
    /// Whether the claim's status already has the new size, because another node has expanded the filesystem.
    pub claim_has_size: bool,
    /// Whether the claim requests another size by now.
    pub is_superseded: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(conditions: Value) -> PersistentVolumeClaim {
        serde_json::from_value(
            json!({"metadata": {"name": "c", "resourceVersion": "7"}, "status": {"conditions": conditions}}),
        )
        .expect("a claim")
    }

    #[test]
    fn a_recreated_claim_gets_no_expansion_of_its_predecessor() {
        let mut made = claim(json!([]));
        made.metadata.uid = Some("two".into());
        let grown = |uid: Option<&str>| Grown {
            namespace: "n".into(),
            claim: "c".into(),
            uid: uid.map(str::to_owned),
            claim_bytes: 1,
            bytes: 2,
            text: "2".into(),
            records_state: true,
            claim_has_size: false,
            is_superseded: false,
        };
        assert!(is_same_claim(&made, &grown(Some("two"))) && is_same_claim(&made, &grown(None)));
        assert!(!is_same_claim(&made, &grown(Some("one"))));
    }

    #[test]
    fn a_claims_conditions_report_its_expansion() {
        let time = "2026-11-20T00:00:01Z";
        let at: Timestamp = time.parse().expect("a time");
        let other = json!({"type": "Other", "status": "True"});
        let resizing = claim(
            json!([{"type": "Resizing", "status": "True"}, {"type": "NodeResizeError", "status": "True"}, other]),
        );
        assert_eq!(
            patch(&resizing, Resize::Completed("2Mi")),
            json!({"metadata": {"resourceVersion": "7"}, "status": {"capacity": {"storage": "2Mi"}, "conditions": [other], "allocatedResourceStatuses": null}})
        );
        assert_eq!(
            patch(&resizing, Resize::Started)["status"],
            json!({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}})
        );
        let failed = |infeasible| Resize::Failed {
            why: "no",
            infeasible,
            at,
        };
        let condition = json!({"type": "NodeResizeError", "status": "True", "lastTransitionTime": time, "message": "failed to expand pvc with no"});
        let plain = claim(json!([other]));
        assert_eq!(
            patch(&plain, failed(false))["status"],
            json!({"conditions": [other, condition]})
        );
        assert_eq!(
            patch(&plain, failed(true))["status"],
            json!({"conditions": [other, condition], "allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}})
        );
        let mut several = claim(json!([]));
        several
            .status
            .as_mut()
            .expect("a status")
            .allocated_resource_statuses = Some(
            ["storage", "other"]
                .map(|of| (of.into(), PENDING.into()))
                .into(),
        );
        assert_eq!(
            patch(&several, Resize::Completed("2Mi"))["status"]["allocatedResourceStatuses"],
            json!({"storage": null})
        );
        // A repeated failure keeps the transition time.
        let before = json!({"type": "NodeResizeError", "status": "True", "lastTransitionTime": "2026-11-19T00:00:00Z"});
        let patched = patch(&claim(json!([before])), failed(false));
        let conditions = patched["status"]["conditions"].as_array().expect("a list");
        assert_eq!(conditions.len(), 1);
        assert_eq!(conditions[0]["lastTransitionTime"], "2026-11-19T00:00:00Z");
    }
}
