//! Expands volumes (KEP-284; `pkg/volume/csi/expander.go`). A new pod gets a volume only after the filesystem has the
//! size of the claim, unless the driver cannot expand it on the node. A pod that already uses the volume continues:
//! failures are reported, and retried with back-off.

use std::sync::{Arc, Mutex};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::events::{Events, Kind};
use crate::metrics::{Metrics, VolumeOperation};
use holdfast_config::Config;
use holdfast_core::lock::lock;
use holdfast_core::volume::expansion::{AttemptOutcome, Expansions, NextAttempt};
use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resize::Resize;
use holdfast_core::volume::resolved::{Problem, ResolvedVolume, Source};
use holdfast_csi::CsiError;
use holdfast_host::{HostError, PodHost};
use holdfast_kubeapi::pods::PodApi;
use holdfast_sys::clock::Clock;

/// Why a volume was not expanded.
pub(super) struct ExpansionFailed {
    why: String,
    /// Whether the outcome is certain: nothing was done, and nothing is in progress.
    is_final: bool,
    /// Whether a retry would fail as well.
    infeasible: bool,
    /// Whether a retry would fail as long as a pod of this node uses the volume.
    in_use: bool,
}

impl ExpansionFailed {
    fn new(why: String, is_final: bool) -> ExpansionFailed {
        ExpansionFailed {
            why,
            is_final,
            infeasible: false,
            in_use: false,
        }
    }

    /// The driver does not support `NodeExpandVolume`.
    pub(super) fn unsupported(driver: &str) -> ExpansionFailed {
        let why = format!("NodeExpand is not supported by the CSI driver {driver}");
        ExpansionFailed::new(why, true)
    }

    /// Marks a repeated failure as infeasible if the claim requests another size by now: the resize controller
    /// continues with that size, and the node must abandon this one.
    pub(super) fn or_superseded(self, grown: &Grown, has_failed: bool) -> ExpansionFailed {
        let is_abandoned = self.is_final && has_failed && grown.is_superseded;
        ExpansionFailed {
            infeasible: self.infeasible || is_abandoned,
            ..self
        }
    }

    fn tried(&self) -> AttemptOutcome {
        match (self.in_use, self.is_final) {
            (true, _) => AttemptOutcome::InUse,
            (false, true) => AttemptOutcome::Failed,
            (false, false) => AttemptOutcome::Unknown,
        }
    }
}

impl From<HostError> for ExpansionFailed {
    fn from(error: HostError) -> ExpansionFailed {
        let is_final = !error.is_under_way();
        ExpansionFailed::new(error.message, is_final)
    }
}

impl From<Problem> for ExpansionFailed {
    fn from(problem: Problem) -> ExpansionFailed {
        ExpansionFailed::new(problem.to_string(), false)
    }
}

impl From<CsiError> for ExpansionFailed {
    fn from(error: CsiError) -> ExpansionFailed {
        ExpansionFailed {
            // The kubelet's message, except for one colon.
            why: format!("Expander.NodeExpand failed to expand the volume : {error}"),
            is_final: error.certain,
            infeasible: error.infeasible,
            in_use: error.unready,
        }
    }
}

/// What expansions of volumes use.
pub(crate) struct Parts {
    pub config: Arc<Config>,
    pub api: Arc<dyn PodApi>,
    pub host: Arc<dyn PodHost>,
    pub clock: Clock,
    pub events: Events,
    pub metrics: Arc<Metrics>,
    /// The expansions that failed or are due later; CSI and local volumes share them.
    pub expansions: Arc<Mutex<Expansions>>,
}

/// A pod's volume that may be larger than its filesystem.
pub(super) struct Expansion<'a> {
    pub parts: &'a Parts,
    pub pod: &'a Pod,
    /// The name of the persistent volume.
    pub volume: &'a str,
    /// The unique name of the volume on the node.
    pub key: String,
    /// The plugin in metrics.
    pub plugin: &'a str,
    pub grown: &'a Grown,
    /// Whether the pod's containers wait for the volume.
    pub waits: bool,
}

