//! A DRA driver whose devices are CDI devices that set an environment variable. It registers through a
//! socket in the plugin registry directory and serves its API on the same socket.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use health::dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer};
use holdfast_proto::registration::PluginInfo;
use holdfast_proto::{dra as pb, dra_health as health};
use pb::dra_plugin_server::{DraPlugin, DraPluginServer};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::support::served::{Servers, registration};

/// The kind of its CDI devices.
const KIND: &str = "holdfast.test/thing";

#[derive(Default)]
struct Inner {
    calls: Mutex<Vec<String>>,
    /// The error message for every NodeUnprepareResources call, if these calls are to fail.
    refusal: Mutex<Option<String>>,
    /// The health of the device, and a message; `None` until the first call of `report_health`.
    health: watch::Sender<Option<(health::HealthStatus, &'static str)>>,
}

#[derive(Clone)]
pub struct Driver {
    name: &'static str,
    inner: Arc<Inner>,
}

impl Driver {
    pub fn new(name: &'static str) -> Driver {
        Driver {
            name,
            inner: Arc::default(),
        }
    }

    /// The calls, in order.
    pub fn calls(&self) -> Vec<String> {
        self.inner.calls.lock().unwrap().clone()
    }

    /// Makes NodeUnprepareResources fail, or succeed again.
    pub fn fail_unprepare(&self, why: Option<&str>) {
        *self.inner.refusal.lock().unwrap() = why.map(ToOwned::to_owned);
    }

    /// Reports the health of the device, and a message.
    pub fn report_health(&self, status: health::HealthStatus, why: &'static str) {
        self.inner.health.send_replace(Some((status, why)));
    }

    /// Runs the driver. Its CDI spec is in the runtime's CDI directory while the driver runs.
    pub fn run(&self, registry: &Path) -> Servers {
        let cdi = PathBuf::from("/var/run/cdi");
        std::fs::create_dir_all(&cdi).unwrap();
        // Always the same file: an interrupted run leaves it, and two files with the same device would conflict.
        let spec = cdi.join("holdfast-test.json");
        let device =
            serde_json::json!({"name": "a", "containerEdits": {"env": ["THING=of the driver"]}});
        let text = serde_json::json!({"cdiVersion": "0.5.0", "kind": KIND, "devices": [device]});
        std::fs::write(&spec, text.to_string()).unwrap();
        let socket = registry.join(format!("{}-reg.sock", self.name));
        let plugin = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: self.name.into(),
            endpoint: String::new(),
            supported_versions: vec!["v1.DRAPlugin".into(), "v1beta1.DRAPlugin".into()],
        };
        let inner = Arc::clone(&self.inner);
        let record_outcome = move |error: String| {
            let mut calls = inner.calls.lock().unwrap();
            calls.push(format!("outcome {error:?}"));
        };
        let services = Server::builder()
            .add_service(DraPluginServer::new(self.clone()))
            .add_service(DraResourceHealthServer::new(self.clone()))
            .add_service(registration(plugin, record_outcome));
        let mut servers = Servers::new();
        servers.owns(&spec);
        servers.serve(&socket, services);
        servers
    }

    fn record(&self, call: &str, claims: &[pb::Claim]) {
        let names: Vec<&str> = claims.iter().map(|c| c.name.as_str()).collect();
        let mut calls = self.inner.calls.lock().unwrap();
        calls.push(format!("{call} {}", names.join(" ")));
    }
}

#[tonic::async_trait]
impl DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<pb::NodePrepareResourcesRequest>,
    ) -> Result<Response<pb::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.record("prepare", &claims);
        let device = pb::Device {
            request_names: vec!["thing".into()],
            pool_name: "pool".into(),
            device_name: "a".into(),
            cdi_device_ids: vec![format!("{KIND}=a")],
            share_id: None,
        };
        let prepared = |claim: pb::Claim| {
            let answer = pb::NodePrepareResourceResponse {
                devices: vec![device.clone()],
                error: String::new(),
            };
            (claim.uid, answer)
        };
        let claims = claims.into_iter().map(prepared).collect();
        Ok(Response::new(pb::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<pb::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<pb::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.record("unprepare", &claims);
        let error = self.inner.refusal.lock().unwrap().clone();
        let answer = pb::NodeUnprepareResourceResponse {
            error: error.unwrap_or_default(),
        };
        let claims = claims.into_iter().map(|c| (c.uid, answer.clone()));
        let claims = claims.collect();
        Ok(Response::new(pb::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Driver {
    type NodeWatchResourcesStream =
        ReceiverStream<Result<health::NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<health::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let mut health = self.inner.health.subscribe();
        tokio::spawn(async move {
            loop {
                let now = *health.borrow_and_update();
                let device = |(status, why): (health::HealthStatus, &str)| health::DeviceHealth {
                    device: Some(health::DeviceIdentifier {
                        pool_name: "pool".into(),
                        device_name: "a".into(),
                    }),
                    health: status.into(),
                    last_updated_time: 0,
                    // Longer than the test.
                    health_check_timeout_seconds: 3600,
                    message: why.into(),
                };
                let message = health::NodeWatchResourcesResponse {
                    devices: now.into_iter().map(device).collect(),
                };
                if sender.send(Ok(message)).await.is_err() || health.changed().await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
