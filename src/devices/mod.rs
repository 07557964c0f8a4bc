//! Device plugins on this node (device plugin API v1beta1): what is asked of them, and the sockets that the agent serves
//! for them and for those who ask which container has which device (podresources API v1).
//!
//! The kubelet sets a deadline for PreStartContainer alone; here every call but the stream has one, so that a plugin that
//! hangs is an error with its name in it and not a pod that never moves.

mod authority;
pub mod dra;
mod server;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use holdfast_proto::failure::Failure;
use holdfast_proto::{deviceplugin as pb, socket};
use pb::device_plugin_client::DevicePluginClient;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};

use crate::core::node::devices::{Device, Offer};
pub use server::{PodResources, Register, Registration, serve_pod_resources, serve_registration};

/// The version of the protocol.
pub const VERSION: &str = "v1beta1";
/// How long a plugin or a driver may take to be connected to, and a plugin to describe itself and to prefer devices.
const DESCRIPTION: Duration = Duration::from_secs(10);
/// How long it may take to say what a container needs for its devices, which may mean to set them up.
const ALLOCATION: Duration = Duration::from_secs(60);
/// How long it may take before a container starts, as the kubelet has it.
const PRE_START: Duration = Duration::from_secs(30);
/// What a device says that can be given to a container.
const HEALTHY: &str = "Healthy";

/// Why a call to a plugin had no success, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginError(String);

impl From<Status> for PluginError {
    fn from(status: Status) -> PluginError {
        Failure::from(status).into()
    }
}

impl From<Failure> for PluginError {
    fn from(failure: Failure) -> PluginError {
        PluginError(failure.to_string())
    }
}

/// What a plugin wants besides Allocate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// To be told before each start of a container that has its devices.
    pub pre_start: bool,
    /// To be asked which devices it prefers.
    pub preference: bool,
}

/// A plugin. Clones share the connection.
#[derive(Clone)]
pub struct Plugin(DevicePluginClient<Channel>);

/// What a plugin says of its devices as they change.
pub struct Listing(Streaming<pb::ListAndWatchResponse>);

impl Listing {
    /// All its devices, whenever something has changed; none when it has ended.
    pub async fn next(&mut self) -> Result<Option<BTreeMap<String, Device>>, PluginError> {
        let message = self.0.message().await?;
        let device = |device: pb::Device| {
            let nodes = device.topology.unwrap_or_default().nodes;
            let described = Device {
                healthy: device.health == HEALTHY,
                numa: nodes.into_iter().map(|node| node.id).collect(),
            };
            (device.id, described)
        };
        Ok(message.map(|m| m.devices.into_iter().map(device).collect()))
    }
}

/// The way to a plugin or a driver. Nothing is sent yet.
fn channel(socket: &Path) -> Result<Channel, PluginError> {
    let path = socket.display();
    socket::channel(&path.to_string(), DESCRIPTION)
        .map_err(|e| PluginError(format!("{path} is not a socket: {e}")))
}

/// A call with its deadline: tonic's own tells the plugin, ours holds whatever the plugin does.
async fn within<T, A>(
    deadline: Duration,
    message: T,
    call: impl AsyncFnOnce(Request<T>) -> Result<tonic::Response<A>, Status>,
) -> Result<A, Failure> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    match tokio::time::timeout(deadline, call(request)).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Failure::late()),
    }
}

impl Plugin {
    /// Behind a socket. Nothing is sent yet.
    pub fn new(socket: &Path) -> Result<Plugin, PluginError> {
        Ok(Plugin(DevicePluginClient::new(channel(socket)?)))
    }

    /// What it wants.
    pub async fn options(&self) -> Result<Options, PluginError> {
        let mut client = self.0.clone();
        let options = within(DESCRIPTION, pb::Empty {}, async |request| {
            client.get_device_plugin_options(request).await
        })
        .await?;
        Ok(Options {
            pre_start: options.pre_start_required,
            preference: options.get_preferred_allocation_available,
        })
    }

    /// Its devices. The stream goes on for as long as the plugin does.
    pub async fn list(&self) -> Result<Listing, PluginError> {
        let stream = self.0.clone().list_and_watch(pb::Empty {}).await?;
        Ok(Listing(stream.into_inner()))
    }

    /// Which devices it prefers.
    pub async fn preferred(&self, offer: Offer) -> Result<Vec<String>, PluginError> {
        let request = pb::PreferredAllocationRequest {
            container_requests: vec![pb::ContainerPreferredAllocationRequest {
                available_device_i_ds: offer.available.into_iter().collect(),
                must_include_device_i_ds: offer.must_include.into_iter().collect(),
                allocation_size: i32::try_from(offer.size).unwrap_or(i32::MAX),
            }],
        };
        let mut client = self.0.clone();
        let answer = within(DESCRIPTION, request, async |request| {
            client.get_preferred_allocation(request).await
        })
        .await?;
        let first = answer.container_responses.into_iter().next();
        Ok(first.map(|c| c.device_i_ds).unwrap_or_default())
    }

    /// What a container needs for these devices.
    pub async fn allocate(
        &self,
        ids: Vec<String>,
    ) -> Result<pb::ContainerAllocateResponse, PluginError> {
        let request = pb::AllocateRequest {
            container_requests: vec![pb::ContainerAllocateRequest { devices_ids: ids }],
        };
        let mut client = self.0.clone();
        let answer = within(ALLOCATION, request, async |request| {
            client.allocate(request).await
        })
        .await?;
        let first = answer.container_responses.into_iter().next();
        first.ok_or_else(|| PluginError("it has answered for no container".into()))
    }

    /// Tells it that a container with these devices is about to start.
    pub async fn pre_start(&self, ids: Vec<String>) -> Result<(), PluginError> {
        let request = pb::PreStartContainerRequest { devices_ids: ids };
        let mut client = self.0.clone();
        within(PRE_START, request, async |request| {
            client.pre_start_container(request).await
        })
        .await?;
        Ok(())
    }
}