impl Expansion<'_> {
    /// Expands the volume if this is due, and reports the result. Returns the time of the next attempt after a failure.
    /// If the pod's containers wait for the volume, a failure is an error instead, and the caller retries.
    ///
    /// # Errors
    ///
    /// If the pod's containers wait for the volume and must not use it yet.
    pub(super) async fn attempt(
        &self,
        grow: impl Future<Output = Result<(), ExpansionFailed>>,
    ) -> Result<Option<Timestamp>, Problem> {
        let (parts, grown) = (self.parts, self.grown);
        let blocks_start = self.waits && !grown.claim_has_size;
        let known = &parts.expansions;
        let (due, has_failed) = {
            let mut known = lock(known);
            let due = known.due(&self.key, grown, parts.clock.now());
            (due, known.has_failed(&self.key))
        };
        match due {
            NextAttempt::Never => return Ok(None),
            NextAttempt::At(at) if !blocks_start => return Ok(Some(at)),
            NextAttempt::Now | NextAttempt::At(_) => {}
        }
        let begun = Instant::now();
        let outcome = grow.await;
        let outcome = outcome.map_err(|failed| failed.or_superseded(grown, has_failed));
        if !self.waits {
            self.count(&outcome, begun);
        }
        let outcome = match outcome {
            Ok(()) => self.emit_success().await,
            Err(failed) => {
                publish_failure(parts, grown, &failed).await;
                Err(failed)
            }
        };
        let tried = outcome
            .as_ref()
            .err()
            .map_or(AttemptOutcome::Done, ExpansionFailed::tried);
        let now = parts.clock.now();
        let again = lock(known).record_attempt(&self.key, grown, tried, now);
        match outcome {
            Err(failed) if !failed.in_use => match blocks_start {
                true => Err(Problem::expansion_failed(failed.why)),
                false => {
                    self.emit_on_pod(&failed.why);
                    Ok(again)
                }
            },
            _ => Ok(again),
        }
    }

    /// Records an expansion of a volume in use. An expansion during the mount is part of that operation.
    fn count(&self, outcome: &Result<(), ExpansionFailed>, begun: Instant) {
        self.parts.metrics.volume(VolumeOperation {
            name: "volume_fs_resize",
            plugin: self.plugin,
            is_migrated: false,
            has_failed: outcome.as_ref().is_err_and(|failed| !failed.in_use),
            took: begun.elapsed(),
        });
    }

    /// Emits events about pod and claim, and publishes the new size in the claim's status.
    async fn emit_success(&self) -> Result<(), ExpansionFailed> {
        let (parts, volume) = (self.parts, self.volume);
        let node = &parts.config.node_name;
        let message =
            format!("MountVolume.NodeExpandVolume succeeded for volume {volume:?} {node}");
        let what = (Kind::Normal, "FileSystemResizeSuccessful");
        emit_on_both(parts, self.pod, self.grown, what, &message);
        publish_size(parts, self.grown).await
    }

    /// Emits an event about the pod that uses the volume; the claim has the failure in its status.
    fn emit_on_pod(&self, why: &str) {
        let volume = self.volume;
        let message =
            format!("NodeExpandVolume.NodeExpandVolume failed for volume {volume:?} : {why}");
        let events = &self.parts.events;
        events.pod(self.pod, None, Kind::Warning, "VolumeResizeFailed", message);
    }
}

/// Expands the filesystem of a local volume to the size of its device, if the claim
/// has a smaller size. See [`Expansion::attempt`].
pub(super) async fn expand_local(
    parts: &Parts,
    pod: &Pod,
    resolved: &ResolvedVolume,
    waits: bool,
) -> Result<Option<Timestamp>, Problem> {
    let Source::Local {
        grown: Some(grown), ..
    } = &resolved.source
    else {
        return Ok(None);
    };
    if resolved.read_only {
        if waits {
            emit_read_only(parts, pod, &resolved.name, grown);
        }
        return Ok(None);
    }
    let expansion = Expansion {
        parts,
        pod,
        volume: &resolved.name,
        key: format!("kubernetes.io/local-volume/{}", resolved.name),
        plugin: &resolved.qualified_plugin(),
        grown,
        waits,
    };
    let grow = async {
        begin(parts, grown).await?;
        let grown = parts.host.grow_volume(pod, resolved).await;
        grown.map_err(ExpansionFailed::from)
    };
    let again = Box::pin(expansion.attempt(grow)).await;
    if let Ok(None) = again {
        lock(&parts.expansions).remove(&expansion.key);
    }
    again
}

/// Publishes in the claim's status that the expansion begins, if the claim tracks the resize.
pub(super) async fn begin(parts: &Parts, grown: &Grown) -> Result<(), ExpansionFailed> {
    if !grown.records_state {
        return Ok(());
    }
    let published = parts.api.publish_resize(grown, Resize::Started);
    published.await.map_err(|e| {
        ExpansionFailed::new(format!("updating the claim's status failed: {e}"), false)
    })
}

