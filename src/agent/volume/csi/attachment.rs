//! Waits until a CSI volume is attached to this node (`pkg/volume/csi/csi_attacher.go`).

use std::collections::HashMap;

use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::time::Instant;

use super::Parts;
use crate::metrics::VolumeOperation;
use crate::volume::attached;
use holdfast_core::volume::csi::{self, VolumeData};
use holdfast_kubeapi::pods::Attachment;

/// Why a volume is not attached yet.
pub(super) struct NotAttached {
    pub(super) why: String,
    /// Whether the driver has reached its limit of volumes on this node.
    pub(super) is_full: bool,
}

impl NotAttached {
    fn new(why: String) -> NotAttached {
        NotAttached {
            why,
            is_full: false,
        }
    }
}

/// Waits until a volume is attached, and records this as an operation. Returns the attachment's metadata for the node.
/// `described` is the driver's CSIDriver object.
pub(super) async fn wait(
    parts: &Parts,
    data: &VolumeData,
    described: Option<&CSIDriver>,
    is_migrated: bool,
) -> Result<HashMap<String, String>, NotAttached> {
    let begun = Instant::now();
    let outcome = attached_by_controller(parts, data, described).await;
    parts.metrics.volume(VolumeOperation {
        name: "verify_controller_attached_volume",
        plugin: &format!("kubernetes.io/csi:{}", data.driver_name),
        is_migrated,
        has_failed: outcome.is_err(),
        took: begun.elapsed(),
    });
    outcome
}

async fn attached_by_controller(
    parts: &Parts,
    data: &VolumeData,
    described: Option<&CSIDriver>,
) -> Result<HashMap<String, String>, NotAttached> {
    let volume = csi::unique_name(&data.driver_name, &data.volume_handle);
    let reported = parts.csi.reported.wait_until_reported(&volume);
    reported.await.map_err(NotAttached::new)?;
    let node = &parts.config.node_name;
    // The cached Node may be older than the report.
    if !parts.node.refresh().await {
        let why = attached::no_answer_error(&parts.config, &volume);
        return Err(NotAttached::new(format!(
            "volume is not attached yet: {why}"
        )));
    }
    // Proceed only when the volume is listed. Before, its VolumeAttachment may not
    // exist, and the node may not be allowed to read it.
    let is_listed = attached::wait_until_listed(&parts.node, &volume).await;
    let (name, driver) = (&data.attachment_id, &data.driver_name);
    let mut has_no_room = false;
    let why = match parts
        .api
        .attachment(name)
        .await
        .map_err(|e| NotAttached::new(e.to_string()))?
    {
        Attachment::Done(metadata) if is_listed => return Ok(metadata),
        Attachment::Done(_) => format!(
            "volumesAttached of node {node} does not list {volume}, although VolumeAttachment {name} reports it as attached; waiting for the attach-detach controller"
        ),
        Attachment::Awaited => format!(
            "VolumeAttachment {name} of driver {driver} is not attached yet; waiting for its attacher"
        ),
        Attachment::Detaching => format!(
            "VolumeAttachment {name} of driver {driver} is being deleted; the volume is attached again after its attacher has detached it"
        ),
        Attachment::Failed { message, is_full } => {
            // The scheduler used an outdated limit (KEP-4876). Only drivers
            // with a refresh period can change their limit.
            has_no_room = is_full && csi::refresh_period(described).is_some();
            if has_no_room {
                parts.csi.request_limit_query(driver);
            }
            format!("VolumeAttachment {name} of driver {driver}: {message}")
        }
    };
    Err(NotAttached {
        why: format!("volume is not attached yet: {why}"),
        is_full: has_no_room,
    })
}
