//! Expands CSI volumes while pods use them: the driver resizes the filesystem (`NodeExpandVolume`).

use holdfast_proto::csi as pb;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::{Parts, Wanted, run_uncancelled, secret};
use crate::volume::growth::{self, Expansion, ExpansionFailed};
use holdfast_core::volume::csi;
use holdfast_core::volume::resize::Grown;
use holdfast_core::volume::resolved::Problem;

/// Expands the filesystem if its volume was expanded, and reports the result. `waits` is whether the pod's containers
/// wait for the volume. See [`Expansion::attempt`].
pub(super) async fn grow(
    parts: &Parts,
    pod: &Pod,
    wanted: &Wanted<'_>,
    staging: String,
    waits: bool,
) -> Result<Option<Timestamp>, Problem> {
    let volume = wanted.volume;
    let Some(grown) = &volume.grown else {
        return Ok(None);
    };
    if volume.read_only {
        if waits && !grown.claim_has_size {
            growth::emit_read_only(&parts.expansion, pod, &volume.name, grown);
        }
        return Ok(None);
    }
    let can = wanted.registered.capabilities.expand;
    if !can && (!grown.records_state || grown.claim_has_size) {
        // No action is expected from this node.
        return Ok(None);
    }
    let data = &wanted.place.data;
    let expansion = Expansion {
        parts: &parts.expansion,
        pod,
        volume: &volume.name,
        key: csi::unique_name(&data.driver_name, &data.volume_handle),
        plugin: &format!("kubernetes.io/csi:{}", data.driver_name),
        grown,
        waits,
    };
    let grow = async {
        match can {
            true => expand(parts, wanted, grown, staging).await,
            false => Err(ExpansionFailed::unsupported(&data.driver_name)),
        }
    };
    Box::pin(expansion.attempt(grow)).await
}

async fn expand(
    parts: &Parts,
    wanted: &Wanted<'_>,
    grown: &Grown,
    staging: String,
) -> Result<(), ExpansionFailed> {
    let Wanted {
        volume,
        registered,
        place,
        volume_lock,
        ..
    } = wanted;
    growth::begin(&parts.expansion, grown).await?;
    let request = pb::NodeExpandVolumeRequest {
        volume_id: place.data.volume_handle.clone(),
        volume_path: place.target.display().to_string(),
        capacity_range: Some(pb::CapacityRange {
            required_bytes: grown.bytes,
            limit_bytes: 0,
        }),
        staging_target_path: staging,
        volume_capability: Some(csi::expansion_capability(volume, registered.capabilities)),
        secrets: secret(parts, "NodeExpandSecretRef", volume.expand_secret.as_ref()).await?,
    };
    let driver = registered.driver.clone();
    let expanded = run_uncancelled(volume_lock, async move { driver.expand(request).await }).await;
    expanded.map_err(ExpansionFailed::from)
}