/// Publishes a failure in the claim's status, if the claim tracks the resize.
async fn publish_failure(parts: &Parts, grown: &Grown, failed: &ExpansionFailed) {
    if !grown.records_state || !failed.is_final {
        return;
    }
    let (namespace, claim) = (&grown.namespace, &grown.claim);
    let step = Resize::Failed {
        why: &failed.why,
        infeasible: failed.infeasible,
        at: parts.clock.now(),
    };
    if let Err(error) = parts.api.publish_resize(grown, step).await {
        tracing::warn!(%error, namespace, claim, "publishing a failed expansion in the claim's status failed");
    }
}

/// Emits events about pod and claim that a read-only volume is not expanded.
pub(super) fn emit_read_only(parts: &Parts, pod: &Pod, volume: &str, grown: &Grown) {
    let message = format!(
        "MountVolume.NodeExpandVolume failed for volume {volume:?} requested read-only file system"
    );
    let kind = Kind::Warning;
    emit_on_both(
        parts,
        pod,
        grown,
        (kind, "FileSystemResizeFailed"),
        &message,
    );
}

/// Emits the same event about the pod and the claim.
fn emit_on_both(
    parts: &Parts,
    pod: &Pod,
    grown: &Grown,
    (kind, reason): (Kind, &str),
    message: &str,
) {
    parts.events.pod(pod, None, kind, reason, message);
    parts.events.claim(grown, kind, reason, message);
}

/// Publishes the volume's size in the claim's status, unless it is there already.
async fn publish_size(parts: &Parts, grown: &Grown) -> Result<(), ExpansionFailed> {
    if grown.claim_has_size {
        return Ok(());
    }
    let published = parts
        .api
        .publish_resize(grown, Resize::Completed(&grown.text));
    published.await.map_err(|e| {
        let why = format!("mountVolume.NodeExpandVolume update pvc status failed: {e}");
        ExpansionFailed::new(why, false)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(certain: bool, infeasible: bool, unready: bool) -> CsiError {
        CsiError {
            text: "rpc error: code = Internal desc = no".into(),
            certain,
            infeasible,
            unready,
        }
    }

    #[test]
    fn a_second_failure_abandons_a_superseded_size() {
        let grown = |is_superseded: bool| Grown {
            namespace: "n".into(),
            claim: "c".into(),
            uid: None,
            claim_bytes: 1,
            bytes: 2,
            text: "2".into(),
            records_state: true,
            claim_has_size: false,
            is_superseded,
        };
        for (certain, has_failed, is_superseded, expected) in [
            (true, true, true, true),
            (true, true, false, false),
            (true, false, true, false),
            // The operation may still be in progress, so its outcome is unknown.
            (false, true, true, false),
        ] {
            let failed = ExpansionFailed::from(error(certain, false, false));
            let failed = failed.or_superseded(&grown(is_superseded), has_failed);
            assert_eq!(failed.infeasible, expected);
        }
        let infeasible = ExpansionFailed::from(error(true, true, false));
        assert!(infeasible.or_superseded(&grown(false), false).infeasible);
    }

    #[test]
    fn the_drivers_error_decides_about_the_next_attempt() {
        for (certain, unready, expected) in [
            (false, false, AttemptOutcome::Unknown),
            (true, false, AttemptOutcome::Failed),
            (true, true, AttemptOutcome::InUse),
        ] {
            let failed = ExpansionFailed::from(error(certain, false, unready));
            assert_eq!(failed.tried(), expected);
            assert_eq!(
                failed.why,
                "Expander.NodeExpand failed to expand the volume : rpc error: code = Internal desc = no"
            );
        }
        for (error, expected) in [
            (
                HostError::under_way("resize2fs has been running"),
                AttemptOutcome::Unknown,
            ),
            (
                HostError::failed("resize2fs failed with 1"),
                AttemptOutcome::Failed,
            ),
        ] {
            assert_eq!(ExpansionFailed::from(error).tried(), expected);
        }
        let failed = ExpansionFailed::unsupported("d");
        assert_eq!(
            failed.why,
            "NodeExpand is not supported by the CSI driver d"
        );
        assert_eq!(failed.tried(), AttemptOutcome::Failed);
    }
}
