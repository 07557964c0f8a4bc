//! Device plugins on this node (device plugin API v1beta1): the calls to them, and the socket for their registration.
//! Also serves the podresources API v1 on a socket.
//!
//! The kubelet sets a deadline only for PreStartContainer. Here every call but the stream has one. So a plugin that
//! hangs causes an error with its name and not a pod that never starts.

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

use holdfast_core::node::devices::{Device, PreferenceRequest};
pub use server::{PodResources, Register, Registration, serve_pod_resources, serve_registration};

/// The version of the protocol.
pub const VERSION: &str = "v1beta1";
/// Timeout of connecting to a plugin or a driver, and of a plugin's options and preferred devices.
const DESCRIPTION: Duration = Duration::from_secs(10);
/// Timeout of an allocation, in which a plugin may set up devices.
const ALLOCATION: Duration = Duration::from_secs(60);
/// Timeout of PreStartContainer; the kubelet's value.
const PRE_START: Duration = Duration::from_secs(30);
/// The health of a device that can be allocated.
const HEALTHY: &str = "Healthy";

/// Why a call to a plugin failed.
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

/// The calls that a plugin wants in addition to Allocate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// PreStartContainer, before each start of a container with its devices.
    pub pre_start: bool,
    /// GetPreferredAllocation, for the devices that it prefers.
    pub preference: bool,
}

/// A plugin. Clones share the connection.
#[derive(Clone)]
pub struct Plugin(DevicePluginClient<Channel>);

/// The stream of a plugin's devices.
pub struct Listing(Streaming<pb::ListAndWatchResponse>);

impl Listing {
    /// Returns all devices after each change; `None` at the end of the stream.
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

/// Creates a channel to a plugin or a driver. Nothing is sent yet.
fn channel(socket: &Path) -> Result<Channel, PluginError> {
    let path = socket.display();
    socket::channel(&path.to_string(), DESCRIPTION)
        .map_err(|e| PluginError(format!("{path} is not a socket: {e}")))
}

/// Makes a call with a deadline: tonic's own is sent to the plugin, ours applies whatever the plugin does.
async fn within<T, A>(
    deadline: Duration,
    message: T,
    call: impl AsyncFnOnce(Request<T>) -> Result<tonic::Response<A>, Status>,
) -> Result<A, Failure> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    match tokio::time::timeout(deadline, call(request)).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Failure::timed_out()),
    }
}

impl Plugin {
    /// Creates a plugin for a socket. Nothing is sent yet.
    pub fn new(socket: &Path) -> Result<Plugin, PluginError> {
        Ok(Plugin(DevicePluginClient::new(channel(socket)?)))
    }

    /// Returns the calls that the plugin wants.
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

    /// Streams the plugin's devices while the plugin runs.
    pub async fn list(&self) -> Result<Listing, PluginError> {
        let stream = self.0.clone().list_and_watch(pb::Empty {}).await?;
        Ok(Listing(stream.into_inner()))
    }

    /// Returns the devices that the plugin prefers.
    pub async fn preferred(&self, request: PreferenceRequest) -> Result<Vec<String>, PluginError> {
        let request = pb::PreferredAllocationRequest {
            container_requests: vec![pb::ContainerPreferredAllocationRequest {
                available_device_i_ds: request.available.into_iter().collect(),
                must_include_device_i_ds: request.must_include.into_iter().collect(),
                allocation_size: i32::try_from(request.size).unwrap_or(i32::MAX),
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

    /// Allocates devices; returns the settings that a container needs for them.
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
        first.ok_or_else(|| PluginError("the allocation response has no container".into()))
    }

    /// Notifies the plugin that a container with these devices is about to start.
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
