//! The usage of published CSI volumes (`NodeGetVolumeStats`).

use std::time::Duration;

use holdfast_proto::csi as pb;

use super::{Csi, VolumeError, failed, lock, staged};
use crate::volume::figures::VolumeFigures;
use holdfast_host::HostError;
use holdfast_host::volume::csi::Published;
use holdfast_sys::machine::Room;

/// Timeout for reading a filesystem's usage.
const USAGE_TIMEOUT: Duration = Duration::from_secs(10);

/// The usage of a pod's published volumes, from the driver or else from the filesystem.
pub(crate) async fn figures(csi: &Csi, uid: &str) -> Vec<VolumeFigures> {
    let of_pod = |place: &&Published| place.uid == uid && !place.block;
    let all: Vec<Published> = lock(&csi.published)
        .values()
        .filter(of_pod)
        .cloned()
        .collect();
    let mut found = vec![];
    for place in all {
        match read_volume_usage(csi, &place).await {
            Ok(figures) => found.push(figures),
            Err(error) => tracing::debug!(
                %error,
                volume = place.name,
                "cannot read the usage of a volume"
            ),
        }
    }
    found
}

async fn read_volume_usage(csi: &Csi, place: &Published) -> Result<VolumeFigures, VolumeError> {
    let (namespace, claim) = place.claim.clone().unzip();
    let mut figures = VolumeFigures {
        name: place.name.clone(),
        namespace: namespace.unwrap_or_default(),
        claim,
        ..VolumeFigures::default()
    };
    let registered = csi.driver(&place.data.driver_name)?;
    if registered.capabilities.stats {
        let staging = staged(csi, place)
            .await?
            .map(|dir| dir.display().to_string())
            .unwrap_or_default();
        let target = place.target.display().to_string();
        let answer = registered
            .driver
            .stats(&place.data.volume_handle, &target, &staging)
            .await
            .map_err(failed("NodeGetVolumeStats"))?;
        let number = |n: i64| u64::try_from(n).unwrap_or(0);
        for usage in &answer.usage {
            let of = (
                number(usage.used),
                number(usage.total),
                number(usage.available),
            );
            match usage.unit() {
                pb::volume_usage::Unit::Bytes => figures.bytes = of,
                pb::volume_usage::Unit::Inodes => figures.inodes = of,
                pb::volume_usage::Unit::Unknown => {}
            }
        }
        figures.abnormal = answer.volume_condition.map(|c| c.abnormal);
        return Ok(figures);
    }
    // A network filesystem that hangs blocks one thread per volume; others do not use this thread.
    let (key, target) = (place.target.display().to_string(), place.target.clone());
    let ask = move || Room::of(&target).map_err(HostError::from);
    let room = csi.rooms.call(&key, USAGE_TIMEOUT, ask).await?;
    figures.bytes = (
        room.capacity.saturating_sub(room.free),
        room.capacity,
        room.available,
    );
    figures.inodes = (
        room.inodes.saturating_sub(room.inodes_free),
        room.inodes,
        room.inodes_free,
    );
    Ok(figures)
}
