//! A device plugin whose devices are ordinary files. It registers as plugins do: at the agent's socket,
//! again whenever this socket is recreated, or through its own socket in the plugin registry directory.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_proto::registration::PluginInfo;
use holdfast_proto::{deviceplugin as pb, socket};
use pb::device_plugin_server::{DevicePlugin, DevicePluginServer};
use pb::registration_client::RegistrationClient;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::support::served::{Servers, registration, serve};

/// How a plugin handles Allocate and GetDevicePluginOptions.
#[derive(Debug, Clone, PartialEq)]
pub enum Behaviour {
    Answers,
    /// GetDevicePluginOptions fails.
    HidesOptions,
    Hangs,
    Refuses(&'static str),
}

struct Inner {
    resource: &'static str,
    /// The file that containers find as `/thing`.
    file: PathBuf,
    devices: watch::Sender<Vec<(&'static str, bool)>>,
    behaviour: watch::Sender<Behaviour>,
    calls: Mutex<Vec<String>>,
}

#[derive(Clone)]
pub struct Plugin(Arc<Inner>);

/// Distinguishes a file from its successor with the same name.
fn identity(path: &Path) -> Option<(u64, i64)> {
    let found = std::fs::metadata(path).ok();
    found.map(|m| (m.ino(), m.ctime_nsec()))
}

impl Plugin {
    pub fn new(resource: &'static str, file: &Path, devices: &[&'static str]) -> Plugin {
        let devices = devices.iter().map(|id| (*id, true)).collect();
        Plugin(Arc::new(Inner {
            resource,
            file: file.into(),
            devices: watch::Sender::new(devices),
            behaviour: watch::Sender::new(Behaviour::Answers),
            calls: Mutex::default(),
        }))
    }

    pub fn set(&self, devices: &[(&'static str, bool)]) {
        self.0.devices.send_replace(devices.to_vec());
    }

    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.0.behaviour.send_replace(behaviour);
    }

    /// The calls, in order.
    pub fn calls(&self) -> Vec<String> {
        self.0.calls.lock().unwrap().clone()
    }

    /// Runs the plugin with its socket next to the agent's.
    pub fn run(&self, dir: &Path) -> Servers {
        let (agents, socket) = (dir.join("kubelet.sock"), dir.join("thing.sock"));
        let mut servers = Servers::new();
        servers.owns(&socket);
        let plugin = self.clone();
        servers.spawn(async move {
            let mut registered = None;
            let mut server: Option<tokio::task::JoinHandle<()>> = None;
            loop {
                let found = identity(&agents);
                if found.is_some() && found != registered {
                    server.take().iter().for_each(|old| old.abort());
                    let service = DevicePluginServer::new(plugin.clone());
                    let services = Server::builder().add_service(service);
                    server = Some(tokio::spawn(serve(&socket, services)));
                    if plugin.register(&agents).await.is_ok() {
                        registered = found;
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        servers
    }

    async fn register(&self, agents: &Path) -> Result<(), String> {
        let channel = socket::channel(agents.to_str().unwrap(), Duration::from_secs(10)).unwrap();
        let mut client = RegistrationClient::new(channel);
        let request = pb::RegisterRequest {
            version: "v1beta1".into(),
            endpoint: "thing.sock".into(),
            resource_name: self.0.resource.into(),
            options: None,
        };
        let outcome = client.register(request).await;
        outcome.map(|_| ()).map_err(|e| e.to_string())
    }

    /// Runs the plugin with one socket for everything, in the plugin registry directory.
    pub fn run_in_registry(&self, registry: &Path) -> Servers {
        let info = PluginInfo {
            r#type: "DevicePlugin".into(),
            name: self.0.resource.into(),
            endpoint: String::new(),
            supported_versions: vec!["v1beta1".into()],
        };
        let plugin = self.clone();
        let record_outcome = move |error: String| plugin.record(format!("outcome {error:?}"));
        let services = Server::builder()
            .add_service(DevicePluginServer::new(self.clone()))
            .add_service(registration(info, record_outcome));
        let mut servers = Servers::new();
        servers.serve(&registry.join("thing-reg.sock"), services);
        servers
    }

    fn record(&self, call: String) {
        self.0.calls.lock().unwrap().push(call);
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<pb::Empty>,
    ) -> Result<Response<pb::DevicePluginOptions>, Status> {
        if *self.0.behaviour.borrow() == Behaviour::HidesOptions {
            return Err(Status::unavailable("no options yet"));
        }
        Ok(Response::new(pb::DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    type ListAndWatchStream = ReceiverStream<Result<pb::ListAndWatchResponse, Status>>;

    async fn list_and_watch(
        &self,
        _: Request<pb::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let mut devices = self.0.devices.subscribe();
        tokio::spawn(async move {
            loop {
                let listed = devices.borrow_and_update().clone();
                let device = |(id, healthy): (&str, bool)| pb::Device {
                    id: id.into(),
                    health: if healthy { "Healthy" } else { "Unhealthy" }.into(),
                    topology: Some(pb::TopologyInfo {
                        nodes: vec![pb::NumaNode { id: 0 }],
                    }),
                };
                let devices_now = listed.into_iter().map(device).collect();
                let message = pb::ListAndWatchResponse {
                    devices: devices_now,
                };
                if sender.send(Ok(message)).await.is_err() || devices.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    /// Prefers the last devices.
    async fn get_preferred_allocation(
        &self,
        request: Request<pb::PreferredAllocationRequest>,
    ) -> Result<Response<pb::PreferredAllocationResponse>, Status> {
        let wanted = request.into_inner().container_requests.remove(0);
        let mut ids = wanted.available_device_i_ds;
        ids.sort();
        ids.reverse();
        ids.truncate(wanted.allocation_size as usize);
        let device_i_ds = ids;
        Ok(Response::new(pb::PreferredAllocationResponse {
            container_responses: vec![pb::ContainerPreferredAllocationResponse { device_i_ds }],
        }))
    }

    async fn allocate(
        &self,
        request: Request<pb::AllocateRequest>,
    ) -> Result<Response<pb::AllocateResponse>, Status> {
        let ids = request.into_inner().container_requests.remove(0);
        let ids = ids.devices_ids.join(",");
        self.record(format!("allocate {ids}"));
        let mut behaviour = self.0.behaviour.subscribe();
        let _ = behaviour
            .wait_for(|behaviour| *behaviour != Behaviour::Hangs)
            .await;
        if let Behaviour::Refuses(why) = &*behaviour.borrow() {
            return Err(Status::unknown(*why));
        }
        let answer = pb::ContainerAllocateResponse {
            envs: [
                ("THING".to_owned(), ids),
                ("OWN".to_owned(), "the plugin's".to_owned()),
            ]
            .into(),
            mounts: vec![pb::Mount {
                container_path: "/thing".into(),
                host_path: self.0.file.display().to_string(),
                read_only: true,
            }],
            devices: vec![pb::DeviceSpec {
                container_path: "/dev/thing".into(),
                host_path: "/dev/null".into(),
                permissions: "rw".into(),
            }],
            ..pb::ContainerAllocateResponse::default()
        };
        Ok(Response::new(pb::AllocateResponse {
            container_responses: vec![answer],
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<pb::PreStartContainerRequest>,
    ) -> Result<Response<pb::PreStartContainerResponse>, Status> {
        let ids = request.into_inner().devices_ids.join(",");
        self.record(format!("start {ids}"));
        Ok(Response::new(pb::PreStartContainerResponse {}))
    }
}
