//! Bringing running containers to the sizes that were granted: the pod's cgroup grows first, then those
//! that shrink, then those that grow, and at last the pod's cgroup shrinks (kubelet spec, 5.7).

use super::{Job, Result, failed};
use crate::agent::Kind;
use crate::core::pod;
use crate::core::pod::journal::Step;
use crate::core::pod::worker::Outcome;
use crate::core::pod::{cri_config, resize};
use crate::cri::RuntimeErrorKind;

impl Job {
    pub(super) async fn resize(&self, names: &[String]) -> Result<Outcome> {
        if let Err(error) = self.resize_containers(names).await {
            self.log().fail(Step::Resize, "", &error, None);
            let described = resize::described(&self.pod, Some(&error));
            let message = format!("Pod resize error: {described}");
            self.say(Kind::Warning, "ResizeError", message);
            return Err(failed(error));
        }
        self.log().close(Step::Resize, "");
        self.inform_sandbox().await?;
        Ok(Outcome::Done)
    }

    async fn resize_containers(&self, names: &[String]) -> std::result::Result<(), String> {
        let (context, pod) = (self.context(), &self.pod);
        let node = self.node().map_err(|_| "the pod is not prepared")?;
        let larger = resize::with_larger(pod, &self.actuated, &resize::desired(pod));
        let widen = context.host.ensure_cgroup(&larger, self.cpu_limit());
        context.metrics.cgroup("update", widen).await?;
        let all = pod::containers(pod);
        let mut wanted: Vec<_> = all
            .iter()
            .filter(|(_, c)| names.contains(&c.name))
            .map(|(_, c)| c)
            .collect();
        wanted.sort_by_key(|c| resize::lowers_memory(c, &self.actuated).is_none());
        for container in wanted {
            let Some(seen) = self.observed.newest(&container.name) else {
                continue;
            };
            if let Some(limit) = resize::lowers_memory(container, &self.actuated) {
                let used = context
                    .runtime
                    .memory_in_use(&seen.id)
                    .await
                    .map_err(|e| e.to_string())?;
                if i128::from(used) > i128::from(limit) {
                    return Err(format!(
                        "container {} uses {used} bytes of memory, more than its new limit of {limit}",
                        container.name
                    ));
                }
            }
            let resources = cri_config::resources(pod, container, &node);
            context
                .runtime
                .update_container(&seen.id, resources)
                .await
                .map_err(|e| format!("container {} cannot be resized: {e}", container.name))?;
        }
        let set = context.host.ensure_cgroup(pod, self.cpu_limit());
        context.metrics.cgroup("update", set).await.map(drop)
    }

    /// The containers have their sizes; this only informs runtimes that size sandboxes by them.
    async fn inform_sandbox(&self) -> Result<()> {
        let Some(sandbox) = self.observed.sandboxes.first() else {
            return Ok(());
        };
        let sizes = cri_config::sandbox_sizes(&self.pod, &self.node()?);
        if let Err(error) = self
            .context()
            .runtime
            .update_sandbox(&sandbox.id, sizes)
            .await
            && error.kind != RuntimeErrorKind::Unimplemented
        {
            tracing::warn!(%error, "the runtime was not told the sandbox's new size");
        }
        Ok(())
    }
}
