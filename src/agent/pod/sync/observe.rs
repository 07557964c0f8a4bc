//! Reads a pod's state from the runtime.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::{Job, Result};
use crate::Kind;
use holdfast_core::fault::Fault;
use holdfast_core::lock::lock;
use holdfast_core::pod;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::observed::{self, ContainerState};
use holdfast_core::pod::worker::Outcome;

impl Job {
    /// Reads the pod from the runtime. If `logs` is set, reads the number of attempts from the log directory for
    /// containers that the runtime does not have.
    pub(super) async fn observe(&self, logs: bool) -> Result<Outcome> {
        let parts = self.parts();
        if self.start_cancelled {
            self.wait_for_cancelled_starts().await;
        }
        let read = async {
            let observed = parts.runtime.observe(pod::uid(&self.pod)).await;
            observed
                .map_err(|e| Fault::from(e).context("cannot read the pod's state from the runtime"))
        };
        let mut observed = self
            .log()
            .step(Step::Observe, "", read)
            .await
            .map_err(|fault| {
                let message = format!("error determining status: {fault}");
                self.emit_event(Kind::Warning, "FailedSync", message);
                fault
            })?;
        for container in observed
            .containers
            .iter_mut()
            .filter(|c| c.state == ContainerState::Exited)
        {
            self.add_termination_message(container).await;
        }
        self.forget_messages(&observed.containers);
        let mut logged = BTreeMap::new();
        if logs {
            for (_, container) in pod::containers(&self.pod) {
                if observed.newest(&container.name).is_some() {
                    continue;
                }
                let name = &container.name;
                match parts.host.last_attempt(&self.pod, name).await {
                    Ok(Some(last)) => _ = logged.insert(name.clone(), last + 1),
                    Ok(None) => {}
                    // As upstream: restarting at zero is better than not starting the container.
                    Err(error) => {
                        tracing::warn!(%error, container = name, "cannot read the last attempt; restarts are counted from zero");
                    }
                }
            }
        }
        let pod = Arc::new(observed);
        Ok(Outcome::Observed { pod, logged })
    }

    /// Adds the termination message to an exited container. First, once, kills processes that the runtime has
    /// lost. After a shim was killed, containerd 2 reports the container as exited while its processes still
    /// run. These must not run next to a new instance.
    async fn add_termination_message(&self, container: &mut observed::Container) {
        let known = || lock(&self.tools.messages);
        let read = known().get(&container.id).cloned();
        let text = match read {
            Some(text) => text,
            None => {
                self.kill_lost_processes(container).await;
                let text = self
                    .termination_message(container)
                    .await
                    .unwrap_or_default();
                known().insert(container.id.clone(), text.clone());
                text
            }
        };
        if !text.is_empty() {
            container.message = if container.message.is_empty() {
                text
            } else {
                format!("{}: {text}", container.message)
            };
        }
    }

    async fn kill_lost_processes(&self, container: &observed::Container) {
        let (host, id) = (&self.parts().host, &container.id);
        if let Err(error) = host.remove_container_cgroup(&self.pod, id).await {
            let name = &container.name;
            tracing::warn!(%error, container = name, id, "processes of an exited container may remain");
        }
    }

    async fn termination_message(&self, container: &observed::Container) -> Option<String> {
        let (host, pod) = (&self.parts().host, &self.pod);
        let text = host.termination_message(pod::uid(pod), container).await;
        if text.is_none() && falls_back_to_logs(pod, container) {
            return host.log_tail(pod, &container.name, container.attempt).await;
        }
        text
    }

    fn forget_messages(&self, containers: &[observed::Container]) {
        let mut known = lock(&self.tools.messages);
        known.retain(|id, _| containers.iter().any(|c| c.id == *id));
    }
}

/// Whether the end of the container's log is its termination message (upstream's `getTerminationMessage`).
fn falls_back_to_logs(pod: &Pod, ended: &observed::Container) -> bool {
    let wants = |c: &Container| {
        c.name == ended.name
            && c.termination_message_policy.as_deref() == Some("FallbackToLogsOnError")
    };
    ended.exit_code != 0
        && ended.reason != "ContainerCannotRun"
        && pod::containers(pod).iter().any(|(_, c)| wants(c))
}
