//! Terminal statuses that do not follow from a pod's containers: one that the API already has, a rejection, and a
//! deadline. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodStatus};

use crate::pod::{self, qos};
use crate::time::{self, seconds};

/// The exit of a container that is terminated.
pub(super) fn exit(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

/// Restores the earlier status of a container. A name is unique among all containers of a pod.
pub(super) fn restore(status: &mut PodStatus, earlier: &ContainerStatus) {
    let lists = [
        &mut status.container_statuses,
        &mut status.init_container_statuses,
        &mut status.ephemeral_container_statuses,
    ];
    let mut all = lists.into_iter().flatten().flatten();
    if let Some(container) = all.find(|c| c.name == earlier.name) {
        container.clone_from(earlier);
    }
}

/// Restores a terminal status that was published before: the phase with its reason and message, and the statuses of
/// containers that had terminated. Instances of these in the runtime began after the pod's termination.
pub(crate) fn keep_terminal_status(status: &mut PodStatus, published: &PodStatus) {
    status.phase.clone_from(&published.phase);
    status.reason.clone_from(&published.reason);
    status.message.clone_from(&published.message);
    let lists = [
        &published.container_statuses,
        &published.init_container_statuses,
        &published.ephemeral_container_statuses,
    ];
    let all = lists.into_iter().flatten().flatten();
    all.filter(|c| exit(c).is_some())
        .for_each(|c| restore(status, c));
}

/// The status of a pod that admission rejected before it was started. It has no container statuses.
#[must_use]
pub fn rejected(
    pod: &Pod,
    previous: &PodStatus,
    refusal: (&str, &str),
    now: Timestamp,
) -> PodStatus {
    let (reason, message) = refusal;
    let qos = || Some(qos::of(pod::spec(pod)).name().into());
    PodStatus {
        phase: Some("Failed".into()),
        reason: Some(reason.into()),
        message: Some(format!("Pod was rejected: {message}")),
        start_time: previous.start_time.clone().or_else(|| Some(seconds(now))),
        qos_class: previous.qos_class.clone().or_else(qos),
        observed_generation: pod.metadata.generation,
        // An earlier status may have reported them as waiting.
        init_container_statuses: None,
        container_statuses: None,
        ephemeral_container_statuses: None,
        ..previous.clone()
    }
}

/// When the pod's `activeDeadlineSeconds` have passed.
#[must_use]
pub fn deadline(pod: &Pod, status: &PodStatus) -> Option<Timestamp> {
    let most = pod::spec(pod).active_deadline_seconds?;
    Some(time::in_seconds(status.start_time.as_ref()?.0, most))
}
