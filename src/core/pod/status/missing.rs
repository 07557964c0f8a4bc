//! Containers of a terminated pod that have no instance in the runtime (`TerminatePod` in
//! `pkg/kubelet/status/status_manager.go`). A container that could have started counts as lost, and as failed. A
//! container that had to wait for others stays waiting.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Facts, before, initialised_before};
use crate::pod::observed::ContainerState;
use crate::pod::{self, Role};

fn init_containers(pod: &Pod) -> &[Container] {
    pod::spec(pod)
        .init_containers
        .as_deref()
        .unwrap_or_default()
}

/// Whether a container is known to have been started.
fn has_started(facts: &Facts<'_>, name: &str) -> bool {
    let seen = facts.observed.newest(name);
    let reported = before(facts.previous, name);
    let state = reported.and_then(|s| s.state.as_ref());
    seen.is_some_and(|c| c.state != ContainerState::Created)
        || state.is_some_and(|s| s.running.is_some() || s.terminated.is_some())
        || reported.is_some_and(|s| {
            s.last_state
                .as_ref()
                .is_some_and(|l| l.terminated.is_some())
        })
}

fn has_succeeded(facts: &Facts<'_>, name: &str) -> bool {
    let seen = facts.observed.newest(name);
    let reported = before(facts.previous, name).and_then(|s| s.state.as_ref()?.terminated.as_ref());
    seen.is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0)
        || reported.is_some_and(|t| t.exit_code == 0)
}

/// Whether the pod was initialised, so that regular containers could start.
fn was_initialised(facts: &Facts<'_>) -> bool {
    let Some(last) = init_containers(facts.pod).last() else {
        return true;
    };
    let regular = &pod::spec(facts.pod).containers;
    initialised_before(facts)
        || regular.iter().any(|c| has_started(facts, &c.name))
        || (!pod::is_sidecar(last) && has_succeeded(facts, &last.name))
}

/// Whether a container without an instance is an init container that must have completed, because a regular container
/// was created after it (`convertToAPIContainerStatuses` in `pkg/kubelet/kubelet_pods.go`). The status of a static pod
/// is not kept across restarts of the agent.
pub(super) fn has_completed(facts: &Facts, role: Role) -> bool {
    let mut regular = pod::spec(facts.pod).containers.iter();
    role == Role::Init && regular.any(|c| facts.observed.newest(&c.name).is_some())
}

/// Whether a container without an instance is lost.
pub(super) fn is_lost(facts: &Facts<'_>, role: Role, container: &Container) -> bool {
    match role {
        Role::Regular => was_initialised(facts),
        // If a later container has started, this one had started too.
        Role::Init | Role::Sidecar => {
            let mut rest = init_containers(facts.pod)
                .iter()
                .skip_while(|c| c.name != container.name);
            was_initialised(facts) || rest.any(|c| has_started(facts, &c.name))
        }
        Role::Ephemeral => false,
    }
}
