//! Resizes running containers to their granted resources. The pod's cgroup grows first, then shrinking containers are
//! resized, then growing ones, and finally the pod's cgroup shrinks (KEP-1287).

use super::{Job, Result};
use crate::Kind;
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::resize::{Lowered, Sizes};
use holdfast_core::pod::worker::Outcome;
use holdfast_core::pod::{cri_config, resize};
use holdfast_cri::RuntimeErrorKind;

impl Job {
    pub(super) async fn resize(&self, names: &[String], to: &Sizes) -> Result<Outcome> {
        if let Err(error) = self.resize_containers(names, to).await {
            self.log().fail(Step::Resize, "", &error, None);
            let described = resize::described(&self.pod, Some(&error));
            let message = format!("Pod resize error: {described}");
            self.emit_event(Kind::Warning, "ResizeError", message);
            return Err(Fault::later(error).into());
        }
        self.log().close(Step::Resize, "");
        self.inform_sandbox().await?;
        Ok(Outcome::Done)
    }

    async fn resize_containers(
        &self,
        names: &[String],
        to: &Sizes,
    ) -> std::result::Result<(), String> {
        let (parts, pod) = (self.parts(), &self.pod);
        let node = self.node().await.map_err(|fault| fault.message)?;
        let at_most = self.resizing.at_most();
        let lowered = |name: &str| resize::lowered_memory_limit(name, to, &at_most);
        let all = pod::containers(pod);
        let mut wanted: Vec<_> = all
            .iter()
            .filter(|(_, c)| names.contains(&c.name))
            .filter_map(|(_, c)| Some((c, self.observed.newest(&c.name)?)))
            .collect();
        wanted.sort_by_key(|(c, _)| lowered(&c.name).is_none());
        // No resize is started if a new memory limit is below the usage.
        let mut checked: Vec<Lowered> = self.lowered_of_pod().into_iter().collect();
        for (container, seen) in &wanted {
            let name = &container.name;
            if let Some(limit) = lowered(name) {
                let unread = |e| format!("unable to read memory usage for container {name:?}: {e}");
                let used = parts.runtime.memory_in_use(&seen.id).await;
                checked.push(Lowered {
                    of: format!("container {name:?}"),
                    limit,
                    used: Some(used.map_err(unread)?),
                });
            }
        }
        resize::check_lowered(&checked)?;
        let larger = resize::with_larger(pod, &at_most, &resize::desired(pod));
        let widen = parts.host.ensure_cgroup(&larger, self.has_cpu_limit());
        let widened = self.count_cgroup("update", widen).await;
        widened.map_err(|e| e.message)?;
        for (container, seen) in wanted {
            let resources = cri_config::resources(pod, container, &node);
            parts
                .runtime
                .update_container(&seen.id, resources)
                .await
                .map_err(|e| format!("container {} cannot be resized: {e}", container.name))?;
        }
        let set = parts.host.ensure_cgroup(pod, self.has_cpu_limit());
        let set = self.count_cgroup("update", set).await;
        set.map(drop).map_err(|e| e.message)
    }

    fn lowered_of_pod(&self) -> Option<Lowered> {
        let limit = resize::lowered_pod_memory_limit(&self.pod, &self.resizing.at_most())?;
        Some(Lowered {
            of: "pod".to_owned(),
            limit,
            used: self.parts().host.memory_of_pod(&self.pod),
        })
    }

    /// Reports the new sizes to the runtime, for runtimes that size their
    /// sandboxes. Not required for the resize itself.
    async fn inform_sandbox(&self) -> Result<()> {
        let Some(sandbox) = self.observed.sandboxes.first() else {
            return Ok(());
        };
        let sizes = cri_config::sandbox_sizes(&self.pod, &self.node().await?);
        if let Err(error) = self
            .parts()
            .runtime
            .update_sandbox(&sandbox.id, sizes)
            .await
            && error.kind != RuntimeErrorKind::Unimplemented
        {
            tracing::warn!(%error, "updating the sandbox's size in the runtime failed");
        }
        Ok(())
    }
}
