//! The health of the pod's containers and of their devices.
//!
//! Results of probes and the health of devices enter. The results leave towards the status (`ready`, `started`,
//! `allocatedResourcesStatus`) and towards `core::pod::actions`, which stops containers whose liveness or startup probe
//! has failed (`pkg/kubelet/prober/results/results_manager.go`).
//!
//! A result belongs to one instance of a container. The result is forgotten when the instance no longer runs. For
//! instances that no probe of this agent has judged yet, the health is adopted from the status in the API, so that the
//! readiness of a pod does not change because the agent was restarted.

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use serde::{Deserialize, Serialize};

use crate::pod::observed::{ContainerState, ObservedPod};
use crate::pod::probe::{self, Kind, Probed};
use crate::pod::status::devices::OfPod;
use crate::pod::{self, Role};

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Health {
    /// The results of probes, by container id.
    pub(super) probed: Probed,
    /// The health of the containers' devices.
    pub(super) devices: OfPod,
}

impl Health {
    /// The result of a probe has changed.
    pub(super) fn apply_probe(&mut self, id: String, kind: Kind, result: bool) {
        let health = self.probed.0.entry(id).or_default();
        *health.of(kind) = Some(result);
    }

    /// Forgets the results of instances that no longer run.
    pub(super) fn apply_observed(&mut self, seen: &ObservedPod) {
        let runs = |id: &str| seen.containers.iter().any(|c| c.id == id && c.is_running());
        self.probed.0.retain(|id, _| runs(id));
    }

    /// Adopts the health in the status for instances that no probe has judged yet.
    pub(super) fn adopt(&mut self, pod: &Pod, seen: &ObservedPod, status: &PodStatus) {
        for (role, container) in &pod::containers(pod) {
            if !matches!(role, Role::Regular | Role::Sidecar) {
                continue;
            }
            let running = seen.newest(&container.name);
            let Some(running) = running.filter(|c| c.state == ContainerState::Running) else {
                continue;
            };
            let known = [&status.container_statuses, &status.init_container_statuses];
            let mut known = known.into_iter().flatten().flatten();
            let known = known.find(|s| s.name == container.name);
            let adopted = probe::Health::adopted(&running.id, known);
            let health = self.probed.0.entry(running.id.clone()).or_default();
            health.started = health.started.or(adopted.started);
            health.ready = health.ready.or(adopted.ready);
        }
    }
}
