//! Waiting until a volume is attached to this node, so that nobody detaches it while it is mounted (kubelet spec, 9.2).
//!
//! The order matters. The node reports that the volume is in use; then it reads whether the controller lists it as
//! attached. The controller does it the other way round: it takes the volume off its list, reads whether it is in use,
//! and only then detaches it. So either the node sees that it is not listed, or the controller that it is in use.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSIDriver;
use tokio::time::Instant;

use crate::agent::Context;
use crate::agent::metrics::VolumeOperation;
use crate::core::volume::csi::{self, VolumeData};
use crate::kubeapi::pods::Attachment;

/// How long a volume waits until the node's status says that it is in use, or that it is attached.
const REPORTING: Duration = Duration::from_secs(10);

/// Why a volume is not attached yet.
pub(super) struct NotAttached {
    pub(super) why: String,
    /// Its driver serves no more volumes on this node.
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

/// Waits for the attachment of a volume, `migrated` or not, and counts that; the answer is what its attacher tells the node.
/// `described` is the driver's object.
pub(super) async fn wait(
    context: &Context,
    data: &VolumeData,
    described: Option<&CSIDriver>,
    is_migrated: bool,
) -> Result<HashMap<String, String>, NotAttached> {
    let begun = Instant::now();
    let outcome = attached(context, data, described).await;
    context.metrics.volume(VolumeOperation {
        name: "verify_controller_attached_volume",
        plugin: &format!("kubernetes.io/csi:{}", data.driver_name),
        is_migrated,
        has_failed: outcome.is_err(),
        took: begun.elapsed(),
    });
    outcome
}

async fn attached(
    context: &Context,
    data: &VolumeData,
    described: Option<&CSIDriver>,
) -> Result<HashMap<String, String>, NotAttached> {
    let volume = csi::unique_name(&data.driver_name, &data.volume_handle);
    reported(context, &volume).await?;
    let node = &context.config.node_name;
    // What was seen before may be older than the report.
    if !context.node.refresh().await {
        return Err(NotAttached::new(format!(
            "volume is not attached yet: the API does not answer whether volumesAttached of node {node} lists {volume}; it is asked again"
        )));
    }
    let (name, driver) = (&data.attachment_id, &data.driver_name);
    let mut has_no_room = false;
    let why = match context
        .api
        .attachment(name)
        .await
        .map_err(|e| NotAttached::new(e.to_string()))?
    {
        Attachment::Done(told) if listed(context, &volume).await => return Ok(told),
        Attachment::Done(_) => format!(
            "volumesAttached of node {node} does not list {volume}, though VolumeAttachment {name} says that it is attached; the attach-detach controller lists it"
        ),
        Attachment::Awaited => format!(
            "VolumeAttachment {name} of driver {driver} is awaited; its attacher makes it so"
        ),
        Attachment::Detaching => format!(
            "VolumeAttachment {name} of driver {driver} is being deleted; the volume is attached anew when its attacher has detached it"
        ),
        Attachment::Failed { message, is_full } => {
            // The scheduler has sent the pod here by a number that does not hold any more (KEP-4876), where the driver's
            // number may change at all.
            has_no_room = is_full && csi::refresh_period(described).is_some();
            if has_no_room {
                context.csi.outdate(driver);
            }
            format!("VolumeAttachment {name} of driver {driver}: {message}")
        }
    };
    Err(NotAttached {
        why: format!("volume is not attached yet: {why}"),
        is_full: has_no_room,
    })
}

/// Waits until the node's status says that a volume is in use.
async fn reported(context: &Context, volume: &str) -> Result<(), NotAttached> {
    let mut reported = context.csi.reported.subscribe();
    let says = reported.wait_for(|names| names.contains(volume));
    match tokio::time::timeout(REPORTING, says).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(NotAttached::new(format!(
            "the node's status does not say yet that {volume} is in use"
        ))),
    }
}

/// Waits until the node's status lists a volume as attached; whether it does.
async fn listed(context: &Context, volume: &str) -> bool {
    let lists = |node: &Node| {
        let status = node.status.as_ref();
        let mut attached = status
            .and_then(|s| s.volumes_attached.as_ref())
            .into_iter()
            .flatten();
        attached.any(|v| v.name == volume)
    };
    let mut node = context.node.subscribe();
    let says = node.wait_for(|node| node.as_deref().is_some_and(lists));
    matches!(tokio::time::timeout(REPORTING, says).await, Ok(Ok(_)))
}
