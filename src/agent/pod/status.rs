//! Publishes the status of one pod: writes the latest status, skips intermediate ones, and retries failures.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::Metrics;
use holdfast_core::backoff::Doubling;
use holdfast_core::pod::{self, status};
use holdfast_core::repeated::RepeatedFailures;
use holdfast_kubeapi::cache::revision;
use holdfast_kubeapi::pods::{ApiFailure, PodApi};
use holdfast_sys::clock::Clock;

const RETRY: Doubling = Doubling::new(Duration::from_millis(200), Duration::from_secs(10));
/// Limit for immediate retries after conflicts, each with the latest
/// object; the next retry waits for the first back-off.
const MAX_CONFLICTS: u32 = 5;

#[derive(Default, Clone)]
struct Wanted {
    version: u64,
    status: Arc<PodStatus>,
    /// The object to write to; `None` for a static pod without a mirror.
    object: Option<Arc<Pod>>,
}

/// Writes one pod's status. Dropping it stops the writer.
pub(crate) struct StatusWriter {
    wanted: watch::Sender<Wanted>,
    written: watch::Receiver<u64>,
    metrics: Arc<Metrics>,
    _task: AbortOnDropHandle<()>,
}

impl StatusWriter {
    /// Starts a writer without a status.
    #[must_use]
    pub fn start(api: Arc<dyn PodApi>, metrics: Arc<Metrics>, clock: Clock) -> StatusWriter {
        let (wanted, changes) = watch::channel(Wanted::default());
        let (done, written) = watch::channel(0);
        let task = tokio::spawn(write(api, changes, done, Arc::clone(&metrics), clock));
        StatusWriter {
            metrics,
            wanted,
            written,
            _task: AbortOnDropHandle::new(task),
        }
    }

    /// Requests that `status` be written to `object`.
    pub fn publish(&self, object: Option<Arc<Pod>>, status: &Arc<PodStatus>) {
        self.wanted.send_if_modified(|wanted| {
            let same = wanted.status == *status
                && wanted
                    .object
                    .as_ref()
                    .map(|o| (o.uid(), o.resource_version()))
                    == object.as_ref().map(|o| (o.uid(), o.resource_version()));
            if !same {
                // After a restart of the agent, containers count as terminated relative to the API's status.
                let before = match wanted.version {
                    0 => object.as_ref().and_then(|o| o.status.as_ref()),
                    _ => Some(&*wanted.status),
                };
                self.metrics.containers_terminated(before, status);
                *wanted = Wanted {
                    version: wanted.version + 1,
                    status: Arc::clone(status),
                    object,
                };
            }
            !same
        });
    }

    /// Waits until the latest status has been written, or its object was deleted.
    pub async fn flush(&self) {
        let version = self.wanted.borrow().version;
        let mut written = self.written.clone();
        // The task ends only when the writer is dropped, and the writer is borrowed here.
        let _ = written.wait_for(|w| *w >= version).await;
    }
}

/// The parts of an API answer that the writer needs.
struct LastAnswer {
    uid: Option<String>,
    version: Option<String>,
    revision: u64,
    status: Option<PodStatus>,
}

impl LastAnswer {
    /// Whether this is newer than `object`, which the watch delivered.
    fn is_newer(&self, object: &Pod) -> bool {
        self.uid == object.uid() && self.revision > revision(object)
    }
}

impl From<Pod> for LastAnswer {
    fn from(pod: Pod) -> LastAnswer {
        LastAnswer {
            uid: pod.uid(),
            version: pod.resource_version(),
            revision: revision(&pod),
            status: pod.status,
        }
    }
}

/// Builds the patch for an object, based on `newer`, the API's last answer, or else on the object from the watch. A
/// published terminal status stays, except on mirrors of static pods. `None` if there is nothing to write.
fn build_patch(object: &Pod, newer: Option<&LastAnswer>, wanted: &PodStatus) -> Option<Value> {
    let (base, version) = match newer {
        Some(newer) => (&newer.status, &newer.version),
        None => (&object.status, &object.metadata.resource_version),
    };
    let none = PodStatus::default();
    let base = base.as_ref().unwrap_or(&none);
    let wanted = match pod::is_mirror(object) {
        true => Cow::Borrowed(wanted),
        false => status::allowed(object, base, wanted)?,
    };
    let target = status::Target {
        uid: pod::uid(object),
        version: version.as_deref(),
    };
    status::patch(target, base, &wanted)
}

