//! Releases the pod's resources, and removes exited containers and old sandboxes.

use std::fmt::Display;

use kube::ResourceExt as _;

use super::{Job, Result};
use holdfast_core::fault::Fault;
use holdfast_core::pod;
use holdfast_core::pod::journal::Step;
use holdfast_core::pod::worker::Outcome;
use holdfast_cri::RuntimeError;

impl Job {
    /// Releases volumes and cgroup. With `content`, for a pod that leaves the node, also
    /// removes sandboxes, containers and directories.
    pub(super) async fn release(&self, content: bool) -> Result<Outcome> {
        let (parts, pod) = (self.parts(), &self.pod);
        let work = async {
            if content {
                // Calls of cancelled starts may still be running; each has a deadline.
                self.tools.starts.wait().await;
                self.remove_from_runtime().await?;
            }
            let torn_down = crate::volume::tear_down(&parts.volumes, pod::uid(pod));
            torn_down.await.map_err(|e| Fault::later(e.to_string()))?;
            let remove = parts.host.remove_cgroup(pod);
            let removed = self.count_cgroup("destroy", remove).await;
            removed?;
            if content {
                let keeps_logs = self.update.starts_again;
                let removed = parts.host.remove_directories(pod, keeps_logs).await;
                removed?;
            }
            Ok::<_, Fault>(())
        };
        self.log().step(Step::Release, "", work).await?;
        parts.ledger.release(pod::uid(pod));
        Ok(Outcome::Done)
    }

    /// Unprepares the pod's resource claims with their drivers.
    pub(super) async fn release_claims(&self) -> Result<Outcome> {
        let parts = self.parts();
        let work = async {
            let released = parts.claims.release(&parts.metrics, pod::uid(&self.pod));
            let fault = |why| Fault::later(format!("unprepare dynamic resources: {why}"));
            released.await.map_err(fault)
        };
        let step = self.log().step(Step::UnprepareClaims, "", work);
        step.await?;
        Ok(Outcome::Done)
    }

    async fn remove_from_runtime(&self) -> std::result::Result<(), Fault> {
        let runtime = &self.parts().runtime;
        let observed = runtime
            .observe(pod::uid(&self.pod))
            .await
            .map_err(|e| Fault::from(e).context("cannot read the pod's state from the runtime"))?;
        let fault = |e: RuntimeError| Fault::from(e).context("the sandbox cannot be removed");
        let newest = observed.sandboxes.iter().max_by_key(|s| s.attempt);
        let older = observed
            .sandboxes
            .iter()
            .filter(|s| newest.is_some_and(|newest| newest.id != s.id));
        let removals = older.map(|s| runtime.remove_sandbox(&s.id));
        for removed in futures::future::join_all(removals).await {
            removed.map_err(fault)?;
        }
        let orphans = observed
            .containers
            .iter()
            .filter(|c| !observed.sandboxes.iter().any(|s| s.id == c.sandbox));
        for container in orphans {
            let removed = runtime.remove_container(&container.id).await;
            removed.map_err(|e| {
                Fault::from(e).context(&format!("container {} cannot be removed", container.name))
            })?;
        }
        // The newest sandbox goes last. If older ones remained without it, the status of a static pod that starts again
        // would show their containers, and its restart counts would decrease.
        if let Some(newest) = newest {
            runtime.remove_sandbox(&newest.id).await.map_err(fault)?;
        }
        Ok(())
    }

    /// Deletes the pod's object in the API after all resources are released and the last
    /// status is written (upstream's `canBeDeleted`).
    pub(super) async fn delete_object(&self) -> Result<Outcome> {
        let Some(object) = &self.update.object else {
            return Ok(Outcome::Done);
        };
        let delete = async {
            self.tools.writer.flush().await;
            let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
            let deleted = self
                .parts()
                .api
                .delete(&namespace, &name, pod::uid(object))
                .await;
            match deleted {
                // Another object of the same name must not be deleted.
                Ok(()) => Ok(()),
                Err(error) if error.is_gone() => Ok(()),
                Err(error) => Err(Fault::later(format!(
                    "the pod cannot be deleted from the API: {error}"
                ))),
            }
        };
        self.log().step(Step::Finalise, "", delete).await?;
        Ok(Outcome::Done)
    }

    /// Removes exited containers with their logs, and sandboxes. The worker plans failed removals again.
    pub(super) async fn remove_exited(
        &self,
        containers: &[(String, String, u32)],
        sandboxes: &[String],
    ) -> Outcome {
        let parts = self.parts();
        let later = |id: &str, error: &dyn Display| {
            let why = format!("terminated container or sandbox not removed yet: {error}");
            self.log().log_failure(Step::Release, id, &why);
        };
        for (id, name, attempt) in containers {
            match parts.runtime.remove_container(id).await {
                Ok(()) => {
                    let removed = parts.host.remove_instance(&self.pod, name, *attempt, id);
                    removed.await.unwrap_or_else(|e| later(id, &e));
                }
                Err(error) => later(id, &error),
            }
        }
        for sandbox in sandboxes {
            let removed = parts.runtime.remove_sandbox(sandbox).await;
            removed.unwrap_or_else(|e| later(sandbox, &e));
        }
        Outcome::Done
    }
}
