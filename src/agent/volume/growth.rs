//! Volumes that become larger while pods have them (kubelet spec, 9.5). A volume that stays as small as it was can be used all
//! the same, so a failure is told and holds nothing up; the next refresh tries again.

use k8s_openapi::api::core::v1::Pod;

use crate::agent::{Context, Kind};
use crate::core::volume::claims::Grown;
use crate::core::volume::resolved::{ResolvedVolume, Source};

/// Makes the filesystem of a local volume as large as its device has become, where the claim does not know of it.
pub(super) async fn of_local(context: &Context, pod: &Pod, resolved: &ResolvedVolume) {
    let Source::Local {
        grown: Some(grown), ..
    } = &resolved.source
    else {
        return;
    };
    let outcome = context.host.grow_volume(pod, resolved).await;
    tell(context, pod, &resolved.name, grown, outcome).await;
}

/// Tells the claim what its volume has now, and pod and claim how it went.
pub(super) async fn tell(
    context: &Context,
    pod: &Pod,
    volume: &str,
    grown: &Grown,
    outcome: Result<(), String>,
) {
    let (namespace, claim) = (&grown.namespace, &grown.claim);
    let told = async {
        outcome?;
        let told = context.api.claim_has(namespace, claim, &grown.text).await;
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