/// Reads the object again after another client has written to it.
async fn read_again(api: &dyn PodApi, object: &Pod) -> Result<LastAnswer, ApiFailure> {
    let namespace = object.namespace().unwrap_or_default();
    let pod = api.pod(&namespace, &object.name_any()).await?;
    match pod.uid() == object.uid() {
        true => Ok(pod.into()),
        false => Err(ApiFailure::Replaced("another pod has its name".into())),
    }
}

/// Whether a failure may mean that the pod was deleted. The apiserver's node authorizer then rejects requests ("no
/// relationship found between node and this object"), and the watch reports the deletion soon.
fn may_be_deleted(error: &ApiFailure, pauses: &Doubling) -> bool {
    matches!(error, ApiFailure::Forbidden(_)) && !pauses.is_at_maximum()
}

async fn write(
    api: Arc<dyn PodApi>,
    mut changes: watch::Receiver<Wanted>,
    done: watch::Sender<u64>,
    metrics: Arc<Metrics>,
    clock: Clock,
) {
    // The API's last answer, if newer than the object from the watch.
    let mut last: Option<LastAnswer> = None;
    let mut pauses = RETRY;
    let mut failures = RepeatedFailures::default();
    while changes.changed().await.is_ok() {
        let begun = Instant::now();
        let mut conflicts = 0;
        loop {
            let wanted = changes.borrow_and_update().clone();
            let object = wanted.object.as_deref();
            // The watch has caught up: drop this copy of the status.
            last = last.filter(|last| object.is_none_or(|object| last.is_newer(object)));
            let patch =
                object.and_then(|object| build_patch(object, last.as_ref(), &wanted.status));
            let (Some(object), Some(patch)) = (object, patch) else {
                done.send_replace(wanted.version);
                break;
            };
            let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
            let mut answer = api.patch_status(&namespace, &name, &patch).await;
            if let Err(ApiFailure::Conflict(_)) = answer {
                match read_again(&*api, object).await {
                    Ok(read) => {
                        last = Some(read);
                        conflicts += 1;
                        if conflicts < MAX_CONFLICTS {
                            continue;
                        }
                        // A client that writes constantly must not delay the status by growing back-off.
                        (conflicts, pauses) = (0, RETRY);
                    }
                    Err(error) => answer = Err(error),
                }
            }
            match answer {
                Ok(pod) => {
                    last = Some(pod.into());
                    metrics.status_written(begun.elapsed());
                    pauses.reset();
                    done.send_replace(wanted.version);
                    break;
                }
                Err(error) if error.is_gone() => {
                    // The object was deleted or replaced: there is nothing to write to.
                    done.send_replace(wanted.version);
                    break;
                }
                Err(error) => {
                    let may_be_deleted = may_be_deleted(&error, &pauses);
                    let pause = pauses.pause();
                    let pod = pod::full_name(object);
                    if may_be_deleted {
                        tracing::debug!(%error, pod, retry_in = ?pause, "the apiserver rejected the pod's status; the pod may have been deleted");
                    } else if let Some(repetitions) =
                        failures.record((), &error.to_string(), clock.now())
                    {
                        tracing::warn!(%error, pod, retry_in = ?pause, repetitions, "publishing the pod's status failed");
                    }
                    tokio::select! {
                        // The order is fixed, so that a simulated run replays exactly.
                        biased;
                        // Cancel-safe: the loop reads the latest value at its top in any case.
                        () = tokio::time::sleep(pause) => {}
                        changed = changes.changed() => if changed.is_err() { return },
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_rejection_does_not_mean_a_deleted_pod() {
        let mut pauses = RETRY;
        let forbidden = ApiFailure::Forbidden("no relationship found".into());
        let mut quiet = Duration::ZERO;
        while may_be_deleted(&forbidden, &pauses) {
            quiet += pauses.pause();
        }
        assert!(quiet > Duration::from_secs(5) && quiet < Duration::from_secs(30));
        let timeout = ApiFailure::Timeout(String::new());
        assert!(
            !may_be_deleted(&timeout, &RETRY),
            "a timeout does not mean that the pod was deleted"
        );
    }
}
