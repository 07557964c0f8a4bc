//! Priorities of pods (`pkg/apis/scheduling/types.go`). Pure.

use k8s_openapi::api::core::v1::Pod;

use crate::pod;

/// Minimum priority of a critical pod.
pub(crate) const CRITICAL: i32 = 2_000_000_000;

/// Whether a pod is critical: static pods, mirror pods, and pods of the highest priorities.
#[must_use]
pub fn is_critical(pod: &Pod) -> bool {
    pod::is_static(pod) || pod::is_mirror(pod) || pod::spec(pod).priority.unwrap_or(0) >= CRITICAL
}
