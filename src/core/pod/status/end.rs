//! The end of a pod that the API tells already. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

fn has_ended(status: &ContainerStatus) -> bool {
    let state = status.state.as_ref();
    state.is_some_and(|s| s.terminated.is_some())
}

/// Keeps what `told` says of the pod's end: the phase with its reason and message, and of containers that had ended there
/// all that was said. What the runtime has of those began after the pod's end.
pub fn keep_end(status: &mut PodStatus, told: &PodStatus) {
    status.phase.clone_from(&told.phase);
    status.reason.clone_from(&told.reason);
    status.message.clone_from(&told.message);
    for (list, before) in [
        (&mut status.container_statuses, &told.container_statuses),
        (
            &mut status.init_container_statuses,
            &told.init_container_statuses,
        ),
        (
            &mut status.ephemeral_container_statuses,
            &told.ephemeral_container_statuses,
        ),
    ] {
        for container in list.iter_mut().flatten() {
            let mut before = before.iter().flatten();
            let ended = before.find(|b| b.name == container.name && has_ended(b));
            if let Some(ended) = ended {
                container.clone_from(ended);
            }
        }
    }
}
