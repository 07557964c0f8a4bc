//! Deletes tasks that containerd has and that its CRI plugin does not know.
//!
//! containerd 1.6 and 1.7 orphan a task if the caller dies after its creation and before the plugin has recorded it.
//! The plugin then refuses to remove the container until containerd restarts.

use std::time::Duration;

use holdfast_proto::tasks as pb;
use pb::tasks_client::TasksClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::RuntimeError;
use super::client::{CriClient, ignore_not_found};

/// The number of SIGKILL.
pub(super) const SIGKILL: u32 = 9;
/// Timeout of each step. A process that survives SIGKILL is blocked in the kernel.
const DEADLINE: Duration = Duration::from_secs(10);

/// Whether a container or a sandbox could not be removed because a task of it is left over.
pub(super) fn has_leftover_task(result: &Result<(), Status>) -> bool {
    matches!(result, Err(status) if status.code() == Code::FailedPrecondition)
}

/// Kills every process of a container or a sandbox and deletes its task, if there is one.
pub(super) async fn end(channel: &Channel, id: &str) -> Result<(), RuntimeError> {
    let mut client = TasksClient::new(channel.clone());
    let kill = pb::KillRequest {
        container_id: id.into(),
        exec_id: String::new(),
        signal: SIGKILL,
        all: true,
    };
    ignore_not_found(client.kill(CriClient::to_containerd(DEADLINE, kill)).await)?;
    let wait = pb::WaitRequest {
        container_id: id.into(),
        exec_id: String::new(),
    };
    ignore_not_found(client.wait(CriClient::to_containerd(DEADLINE, wait)).await)?;
    let delete = pb::DeleteTaskRequest {
        container_id: id.into(),
    };
    ignore_not_found(
        client
            .delete(CriClient::to_containerd(DEADLINE, delete))
            .await,
    )
}
