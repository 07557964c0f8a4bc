//! The container states of the API. Pure.

use k8s_openapi::api::core::v1::{
    ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated,
};

use super::{Facts, RESTARTING_ALL, waiting};
use crate::pod::observed::{self, ContainerState};
use crate::time::seconds;

const LOST: &str = "The container could not be located when the pod was terminated";

/// A container's id in the API (upstream's `ContainerID.String`). If the runtime's name is unknown, as shortly after a
/// start of the agent, the name in earlier ids is used.
pub(super) fn api_id(facts: &Facts<'_>, id: &str) -> String {
    let name = match facts.runtime {
        "" => {
            let before = [
                &facts.previous.container_statuses,
                &facts.previous.init_container_statuses,
            ];
            let mut ids = before.into_iter().flatten().flatten();
            let known = ids.find_map(|s| s.container_id.as_deref()?.split_once("://"));
            known.map_or("containerd", |(name, _)| name)
        }
        name => name,
    };
    format!("{name}://{id}")
}

pub(super) fn terminated(
    facts: &Facts<'_>,
    container: &observed::Container,
) -> ContainerStateTerminated {
    let reason = match (container.reason.as_str(), container.exit_code) {
        ("", 0) => "Completed",
        ("", _) => "Error",
        (reason, _) => reason,
    };
    ContainerStateTerminated {
        container_id: Some(api_id(facts, &container.id)),
        exit_code: container.exit_code,
        finished_at: container.finished_at.map(seconds),
        started_at: container.started_at.map(seconds),
        reason: Some(reason.into()),
        message: (!container.message.is_empty()).then(|| container.message.clone()),
        signal: None,
    }
}

pub(super) fn lost() -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 137,
        reason: Some("ContainerStatusUnknown".into()),
        message: Some(LOST.into()),
        ..ContainerStateTerminated::default()
    }
}

/// The terminated state of an init container that was removed from the runtime, in a pod whose regular containers were
/// created.
pub(super) fn completed() -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 0,
        reason: Some("Completed".into()),
        message: Some("Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally".into()),
        ..ContainerStateTerminated::default()
    }
}

pub(super) fn removed_to_restart() -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 137,
        reason: Some(RESTARTING_ALL.into()),
        message: Some("The container is removed because RestartAllContainers in place".into()),
        ..ContainerStateTerminated::default()
    }
}

/// The state of an exited instance.
pub(super) fn ended(facts: &Facts<'_>, instance: &observed::Container) -> ApiState {
    ApiState {
        terminated: Some(terminated(facts, instance)),
        ..ApiState::default()
    }
}

/// The API's state of an instance.
pub(super) fn state(facts: &Facts<'_>, instance: &observed::Container) -> ApiState {
    match instance.state {
        ContainerState::Running => ApiState {
            running: Some(ContainerStateRunning {
                started_at: instance.started_at.map(seconds),
            }),
            ..ApiState::default()
        },
        ContainerState::Created => waiting("", ""),
        ContainerState::Unknown => ApiState {
            terminated: Some(lost()),
            ..ApiState::default()
        },
        ContainerState::Exited => ended(facts, instance),
    }
}
