//! Storage drivers on this node: their registration, and the calls to them (CSI 1).
//!
//! Calls about volumes have a timeout of two minutes, as in the kubelet (`csiTimeout` in
//! `pkg/volume/csi/csi_plugin.go`). A call that fails during its work has an unknown outcome. It is repeated, because
//! CSI calls are idempotent, and a volume is not forgotten before the driver has confirmed that it is unpublished and
//! unstaged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_proto::csi as pb;
use holdfast_proto::failure::{Failure, code_name};
use holdfast_proto::{registration as reg, socket};
use pb::node_client::NodeClient;
use pb::node_service_capability::Type as Capability;
use pb::node_service_capability::rpc::Type as Rpc;
use reg::registration_client::RegistrationClient;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use holdfast_core::volume::csi::NodeCapabilities;

/// Timeout of connecting to a driver.
const CONNECTION: Duration = Duration::from_secs(10);
/// Timeout of a call about a volume.
const DEADLINE: Duration = Duration::from_secs(120);
/// Timeout of a driver's description of itself and of this node. The call is retried later.
const DESCRIPTION: Duration = Duration::from_secs(15);
/// Timeouts of the registration calls: the query, and the notification of the outcome.
const REGISTRATION: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct CsiError {
    /// The code and the driver's message, in the format of Go's gRPC library.
    pub text: String,
    /// Whether nothing was done. Otherwise the call may have taken effect, or may still be running.
    pub certain: bool,
    /// Whether the same call would always fail, because the request cannot be satisfied.
    pub infeasible: bool,
    /// Whether the call would fail while the volume is in its present state, for example in use during an expansion.
    pub unready: bool,
}

impl From<Failure> for CsiError {
    fn from(failure: Failure) -> CsiError {
        let open = matches!(
            failure.code,
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Unavailable
                | Code::ResourceExhausted
                | Code::Aborted
        );
        CsiError {
            text: failure.to_string(),
            certain: !open,
            infeasible: matches!(
                failure.code,
                Code::InvalidArgument | Code::OutOfRange | Code::NotFound
            ),
            unready: failure.code == Code::FailedPrecondition,
        }
    }
}

impl From<Status> for CsiError {
    fn from(status: Status) -> CsiError {
        Failure::from(status).into()
    }
}

/// A driver's description of itself and of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// The driver's name for this node.
    pub node_id: String,
    /// Maximum number of volumes on this node; 0 for no limit.
    pub max_volumes: i64,
    /// The topology of this node, in the driver's terms.
    pub topology: std::collections::BTreeMap<String, String>,
}

/// A plugin that requests its registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plugin {
    /// The type, for instance `CSIPlugin`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// The socket of its service; empty for the socket of its registration.
    pub endpoint: String,
    /// The versions that it supports.
    pub versions: Vec<String>,
}

fn channel(path: &str) -> Result<Channel, CsiError> {
    socket::channel(path, CONNECTION).map_err(|e| CsiError {
        text: format!("CSI driver socket {path:?} cannot be used: {e}"),
        certain: true,
        infeasible: false,
        unready: false,
    })
}

fn within<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

/// Queries the plugin behind a socket in the registration directory.
pub async fn get_plugin_info(socket: &str) -> Result<Plugin, CsiError> {
    let info = RegistrationClient::new(channel(socket)?)
        .get_info(within(reg::InfoRequest {}, REGISTRATION.0))
        .await?
        .into_inner();
    Ok(Plugin {
        kind: info.r#type,
        name: info.name,
        endpoint: info.endpoint,
        versions: info.supported_versions,
    })
}

/// Notifies a plugin of the outcome of its registration.
pub async fn notify_registration_status(
    socket: &str,
    outcome: Result<(), String>,
) -> Result<(), CsiError> {
    let status = reg::RegistrationStatus {
        plugin_registered: outcome.is_ok(),
        error: outcome.err().unwrap_or_default(),
    };
    RegistrationClient::new(channel(socket)?)
        .notify_registration_status(within(status, REGISTRATION.1))
        .await?;
    Ok(())
}

