//! Tasks that containerd has and its CRI plugin does not know of.
//!
//! A caller that dies between the creation of a task and the plugin's record of it leaves such a task behind
//! (containerd 1.6 and 1.7). The plugin refuses to remove the container from then on, until containerd starts anew.

use std::time::Duration;

use holdfast_proto::tasks as pb;
use pb::tasks_client::TasksClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::RuntimeError;
use super::client::{CriClient, gone_is_fine};

/// SIGKILL's number.
pub(super) const SIGKILL: u32 = 9;
/// How long each step may take. A process that does not end on SIGKILL is in the kernel.
const DEADLINE: Duration = Duration::from_secs(10);

/// Whether a refusal to remove a container or a sandbox says that a task of it is left.
pub(super) fn is_left(result: &Result<(), Status>) -> bool {
    matches!(result, Err(status) if status.code() == Code::FailedPrecondition)
}

/// Kills every process of a container or a sandbox and removes its task; none is fine.
pub(super) async fn end(channel: &Channel, id: &str) -> Result<(), RuntimeError> {
    let mut client = TasksClient::new(channel.clone());
    let kill = pb::KillRequest {
        container_id: id.into(),
        exec_id: String::new(),
        signal: SIGKILL,
        all: true,
    };
    gone_is_fine(client.kill(CriClient::to_containerd(DEADLINE, kill)).await)?;
    let wait = pb::WaitRequest {
        container_id: id.into(),
        exec_id: String::new(),
    };
    gone_is_fine(client.wait(CriClient::to_containerd(DEADLINE, wait)).await)?;
    let delete = pb::DeleteTaskRequest {
        container_id: id.into(),
    };
    gone_is_fine(
        client
            .delete(CriClient::to_containerd(DEADLINE, delete))
            .await,
    )
}
