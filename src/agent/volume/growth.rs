//! Volumes that become larger while pods have them (kubelet spec, 9.5). A volume that stays as small as it was can be used all
//! the same, so a failure is told and holds nothing up; the next refresh tries again, unless the driver has said that it would
//! fail again and whoever resizes the volume knows.

use k8s_openapi::api::core::v1::Pod;

use crate::agent::{Context, Kind};
use crate::core::volume::claims::Grown;
use crate::core::volume::resize::Resize;
use crate::core::volume::resolved::{ResolvedVolume, Source};
use crate::csi::CsiError;

/// Why a volume was not grown.
pub(super) struct NotGrown {
    why: String,
    /// Nothing was done, and nothing is under way.
    is_final: bool,
    /// It would fail again.
    infeasible: bool,
}

impl From<String> for NotGrown {
    fn from(why: String) -> NotGrown {
        NotGrown {
            why,
            is_final: false,
            infeasible: false,
        }
    }
}

impl From<CsiError> for NotGrown {
    fn from(error: CsiError) -> NotGrown {
        NotGrown {
            why: format!("NodeExpandVolume: {error}"),
            is_final: error.certain,
            infeasible: error.infeasible,
        }
    }
}

/// Makes the filesystem of a local volume as large as its device has become, where the claim does not know of it.
pub(super) async fn of_local(context: &Context, pod: &Pod, resolved: &ResolvedVolume) {
    let Source::Local {
        grown: Some(grown), ..
    } = &resolved.source
    else {
        return;
    };
    let outcome = context.host.grow_volume(pod, resolved).await;
    let outcome = outcome.map_err(NotGrown::from);
    tell(context, pod, &resolved.name, grown, outcome).await;
}

/// Tells the claim that its volume is about to be grown here, if anybody wants to know.
pub(super) async fn begin(context: &Context, grown: &Grown) -> Result<(), String> {
    if !grown.is_followed {
        return Ok(());
    }
    let (namespace, claim) = (&grown.namespace, &grown.claim);
    let told = context.api.claim_resize(namespace, claim, Resize::Begun);
    told.await
        .map_err(|e| format!("the claim could not be told: {e}"))
}

/// Tells the claim of a failure, if anybody wants to know.
async fn tell_failure(context: &Context, grown: &Grown, failed: &NotGrown) {
    if !grown.is_followed || !failed.is_final {
        return;
    }
    let (namespace, claim) = (&grown.namespace, &grown.claim);
    let step = Resize::Failed {
        why: &failed.why,
        infeasible: failed.infeasible,
        at: context.clock.now(),
    };
    if let Err(error) = context.api.claim_resize(namespace, claim, step).await {
        tracing::warn!(%error, namespace, claim, "a claim was not told that its volume cannot be grown");
    }
}

/// Tells the claim what its volume has now, and pod and claim how it went.
pub(super) async fn tell(
    context: &Context,
    pod: &Pod,
    volume: &str,
    grown: &Grown,
    outcome: Result<(), NotGrown>,
) {
    let (namespace, claim) = (&grown.namespace, &grown.claim);
    let told = async {
        if let Err(failed) = outcome {
            tell_failure(context, grown, &failed).await;
            return Err(failed.why);
        }
        let has = Resize::Has(&grown.text);
        let told = context.api.claim_resize(namespace, claim, has).await;
        told.map_err(|e| format!("the claim could not be told: {e}"))
    };
    let (kind, reason, message) = match told.await {
        Ok(()) => (
            Kind::Normal,
            "FileSystemResizeSuccessful",
            format!(
                "MountVolume.NodeExpandVolume succeeded for volume {volume:?}: it has {} now",
                grown.text
            ),
        ),
        Err(error) => (
            Kind::Warning,
            "VolumeResizeFailed",
            format!("NodeExpandVolume.NodeExpandVolume failed for volume {volume:?} : {error}"),
        ),
    };
    let events = &context.events;
    events.pod(pod, None, kind, reason, message.clone());
    events.claim(namespace, claim, kind, reason, message);
}
