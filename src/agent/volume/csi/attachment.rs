//! Waiting until a volume is attached to this node, so that nobody detaches it while it is mounted (kubelet spec, 9.2).
//!
//! The order matters. The node reports that the volume is in use; then it reads whether the controller lists it as
//! attached. The controller does it the other way round: it takes the volume off its list, reads whether it is in use,
//! and only then detaches it. So either the node sees that it is not listed, or the controller that it is in use.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;

use crate::agent::Context;
use crate::core::volume::csi::{self, VolumeData};
use crate::kubeapi::pods::Attachment;

/// How long a volume waits until the node's status says that it is in use, or that it is attached.
const REPORTING: Duration = Duration::from_secs(10);

/// Waits for the attachment; the answer is what its attacher tells the node.
pub(super) async fn wait(
    context: &Context,
    data: &VolumeData,
) -> Result<HashMap<String, String>, String> {
    let volume = csi::unique_name(&data.driver_name, &data.volume_handle);
    reported(context, &volume).await?;
    let node = &context.config.node_name;
    // What was seen before may be older than the report.
    if !context.node.refresh().await {
        return Err(format!(
            "volume is not attached yet: the API does not answer whether volumesAttached of node {node} lists {volume}; it is asked again"
        ));
    }
    let (name, driver) = (&data.attachment_id, &data.driver_name);
    let why = match context
        .api
        .attachment(name)
        .await
        .map_err(|e| e.to_string())?
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
            if is_full {
                // The scheduler has sent the pod here by a number that does not hold any more (KEP-4876).
                context.csi.outdate(driver);
            }
            format!("VolumeAttachment {name} of driver {driver}: {message}")
        }
    };
    Err(format!("volume is not attached yet: {why}"))
}

/// Waits until the node's status says that a volume is in use.
async fn reported(context: &Context, volume: &str) -> Result<(), String> {
    let mut reported = context.csi.reported.subscribe();
    let says = reported.wait_for(|names| names.contains(volume));
    match tokio::time::timeout(REPORTING, says).await {
        Ok(Ok(_)) => Ok(()),
        _ => Err(format!(
            "the node's status does not say yet that {volume} is in use"
        )),
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