/// Receives each call to a driver: the method, gRPC's name of the code, and the duration.
pub type Report = Arc<dyn Fn(&'static str, &str, Duration) + Send + Sync>;

/// A driver. Clones share the connection.
#[derive(Clone)]
pub struct Driver {
    client: NodeClient<Channel>,
    report: Report,
}

impl Driver {
    /// Creates a driver for a socket. Nothing is sent yet. `report` receives every call that returns.
    pub fn new(socket: &str, report: Report) -> Result<Driver, CsiError> {
        Ok(Driver {
            client: NodeClient::new(channel(socket)?),
            report,
        })
    }

    /// Makes a call and reports it.
    async fn call<T>(
        &self,
        method: &'static str,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CsiError> {
        let begun = Instant::now();
        let answer = call.await.map_err(Failure::from);
        let code = answer.as_ref().err().map_or(Code::Ok, |f| f.code);
        (self.report)(method, code_name(code), begun.elapsed());
        Ok(answer?.into_inner())
    }

    /// Returns the driver's description of itself and of this node.
    pub async fn info(&self) -> Result<NodeInfo, CsiError> {
        let info = self
            .call(
                "NodeGetInfo",
                self.client
                    .clone()
                    .node_get_info(within(pb::NodeGetInfoRequest {}, DESCRIPTION)),
            )
            .await?;
        let topology = info
            .accessible_topology
            .unwrap_or_default()
            .segments
            .into_iter()
            .collect();
        Ok(NodeInfo {
            node_id: info.node_id,
            max_volumes: info.max_volumes_per_node,
            topology,
        })
    }

    /// Returns the driver's capabilities.
    pub async fn capabilities(&self) -> Result<NodeCapabilities, CsiError> {
        let answer = self
            .call(
                "NodeGetCapabilities",
                self.client
                    .clone()
                    .node_get_capabilities(within(pb::NodeGetCapabilitiesRequest {}, DESCRIPTION)),
            )
            .await?;
        let has = |rpc: Rpc| {
            answer
                .capabilities
                .iter()
                .any(|c| matches!(&c.r#type, Some(Capability::Rpc(r)) if r.r#type == rpc as i32))
        };
        Ok(NodeCapabilities {
            stage: has(Rpc::StageUnstageVolume),
            mount_group: has(Rpc::VolumeMountGroup),
            single_node_multi_writer: has(Rpc::SingleNodeMultiWriter),
            expand: has(Rpc::ExpandVolume),
            stats: has(Rpc::GetVolumeStats),
        })
    }

    /// Stages a volume: prepares it for this node.
    pub async fn stage(&self, request: pb::NodeStageVolumeRequest) -> Result<(), CsiError> {
        self.call(
            "NodeStageVolume",
            self.client
                .clone()
                .node_stage_volume(within(request, DEADLINE)),
        )
        .await?;
        Ok(())
    }

    /// Unstages a volume.
    pub async fn unstage(&self, volume: &str, staging: &str) -> Result<(), CsiError> {
        let request = pb::NodeUnstageVolumeRequest {
            volume_id: volume.into(),
            staging_target_path: staging.into(),
        };
        self.call(
            "NodeUnstageVolume",
            self.client
                .clone()
                .node_unstage_volume(within(request, DEADLINE)),
        )
        .await?;
        Ok(())
    }

    /// Returns the usage of a published volume.
    pub async fn stats(
        &self,
        volume: &str,
        target: &str,
        staging: &str,
    ) -> Result<pb::NodeGetVolumeStatsResponse, CsiError> {
        let request = pb::NodeGetVolumeStatsRequest {
            volume_id: volume.into(),
            volume_path: target.into(),
            staging_target_path: staging.into(),
        };
        self.call(
            "NodeGetVolumeStats",
            self.client
                .clone()
                .node_get_volume_stats(within(request, DEADLINE)),
        )
        .await
    }

    /// Grows the filesystem of a published volume to the size of the volume.
    pub async fn expand(&self, request: pb::NodeExpandVolumeRequest) -> Result<(), CsiError> {
        self.call(
            "NodeExpandVolume",
            self.client
                .clone()
                .node_expand_volume(within(request, DEADLINE)),
        )
        .await?;
        Ok(())
    }

    /// Publishes a volume: prepares it for one pod.
    pub async fn publish(&self, request: pb::NodePublishVolumeRequest) -> Result<(), CsiError> {
        self.call(
            "NodePublishVolume",
            self.client
                .clone()
                .node_publish_volume(within(request, DEADLINE)),
        )
        .await?;
        Ok(())
    }

    /// Unpublishes a volume.
    pub async fn unpublish(&self, volume: &str, target: &str) -> Result<(), CsiError> {
        let request = pb::NodeUnpublishVolumeRequest {
            volume_id: volume.into(),
            target_path: target.into(),
        };
        self.call(
            "NodeUnpublishVolume",
            self.client
                .clone()
                .node_unpublish_volume(within(request, DEADLINE)),
        )
        .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_codes_are_classified_as_certain_infeasible_or_unready() {
        for (code, certain, infeasible, unready) in [
            (Code::DeadlineExceeded, false, false, false),
            (Code::Unavailable, false, false, false),
            (Code::Internal, true, false, false),
            (Code::OutOfRange, true, true, false),
            (Code::FailedPrecondition, true, false, true),
        ] {
            let error = CsiError::from(Status::new(code, "no"));
            assert_eq!(
                (error.certain, error.infeasible, error.unready),
                (certain, infeasible, unready),
                "{code:?}"
            );
        }
    }
}
