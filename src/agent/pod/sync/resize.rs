//! Bringing running containers to the sizes that were granted: the pod's cgroup grows first, then those
//! that shrink, then those that grow, and at last the pod's cgroup shrinks (KEP-1287).

use super::{Job, Result, failed};
use crate::agent::Kind;
use crate::core::pod;
use crate::core::pod::journal::Step;
use crate::core::pod::resize::Sizes;
use crate::core::pod::worker::Outcome;
use crate::core::pod::{cgroup, cri_config, resize};
use crate::cri::RuntimeErrorKind;

impl Job {
    pub(super) async fn resize(&self, names: &[String], to: &Sizes) -> Result<Outcome> {
        if let Err(error) = self.resize_containers(names, to).await {
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

    async fn resize_containers(
        &self,
        names: &[String],
        to: &Sizes,
    ) -> std::result::Result<(), String> {
        let (context, pod) = (self.context(), &self.pod);
        let node = self.node().map_err(|_| "the pod is not prepared")?;
        let lowered = |name: &str| resize::lowers_memory(name, to, &self.resizing.actuated);
        let all = pod::containers(pod);
        let mut wanted: Vec<_> = all
            .iter()
            .filter(|(_, c)| names.contains(&c.name))
            .filter_map(|(_, c)| Some((c, self.observed.newest(&c.name)?)))
            .collect();
        wanted.sort_by_key(|(c, _)| lowered(&c.name).is_none());
        // Nothing is changed where one of the limits is below what is used: the kernel would kill for it.
        self.fits_pod()?;
        for (container, seen) in &wanted {
            if let Some(limit) = lowered(&container.name) {
                let used = context.runtime.memory_in_use(&seen.id).await;
                let used = used.map_err(|e| e.to_string())?;
                fits(&format!("container \"{}\"", container.name), limit, used)?;
            }
        }
        let larger = resize::with_larger(pod, &self.resizing.actuated, &resize::desired(pod));
        let widen = context.host.ensure_cgroup(&larger, self.cpu_limit());
        self.count_cgroup("update", widen).await?;
        for (container, seen) in wanted {
            let resources = cri_config::resources(pod, container, &node);
            context
                .runtime
                .update_container(&seen.id, resources)
                .await
                .map_err(|e| format!("container {} cannot be resized: {e}", container.name))?;
        }
        let set = context.host.ensure_cgroup(pod, self.cpu_limit());
        self.count_cgroup("update", set).await.map(drop)
    }

    fn fits_pod(&self) -> std::result::Result<(), String> {
        let bounds = cgroup::pod_bounds(&self.pod);
        let limit = bounds.get("memory").map(|q| q.units());
        let used = limit.and(self.context().host.memory_of_pod(&self.pod));
        limit
            .zip(used)
            .map_or(Ok(()), |(limit, used)| fits("pod", limit, used))
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

/// Both in bytes.
fn fits(what: &str, limit: i64, used: u64) -> std::result::Result<(), String> {
    if i128::from(used) <= i128::from(limit) {
        return Ok(());
    }
    let below =
        format!("attempting to set {what} memory limit ({limit}) below current usage ({used})");
    Err(format!("cannot decrease memory limits: {below}"))
}
